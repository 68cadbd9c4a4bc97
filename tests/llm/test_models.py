"""Loading models: the embedded one is what its card says, and pairs that cannot train are refused."""

from __future__ import annotations

import json
import math
import shutil
import string
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tether.errors import CheckpointError, ConfigError
from tether.llm.models import embedded_model_path, load_model_and_tokenizer
from tether.llm.tasks import Task, make_task


@pytest.fixture(scope="module", params=["embedded", "embedded-llama"])
def shipped(request: pytest.FixtureRequest) -> str:
    """The name of each model that comes with the package."""
    return str(request.param)


@pytest.fixture(scope="module")
def embedded(shipped: str) -> tuple[Any, Any]:
    return load_model_and_tokenizer(shipped)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the embedded model to damage."""
    return Path(shutil.copytree(embedded_model_path(), tmp_path / "model"))


def edit(file: Path, **changes: Any) -> None:
    """Set keys of a JSON file; None removes."""
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def respond(pair: tuple[Any, Any], prompts: list[str], tokens: int, **options: Any) -> list[str]:
    model, tokenizer = pair
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    with torch.no_grad():
        output = model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, max_new_tokens=tokens, **options
        )
    return tokenizer.batch_decode(output[:, inputs.input_ids.shape[1] :], skip_special_tokens=True)


def test_the_embedded_model_is_small_and_its_files_complete(shipped: str, embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    files = list(embedded_model_path(shipped).iterdir())
    assert f"({shipped!r})".replace("'", '"') in (embedded_model_path(shipped) / "README.md").read_text()
    assert sum(parameter.numel() for parameter in model.parameters()) <= 3_000_000
    assert sum(file.stat().st_size for file in files) <= 8_000_000
    assert {file.name for file in files} >= {
        "README.md",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }
    assert len(tokenizer) < model.get_input_embeddings().num_embeddings


def test_the_embedded_models_are_two_families_of_one_size_with_one_tokenizer() -> None:
    (qwen, words), (llama, same_words) = map(load_model_and_tokenizer, ("embedded", "embedded-llama"))
    assert (qwen.config.model_type, llama.config.model_type) == ("qwen3", "llama")
    assert llama.num_parameters() == pytest.approx(qwen.num_parameters(), rel=0.02)
    assert words.get_vocab() == same_words.get_vocab()
    # Beyond the architecture's own, what large models have: grouped-query attention and a head of its own.
    assert llama.config.num_key_value_heads < llama.config.num_attention_heads
    assert llama.get_output_embeddings().weight is not llama.get_input_embeddings().weight


def test_a_model_that_does_not_ship_is_named() -> None:
    with pytest.raises(ConfigError, match="No model 'embedded-gpt' ships"):
        embedded_model_path("embedded-gpt")


def test_the_embedded_tokenizer_gives_one_token_a_character_and_loses_none(embedded: tuple[Any, Any]) -> None:
    _, tokenizer = embedded
    text = "".join(sorted(string.ascii_letters + string.digits + string.punctuation)) + " a  b\n. , 's\n"
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_generation_pads_left_and_ends_where_it_ends_alone(embedded: tuple[Any, Any]) -> None:
    prompts = ["374+258=", "23+45-17+80:", "99+99+99+99:", "900-111="]
    together = respond(embedded, prompts, 48, do_sample=False)
    alone = [respond(embedded, [prompt], 48, do_sample=False)[0] for prompt in prompts]
    assert together == alone
    assert all(len(response) < 48 for response in together), "every response ended by itself"
    assert together[0].isdigit()
    assert "#" in together[1]


@pytest.mark.parametrize("task", [make_task("arithmetic"), make_task("chained")], ids=lambda task: task.name)
def test_the_embedded_model_leaves_room_to_learn(embedded: tuple[Any, Any], task: Task) -> None:
    problems = task.problems("validation", limit=400)
    torch.manual_seed(0)
    prompts = [str(problem.prompt) for problem in problems]
    responses = respond(embedded, prompts, task.max_response_tokens, do_sample=True, temperature=1.0, top_k=0)
    correct = sum(
        task.verify(response, problem.answer).correct
        for response, problem in zip(responses, problems, strict=True)
    )
    assert 0.20 <= correct / len(problems) <= 0.45


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("float32", torch.float32), ("bfloat16", torch.bfloat16), (torch.float64, torch.float64)],
)
def test_weights_take_the_type_asked_for(dtype: torch.dtype | str, expected: torch.dtype) -> None:
    model, _ = load_model_and_tokenizer("embedded", dtype=dtype)
    assert {parameter.dtype for parameter in model.parameters()} == {expected}


@pytest.mark.parametrize("dtype", ["float31", "int8", "nn"])
def test_an_unknown_type_is_refused(dtype: str) -> None:
    with pytest.raises(ConfigError, match=f"Unknown dtype '{dtype}'"):
        load_model_and_tokenizer("embedded", dtype=dtype)


def test_a_folder_gives_the_same_model(tmp_path: Path, shipped: str, embedded: tuple[Any, Any]) -> None:
    model, _ = load_model_and_tokenizer(shutil.copytree(embedded_model_path(shipped), tmp_path / "model"))
    ids = torch.arange(3, 90)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, embedded[0](ids).logits)


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "a/b/c", Path("nowhere")])
def test_a_missing_folder_is_named(name: str | Path) -> None:
    with pytest.raises(ConfigError, match=r"no model folder .*nowhere|no model folder a/b/c"):
        load_model_and_tokenizer(name)


def test_a_name_the_hub_does_not_give_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError("owner/model is not a valid model identifier")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", refuse)
    with pytest.raises(ConfigError, match="'owner/model' is neither a folder here nor a model the hub gives"):
        load_model_and_tokenizer("owner/model")


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no config\.json"):
        load_model_and_tokenizer(tmp_path)


def test_a_run_and_a_checkpoint_of_adapters_are_not_taken_for_models(tmp_path: Path) -> None:
    for name in ("config.json", "metrics.jsonl"):
        (tmp_path / name).write_text("{}\n")
    with pytest.raises(CheckpointError, match=r"folder of a run, whose model is in .*model when"):
        load_model_and_tokenizer(tmp_path)
    adapters = tmp_path / "checkpoints" / "step-000016"
    adapters.mkdir(parents=True)
    (adapters / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds adapters, and not the model"):
        load_model_and_tokenizer(adapters)


def test_missing_and_damaged_weights_are_refused(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model_and_tokenizer(folder)
    weights.unlink()
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_model_and_tokenizer(folder)


def test_a_tokenizer_larger_than_the_embedding_is_refused(folder: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_tokens([f"<extra-{number}>" for number in range(100)])
    tokenizer.save_pretrained(folder)
    with pytest.raises(ConfigError, match="has 199 tokens but the model has 128 embedding rows"):
        load_model_and_tokenizer(folder)


def test_a_tokenizer_without_end_token_is_refused(folder: Path) -> None:
    edit(folder / "tokenizer_config.json", eos_token=None)
    with pytest.raises(ConfigError, match="has no end token"):
        load_model_and_tokenizer(folder)


@pytest.mark.parametrize("padding", [None, "<eos>"])
def test_padding_never_falls_on_the_end_token_where_another_is_to_be_had(
    folder: Path, padding: str | None
) -> None:
    edit(folder / "tokenizer_config.json", pad_token=padding)
    model, tokenizer = load_model_and_tokenizer(folder)
    assert tokenizer.pad_token == "<pad>"
    assert model.config.pad_token_id == model.generation_config.pad_token_id == tokenizer.pad_token_id
    assert tokenizer.padding_side == "left"


def test_without_any_spare_token_padding_takes_a_free_row_of_the_embedding(folder: Path) -> None:
    renamed = (
        (folder / "tokenizer.json").read_text().replace('"<pad>"', '"<fill>"').replace('"<unk>"', '"<odd>"')
    )
    (folder / "tokenizer.json").write_text(renamed)
    edit(folder / "tokenizer.json", padding=None)
    edit(folder / "tokenizer_config.json", pad_token=None, unk_token=None)
    model, tokenizer = load_model_and_tokenizer(folder)
    assert tokenizer.pad_token == "<|pad|>"
    assert tokenizer.pad_token_id == 99 < model.config.vocab_size


def test_the_model_ends_where_the_tokenizer_says(folder: Path) -> None:
    edit(folder / "generation_config.json", eos_token_id=[7])
    model, tokenizer = load_model_and_tokenizer(folder)
    assert model.generation_config.eos_token_id == [tokenizer.eos_token_id, 7]


def test_the_reference_answers_fit_the_context(embedded: tuple[Any, Any]) -> None:
    model, tokenizer = embedded
    for task in (make_task("arithmetic", digits=9), make_task("chained", terms=8)):
        longest = max(
            len(tokenizer(f"{problem.prompt}{problem.metadata['solution']}").input_ids)
            for problem in task.problems("train", limit=100)
        )
        assert math.ceil(longest) < model.config.max_position_embeddings
