"""Which rows of logits a support proves inside the bound: one kernel instead of a hundred operations.

`certificate.py` is the reference beside it and says why each line holds. An accelerator needs next to no time
for the few numbers of a support, its host a microsecond or ten for each operation on them.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from tether.ops.certificate_triton_kernels import certify_kernel
from tether.ops.token_state import TokenState
from tether.projection.sparse import SparseLogProbs


def certify_rows(
    logits: Tensor,
    old: SparseLogProbs,
    ratio_range: Tensor,
    kl_bound: float,
    vocabulary: int,
    state: TokenState,
) -> None:
    """Fill in `kl`, `tail_mass`, `certified` and `uncertain` of rows whose `log_sum` is known.

    Args:
        logits: of the new policy, [n, V].
        old: on its support, [n, K].
        ratio_range: a bound on max - min of log(new / old), [n] float64.
        vocabulary: ids that can be sampled.
        state: of these rows, [n].
    """
    slots = old.ids.shape[-1]
    epsilon = torch.finfo(logits.dtype).eps
    bound = logits.new_full((1,), kl_bound, dtype=torch.float64)
    least = None if old.log_tail_min is None else old.log_tail_min.contiguous()
    with torch.cuda.device_of(logits):
        certify_kernel[(len(logits),)](
            logits, state.log_sum,
            old.ids.contiguous(), old.log_probs.contiguous(), old.log_tail.contiguous(), least,
            ratio_range, bound, state.kl, state.tail_mass,
            state.certified.view(torch.int8), state.uncertain.view(torch.int8),
            slots, vocabulary, logits.stride(0),
            EPSILON=epsilon, COARSER=max(epsilon, torch.finfo(old.log_probs.dtype).eps),
            SMALLEST=math.log(epsilon), TERMS=4 + 2 * math.log(slots + 1),
            BLOCK=triton.next_power_of_2(slots), num_warps=1,
        )  # fmt: skip
