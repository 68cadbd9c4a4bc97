"""Another sampler on purpose: the policy of some updates ago, or one in half precision, in one process.

What an asynchronous trainer and another engine do to a method, without their chance: the sampler's weights
are exactly `lag` updates old, so that two methods, or two runs of one, see data of the same age.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from tether.errors import CheckpointError, ConfigError
from tether.integrations.trl_kl_stop import StoppableTrainer
from tether.integrations.trl_resume import write_tensors


class LaggedTrainer(StoppableTrainer):
    """`GRPOTrainer` whose own policy of `lag` updates ago writes its completions, if it is given one.

    Args besides those of `GRPOTrainer`:

        lag: optimizer steps between the weights that sample and those of the present; fewer in the first
            steps, which the starting model samples.
        sampler_dtype: what the sampling model computes in, such as `torch.bfloat16`; by default as it is.

    Evaluations sample from the present policy. Keeps the trained weights of ``lag / updates a batch + 1``
    versions in memory; a checkpoint holds them, so that a resumed run goes on with the same samplers.

    Raises:
        ConfigError: a negative lag, batches of which each is used more than once, vLLM (which has weights of
            its own), or weights that are sharded by DeepSpeed.
        CheckpointError: a checkpoint without the versions.
    """

    def __init__(
        self, *args: Any, lag: int = 0, sampler_dtype: torch.dtype | None = None, **kwargs: Any
    ) -> None:
        self.lag, self.sampler_dtype = lag, sampler_dtype
        super().__init__(*args, **kwargs)
        self._check_lag()
        #: Trained weights by the optimizer step they are of, oldest first.
        self._versions: OrderedDict[int, dict[str, Tensor]] = OrderedDict()

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As TRL's; the samplers of an earlier call are forgotten."""
        self._versions.clear()
        return super().train(*args, **kwargs)

    def _check_lag(self) -> None:
        if isinstance(self.lag, bool) or not isinstance(self.lag, int) or self.lag < 0:
            raise ConfigError(f"lag counts updates, an integer from 0; got {self.lag!r}.")
        if self.lag and self.num_iterations != 1:
            raise ConfigError(
                f"num_iterations={self.num_iterations} would use each stale batch several times, and its "
                "age would be no longer the lag. Set it to 1."
            )
        if self.lag and self.use_vllm:
            raise ConfigError(
                f"lag={self.lag} keeps old weights of the trainer's to sample from, and vLLM has its own. "
                "Use Transformers for rollouts, or an asynchronous trainer."
            )
        if (self.lag or self.sampler_dtype) and self.rollout_func is not None:
            raise ConfigError(
                f"lag={self.lag} and sampler_dtype={self.sampler_dtype} are of the responses that this "
                "trainer writes, and a rollout_func writes its own. Leave one of them out."
            )
        if self.sampler_dtype is not None and self.use_vllm:
            raise ConfigError(
                f"sampler_dtype={self.sampler_dtype} is of Transformers' generation; vLLM has its own dtype. "
                "Leave it out."
            )
        if (self.lag or self.sampler_dtype) and self.is_deepspeed_enabled:
            raise ConfigError(
                f"lag={self.lag} and sampler_dtype={self.sampler_dtype} swap weights in place, which "
                "DeepSpeed does not allow. Use DDP or FSDP2."
            )

    def _trained(self) -> dict[str, torch.nn.Parameter]:
        return {
            name: p
            for name, p in self.accelerator.unwrap_model(self.model).named_parameters()
            if p.requires_grad
        }

    @contextmanager
    def _sampling_weights(self) -> Iterator[int]:
        """While completions are generated: whose weights do it, as the optimizer step they are of."""
        with self._lagging_weights() as version, self._rounded_weights():
            yield version

    @contextmanager
    def _rounded_weights(self) -> Iterator[None]:
        if self.sampler_dtype is None or not self.model.training:
            yield
            return
        parameters = list(self.accelerator.unwrap_model(self.model).parameters())
        present = [p.data for p in parameters]
        try:
            for parameter in parameters:
                parameter.data = parameter.data.to(self.sampler_dtype)
            yield
        finally:
            for parameter, weight in zip(parameters, present, strict=True):
                parameter.data = weight

    @contextmanager
    def _lagging_weights(self) -> Iterator[int]:
        now = int(self.state.global_step)
        if not self.lag or not self.model.training:
            yield now
            return
        if now not in self._versions:
            self._versions[now] = {name: p.detach().clone() for name, p in self._trained().items()}
        version = self._sampler_version(now)
        present = {name: p.data for name, p in self._trained().items()}
        try:
            self._put(self._versions[version])
            yield version
        finally:
            self._put(present)

    def _sampler_version(self, now: int) -> int:
        """The newest version at least `lag` updates old, or the first; what is older is forgotten."""
        old_enough = [version for version in self._versions if version <= now - self.lag]
        version = max(old_enough, default=min(self._versions))
        for forgotten in [v for v in self._versions if v < version]:
            del self._versions[forgotten]
        return version

    def _put(self, weights: dict[str, Tensor]) -> None:
        for name, parameter in self._trained().items():
            parameter.data = weights[name]

    def _save_beside(self, folder: Path) -> None:
        super()._save_beside(folder)
        if self.lag:
            tensors = {
                f"{version}/{name}": weight
                for version, weights in self._versions.items()
                for name, weight in weights.items()
            }
            write_tensors(self._versions_file(folder), tensors)

    def _load_beside(self, folder: Path) -> None:
        super()._load_beside(folder)
        if not self.lag:
            return
        file = self._versions_file(folder)
        if not file.is_file():
            raise CheckpointError(
                f"The checkpoint {folder} has no {file.name} with the weights that sample: it was "
                "written with "
                "lag=0. Continue with the same lag, or begin a new run."
            )
        device = str(self.accelerator.device)
        with safe_open(file, framework="pt", device=device) as opened:
            for key in sorted(opened.keys(), key=lambda key: int(key.partition("/")[0])):
                version, _, name = key.partition("/")
                self._versions.setdefault(int(version), {})[name] = opened.get_tensor(key)

    def _versions_file(self, folder: Path) -> Path:
        return folder / f"sampler-versions-{self.accelerator.process_index}.safetensors"
