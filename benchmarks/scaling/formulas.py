"""Bytes, arithmetic and traffic of a step as formulas, and the models and the machine they are applied to."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tether.ops.memory import rows_that_fit

GPUS = (8, 64, 256, 1024)
HALF, SINGLE = 2, 4  # bytes of bfloat16 and of float32


@dataclass(frozen=True)
class Model:
    """Sizes as in the published config.json."""

    name: str
    layers: int
    width: int
    heads: int
    key_value_heads: int
    intermediate: int
    vocabulary: int
    head_width: int = 128
    experts: int = 0
    experts_a_token: int = 0
    query_key_norm: bool = False

    @property
    def head(self) -> int:
        """Parameters of the LM head; the embedding has as many, as none of these ties them."""
        return self.vocabulary * self.width

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self._attention + self._expert * max(1, self.experts) + self.width * self.experts

    @property
    def parameters(self) -> int:
        return 2 * self.head + self.layers * self.layer + self.width

    @property
    def active(self) -> int:
        """Parameters that one token meets in matrix products, the head left out."""
        experts = self._expert * max(1, self.experts_a_token) + self.width * self.experts
        return self.layers * (self._attention + experts)

    @property
    def _attention(self) -> int:
        keys = self.key_value_heads * self.head_width
        norms = 2 * self.width + (2 * self.head_width if self.query_key_norm else 0)
        return 2 * self.width * (self.heads * self.head_width + keys) + norms

    @property
    def _expert(self) -> int:
        return 3 * self.width * self.intermediate

    def forward(self, length: int) -> float:
        """Operations of a token's forward pass without the head, in a causal context of this length."""
        return 2 * self.active + 2 * self.layers * self.heads * self.head_width * length

    @property
    def product(self) -> float:
        """Operations of one product of a token with the LM head."""
        return 2.0 * self.head


MODELS = (
    Model("Qwen3-8B", 36, 4096, 32, 8, 12288, 151_936, query_key_norm=True),
    Model("Llama-3.3-70B", 80, 8192, 64, 8, 28672, 128_256),
    Model(
        "Qwen3-235B-A22B", 94, 4096, 64, 4, 1536, 151_936,
        experts=128, experts_a_token=8, query_key_norm=True,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """A batch of rollouts on some GPUs: the same everywhere, until a GPU has two responses an update."""

    gpus: int
    least_responses: int = 2048
    prompt: int = 512
    response: int = 2048
    updates: int = 8
    micro_batch: int = 16_384
    """Tokens a GPU takes at a time."""
    top_k: int = 64
    sharp_ids: float = 6.1
    """Ids kept of a token where the model is sharp: benchmarks/results/verl_payload."""

    @property
    def responses(self) -> int:
        return max(self.least_responses, 2 * self.updates * self.gpus)

    @property
    def length(self) -> int:
        return self.prompt + self.response

    @property
    def tokens(self) -> int:
        return self.responses * self.length

    @property
    def response_tokens(self) -> int:
        return self.responses * self.response

    @property
    def micro_batches(self) -> int:
        """Of one GPU in a whole step; each update has one at least."""
        return self.updates * math.ceil(self.tokens / self.updates / self.gpus / self.micro_batch)


@dataclass(frozen=True)
class Machine:
    """What times are made with; a quarter more or less changes no conclusion."""

    operations: float = 400e12
    """A second, of an H100 in bfloat16 as trainings reach it."""
    network: float = 50e9
    """Bytes a second between machines, a GPU: 400 Gbit/s."""
    host_link: float = 50e9
    """Bytes a second between a GPU and pinned memory of its host: PCIe 5."""
    memory: float = 80e9
    memory_speed: float = 3.35e12
    """Bytes a second of its own memory."""


MACHINE = Machine()
LENGTH, TOP_K, SHARP_IDS = Work(8).length, Work(8).top_k, Work(8).sharp_ids
#: Bytes a parameter at rest: bfloat16 weights, float32 master, two moments of Adam, a bfloat16 gradient.
STATE = HALF + SINGLE + 2 * SINGLE + HALF


# ------------------------------------------------------------------------------ what is kept of a token


def hidden_bytes(width: int, itemsize: int = HALF) -> int:
    """Exact support: the last hidden state of the old policy."""
    return width * itemsize


def record_bytes(ids: float) -> float:
    """Bucket support: an id and a log-probability each, and 10 bytes a token for its tail and its length."""
    return 8 * ids + 10


def logits_bytes(vocabulary: int, itemsize: int = HALF) -> int:
    """What neither of them keeps."""
    return vocabulary * itemsize


# ------------------------------------------------------------------------------ what an update holds

DEVICE_BYTES = 80 * 10**9
"""An H100's, whose share decides how many tokens' logits are formed at a time."""


def head_gradient_bytes(head: int) -> int:
    """Exact support, if the head is trained: summed in float32, a block of tokens at a time, then rounded."""
    return head * SINGLE


def block_bytes(vocabulary: int, policies: int) -> int:
    """Exact support: logits of a block of tokens, and their gradient as the products take it."""
    return rows_that_fit(DEVICE_BYTES, vocabulary) * vocabulary * (policies * SINGLE + HALF)


# ------------------------------------------------------------------------------ what the head costs


def head_products(
    support: str, uncertain: float = 0.0, projected: float = 0.0, *, one_pass: bool = False
) -> float:
    """Products of a token with the LM head in an update, on an accelerator.

    Forward one, backward the same once more (logits are not kept) and one each for the gradients of hidden
    states and head. Exact support adds the old logits: forward of tokens that no certificate clears, backward
    of those that are projected. In one pass (`tether.losses.linear_policy_loss`) nothing is formed again.
    """
    old = uncertain + (0 if one_pass else projected)
    return (3 if one_pass else 4) + (old if support == "exact" else 0)


# ------------------------------------------------------------------------------ what collectives move


def gathered(size: float, processes: int) -> float:
    """Bytes a process receives in an all-gather of `size` bytes in all; a reduce-scatter's are as many."""
    return size * (processes - 1) / processes


def reduced(size: float, processes: int) -> float:
    """Bytes a process receives in an all-reduce of `size` bytes: both of the above."""
    return 2 * gathered(size, processes)


def forward_traffic(parameters: float, processes: int, itemsize: int = HALF) -> float:
    """FSDP2: all parameters once."""
    return gathered(parameters * itemsize, processes)


def update_traffic(
    parameters: float, processes: int, itemsize: int = HALF, gradient_itemsize: int = SINGLE
) -> float:
    """FSDP2: parameters forward and again backward, and their gradients, of one micro-batch."""
    return gathered(parameters * (2 * itemsize + gradient_itemsize), processes)


def snapshot_traffic(head: float, processes: int, itemsize: int = HALF) -> float:
    """Exact support: the old head, which is sharded at rest; nothing if the head is frozen (LoRA)."""
    return gathered(head * itemsize, processes)


def shared_vocabulary_traffic(tokens: int, ids: int, top_k: int, processes: int) -> float:
    """`tether.ops.vocabulary_parallel` forward: largest logit, mass, entropy, logits at ids, top-K."""
    sums = reduced(SINGLE * tokens * (1 + 2 + ids), processes)
    if not top_k:
        return sums
    best = (processes - 1) * tokens * top_k * (8 + SINGLE)  # int64 ids and logits of every other shard
    return sums + best + reduced(SINGLE * tokens * top_k, processes)


def shared_vocabulary_backward_traffic(tokens: int, width: int, processes: int) -> float:
    """The same, backward: the gradient of the hidden states, in float32."""
    return reduced(SINGLE * tokens * width, processes)
