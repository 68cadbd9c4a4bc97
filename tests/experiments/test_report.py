from __future__ import annotations

import base64
import csv
import math
from collections.abc import Callable, Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tether.errors import CheckpointError
from tether.experiments import RunData, study_table
from tether.experiments.report import page as page_module
from tether.experiments.report.lag_panels import lag_panels
from tether.experiments.report.panels import _panel, _specs, bounds, other_pictures, pictures
from tether.experiments.report.responses import choose, samples
from tether.experiments.report.words import compare_settings, mixed_labels
from tether.experiments.statistics import bootstrap_interval
from tether.kinds import KINDS
from tether.llm.run_kind import PANELS

WriteRun = Callable[..., Path]

VOID = {"meta", "img", "source", "br"}
EVIL = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&{{ 7*7 }}"

FINALS = {"TROLL": (0.60, 0.70, 0.65), "clip": (0.50, 0.42, 0.46)}
TOKENS = [
    {"text": "4", "kl": 0.0, "projected": False, "log_prob": math.log(0.5), "old_log_prob": math.log(0.25)},
    {
        "text": "2\n",
        "kl": 0.06,
        "projected": True,
        "new_log_prob": math.log(0.2),
        "log_prob": math.log(0.9),
        "old_log_prob": math.log(0.8),
    },
    {"text": "", "kl": math.inf, "projected": True, "log_prob": -math.inf, "old_log_prob": 0.0},
    {"text": EVIL, "kl": math.nan, "projected": False},
]

MOVED = [
    {
        "at": 1,
        "step": 0.25,
        "entries": [
            {"text": "2\n", "old": 0.8, "new": 0.9, "projected": 0.85, "sampled": True},
            {"text": EVIL, "old": 0.2, "new": 0.1, "projected": 0.15, "sampled": False},
        ],
    }
]


def load_runs(paths: Iterable[str | Path]) -> list[RunData]:
    return study_table.load_runs(paths, KINDS)


def write_report(paths: Iterable[str | Path], out: Path, title: str | None = None) -> Path:
    return page_module.write_report(paths, out, title, kinds=KINDS)


class Page(HTMLParser):
    """The elements, links and texts of a page; fails on tags that are not closed."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.html = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(self.html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def links(self) -> list[str]:
        names = ("src", "srcset", "href", "action", "data", "poster")
        return [value for _, attributes in self.tags for name in names if (value := attributes.get(name))]

    def of_class(self, name: str) -> list[dict[str, str | None]]:
        return [attributes for _, attributes in self.tags if name in (attributes.get("class") or "").split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, write_run: WriteRun) -> Path:
    """Two methods of three seeds, one of them with samples, one of them unfinished; and their report."""
    root = tmp_path_factory.mktemp("report")
    for label, finals in FINALS.items():
        for seed, final in enumerate(finals):
            write_run(
                root / "runs" / f"{label}-{seed}",
                [{"reward": 0.1, "kl_mean": 0.01, "kl_max": 0.3, "projected": 0.2, "odd_number": 7.0}] * 3,
                [{"step": 0, "success": 0.3, "problems": 50}, {"step": 3, "success": final, "problems": 50}],
                samples=[
                    {
                        "prompt": f"What? {EVIL}",
                        "reference": "42",
                        "reward": 1.0,
                        "tokens": TOKENS,
                        "moved": MOVED,
                    },
                    {
                        "prompt": [{"role": "user", "content": "Chat?"}],
                        "reference": EVIL,
                        "reward": 0.0,
                        "tokens": [],
                    },
                    {"prompt": "", "reference": "", "reward": 0.5, "tokens": TOKENS[:1]},
                ],
                label=label,
                seed=seed,
                finished=(label, seed) != ("clip", 2),
                settings={
                    "trust_region": label.lower(),
                    "kl_bound": 0.05,
                    "steps": 3,
                    "optimizer": {"learning_rate": 1e-4 if label == "clip" else 3e-4},
                    "note": EVIL,
                },
            )
    write_report([root / "runs"], root / "out", title=f"Title {EVIL}")
    return root


@pytest.fixture(scope="module")
def page(folder: Path) -> Page:
    return Page(folder / "out" / "report.html")


# ---------------------------------------------------------------------- one page, safe to open


def test_the_page_needs_nothing_from_elsewhere(page: Page) -> None:
    links = page.links()
    assert len(links) >= 12
    assert all(link.startswith("data:") for link in links)
    assert "url(" not in page.html
    assert "@import" not in page.html
    policy = [attributes["content"] for tag, attributes in page.tags if attributes.get("http-equiv")]
    assert policy == ["default-src 'none'; img-src data:; media-src data:; style-src 'unsafe-inline'"]


def test_what_models_and_users_write_stays_text(page: Page) -> None:
    assert "script" not in {tag for tag, _ in page.tags}
    assert not [
        attributes for _, attributes in page.tags if any(name.startswith("on") for name in attributes)
    ]
    # Title (twice), prompts and references of both methods, the shared setting, the odd token: all are shown.
    assert page.text.count("alert(1)</script>") >= 8
    assert "{{ 7*7 }}" in page.text


def test_the_plots_lie_beside_the_page_too_in_both_themes(folder: Path, page: Page) -> None:
    plots = folder / "out" / "report-plots"
    names = {path.name for path in plots.iterdir()}
    expected = {"eval-success", "reward", "kl_mean", "kl_max", "projected", "all-metrics-1"}
    assert names == {f"{name}{theme}.png" for name in expected for theme in ("", "-dark")}
    shown = [link for link in page.links() if link.startswith("data:image/png")]
    embedded = {base64.b64decode(link.partition(",")[2]) for link in shown}
    assert embedded == {path.read_bytes() for path in plots.iterdir()}


def test_each_plot_can_be_taken_away_as_svg_and_its_points_as_csv(page: Page) -> None:
    files = {
        str(attributes["download"]): base64.b64decode(str(attributes["href"]).partition(",")[2]).decode()
        for tag, attributes in page.tags
        if tag == "a"
    }
    assert {name.partition(".")[2] for name in files} == {"svg", "csv"}
    assert len(files) == 2 * len([tag for tag, _ in page.tags if tag == "img"])
    assert "Success on held-out problems" in files["eval-success.svg"]
    assert "<script" not in files["eval-success.svg"]
    rows = list(csv.reader(files["eval-success.csv"].splitlines()))
    assert rows[0] == ["panel", "method", "run", "x", "y"]
    finals = {(method, int(run)): float(y) for _, method, run, x, y in rows[1:] if float(x) == 3}
    assert finals == {
        (label, i + 1): value for label, values in FINALS.items() for i, value in enumerate(values)
    }


def test_each_plot_has_a_light_and_a_dark_face(page: Page) -> None:
    dark = [attributes for tag, attributes in page.tags if tag == "source"]
    assert {attributes["media"] for attributes in dark} == {"(prefers-color-scheme: dark)"}
    assert len(dark) == len([tag for tag, _ in page.tags if tag == "img"]) == 6


# ---------------------------------------------------------------------- what it says


def test_the_headline_table_holds_hand_computed_numbers(page: Page) -> None:
    interval = bootstrap_interval(FINALS["TROLL"])
    for shown in (
        "3 seeds 0, 1, 2 30.0 % 65.0 %",
        f"({100 * interval.low:.1f}-{100 * interval.high:.1f})",
        "+35.0 points",
        "+16.0 points",
        "0.01 0.3 20 % 2 0:06",
    ):
        assert shown in page.text


def test_the_outcome_claims_what_the_intervals_carry(page: Page) -> None:
    assert "So far: TROLL ends highest, with a success of 65.0 %" in page.text
    assert "its interval lies above all others, but so few seeds decide nothing." in page.text


@pytest.mark.parametrize(
    ("finals", "problems", "sentence"),
    [
        (((0.50, 0.60), (0.52, 0.58)), None, "but its interval does not set it apart from b."),
        (((0.9,), (0.1,)), 100, "its interval lies above all others; other seeds may end otherwise."),
        (((0.9,), (0.1,)), None, "how certain that is cannot be told from these runs."),
        (((0.6, 0.6), (0.5, 0.5)), 100, "how certain that is cannot be told from these runs."),
        (((0.6, 0.7), (0.0, 0.0)), 100, "how certain that is cannot be told from these runs."),
        (((0.6, 0.7), (0.0, 0.1)), 100, "lies above all others, but so few seeds decide nothing."),
        (((0.6, 0.7), (0.0,) * 7), 100, "its interval lies above all others."),
        (((0.6,) * 4, (0.0,) * 4), 100, "its interval lies above all others."),
        (((0.55,),), 100, "a: success goes from 30.0 % (21.9-39.6) to 55.0 % (45.2-64.4)."),
    ],
)
def test_the_outcome_says_how_far_it_goes(
    make_run: WriteRun, finals: tuple[tuple[float, ...], ...], problems: int | None, sentence: str
) -> None:
    counted = {} if problems is None else {"problems": problems}
    paths = [
        make_run(
            f"{label}{seed}", [],
            [{"step": 0, "success": 0.3, **counted}, {"step": 1, "success": final, **counted}],
            label=label, seed=seed,
        )
        for label, values in zip("ab", finals, strict=False)
        for seed, final in enumerate(values)
    ]  # fmt: skip
    summaries = page_module.summarise(load_runs(paths))
    assert page_module._lead(summaries).endswith(sentence)


def test_unfinished_runs_are_named(page: Page) -> None:
    assert "Not finished: clip, seed 2." in page.text


def test_settings_are_split_into_shared_and_differing(folder: Path) -> None:
    shared, differing = compare_settings(load_runs([folder / "runs"]))
    assert shared["method.top_k"] == "64"
    assert (shared["note"], shared["steps"]) == (EVIL, "3")
    assert differing["optimizer.learning_rate"] == {"TROLL": "0.0003", "clip": "0.0001"}
    assert differing["method.name"] == {"TROLL": "troll", "clip": "clip"}
    assert differing["method.kl_bound"]["TROLL"] == "0.05"


def test_a_setting_that_differs_within_a_label_is_given_with_each_value_once(make_run: WriteRun) -> None:
    """Values may hold commas, and a name that follows the label is no setting."""
    paths = [
        make_run(
            f"{label}{seed}", [{"reward": 0.5}], label=label, seed=seed,
            settings={"name": label, "clip": label, "note": "a, b" if seed % 2 else "c"},
        )
        for label in ("low 1, high 2", "none")
        for seed in range(4)
    ]  # fmt: skip
    _, differing = compare_settings(load_runs(paths))
    assert differing == {
        "clip": {"low 1, high 2": "low 1, high 2", "none": "none"},
        "note": {"low 1, high 2": "c or a, b", "none": "c or a, b"},
    }


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory, write_run: WriteRun) -> Page:
    """The report of more methods than have a colour, each of two seeds that differ in a setting."""
    root = tmp_path_factory.mktemp("grid")
    for i in range(11):
        for seed in range(2):
            write_run(
                root / "runs" / f"{i}-{seed}", [],
                [{"step": 0, "success": 0.1}, {"step": 1, "success": 0.5 + i / 50 + 0.2 * seed}],
                label=f"method {i}", seed=seed, settings={"knob": i, "tail": seed},
            )  # fmt: skip
    write_report([root / "runs"], root / "out")
    return Page(root / "out" / "report.html")


def test_many_methods_stand_best_first_and_few_are_named(grid: Page) -> None:
    assert "11 methods" in grid.text
    assert "does not set it apart from method 9, method 8, method 7 and 7 more." in grid.text
    places = [grid.text.index(f"method {i} 2 seeds 0, 1") for i in reversed(range(11))]
    assert places == sorted(places)
    assert "In colour the 7 methods that end highest, in grey the means of the other 4." in grid.text


def test_warnings_of_many_methods_are_one(grid: Page) -> None:
    assert len(grid.of_class("warning")) == 1
    assert "11 labels are not one method each: their runs differ in tail" in grid.text


def test_settings_of_many_methods_have_a_row_a_method(grid: Page) -> None:
    assert "What differs method knob tail method 10 10 0 or 1 method 9 9 0 or 1" in grid.text


def test_a_single_run_is_not_described_by_bands_it_does_not_have(make_run: WriteRun, tmp_path: Path) -> None:
    evals = [{"step": step, "success": step / 4} for step in range(3)]
    page = Page(write_report([make_run("a", [], evals)], tmp_path / "out"))
    assert "band" not in page.text
    assert "Each line is a single run" in page.text


def test_the_title_names_what_all_runs_learn_and_nothing_that_some_do_not(
    make_run: WriteRun, tmp_path: Path
) -> None:
    paths = [
        make_run(task, [{"reward": 0.1}], label=f"TROLL, {task}", settings={"task": task})
        for task in ("chained", "gsm8k")
    ]
    assert "TROLL, chained on chained" in Page(write_report(paths[:1], tmp_path / "one")).text
    assert "on chained" not in Page(write_report(paths, tmp_path / "two")).text


def test_what_all_labels_end_in_stands_in_the_headline_only(make_run: WriteRun, tmp_path: Path) -> None:
    methods = {"TROLL": "troll", "clip": "clip"}

    def titled(*points: str) -> Page:
        paths = [
            make_run(f"{name}{point}", [{"reward": 0.1}], label=f"{method}, 8 updates, {point}")
            for method, name in methods.items()
            for point in points
        ]
        return Page(write_report(paths, tmp_path / f"page-{len(points)}"))

    one, two = titled("lr 1e-05"), titled("lr 3e-05", "lr 1e-04")
    assert "TROLL against clip, 8 updates, lr 1e-05" in one.text
    assert one.text.count("8 updates") == one.text.count("TROLL against clip") > 0
    assert "TROLL, 8 updates, lr 3e-05" in two.text
    assert "clip, 8 updates, lr 1e-04" in two.text


def test_a_label_that_covers_two_methods_is_found(make_run: WriteRun) -> None:
    numbers = [{"reward": 0.5}]
    first = make_run("a", numbers, settings={"kl_bound": 0.05})
    other_bound = make_run("b", numbers, settings={"kl_bound": 0.2}, seed=1)
    same_seed = make_run("c", numbers, settings={"kl_bound": 0.05})
    other_seed = make_run("d", numbers, settings={"kl_bound": 0.05, "seed": 2}, seed=2)
    assert mixed_labels(load_runs([first, other_bound])) == {"TROLL": ["kl_bound"]}
    assert "a seed appears twice" in mixed_labels(load_runs([first, same_seed]))["TROLL"][0]
    assert mixed_labels(load_runs([first, other_seed])) == {}


def test_only_runs_with_the_trust_region_draw_its_bound(make_run: WriteRun) -> None:
    def run(name: str, region: str, bound: float) -> Path:
        return make_run(
            name, [{"reward": 0.5}], settings={"trust_region": region, "kl_bound": bound}, label=name
        )

    paths = [
        run("a", "troll", 0.2),
        run("b", "troll", math.inf),
        run("c", "clip", 0.05),
        run("d", "troll", 0.05),
    ]
    assert bounds(load_runs(paths), "kl_bound") == {"bound 0.05": 0.05, "bound 0.2": 0.2}
    assert bounds(load_runs(paths[1:3]), "kl_bound") == {}
    nested = make_run("e", [{"reward": 0.5}], settings={"trust_region": {"mean_bound": 0.1}}, label="tce")
    assert bounds(load_runs([nested]), "mean_bound") == {"bound 0.1": 0.1}


def test_cycles_of_updates_become_one_point_each(make_run: WriteRun) -> None:
    # Four updates a batch; the reward comes once a batch, the KL with each update.
    steps: list[dict[str, float]] = [
        {"kl_max": 0.1 * (i % 4 + 1), "kl_mean": 0.01 * (i % 4)} for i in range(40)
    ]
    for i in range(0, 40, 4):
        steps[i]["reward"] = float(i)
    runs = load_runs([make_run("a", steps, settings={"updates_per_rollout": 4})])
    specs = {spec.metric: spec for spec in PANELS}
    panels = {name: _panel(runs, specs[name], frozenset()) for name in ("kl_max", "kl_mean", "reward")}
    shown = {name: panel.curves["TROLL"][0] for name, panel in panels.items() if panel is not None}
    assert shown["kl_max"].x.tolist() == list(range(4, 41, 4))
    assert shown["kl_max"].y.tolist() == pytest.approx([0.4] * 10)
    assert shown["kl_mean"].y.tolist() == pytest.approx([0.015] * 10)
    assert shown["reward"].x.tolist() == list(range(1, 41, 4))
    assert panels["kl_max"] is not None
    assert panels["kl_max"].x_label == "optimiser step (maxima of 4)"


# ---------------------------------------------------------------------- responses


def test_tokens_carry_tint_mark_and_numbers(page: Page) -> None:
    tokens = [attributes for attributes in page.of_class("tok") if "data-tip" in attributes]
    assert len(tokens) == 2 * (len(TOKENS) + 1)
    first, second, third, fourth = tokens[: len(TOKENS)]
    assert first["class"] == "tok k0"
    assert first["data-tip"] == "KL 0 nats\nprobability 25 % → 50 %"
    assert second["class"] == "tok k4 p"  # between 1 and 4 times the bound
    assert second["data-tip"] == "KL 0.06 nats\nprobability 80 % → 20 %\nprojected back to the bound: 90 %"
    assert third["class"] == "tok k5 p"
    assert third["data-tip"] == "KL inf nats\nprojected back to the bound: 0 %"  # of an older run
    assert fourth["class"] == "tok k0"
    assert fourth["data-tip"] == "KL nan nats"


def test_a_moved_token_is_drawn_as_bars(page: Page) -> None:
    assert "Token 2, 2↵ : old, new and projected probabilities" in page.text
    assert "The loss sees the projection, 25 % of the way from old to new" in page.text
    widths = [str(attributes["style"]) for tag, attributes in page.tags if tag == "i"][:3]
    assert widths == ["width:48.0%", "width:54.0%", "width:51.0%"]  # 60 % of the room is a certain token
    opened = [attributes for attributes in page.of_class("moved") if "open" in attributes]
    assert len(opened) == 2  # one of each method


def test_responses_are_marked_right_partly_right_or_wrong(page: Page) -> None:
    badges = [str(attributes["class"]).split()[1] for attributes in page.of_class("badge")]
    assert badges.count("right") == badges.count("wrong") == 2
    assert badges.count("partly") == 2 + 1  # and the mark of the unfinished method
    assert "user: Chat?" in page.text
    assert "2 of 4 tokens projected" in page.text


def test_right_is_what_the_task_says_whatever_it_pays(make_run: WriteRun) -> None:
    said = [
        ({"reward": 1.0, "correct": False}, "partly right"),  # paid for its form, say
        ({"reward": 0.4, "correct": True}, "right"),
        ({"reward": 0.0, "correct": False}, "wrong"),
        ({"reward": 1.0}, "right"),  # of a run from before this was kept
        ({"reward": 0.4}, "partly right"),
    ]
    rows = [{"prompt": "", "tokens": [], **row} for row, _ in said]
    [shown] = samples(load_runs([make_run("a", [{"reward": 0.5}], samples=rows)]))
    assert [one["verdict"] for one in shown["responses"]] == [verdict for _, verdict in said]


def test_invisible_tokens_are_made_visible(page: Page) -> None:
    assert "2↵" in page.text
    assert "∅" in page.text


def test_all_methods_are_tinted_on_one_scale(make_run: WriteRun) -> None:
    def run(label: str, kl: float) -> Path:
        rows = [{"prompt": "", "tokens": [{"text": "a", "kl": kl}] * 20}]
        return make_run(label, [{"reward": 0.5}], samples=rows, label=label, settings={})

    near, far = samples(load_runs([run("near", 0.01), run("far", 1.0)]))
    assert near["scale"] == far["scale"] == 1.0  # the KL one token in twenty exceeds, over both
    assert not near["scale_is_bound"]
    assert (near["responses"][0]["tokens"][0]["level"], far["responses"][0]["tokens"][0]["level"]) == (1, 4)


def test_the_choice_is_half_as_drawn_and_half_what_moved_most() -> None:
    rows: list[dict[str, Any]] = [{"id": i, "tokens": [{"kl": i / 10}, {"kl": math.nan}]} for i in range(10)]
    assert [row["id"] for row in choose(rows, 5)] == [0, 1, 2, 9, 8]
    assert [row["id"] for row in choose(rows[:3], 5)] == [0, 1, 2]
    assert choose([], 5) == []


# ---------------------------------------------------------------------- episodic runs


def test_an_episodic_report_shows_its_plots_pictures_and_videos(
    make_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_module, "EMBEDDED_BYTES", 100)
    numbers = {
        "kl_mean_part": 0.01, "kl_cov_part": 0.001,
        "sampling_seconds": 2.0, "critic_seconds": 1.0, "policy_seconds": 1.0, "critic_loss": 0.1,
    }  # fmt: skip
    path = make_run(
        "tce",
        [{**numbers, "env_steps": 100.0}, {**numbers, "env_steps": 200.0}],
        [{"step": 0, "return_mean": 1.0, "jerk": 5.0}, {"step": 2, "return_mean": 2.0, "jerk": 3.0}],
        figures={"exploration.png": b"png", "motion.mp4": b"mp4", "long.mp4": b"x" * 100, "notes.txt": b"t"},
        kind="episodic", label="tce", settings={"env": "Hopper", "mean_bound": 0.005},
    )  # fmt: skip
    written = write_report([path], tmp_path / "out" / "tce.html")
    assert written == tmp_path / "out" / "tce.html"
    page = Page(written)
    plots = {path.stem for path in (tmp_path / "out" / "tce-plots").iterdir()}
    assert {
        "eval-return_mean",
        "kl_mean_part",
        "kl_cov_part",
        "eval-jerk",
        "time-split",
        "all-metrics-1",
    } <= plots
    links = page.links()
    assert "data:image/png;base64," + base64.b64encode(b"png").decode() in links
    assert "data:video/mp4;base64," + base64.b64encode(b"mp4").decode() in links
    assert "Too large to stand in this page:" in page.text
    assert "long.mp4" in page.text
    assert "notes" not in page.text
    assert "tce: return mean goes from 1 to 2." in page.text


# ---------------------------------------------------------------------- what cannot be reported


def test_a_report_that_cannot_be_made_writes_nothing(make_run: WriteRun, tmp_path: Path) -> None:
    good = make_run("good", [{"reward": 0.5}])
    other = make_run("other", [{"reward": 0.5}], kind="episodic", label="tce")
    for paths in ([good, tmp_path / "nowhere"], [good, other], []):
        with pytest.raises(CheckpointError):
            write_report(paths, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_run_with_hardly_any_numbers_still_makes_a_page(make_run: WriteRun, tmp_path: Path) -> None:
    path = make_run("thin", [{"reward": math.nan}], finished=False, settings={})
    page = Page(write_report([path], tmp_path / "out"))
    assert "Not finished: TROLL, seed 0." in page.text
    assert page.links() == []


def test_a_task_judged_by_another_number_is_shown_without_success(
    tmp_path: Path, write_run: WriteRun
) -> None:
    evals = [{"step": 0, "success_greedy": 0.0, "height_greedy": 1.5}]
    shown = {}
    for headline in ("height", "success"):
        path = tmp_path / headline
        write_run(path, [{"success": 0.0}], evals, kind="episodic", settings={"headline": headline})
        shown[headline] = [spec.metric for spec in _specs(load_runs([path]))]
    assert shown["height"][0] == "height_greedy"
    assert not {"success", "success_greedy"} & set(shown["height"])
    assert {"success", "success_greedy"} < set(shown["success"])


def test_what_the_region_does_is_drawn_against_the_age_of_the_data(make_run: WriteRun) -> None:
    rows = [
        {"lag_0_kl": 0.1},
        {"lag_1_kl": 0.2, "lag_1_projected": 0.5},
        {"lag_1_kl": 0.4, "lag_1_projected": 0.7},
    ]
    (run,) = load_runs([make_run("a", rows)])
    (panel,) = lag_panels([run])  # projected tokens are known at one age only
    (curve,) = panel.curves["TROLL"]
    assert curve.x.tolist() == [0, 1]
    assert curve.y.tolist() == pytest.approx([0.1, 0.3])
    assert "kl-to-the-sampler-by-lag" in [picture.name for picture in pictures([run])]
    assert not other_pictures([run])


def test_an_age_at_which_nothing_finite_was_measured_has_no_point(make_run: WriteRun) -> None:
    rows = [{"lag_0_kl": math.inf, "lag_1_kl": 0.2, "lag_2_kl": 0.4}]
    (panel,) = lag_panels(load_runs([make_run("a", rows)]))
    assert panel.curves["TROLL"][0].x.tolist() == [1, 2]
    assert not lag_panels(load_runs([make_run("b", [{"lag_0_kl": math.inf, "lag_1_kl": math.inf}])]))
