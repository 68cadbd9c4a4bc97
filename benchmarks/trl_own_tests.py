"""TRL's own tests of GRPOTrainer, run once as they are and once with TROLLTrainer in its place.

    python -m benchmarks.trl_own_tests PATH_TO_A_CHECKOUT_OF_TRL [-k EXPRESSION] [--quick]

Of the checkout only tests/test_grpo_trainer.py (and what it imports from tests/) is used; TRL itself is the
installed one. Models and data sets are local stand-ins (`trl_stand_ins`), and everything runs on the CPU, in
float32 where TRL's default is bfloat16 and without the tests of Liger's kernels. A test whose settings
TROLLTrainer refuses (ConfigError) counts as refused; docs/trl.md lists these settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "trl_own_tests"
_TRAINER, _OUTPUT, _EPOCHS = (f"TRL_OWN_TESTS_{name}" for name in ("TRAINER", "OUTPUT", "EPOCHS"))

# ---------------------------------------------------------------------- inside pytest (-p)

_outcomes: dict[str, dict[str, str]] = {}


def pytest_configure() -> None:
    """Let the defaults of both configurations train on a CPU."""
    if _TRAINER not in os.environ:
        return
    from trl import GRPOConfig

    from tether.integrations.trl import TROLLConfig

    for config in (GRPOConfig, TROLLConfig):
        config.__init__ = _on_cpu(config.__init__)  # type: ignore[method-assign]


def _on_cpu(initialise: Any) -> Any:
    defaults: dict[str, Any] = {"use_cpu": True, "bf16": False}
    if os.environ.get(_EPOCHS):
        defaults["num_train_epochs"] = int(os.environ[_EPOCHS])

    def on_cpu(self: Any, *args: Any, **kwargs: Any) -> None:
        initialise(self, *args, **{**defaults, **kwargs})

    return on_cpu


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Put the stand-ins, and TROLL if it is its turn, in place of what the test module imported."""
    from benchmarks.trl_stand_ins import load_dataset

    from tether.integrations.trl import TROLLConfig, TROLLTrainer

    for module in {item.module for item in items}:
        module.load_dataset = load_dataset
        if os.environ.get(_TRAINER) == "TROLLTrainer":
            module.GRPOTrainer, module.GRPOConfig = TROLLTrainer, TROLLConfig


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: Any, call: Any) -> Iterator[None]:
    """Note how each test ended, and with which error."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    name = item.nodeid.split("::", 1)[1]
    if report.when == "call" or report.outcome != "passed":
        error = call.excinfo
        kind = "" if error is None else error.type.__name__
        refused = report.outcome == "failed" and kind == "ConfigError"
        _outcomes[name] = {
            "outcome": "refused" if refused else report.outcome,
            "error": "" if error is None else f"{kind}: {error.value}".splitlines()[0][:300],
        }


def pytest_sessionfinish() -> None:
    """Leave the outcomes to whoever started this run."""
    if _OUTPUT in os.environ:
        Path(os.environ[_OUTPUT]).write_text(json.dumps(_outcomes), encoding="utf-8")


# ---------------------------------------------------------------------- outside


def run_tests(
    checkout: Path, trainer: str, cache: Path, select: str, quick: bool
) -> dict[str, dict[str, str]]:
    """The outcome of each test with `trainer` under the name of GRPOTrainer."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "outcomes.json"
        environment = {
            **os.environ, _TRAINER: trainer, _OUTPUT: str(output), _EPOCHS: "1" if quick else "",
            "HF_HOME": str(cache),
            "HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TRL_EXPERIMENTAL_SILENCE": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]),
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-p", "benchmarks.trl_own_tests", "-p", "no:cacheprovider",
            "--rootdir", str(checkout), "--confcutdir", str(checkout / "tests"), "-W", "default",
            "--no-header", "--tb=line", "--disable-warnings", "tests/test_grpo_trainer.py",
        ]  # fmt: skip
        # Liger's kernels need a GPU, and stay in place for the tests that follow.
        chosen = f"({select}) and not liger" if select else "not liger"
        subprocess.run([*command, "-k", chosen], cwd=checkout, env=environment)
        if not output.is_file():
            raise SystemExit(f"pytest did not get through {checkout / 'tests/test_grpo_trainer.py'}.")
        outcomes: dict[str, dict[str, str]] = json.loads(output.read_text(encoding="utf-8"))
    return outcomes


def compare(grpo: dict[str, dict[str, str]], troll: dict[str, dict[str, str]]) -> list[str]:
    """The lines of the report: counts, then each test that GRPO passes and TROLL does not."""
    lines = [
        f"{name}: " + ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        for name, counts in (
            ("GRPOTrainer", Counter(result["outcome"] for result in grpo.values())),
            ("TROLLTrainer", Counter(result["outcome"] for result in troll.values())),
        )
    ]
    passing = [name for name, result in grpo.items() if result["outcome"] == "passed"]
    by_outcome = Counter(troll[name]["outcome"] for name in passing)
    lines.append(
        f"Of the {len(passing)} that GRPOTrainer passes, TROLLTrainer passes {by_outcome['passed']}, refuses "
        f"{by_outcome['refused']} and fails {len(passing) - by_outcome['passed'] - by_outcome['refused']}."
    )
    lines += [
        f"  {troll[name]['outcome']}  {name}: {troll[name]['error']}"
        for name in passing
        if troll[name]["outcome"] != "passed"
    ]
    return lines


def main() -> None:
    """Run both, print the comparison and keep it with the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=Path, help="folder with TRL's tests/")
    parser.add_argument("-k", dest="select", default="", help="only tests that pytest's -k selects")
    parser.add_argument("--quick", action="store_true", help="small vocabularies, and one epoch instead of 3")
    parser.add_argument("--cache", type=Path, help="where stand-ins are kept (default: a temporary folder)")
    chosen = parser.parse_args()
    import transformers
    import trl
    from benchmarks.trl_stand_ins import fill_cache

    with tempfile.TemporaryDirectory() as temporary:
        cache = chosen.cache or Path(temporary)
        fill_cache(cache / "hub", quick=chosen.quick)
        grpo, troll = (
            run_tests(chosen.checkout.resolve(), trainer, cache.resolve(), chosen.select, chosen.quick)
            for trainer in ("GRPOTrainer", "TROLLTrainer")
        )
    versions = f"TRL {trl.__version__}, Transformers {transformers.__version__}"
    lines = [versions + (", quick" if chosen.quick else ""), *compare(grpo, troll)]
    print("\n".join(lines))
    if not chosen.select:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "report.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        both = {name: {"GRPOTrainer": grpo[name], "TROLLTrainer": troll[name]} for name in grpo}
        (RESULTS / "outcomes.json").write_text(json.dumps(both, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
