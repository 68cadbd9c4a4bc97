"""Buffers in huge pages are buffers like any other."""

from __future__ import annotations

import sys

import pytest
import torch

from tether.ops import memory


@pytest.mark.parametrize("shape", [(0, 5), (3, 7), (300, 5000)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_buffers_have_the_shape_type_and_content_asked_for(
    shape: tuple[int, int], dtype: torch.dtype
) -> None:
    like = torch.ones(2, dtype=torch.bfloat16)
    empty, zeros = memory.new_empty(like, shape, dtype), memory.new_zeros(like, shape, dtype)
    assert empty.shape == zeros.shape == shape
    assert empty.dtype == zeros.dtype == dtype
    assert not zeros.any()


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are asked for on Linux alone")
def test_only_whole_huge_pages_inside_the_buffer_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, int, int]] = []

    class Libc:
        @staticmethod
        def madvise(start, length, advice) -> int:  # type: ignore[no-untyped-def]
            asked.append((start.value, length.value, advice))
            return 0

    monkeypatch.setattr(memory, "_LIBC", Libc)
    like = torch.zeros(1)
    memory.new_empty(like, (1000,), torch.float32)  # smaller than a huge page
    assert asked == []
    tensor = memory.new_empty(like, (3 << 19,), torch.float32)  # three huge pages long
    ((start, length, advice),) = asked
    assert advice == 14
    assert start % (1 << 21) == length % (1 << 21) == 0
    assert tensor.data_ptr() <= start
    assert start + length <= tensor.data_ptr() + tensor.numel() * 4
    assert length >= 2 << 21
