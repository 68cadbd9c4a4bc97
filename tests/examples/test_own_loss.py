"""A loss from outside the package: its options, its training on the command line, its example and page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import REPOSITORY
from tether.cli import main
from tether.errors import ConfigError
from tether.experiments import RunFolder
from tether.integrations.loss_options import check_loss_options, given_to, loss_options
from tether.losses import find_loss
from tether.losses.base import looks_at_distributions_if

SHORT = ("--task", "arithmetic", "--steps", "2", "--updates-per-rollout", "2", "--prompts-per-rollout", "4",
         "--eval-problems", "4", "--eval-every", "2", "--save-every", "2", "--threads", "1")  # fmt: skip


@pytest.fixture(autouse=True)
def losses_can_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = (REPOSITORY / "docs" / "own_loss.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_losses.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{REPOSITORY / 'examples'}:{REPOSITORY / 'src'}")


def test_the_examples_loss_is_what_its_docstring_says() -> None:
    log_probs = torch.tensor([[0.3, -0.2]]).requires_grad_()
    result = find_loss("own_loss:soft_wall")(log_probs, torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2))
    expected = (-log_probs.exp() + log_probs.square()).mean()  # width 0.5
    assert result.loss.item() == pytest.approx(expected.item())


def test_its_options_are_its_keywords_and_are_tried_out() -> None:
    assert {name: one.default for name, one in loss_options("own_loss:soft_wall").items()} == {"width": 0.5}
    with pytest.raises(ConfigError, match=r"no option 'widht'. Did you mean 'width'\?"):
        check_loss_options("own_loss:soft_wall", {"widht": 1})
    with pytest.raises(ConfigError, match="width must be greater than 0"):
        check_loss_options("own_loss:soft_wall", {"width": 0})


def test_a_signature_says_what_a_loss_is_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import my_losses

    averaging: dict[str, Any] = {"loss_agg_mode": "token-mean", "max_response_length": None}

    def always(a, b, c, d, *, new, old, generator, loss_agg_mode, max_response_length): ...

    @looks_at_distributions_if(lambda options: options["exact"])
    def sometimes(a, b, c, d, *, exact=False, new=None, old=None, loss_agg_mode, max_response_length): ...

    def incomplete(a, b, c, d, *, loss_agg_mode): ...

    for loss in (always, sometimes, incomplete):
        monkeypatch.setattr(my_losses, loss.__name__, loss, raising=False)
    assert averaging.keys() & given_to("my_losses:always", {}) == set()
    assert given_to("my_losses:always", {}) == {"new", "old", "generator"}
    assert given_to("my_losses:sometimes", {}) == set()
    assert given_to("my_losses:sometimes", {"exact": True}) == {"new", "old"}
    with pytest.raises(ConfigError, match="lacks the keywords max_response_length"):
        loss_options("my_losses:incomplete")
    with pytest.raises(ConfigError, match=r"my_losses has no 'caped'. Did you mean 'capped'\?"):
        find_loss("my_losses:caped")


def test_the_loss_of_the_page_trains_on_the_command_line(tmp_path: Path) -> None:
    output = tmp_path / "run"
    options = ("--method", "my_losses:capped", "--method.cap", "3", "--output", str(output))
    with pytest.raises(SystemExit) as ending:
        main(("llm", "train", *options, *SHORT))
    assert ending.value.code == 0
    assert RunFolder.open(output).config.label == "my_losses:capped cap=3"


def test_the_example_trains(tmp_path: Path) -> None:
    import own_loss

    own_loss.main(tmp_path / "run")
    assert (tmp_path / "run" / "FINISHED").is_file()
