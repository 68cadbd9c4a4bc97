"""The tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from benchmarks.scaling import two_processes
from benchmarks.scaling.formulas import (
    GPUS,
    HALF,
    LENGTH,
    MACHINE,
    MODELS,
    SHARP_IDS,
    SINGLE,
    STATE,
    TOP_K,
    Model,
    Work,
    block_bytes,
    forward_traffic,
    head_gradient_bytes,
    head_products,
    hidden_bytes,
    logits_bytes,
    record_bytes,
    snapshot_traffic,
    update_traffic,
)


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def size(number: float) -> str:
    """Bytes in three digits.

    >>> size(34_359_738_368), size(536), size(0)
    ('34.4 GB', '536 B', '0')
    """
    return _scaled(number, "B")


def _scaled(number: float, unit: str) -> str:
    if number == 0:
        return "0"
    for prefix in ("", "k", "M", "G", "T"):
        if number < 999.5 or prefix == "T":
            break
        number /= 1000
    digits = 0 if number >= 99.5 or not prefix else 1 if number >= 9.95 else 2
    return f"{number:.{digits}f} {prefix}{unit}"


def percent(share: float) -> str:
    """In two digits.

    >>> percent(0.0123), percent(0.0004), percent(1e-6)
    ('1.2 %', '0.04 %', '< 0.01 %')
    """
    if 0 < share < 0.0001:
        return "< 0.01 %"
    return f"{100 * share:.0f} %" if share >= 0.0995 else f"{100 * share:.{1 if share >= 0.00095 else 2}f} %"


def seconds(number: float) -> str:
    """In two digits or so.

    >>> seconds(131.2), seconds(1.31), seconds(0.0312)
    ('131 s', '1.3 s', '31 ms')
    """
    if number >= 1:
        return f"{number:.{0 if number >= 10 else 1}f} s"
    return f"{1000 * number:.{0 if number >= 0.01 else 1}f} ms"


def models_table() -> str:
    """The models, and how much of them the head is."""
    rows = []
    for model in MODELS:
        forward = model.forward(LENGTH)
        product = model.product / MACHINE.operations
        read_and_write = 2 * SINGLE * model.vocabulary / MACHINE.memory_speed
        rows.append([
            model.name, f"{model.parameters / 1e9:.2f} B", f"{(model.active + model.head) / 1e9:.1f} B",
            f"{model.width:,}", f"{model.vocabulary:,}", _scaled(forward, "FLOP"),
            _scaled(model.product, "FLOP"), percent(model.product / (forward + model.product)),
            percent(read_and_write / product),
        ])  # fmt: skip
    header = [
        "model", "parameters", "of them active", "D", "V", "forward without head, a token",
        "a product with the head",
        "its share of forward", "a pass over the logits / that product",
    ]  # fmt: skip
    return table(header, rows)


def token_table() -> str:
    """Bytes of the old policy, a response token."""
    rows = []
    for model in MODELS:
        hidden, most = hidden_bytes(model.width), record_bytes(TOP_K + 1)
        rows.append([
            model.name, f"{hidden:,}", f"{record_bytes(SHARP_IDS):.0f} to {most:.0f}",
            f"{logits_bytes(model.vocabulary):,}", f"{hidden / most:.0f}", f"{(hidden - 10) // 8:,}",
            size(model.head * HALF),
        ])  # fmt: skip
    header = [
        "model", "exact: hidden state", "bucket: record", "logits, bf16", "exact / largest record",
        "ids at which a record is as large", "once: the old head",
    ]  # fmt: skip
    return table(header, rows)


def memory_table() -> str:
    """Bytes a GPU."""
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            tokens = Work(gpus).response_tokens / gpus
            state = model.parameters * STATE / gpus
            hidden = tokens * hidden_bytes(model.width)
            rows.append([
                model.name, f"{gpus}", size(state) + ("" if state < MACHINE.memory else ": offloaded"),
                size(hidden), seconds(2 * hidden / MACHINE.host_link), size(model.head * HALF / gpus),
                size(tokens * record_bytes(TOP_K + 1)), size(tokens * logits_bytes(model.vocabulary)),
            ])  # fmt: skip
    header = [
        "model", "GPUs", "training state", "exact: hidden states, on the host", "there and back",
        "exact: old head, sharded", "bucket: largest records", "logits, were they kept",
    ]  # fmt: skip
    return table(header, rows)


def update_table() -> str:
    """Bytes a GPU holds while it updates, whatever the number of GPUs."""
    rows = []
    for model in MODELS:
        logits = Work(GPUS[0]).micro_batch * logits_bytes(model.vocabulary)
        parts = (2 * model.head * HALF, head_gradient_bytes(model.head), block_bytes(model.vocabulary, 2))
        rows.append([model.name, *map(size, parts), size(sum(parts)), size(model.head * HALF + 2 * logits)])
    header = [
        "model", "exact: head and old head, gathered", "exact: the head's gradient, float32",
        "exact: logits of a block, two policies, and their gradient", "exact, in all",
        "bucket in verl: head, logits and their gradient",
    ]  # fmt: skip
    return table(header, rows)


#: What exact support meets: name, tokens that no certificate clears, tokens that are projected.
CASES = (
    ("1 % uncertain, 0.1 % projected", 0.01, 0.001),
    ("no certificate holds", 1.0, 0.001),
    ("every token projected", 1.0, 1.0),
)


def step_operations(model: Model, work: Work, products: float) -> float:
    """Of the trainer: an old pass, and an update of every token with gradient checkpointing."""
    passes = 1 + 1 + 1 + 2
    backbone = work.tokens * passes * model.forward(work.length)
    return backbone + work.response_tokens * (1 + products) * model.product


def trainer_seconds(model: Model, gpus: int) -> float:
    """Of a step with the clip or bucket support, arithmetic alone."""
    return step_operations(model, Work(gpus), head_products("bucket")) / gpus / MACHINE.operations


def arithmetic_table() -> str:
    """Operations of a step, and what exact support adds to them."""
    rows = []
    for model in MODELS:
        work = Work(GPUS[0])
        bucket = step_operations(model, work, head_products("bucket"))
        head = work.response_tokens * (1 + head_products("bucket")) * model.product
        extra = [
            percent(step_operations(model, work, head_products("exact", *shares)) / bucket - 1)
            for _, *shares in CASES
        ]
        times = " / ".join(seconds(trainer_seconds(model, gpus)) for gpus in GPUS)
        rows.append([model.name, f"{bucket / 1e15:,.0f} PFLOP", percent(head / bucket), *extra, times])
    header = [
        "model", f"clip or bucket, {Work(8).responses:,} responses", "of it the head",
        *(f"exact, {name}" for name, *_ in CASES), f"seconds on {' / '.join(map(str, GPUS))} GPUs",
    ]  # fmt: skip
    return table(header, rows)


def traffic_table() -> str:
    """Bytes a GPU receives over the network in a step."""
    rows = []
    for model in MODELS:
        for gpus in GPUS:
            work, arithmetic = Work(gpus), trainer_seconds(model, gpus)
            weights = work.micro_batches * (
                forward_traffic(model.parameters, gpus) + update_traffic(model.parameters, gpus)
            )
            there_and_back = 2 * work.response_tokens / gpus
            local = work.updates * snapshot_traffic(model.head, gpus)
            queue = local + there_and_back * hidden_bytes(model.width)
            records = there_and_back * record_bytes(TOP_K + 1)
            shares = (percent(b / MACHINE.network / arithmetic) for b in (weights, local, queue, records))
            cells = [f"{size(b)}, {s}" for b, s in zip((weights, local, queue, records), shares, strict=True)]
            rows.append([model.name, f"{gpus}", *cells])
    header = [
        "model", "GPUs", "FSDP2's weights and gradients", "exact, store on the worker",
        "exact, through a queue", "bucket, through a queue",
    ]  # fmt: skip
    return table(header, rows)


def sampler_table() -> str:
    """What an asynchronous step sends to the samplers, and what they would have to send back."""
    rows = []
    for model in MODELS:
        tokens = Work(64).response_tokens
        back = [tokens * one for one in (record_bytes(TOP_K + 1), hidden_bytes(model.width))]
        cells = (model.parameters * HALF, *back, model.head * HALF)
        rows.append([model.name, *map(size, cells)])
    header = [
        "model", "weights to every sampler", "largest records of a batch", "hidden states of a batch",
        "a head for each version in flight",
    ]  # fmt: skip
    return table(header, rows)


def measured_table() -> str:
    """Two processes of this machine."""
    rows = [
        [name, f"{found:,.0f}", f"{expected:,.0f}", f"{found / expected:.3f}"]
        for name, found, expected in two_processes.compare()
    ]
    return table(["on two processes, received by one", "bytes moved", "formula", "ratio"], rows)


#: As they are marked in the page.
TABLES: dict[str, Callable[[], str]] = {
    "models": models_table,
    "token": token_table,
    "memory": memory_table,
    "update": update_table,
    "arithmetic": arithmetic_table,
    "traffic": traffic_table,
    "sampler": sampler_table,
    "measured": measured_table,
}
