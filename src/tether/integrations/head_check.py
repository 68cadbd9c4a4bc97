"""Whether a model's output embeddings alone make its logits of the backbone's hidden states."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tether.errors import ConfigError
from tether.integrations.exact_head import whole
from tether.ops import linear_log_probs
from tether.ops.head import Head

_TOKENS, _IDS = 5, 64


def run_backbone(model: Any, *args: Any, **kwargs: Any) -> Any:
    """The model's own output without its head."""
    # Looked up on each call: FSDP and PEFT replace modules after the forward was extended.
    kwargs["use_cache"] = False
    return model.base_model(*args, **kwargs)


@torch.no_grad()
def check_head(
    model: Any,
    forward: Callable[..., Any],
    head: Head,
    weights_at_hand: Callable[..., AbstractContextManager[Any]],
) -> None:
    """Compare a few log-probabilities with those of the model's own logits.

    Some families have layers in between, or scale their logits by a number of a name that nobody knows; the
    responses would be drawn from one distribution and trained on another.

    Args:
        model: a causal language model.
        forward: of the whole of it.
        head: what becomes of the output embeddings' product.
        weights_at_hand: as in `tether.integrations.sparse_head.add_sparse_head`.

    Raises:
        ConfigError: they differ by more than rounding.
    """
    lm_head = model.get_output_embeddings()
    tokens = _plain_tokens(model.config, lm_head.weight.device)
    with evaluated(model), _plain_attention(model.config.get_text_config()):
        logits = forward(input_ids=tokens, use_cache=False).logits[0]
        hidden = run_backbone(model, input_ids=tokens).last_hidden_state[0]
    weight, bias = whole(lm_head.weight), None if lm_head.bias is None else whole(lm_head.bias)
    ids = torch.arange(min(_IDS, logits.shape[-1]), device=logits.device).expand(len(logits), -1)
    own = (logits.float() / head.temperature).log_softmax(-1).gather(-1, ids)
    with torch.autocast(hidden.device.type, enabled=False):
        found = linear_log_probs(
            hidden.to(weight), weight, ids.to(weight.device), bias=bias, temperature=head.temperature,
            logit_scale=head.logit_scale, softcap=head.softcap,
            weights_at_hand=functools.partial(weights_at_hand, weight, bias),
        ).log_probs.to(own)  # fmt: skip
    apart, spread = found - own, own - own.mean(-1, keepdim=True)
    difference, size, whole_size = torch.stack([v.norm() for v in (apart, spread, own)]).tolist()
    rounding = rounding_of(logits)
    limit = rounding**0.5
    # Never so for NaN, which is another failure and told elsewhere.
    if difference > limit * size + rounding * whole_size:
        raise ConfigError(
            f"{type(model).__name__} has more than its output embeddings between its hidden states and its "
            f"logits: log-probabilities differ by {difference:.1e} without it, at a size of {size:.1e} "
            f"(rounding explains {limit:.1e} of that). It would be trained on another distribution than the "
            "one it samples from. Its trust region can be had through its logits, as docs/other_engines.md "
            "shows."
        )


def _plain_tokens(config: Any, device: torch.device) -> Tensor:
    """A few ids, [1, T], none of which stands for an image or another special thing."""
    special = {
        value
        for of in (config, config.get_text_config())
        for name, value in of.to_dict().items()
        if name.endswith(("_id", "_index")) and isinstance(value, int)
    }
    plain = [id for id in range(config.get_text_config().vocab_size) if id not in special]
    step = max(1, len(plain) // _TOKENS)
    return torch.tensor([plain[::step][:_TOKENS]], device=device)


@contextmanager
def _plain_attention(config: Any) -> Iterator[None]:
    """Attention that needs no more than tokens, as that of a trainer's own packing may."""
    own = config._attn_implementation
    config._attn_implementation = "eager"
    try:
        yield
    finally:
        config._attn_implementation = own


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """The model without dropout, which would make two passes differ."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def rounding_of(values: Tensor) -> float:
    """The relative rounding error of the coarsest arithmetic that made a model's output."""
    kind = values.device.type
    # Norms and rotary angles are float32 in any model, also in a float64 one.
    types = [values.dtype, torch.float32]
    if torch.is_autocast_enabled(kind):
        types.append(torch.get_autocast_dtype(kind))
    coarsest = max(torch.finfo(dtype).eps for dtype in types)
    tf32 = kind == "cuda" and torch.get_float32_matmul_precision() != "highest"
    return max(coarsest, 2.0**-10) if tf32 else coarsest
