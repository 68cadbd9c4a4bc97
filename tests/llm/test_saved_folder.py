"""The trained model is a plain Hugging Face folder: transformers and llama.cpp's converter take it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import load_file
from short_run import config
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from scripts import REPOSITORY
from tether.experiments import RunFolder
from tether.llm.generate import answer
from tether.llm.models import embedded_model_path, load_model_and_tokenizer
from tether.llm.saving import save_trained_model

PROMPTS = ["37+58=", "9+4="]


@pytest.fixture(scope="module")
def saved(uninterrupted: Path) -> Path:
    return uninterrupted / "model"


def test_the_folder_holds_what_transformers_writes_and_a_card(saved: Path) -> None:
    assert {path.name for path in saved.iterdir()} == {
        "README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["Qwen3ForCausalLM"]
    assert "auto_map" not in config, "code of ours would be needed to load it"


def test_transformers_alone_loads_every_weight_and_nothing_else(saved: Path) -> None:
    """In a process that cannot import Tether."""
    code = """
import sys
sys.modules["tether"] = None
from transformers import AutoModelForCausalLM, AutoTokenizer
model, found = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(found[name] for name in found if name.endswith("_keys") or name == "error_msgs"), found
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(tokenizer("37+58=").input_ids), sum(p.numel() for p in model.parameters()))
"""
    finished = subprocess.run(
        [sys.executable, "-c", code, str(saved)], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stderr[-2000:]
    spelt, weights = finished.stdout.split()
    assert spelt == "37+58="
    assert int(weights) == sum(weight.numel() for weight in load_file(saved / "model.safetensors").values())


def test_its_weights_are_the_trained_ones(saved: Path) -> None:
    before = load_file(embedded_model_path() / "model.safetensors")
    after = load_file(saved / "model.safetensors")
    assert before.keys() == after.keys()
    assert all(not torch.equal(before[name].float(), after[name].float()) for name in before)


def test_a_pipeline_answers_what_tether_does(saved: Path) -> None:
    model, tokenizer = load_model_and_tokenizer(saved)
    ours = answer(model, tokenizer, PROMPTS, max_response_tokens=6, temperature=None, batch_size=1, seed=0)
    write = pipeline(
        "text-generation", model=AutoModelForCausalLM.from_pretrained(saved, dtype=torch.float32),
        tokenizer=AutoTokenizer.from_pretrained(saved),
    )  # fmt: skip
    said = [write(prompt, max_new_tokens=6, do_sample=False, return_full_text=False) for prompt in PROMPTS]
    assert [each[0]["generated_text"] for each in said] == [response.text for response in ours]


# ---------------------------------------------------------------------- llama.cpp

LLAMA_CPP = os.environ.get("TETHER_LLAMA_CPP")
SMOLLM2 = Path(os.environ.get("TETHER_SMOLLM2", REPOSITORY / "models" / "smollm2-135m-instruct"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(
    LLAMA_CPP is None, reason="needs llama.cpp's converter: set TETHER_LLAMA_CPP to its folder"
)
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs SmolLM2: python recipes/smollm2.py")
def test_llama_cpps_converter_takes_what_a_run_saves(tmp_path: Path) -> None:
    """The embedded model's alphabet is no tokenizer llama.cpp knows, so this takes SmolLM2."""
    model, tokenizer = load_model_and_tokenizer(SMOLLM2)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.25)
    accelerator = SimpleNamespace(unwrap_model=lambda wrapped: wrapped)
    trainer: Any = SimpleNamespace(
        model=model, accelerator=accelerator, is_fsdp_enabled=False, is_deepspeed_enabled=False
    )
    settings = config(tmp_path / "run", model=str(SMOLLM2))
    with RunFolder.create(settings.output, kind="llm", label="x", seed=0, settings={}) as run:
        save_trained_model(settings, run, trainer, tokenizer)
    gguf = tmp_path / "model.gguf"
    command = [sys.executable, f"{LLAMA_CPP}/convert_hf_to_gguf.py", str(tmp_path / "run" / "model")]
    subprocess.run([*command, "--outfile", str(gguf), "--outtype", "f32"], check=True)
    read = GGUFReader(gguf)
    assert read.fields["general.architecture"].contents() == "llama"
    assert read.fields["tokenizer.ggml.pre"].contents() == "smollm", "spelt as the published tokenizer"
    assert read.fields["tokenizer.ggml.tokens"].contents() == tokenizer.convert_ids_to_tokens(
        range(len(tokenizer))
    )
    theirs = {tensor.name: torch.tensor(tensor.data) for tensor in read.tensors}
    ours = model.state_dict()
    assert torch.equal(theirs["token_embd.weight"], ours["model.embed_tokens.weight"])
    assert torch.equal(theirs["blk.7.ffn_down.weight"], ours["model.layers.7.mlp.down_proj.weight"])
    assert torch.equal(theirs["output_norm.weight"], ours["model.norm.weight"])
