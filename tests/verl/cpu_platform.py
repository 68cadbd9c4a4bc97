"""A platform for verl that is no accelerator at all. For these tests only.

Loaded by `VERL_USE_EXTERNAL_MODULES=cpu_platform` while verl is being imported, before anything asks which
platform there is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry, platform_manager, set_platform


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


_COUNTERS = (
    "memory_allocated max_memory_allocated memory_reserved max_memory_reserved empty_cache synchronize "
    "set_device current_device reset_peak_memory_stats manual_seed manual_seed_all ipc_collect"
)
_DEVICE = SimpleNamespace(
    **dict.fromkeys(_COUNTERS.split(), _nothing),
    is_available=lambda: True,
    device_count=lambda: 1,
    mem_get_info=lambda *_: (1, 1),
    get_device_name=lambda *_: "cpu",
    get_rng_state=torch.get_rng_state,
    set_rng_state=torch.set_rng_state,
)


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Answers every question verl asks of an accelerator."""

    device_name = "cpu"
    vendor_name = "cpu"
    device_module = _DEVICE  # type: ignore[assignment]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def set_device(self, device_index: int) -> None:
        pass

    def synchronize(self, device_index: int | None = None) -> None:
        pass

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> None:
        torch.manual_seed(seed)

    def set_allocator_settings(self, settings: str) -> None:
        pass

    def empty_cache(self) -> None:
        pass

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def profiler_start(self) -> None:
        pass

    def profiler_stop(self) -> None:
        pass

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_resource_options(self, num_gpus: float) -> dict[str, Any]:
        return {"num_cpus": num_gpus}

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    def cudart(self) -> Any:
        return None


if platform_manager._current_platform is None or platform_manager._current_platform.device_name != "cpu":
    set_platform(CPUPlatform())
