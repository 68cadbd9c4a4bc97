"""Evaluation: unbiased pass@k, pairs, a kill that costs nothing, and a page that shows what was said."""

from __future__ import annotations

import itertools
import json
import math
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from tether.cli import main
from tether.errors import CheckpointError, ConfigError, InvalidInputError, TetherError
from tether.experiments.statistics import proportion_interval
from tether.llm import answers, evaluate
from tether.llm.answers import score_tokens
from tether.llm.eval_config import EvalConfig
from tether.llm.evaluate import evaluate as run_evaluation
from tether.llm.generate import answer
from tether.llm.measures import difference, pass_at_k, summarise_problems
from tether.llm.models import load_model_and_tokenizer

SMALL = {
    "task": ("arithmetic",),
    "problems": 10,
    "samples": 3,
    "batch_size": 9,
    "threads": 1,
    "device": "cpu",
}


def settings(output: Path | None = None, **changes: Any) -> EvalConfig:
    return EvalConfig(**{**SMALL, "output": output, **changes})


def response(correct: bool, **more: Any) -> dict[str, Any]:
    base = {
        "text": "x",
        "correct": correct,
        "reward": float(correct),
        "parts": {},
        "truncated": False,
        "length": 1,
    }
    return base | more


def row(right: int, samples: int, greedy: bool | None = None) -> dict[str, Any]:
    return {
        "prompt": "p", "reference": "r", "greedy": None if greedy is None else response(greedy),
        "samples": [response(n < right) for n in range(samples)],
    }  # fmt: skip


# ---------------------------------------------------------------------- measures


@pytest.mark.parametrize("samples", [1, 2, 5, 7])
def test_pass_at_k_is_the_share_of_draws_with_a_right_response(samples: int) -> None:
    """Against all ways to draw k responses, one by one."""
    for correct in range(samples + 1):
        responses = [True] * correct + [False] * (samples - correct)
        for k in range(1, samples + 1):
            draws = [any(draw) for draw in itertools.combinations(responses, k)]
            assert pass_at_k(correct, samples, k) == pytest.approx(sum(draws) / len(draws), abs=1e-12)


def test_pass_at_k_does_not_overflow() -> None:
    exact = 1 - math.comb(9_990, 5_000) / math.comb(10_000, 5_000)
    assert pass_at_k(10, 10_000, 5_000) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize(("correct", "samples", "k"), [(0, 4, 0), (0, 4, 5), (5, 4, 1), (-1, 4, 1)])
def test_pass_at_k_outside_its_range_is_refused(correct: int, samples: int, k: int) -> None:
    with pytest.raises(InvalidInputError, match=f"pass@{k}"):
        pass_at_k(correct, samples, k)


def test_a_summary_by_hand() -> None:
    summary = summarise_problems([row(0, 4, False), row(2, 4, True), row(4, 4, True)], ks=(1, 2, 4))
    assert summary.success is not None
    assert summary.greedy is not None
    assert summary.success.value == pytest.approx(0.5)
    assert summary.pass_at[1].value == pytest.approx(0.5)
    assert summary.pass_at[2].value == pytest.approx((0 + 5 / 6 + 1) / 3)
    assert summary.pass_at[4].value == pytest.approx(2 / 3)
    assert summary.greedy.value == pytest.approx(2 / 3)
    assert (summary.problems, summary.samples, summary.reward, summary.length) == (3, 4, 0.5, 1)
    assert summary.success == proportion_interval(0.5, 3)
    assert summary.pass_at[4] == proportion_interval(2 / 3, 3)


def test_parts_are_averaged_over_the_responses_that_have_them() -> None:
    rows = [{**row(0, 0), "greedy": response(True, parts={"boxed": 1.0})}, row(0, 0, False)]
    summary = summarise_problems(rows)
    assert summary.parts == {"boxed": 1.0}
    assert summary.success is None
    assert summary.reward == 0.5


def test_pairs_see_a_difference_that_the_two_intervals_hide() -> None:
    """Problems from hopeless to trivial, on each of which the model is right once more in eight."""
    baseline = [row(n % 8, 8) for n in range(40)]
    model = [row(n % 8 + 1, 8) for n in range(40)]
    alone = [summarise_problems(rows).success for rows in (model, baseline)]
    paired = difference(model, baseline).success
    assert alone[0].low < alone[1].high
    assert paired.value == pytest.approx(1 / 8)
    assert paired.low == pytest.approx(1 / 8) == paired.high


def test_other_problems_are_no_pair() -> None:
    with pytest.raises(InvalidInputError, match="different problems"):
        difference([row(1, 2)], [{**row(1, 2), "prompt": "another"}])


# ---------------------------------------------------------------------- token scores


def test_scores_are_those_of_each_sequence_alone() -> None:
    model, tokenizer = load_model_and_tokenizer("embedded")
    prompts = [tokenizer(text).input_ids for text in ("37+58=", "1+1=", "900-111=")]
    responses = [tokenizer(text).input_ids for text in ("95", "2", "")]
    for scores, prompt, said in zip(score_tokens(model, prompts, responses), prompts, responses, strict=True):
        assert len(scores.log_probs) == len(scores.entropies) == len(said)
        for place, token in enumerate(said):
            with torch.no_grad():
                logits = model(torch.tensor([[*prompt, *said[:place]]])).logits[0, -1].double()
            alone = torch.distributions.Categorical(logits=logits)
            assert scores.log_probs[place] == pytest.approx(
                alone.log_prob(torch.tensor(token)).item(), abs=1e-4
            )
            assert scores.entropies[place] == pytest.approx(alone.entropy().item(), abs=1e-4)


def test_scores_do_not_depend_on_how_many_fit_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = load_model_and_tokenizer("embedded")
    prompts = [tokenizer("12+30=").input_ids] * 5
    responses = [tokenizer(str(n)).input_ids for n in (4, 42, 421, 42, 4)]
    together = score_tokens(model, prompts, responses)
    monkeypatch.setattr("tether.llm.answers._LOGITS_BYTES", 1)
    for one, other in zip(together, score_tokens(model, prompts, responses), strict=True):
        assert one.log_probs == pytest.approx(other.log_probs, abs=1e-5)


@pytest.mark.parametrize(
    "own",
    [
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_p": 0.9},
        {"typical_p": 0.01},
        {"epsilon_cutoff": 0.5},
        {"eta_cutoff": 0.5},
        {"min_new_tokens": 8},
        {"min_length": 16},
        {"num_beams": 2},
    ],
)
def test_a_models_own_settings_do_not_reshape_what_is_measured(own: dict[str, Any]) -> None:
    model, tokenizer = load_model_and_tokenizer("embedded")

    def said(temperature: float | None) -> list[list[int]]:
        prompts = ["37+58=", "11+11=", "20+80="]
        responses = answer(
            model, tokenizer, prompts, max_response_tokens=8, temperature=temperature, batch_size=3, seed=0
        )
        return [response.ids for response in responses]

    plain = said(None), said(2.0)
    model.generation_config.update(**own)
    assert (said(None), said(2.0)) == plain


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "eval"
    run_evaluation(settings(folder))
    return folder


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "arithmetic-model.jsonl").read_text().splitlines()]


def test_every_response_and_verdict_is_written(measured: Path) -> None:
    rows = lines(measured)
    assert [row["problem"] for row in rows] == list(range(10))
    for found in rows:
        assert len(found["samples"]) == 3
        for one in [*found["samples"], found["greedy"]]:
            assert one["correct"] == (one["text"] == found["reference"])
            assert one["length"] == len(one["text"]) + (not one["truncated"])
        assert (
            "".join(text for text, *_ in found["greedy"]["tokens"]).removesuffix("<eos>")
            == found["greedy"]["text"]
        )
    results = json.loads((measured / "results.json").read_text())["arithmetic"]["model"]
    right = sum(one["correct"] for found in rows for one in found["samples"])
    assert results["success"]["value"] == pytest.approx(right / 30)
    assert results["greedy"]["value"] == pytest.approx(sum(found["greedy"]["correct"] for found in rows) / 10)


@pytest.mark.parametrize("share", [0.0, 0.2, 0.5, 0.77, 0.999])
def test_a_kill_at_any_byte_costs_nothing(tmp_path: Path, measured: Path, share: float) -> None:
    folder = tmp_path / "eval"
    folder.mkdir()
    (folder / "config.json").write_bytes((measured / "config.json").read_bytes())
    whole = (measured / "arithmetic-model.jsonl").read_bytes()
    (folder / "arithmetic-model.jsonl").write_bytes(whole[: int(share * len(whole))])
    run_evaluation(settings(folder))
    assert (folder / "arithmetic-model.jsonl").read_bytes() == whole
    assert (folder / "results.json").read_bytes() == (measured / "results.json").read_bytes()


def test_an_interrupted_batch_is_asked_again_and_the_others_are_not(
    tmp_path: Path, measured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    ask = answers._answer_batch

    def counting(config: Any, examinee: Any, task: Any, batch: Any, start: int, seed: int) -> Any:
        asked.append(start)
        if len(asked) == 3:
            raise KeyboardInterrupt
        return ask(config, examinee, task, batch, start, seed)

    monkeypatch.setattr(answers, "_answer_batch", counting)
    with pytest.raises(KeyboardInterrupt):
        run_evaluation(settings(tmp_path / "eval"))
    run_evaluation(settings(tmp_path / "eval"))
    assert asked == [0, 3, 6, 6, 9]
    assert lines(tmp_path / "eval") == lines(measured)


def test_what_is_answered_needs_no_model(measured: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "_load", lambda *_: pytest.fail("loaded"))
    assert run_evaluation(settings(measured))[0].summaries["model"].problems == 10


def test_a_mistake_in_the_last_task_costs_no_answer(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"code ask in conversations, but 'embedded' has no chat template"):
        run_evaluation(settings(tmp_path / "chat", task=("arithmetic", "code")))
    options = {"gsm8k.path": "/no/such/file.jsonl"}
    with pytest.raises(TetherError, match="no/such/file"):
        run_evaluation(settings(tmp_path / "data", task=("arithmetic", "gsm8k"), task_options=options))
    assert not list(tmp_path.rglob("*.jsonl"))


def test_another_measurement_or_other_data_in_the_folder_is_refused(tmp_path: Path, measured: Path) -> None:
    before = (measured / "arithmetic-model.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match="samples: 3 then, 2 now"):
        run_evaluation(settings(measured, samples=2))
    assert (measured / "arithmetic-model.jsonl").read_bytes() == before
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="holds no measurement"):
        run_evaluation(settings(tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_answers_to_other_problems_are_not_taken(tmp_path: Path, measured: Path) -> None:
    for name in ("config.json", "arithmetic-model.jsonl"):
        (tmp_path / name).write_bytes(
            (measured / name).read_bytes().replace(b'"reference": "', b'"reference": "1')
        )
    with pytest.raises(CheckpointError, match="answers to other problems"):
        run_evaluation(settings(tmp_path))


def test_random_numbers_of_a_task_do_not_depend_on_other_tasks(measured: Path) -> None:
    results = run_evaluation(settings(task=("chained", "arithmetic"), token_scores=False))
    texts = [[one["text"] for one in found["samples"]] for found in results[1].rows["model"]]
    assert texts == [[one["text"] for one in found["samples"]] for found in lines(measured)]


def test_compact_rollouts_give_the_same_greedy_responses_and_other_samples(measured: Path) -> None:
    compact = run_evaluation(settings(rollouts="compact"))[0].rows["model"]
    plain = lines(measured)
    assert [row["greedy"]["text"] for row in compact] == [row["greedy"]["text"] for row in plain]
    assert [row["samples"] for row in compact] != [row["samples"] for row in plain]
    assert [len(row["samples"]) for row in compact] == [len(row["samples"]) for row in plain]


def test_a_measurement_older_than_a_setting_goes_on_with_its_default(tmp_path: Path, measured: Path) -> None:
    shutil.copytree(measured, tmp_path / "eval")
    file = tmp_path / "eval" / "config.json"
    known = json.loads(file.read_text())
    del known["rollouts"]
    file.write_text(json.dumps(known))
    run_evaluation(settings(tmp_path / "eval"))
    with pytest.raises(CheckpointError, match="rollouts: 'transformers' then, 'compact' now"):
        run_evaluation(settings(tmp_path / "eval", rollouts="compact"))


def test_greedy_or_samples_alone() -> None:
    greedy = run_evaluation(settings(samples=0))[0]
    assert greedy.summaries["model"].success is None
    assert greedy.rows["model"][0]["samples"] == []
    sampled = run_evaluation(settings(greedy=False))[0]
    assert sampled.summaries["model"].greedy is None
    assert len(sampled.rows["model"][0]["samples"][0]["tokens"]) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "arithmetic"}, "different names"),
        ({"task": ("chained", "chained")}, "different names"),
        ({"samples": 0, "greedy": False}, "measures nothing"),
        ({"pass_at": (4,)}, "pass_at=4 needs as many samples, and there are 3"),
        ({"baseline": "embedded"}, "give two models"),
        ({"problems": 0}, "problems must be at least 1"),
        ({"max_response_tokens": -5}, "max_response_tokens must be at least 1, got -5"),
        ({"threads": -1}, "threads must be at least 1, got -1"),
        ({"temperature": 0.0}, "temperature must be positive"),
        ({"task": ("chained", "arithmetic"), "task_options": {"digits": 2}}, "write chained.digits"),
        ({"task_options": {"gsm8k.path": "x"}}, "belongs to none of arithmetic"),
    ],
)
def test_settings_that_measure_nothing_name_themselves(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


# ---------------------------------------------------------------------- two models, and the page


class Page(HTMLParser):
    """Tags with their attributes, and the text without them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def side_by_side(tmp_path_factory: pytest.TempPathFactory, uninterrupted: Path) -> Path:
    """A trained model beside the embedded one, from the command line, with hostile problems among them."""
    folder = tmp_path_factory.mktemp("two")
    rows = [{"prompt": f"<script>alert({n})</script> {n}+1=", "answer": str(n + 1)} for n in range(60)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = [
        "--model", str(uninterrupted / "model"), "--baseline", "embedded", "--task", "arithmetic", "custom",
        "--task-options", "custom.path", str(folder / "rows.jsonl"), "custom.chat", "False",
        "custom.max_response_tokens", "4", "--problems", "6", "--samples", "2", "--threads", "1",
        "--page-problems", "4", "--output", str(folder / "eval"),
    ]  # fmt: skip
    with pytest.raises(SystemExit) as ending:
        main(["llm", "eval", *options])
    assert ending.value.code == 0
    return folder / "eval"


def test_both_models_answer_the_same_problems(side_by_side: Path) -> None:
    sides = [
        [json.loads(line) for line in (side_by_side / f"arithmetic-{side}.jsonl").read_text().splitlines()]
        for side in ("model", "baseline")
    ]
    assert [found["prompt"] for found in sides[0]] == [found["prompt"] for found in sides[1]]
    assert sides[0] != sides[1]
    results = json.loads((side_by_side / "results.json").read_text())["arithmetic"]
    expected = results["model"]["greedy"]["value"] - results["baseline"]["greedy"]["value"]
    assert results["difference"]["greedy"]["value"] == pytest.approx(expected)
    assert results["difference"]["greedy"]["low"] <= expected <= results["difference"]["greedy"]["high"]


def test_the_page_needs_nothing_and_lets_nothing_in(side_by_side: Path) -> None:
    text = (side_by_side / "report.html").read_text()
    page = Page(text)
    assert not any(tag == "script" for tag, _ in page.tags)
    assert "&lt;script&gt;alert(" in text
    assert not re.findall(r"(?:src|href)=|url\(|https?://", text)
    assert any("default-src 'none'" in (attributes.get("content") or "") for _, attributes in page.tags)


def test_the_page_shows_problems_responses_verdicts_and_tints(side_by_side: Path) -> None:
    page = Page((side_by_side / "report.html").read_text())
    shown = [attributes for tag, attributes in page.tags if tag == "details"]
    assert len(shown) == 8, "four problems of each task"
    assert all(re.fullmatch(r"problem (better|worse|same)", str(one["class"])) for one in shown)
    badges = [attributes for tag, attributes in page.tags if "badge" in str(attributes.get("class"))]
    assert len(badges) == 8 * 2 * 3, "of each model a greedy and two sampled responses"
    words = "".join(page.words)
    assert words.count("2 more problems are in the JSON lines") == 2
    assert "model less baseline" in words
    tokens = [
        attributes for tag, attributes in page.tags if re.match(r"tok s\d e\d", str(attributes.get("class")))
    ]
    assert len({one["class"] for one in tokens}) > 3
    assert all(re.match(r"probability [\d.e-]+ %\nentropy", str(one["data-tip"])) for one in tokens)


def test_the_page_of_one_model_sorts_by_how_often_it_is_right(measured: Path) -> None:
    page = Page((measured / "report.html").read_text())
    kinds = [str(attributes["class"]).split()[1] for tag, attributes in page.tags if tag == "details"]
    shares = [sum(one["correct"] for one in found["samples"]) / 3 for found in lines(measured)]
    assert kinds == ["solved" if s == 1 else "unsolved" if s == 0 else "mixed" for s in shares]


def test_the_terminal_shows_both_models(side_by_side: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tether.llm.evaluation_page import print_evaluation

    config = settings(baseline="other", output=side_by_side)
    rows = [row(1, 3, True), row(0, 3, False)]
    result = evaluate._result(config, "arithmetic", {"model": rows, "baseline": rows[::-1]})
    print_evaluation(config, [result])
    shown = capsys.readouterr().out
    for words in ("embedded", "other", "model less", "+0.0 points", "pass@2", "16.7 %"):
        assert words in shown
