"""Turns end where each family ends them: in our generation, in TRL's, and through a step of training."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, follow, save_tiny
from short_run import config

from tether.errors import ConfigError, TetherWarning
from tether.experiments import RunFolder
from tether.llm.generate import answer, encode_prompt
from tether.llm.models import end_of_turn_token, load_model_and_tokenizer
from tether.llm.tasks import make_task
from tether.llm.train import train
from tether.llm.trainers import make_trainer

ASK = [{"role": "user", "content": "7+5?"}]


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    name: str = request.param
    return name, save_tiny(name, tmp_path_factory.mktemp("family") / "model")


def custom_task(folder: Path, **options: Any) -> dict[str, Any]:
    file = folder / "rows.jsonl"
    rows = [{"prompt": f"Say {n}.", "answer": str(n)} for n in range(60)]
    file.write_text("\n".join(map(json.dumps, rows)))
    return {"path": str(file), "verifier": "number", "max_response_tokens": 6, **options}


def test_every_end_of_the_family_ends_a_response(family: tuple[str, Path]) -> None:
    name, folder = family
    model, tokenizer = load_model_and_tokenizer(folder)
    ends = FAMILIES[name].turn_ends
    follow(model, tokenizer, [*(f"12{end}34" for end in ends), "123456789"])
    responses = answer(
        model, tokenizer, [ASK] * (len(ends) + 1),
        max_response_tokens=5, temperature=None, batch_size=8, seed=0,
    )  # fmt: skip
    for end, response in zip(ends, responses, strict=False):
        assert response.text == "12"
        assert tokenizer.convert_ids_to_tokens(response.ids)[-1] == end
        assert not response.truncated
    assert responses[-1].text == "12345"
    assert responses[-1].truncated


def test_the_tokenizers_end_comes_first_and_padding_is_another(family: tuple[str, Path]) -> None:
    name, folder = family
    model, tokenizer = load_model_and_tokenizer(folder)
    ends = tokenizer.convert_ids_to_tokens(model.generation_config.eos_token_id)
    assert ends[0] == FAMILIES[name].eos
    assert set(ends) == set(FAMILIES[name].turn_ends)
    assert len(ends) == len(set(ends))
    assert tokenizer.pad_token_id != tokenizer.eos_token_id


def test_trl_counts_a_response_up_to_the_end_of_its_turn(family: tuple[str, Path], tmp_path: Path) -> None:
    """In its own generation: nothing after the end of a turn is kept, so nothing of it is learnt from."""
    name, folder = family
    model, tokenizer = load_model_and_tokenizer(folder)
    task = make_task("custom", **custom_task(tmp_path))
    settings = config(tmp_path, task="custom", mask_truncated=True, steps=4)
    trainer = make_trainer(settings, model, tokenizer, task, tmp_path)
    ends = FAMILIES[name].turn_ends
    texts = [f"7{ends[row % len(ends)]}89" for row in range(15)] + ["123456789"]
    follow(trainer.model, tokenizer, texts)
    asked = encode_prompt(tokenizer, ASK)
    completion_ids, _ = trainer._generate_single_turn([asked] * 16, None, {}, num_generations=4)
    assert len(completion_ids) == 16
    assert trainer.mask_truncated_completions
    for row, ids in enumerate(completion_ids[:15]):
        assert tokenizer.convert_ids_to_tokens(ids) == ["7", ends[row % len(ends)]]
    assert tokenizer.decode(completion_ids[15]) == "123456"


def test_a_step_of_training_counts_what_was_cut_off(family: tuple[str, Path], tmp_path: Path) -> None:
    _, folder = family
    run = train(config(
        tmp_path / "run", model=str(folder), task="custom", task_options=custom_task(tmp_path),
        steps=2, updates_per_rollout=2, save_every=0, eval_every=0, eval_problems=2, mask_truncated=True,
        preflight="off", chat_template_options={"enable_thinking": False},
    ))  # fmt: skip
    first = RunFolder.open(run.path).metrics()[0]
    assert 0 <= first["truncated"] <= 1
    assert first["truncated_responses"] == round(16 * first["truncated"])
    model, tokenizer = load_model_and_tokenizer(run.path / "model")
    original, _ = load_model_and_tokenizer(folder)
    assert model.generation_config.eos_token_id == original.generation_config.eos_token_id
    assert tokenizer.chat_template is not None
    assert all(torch.isfinite(weight).all() for weight in model.parameters())


@pytest.mark.parametrize("name", ["Qwen3", "SmolLM3"])
def test_options_reach_the_chat_template(name: str, tmp_path: Path) -> None:
    _, tokenizer = load_model_and_tokenizer(save_tiny(name, tmp_path / "model"))
    plain = tokenizer.decode(encode_prompt(tokenizer, ASK))
    without = tokenizer.decode(encode_prompt(tokenizer, ASK, {"enable_thinking": False}))
    assert without == plain + "<think>\n\n</think>\n\n"


def test_without_a_template_there_is_no_turn_and_conversations_are_refused() -> None:
    _, tokenizer = load_model_and_tokenizer("embedded")
    assert end_of_turn_token(tokenizer) is None
    with pytest.raises(ConfigError, match="no chat template"):
        encode_prompt(tokenizer, ASK)


def test_a_template_that_cannot_render_an_answer_is_warned_of(tmp_path: Path) -> None:
    _, tokenizer = load_model_and_tokenizer(save_tiny("SmolLM2", tmp_path / "model"))
    tokenizer.chat_template = "{{ raise_exception('no assistant here') }}"
    with pytest.warns(TetherWarning, match="no assistant here"):
        assert end_of_turn_token(tokenizer) is None


def test_a_template_that_leaves_out_the_answer_is_warned_of(tmp_path: Path) -> None:
    """What it begins with must not be taken for what ends a turn."""
    _, tokenizer = load_model_and_tokenizer(save_tiny("SmolLM2", tmp_path / "model"))
    tokenizer.chat_template = (
        "{% for m in messages if m['role'] == 'user' %}<|im_start|>user\n{{ m['content'] }}{% endfor %}"
    )
    with pytest.warns(TetherWarning, match="leaves out what the assistant said"):
        assert end_of_turn_token(tokenizer) is None


def test_a_template_without_end_after_an_answer_has_none(tmp_path: Path) -> None:
    _, tokenizer = load_model_and_tokenizer(save_tiny("SmolLM2", tmp_path / "model"))
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    )
    assert end_of_turn_token(tokenizer) is None
