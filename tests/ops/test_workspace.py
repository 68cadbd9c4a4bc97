"""The memory for logits that outlives a pass: never two users at a time, never more than one buffer."""

from __future__ import annotations

import torch
from torch import Tensor

from tether.ops.memory import Workspace

HERE = torch.empty(1)


def _taken(space: Workspace, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    taken = space.take(HERE, shape, dtype)
    assert taken.shape == shape
    assert taken.dtype == dtype
    assert taken.is_contiguous()
    return taken


def test_what_comes_back_is_used_again_in_any_shape_that_fits() -> None:
    space = Workspace()
    first = _taken(space, 4, 6)
    at = first.data_ptr()
    del first
    second = _taken(space, 2, 3, 2, dtype=torch.float64)
    assert second.data_ptr() == at
    del second
    larger = _taken(space, 5, 6)
    assert larger.untyped_storage().nbytes() == 5 * 6 * 4


def test_it_is_where_the_tensor_is_and_not_on_the_default_device() -> None:
    with torch.device("meta"):
        assert _taken(Workspace(), 4, 6).device.type == "cpu"


def test_what_waits_can_be_given_back() -> None:
    space = Workspace()
    _taken(space, 50, 6)
    space.release()
    assert _taken(space, 4, 6).untyped_storage().nbytes() == 4 * 6 * 4


def test_two_at_a_time_share_nothing() -> None:
    space = Workspace()
    first, second = _taken(space, 4, 6), _taken(space, 4, 6)
    first.fill_(1)
    second.fill_(2)
    assert float(first.sum()) == 24


def test_a_view_keeps_it_in_use() -> None:
    space = Workspace()
    with torch.no_grad():
        view = _taken(space, 4, 6)[:2]  # nobody holds the whole
        part = view[:, 1:3].t()
        del view
        part.fill_(1)
        _taken(space, 4, 6).fill_(2)
        assert float(part.sum()) == 4


def test_a_view_keeps_it_in_use_in_inference_mode() -> None:
    space = Workspace()
    with torch.inference_mode():
        view = _taken(space, 4, 6)[:2]
        view.fill_(1)
        _taken(space, 4, 6).fill_(2)
        assert float(view.sum()) == 12


def test_one_buffer_waits() -> None:
    space = Workspace()
    both = [_taken(space, 4, 6), _taken(space, 4, 6)]
    both.clear()
    assert len(space._idle) == 1
