"""A GPU that is not there: its tensors say that they are on "cuda:0", and compute on the CPU.

Code that runs on them takes the branches that it takes on a GPU, with true values, so results can be
compared. What a GPU refuses is refused: operations on tensors of two devices, as factories without a device
cause them. What makes the host wait for a GPU is noted with the place it happens: looking at a value, results
whose size depends on values, and copies between host and device. What a library waits for within one of its
operations (an eigenvalue decomposition) is not seen.
"""

from __future__ import annotations

import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map

import tether

DEVICE = torch.device("cuda:0")
#: Of tests that run Triton's kernels on the pretended GPU.
NEEDS_INTERPRETER = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="Triton interprets kernels where there is no GPU",
)
aten = torch.ops.aten

# What the host waits for, as it is called in tables.
VALUE, ROWS, TO_HOST, FROM_HOST = "value", "rows", "to host", "from host"
# And what it waits for while the device has been asked for more already.
BEHIND_WORK = "behind work"

_VALUE = {aten._local_scalar_dense, aten.equal, aten.is_nonzero, aten._linalg_check_errors, aten.allclose}
GRADIENT_OF_MASKED_SCATTER = ("gradient:masked_scatter", ROWS)
# The size of the result is known to the device alone.
_ROWS = {
    aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.unique_consecutive, aten.bincount,
}  # fmt: skip
# They change the shape of what they have made, which a tensor made in Python does not notice. None waits.
_SHAPED_INSIDE = (Tensor.nanquantile, Tensor.quantile, torch.nanquantile, torch.quantile)
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}

_LIBRARY = Path(tether.__file__).parent
_TORCH = Path(torch.__file__).parent
_NOT_A_PLACE = (str(_TORCH), __file__, "<")  # "<frozen ...>", "<string>"


class PretendTensor(Tensor):
    """On the pretended GPU. C++ takes it for one of the meta device, which needs no driver."""

    values: Tensor
    device = property(lambda self: DEVICE)  # type: ignore[assignment]
    is_cuda = property(lambda self: True)  # type: ignore[assignment]
    is_meta = property(lambda self: False)  # type: ignore[assignment]
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, values: Tensor) -> PretendTensor:
        made = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(),
            dtype=values.dtype, device="meta",
        )  # fmt: skip
        made.values = values.detach()
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PretendTensor({self.values!r})"

    def get_device(self) -> int:
        return 0

    def tolist(self) -> Any:
        _active().note(TO_HOST)
        return self.values.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{func} of tensors on the pretended GPU, outside of `with PretendGPU()`.")


class PretendGPU:
    """Within its context, "cuda:0" exists. `waits` counts, by place and cause, what the host waited for, and
    `launches`, by place, what it asked the GPU to do.

    A place is ``file:function``, the innermost of this package, or the name of the package it lies in.

    Args:
        kernels: whether ``backend="auto"`` takes the Triton kernels, which are interpreted: slow.
    """

    def __init__(self, *, kernels: bool = False) -> None:
        self.kernels = kernels
        self.waits: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self._stack = ExitStack()

    def put(self, tensor: Tensor) -> Tensor:
        """A copy on the device, a leaf if the tensor is one; not counted."""
        return PretendTensor(tensor.detach().clone()).requires_grad_(tensor.requires_grad)

    def put_module(self, module: torch.nn.Module) -> None:
        """Move parameters and buffers, tied ones together; not counted."""
        made: dict[int, Any] = {}
        for part in module.modules():
            for name, parameter in list(part._parameters.items()):
                if parameter is not None:
                    new = made.setdefault(id(parameter), torch.nn.Parameter(self.put(parameter.detach())))
                    part._parameters[name] = new.requires_grad_(parameter.requires_grad)
            for name, buffer in list(part._buffers.items()):
                part._buffers[name] = None if buffer is None else self.put(buffer)

    def note(self, cause: str) -> None:
        """That the host waits here."""
        self.waits[_place(sys._getframe(1)), cause] += 1

    def ours(self) -> dict[tuple[str, str], int]:
        """The waits in this package."""
        return {wait: count for wait, count in sorted(self.waits.items()) if ":" in wait[0]}

    def __enter__(self) -> PretendGPU:
        global _gpu
        assert _gpu is None, "one pretended GPU at a time"
        _gpu = self
        enter = self._stack.enter_context
        enter(mock.patch.object(torch.cuda, "_lazy_init", return_value=None))
        enter(mock.patch.object(torch.cuda, "device_of", return_value=nullcontext()))
        enter(mock.patch.object(torch.cuda, "Event", _Event))
        for context in _triton_patches(self.kernels):
            enter(context)
        enter(_FromPython())
        enter(_OnDevice(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        global _gpu
        _gpu = None
        self._stack.close()


_gpu: PretendGPU | None = None


def _active() -> PretendGPU:
    assert _gpu is not None, "a tensor of the pretended GPU outlived it"
    return _gpu


def values_of(tensor: Tensor) -> Tensor:
    """Of a tensor on the device, for a test to look at; not counted."""
    assert isinstance(tensor, PretendTensor), (
        f"expected a tensor on the pretended GPU, got one on {tensor.device}"
    )
    return tensor.values


class _Event:
    """A point in the order of what the device was asked for."""

    def record(self) -> None:
        self._asked = _active().launches.total()

    def synchronize(self) -> None:
        _active().note(BEHIND_WORK if _active().launches.total() > self._asked else TO_HOST)


class _FromPython(TorchFunctionMode):
    """What torch does before it dispatches: tensors of Python's numbers and lists."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and _is_ours(kwargs.get("device")):
            del kwargs["device"]
            return func(*args, **kwargs).to(DEVICE)
        if func is Tensor.__setitem__:
            _note_number(*args)
        if func in _SHAPED_INSIDE:
            values, *rest = args
            return PretendTensor(func(_values(values), *rest, **kwargs))
        return func(*args, **kwargs)


class _OnDevice(TorchDispatchMode):
    def __init__(self, gpu: PretendGPU) -> None:
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        touched = any(isinstance(leaf, PretendTensor) for leaf in leaves)
        device = kwargs.get("device")
        here = touched if device is None else _is_ours(device)
        if touched or here:
            self._check(func, args, kwargs, leaves, here)
            self._count(func)
        inner, inner_kwargs = tree_map(_values, (args, kwargs))
        if _is_ours(device):
            inner_kwargs["device"] = torch.device("cpu")
        found = _run(func, inner, inner_kwargs)
        if not here:
            return found
        result = tree_map(lambda leaf: PretendTensor(leaf) if isinstance(leaf, Tensor) else leaf, found)
        for leaf in leaves:
            if isinstance(leaf, PretendTensor) and leaf.shape != leaf.values.shape:
                raise NotImplementedError(f"{func} changes a tensor's shape in place.")
        return return_and_correct_aliasing(func, args, kwargs, result)

    def _count(self, func: Any) -> None:
        """Note the launch of a kernel; views and memory need none."""
        is_view = any(r.alias_info and not r.alias_info.is_write for r in func._schema.returns)
        if not is_view and "empty" not in func.overloadpacket.__name__:
            self.gpu.launches[_place(sys._getframe(2))] += 1

    def _check(self, func: Any, args: Any, kwargs: Any, leaves: list[Any], here: bool) -> None:
        """Note what the host waits for, and refuse what a GPU refuses."""
        packet = func.overloadpacket
        if packet in (aten._to_copy, aten.copy_):
            device_of_source = isinstance(args[1] if packet is aten.copy_ else args[0], PretendTensor)
            to = isinstance(args[0], PretendTensor) if packet is aten.copy_ else here
            late = device_of_source and kwargs.get("non_blocking")  # its event is waited for
            if device_of_source != to and not late:
                self.gpu.note(FROM_HOST if to else TO_HOST)
            return
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise RuntimeError(f"{func} on {DEVICE} with a generator of the CPU.")
        if packet in _INDEXED:
            self._check_index(packet, args)
            leaves = [leaf for leaf in leaves if leaf is not None and not any(leaf is i for i in args[1])]
        elif packet in _VALUE:
            self.gpu.note(VALUE)
        elif packet in _ROWS or (packet is aten.repeat_interleave and kwargs.get("output_size") is None):
            self.gpu.note(ROWS)
        elif packet is aten.masked_scatter_backward:  # which runs where no code of ours is on the stack
            self.gpu.waits[GRADIENT_OF_MASKED_SCATTER] += 1
        for leaf in leaves:
            if isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor):
                if leaf.dim():
                    raise RuntimeError(
                        f"{func}: expected all tensors to be on the same device, but found {DEVICE} and "
                        f"{leaf.device} {tuple(leaf.shape)}, in {_place(sys._getframe(1))}."
                    )
                if packet is aten.where:  # other operations take a single number as an argument of theirs
                    self.gpu.note(FROM_HOST)

    def _check_index(self, packet: Any, args: Any) -> None:
        indices = [index for index in args[1] if index is not None]
        if any(not isinstance(index, PretendTensor) for index in indices):
            self.gpu.note(FROM_HOST)
        # A mask that receives one number is filled; any other is turned into positions first.
        filled = packet is not aten.index and args[2].numel() == 1 and not (len(args) > 3 and args[3])
        if any(index.dtype in (torch.bool, torch.uint8) for index in indices) and not filled:
            self.gpu.note(ROWS)


def _note_number(tensor: Any, index: Any, value: Any) -> None:
    """A number for chosen positions is copied there first; slices and masks are filled."""
    parts = index if isinstance(index, tuple) else (index,)
    positions = any(isinstance(part, Tensor) and part.dtype is not torch.bool for part in parts)
    if positions and isinstance(tensor, PretendTensor) and not isinstance(value, Tensor):
        _active().note(FROM_HOST)


def _is_ours(device: Any) -> bool:
    return device is not None and torch.device(device).type in ("cuda", "meta")


def _values(leaf: Any) -> Any:
    return leaf.values if isinstance(leaf, PretendTensor) else leaf


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the values; products in half precision that add up in float32 are a GPU's alone."""
    if func in (aten.mm.dtype, aten.mm.dtype_out):
        wide = aten.mm(args[0].to(args[2]), args[1].to(args[2]))
        return kwargs["out"].copy_(wide) if "out" in kwargs else wide
    if func in (aten.addmm.dtype, aten.addmm.dtype_out):
        wide = aten.addmm(args[0], args[1].to(args[3]), args[2].to(args[3]))
        return kwargs["out"].copy_(wide) if "out" in kwargs else wide
    return func(*args, **kwargs)


def _place(frame: FrameType | None) -> str:
    """The innermost code that is neither torch's nor this file's."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(_NOT_A_PLACE):
            break
        frame = frame.f_back
    assert frame is not None
    path = Path(code.co_filename)
    if path.is_relative_to(_LIBRARY):
        # What is inlined into its function depends on Python's version.
        function = code.co_qualname.split(".<locals>.<")[0]
        return f"{path.relative_to(_LIBRARY)}:{function}"
    package = (
        path.parts[path.parts.index("site-packages") + 1] if "site-packages" in path.parts else path.stem
    )
    return package


def _triton_patches(chosen: bool) -> Iterator[AbstractContextManager[Any]]:
    """Kernels are interpreted on the values."""
    from tether.projection import backend

    yield mock.patch.object(backend, "_compiles_for", return_value=chosen)
    if not backend._installed():
        return
    from tether.ops import certificate_triton, dense_rows_triton, rows_triton
    from tether.projection import categorical_triton

    for module in (rows_triton, dense_rows_triton, certificate_triton, categorical_triton):
        for name in [name for name in vars(module) if name.endswith("_kernel")]:
            yield mock.patch.object(module, name, _Interpreted(getattr(module, name), module))


class _Interpreted:
    def __init__(self, kernel: Any, module: ModuleType) -> None:
        self.kernel = kernel

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **kwargs: Any) -> None:
            for leaf in (*args, *kwargs.values()):
                if isinstance(leaf, Tensor) and not isinstance(leaf, PretendTensor):
                    raise RuntimeError(f"a kernel was given a tensor on {leaf.device} {tuple(leaf.shape)}.")
            _active().launches[_place(sys._getframe(1))] += 1
            args, kwargs = tree_map(_values, (args, kwargs))
            with _disable_current_modes(), torch._C.DisableTorchFunction():
                self.kernel[grid](*args, **kwargs)

        return launch
