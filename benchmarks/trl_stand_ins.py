"""Tiny local models and data sets under the names of those that TRL's tests download.

They have the architectures, token ids and columns that the tests look at, and random weights; they are laid
out as a model hub's cache, so that nothing of TRL or Transformers has to be replaced to find them.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from datasets import Dataset, DatasetDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCABULARY = 151_936
#: Of most models in a quick run; too small for the one test that spells out Qwen's end token to them.
QUICK_VOCABULARY = 4_096
_REVISION = "0" * 40

# Where Qwen's vocabulary has what the tests spell out as ids.
_SPECIAL = {
    "<|endoftext|>": 151643, "<|im_start|>": 151644, "<|im_end|>": 151645, "<|vision_start|>": 151652,
    "<|vision_end|>": 151653, "<|image_pad|>": 151655, "<|video_pad|>": 151656,
    "<|finetune_right_pad_id|>": 151660,
}  # fmt: skip
_ADDED = {"<tool_call>": 151657, "</tool_call>": 151658}
_PIECES = {
    "a": 64, "b": 65, "c": 66, "Ċ": 198, '{"': 4913, "name": 606, '":': 788, 'Ġ"': 330, "multiply": 64648,
    "async": 7692, "_multiply": 93054, "_tool": 22785, '",': 497, "arguments": 16370, 'Ġ{"': 5212, "Ġ": 220,
    "3": 18, ",": 11, "4": 19, "}}Ċ": 11248, "I": 40, "Ġdon": 1513, "'t": 944, "Ġknow": 1414, "Ġany": 894,
    "Ġtool": 5392, "Done": 17453, "!": 0,
}  # fmt: skip

_ZEN = (
    "Beautiful is better than", "Explicit is", "Simple is better", "Complex", "Flat is better than",
    "Sparse is better", "Readability", "Special cases aren't special", "Although practicality beats",
    "Errors should never", "Unless explicitly", "In the face of ambiguity, refuse",
    "There should be one-- and preferably", "Although that way may not be", "Now is",
    "Although never is often", "If the implementation is hard", "If the implementation is easy",
    "Namespaces are one",
)  # fmt: skip
_TRAIN_ROWS = 17


def _ids(size: int) -> dict[str, int]:
    """Of the special and added tokens, at the same distance from the end of any vocabulary."""
    return {name: number + size - VOCABULARY for name, number in {**_SPECIAL, **_ADDED}.items()}


def make_tokenizer(size: int) -> PreTrainedTokenizerFast:
    """Bytes as tokens, and the tests' pieces at Qwen's ids, with TRL's own copy of Qwen3's template."""
    vocabulary = {name: number for name, number in _PIECES.items() if number < size} | _ids(size)
    free = iter(number for number in range(1000, 3000) if number not in vocabulary.values())
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        if byte not in vocabulary:
            vocabulary[byte] = next(free)
    taken = set(vocabulary.values())
    vocabulary |= {f"<unused-{number}>": number for number in range(size) if number not in taken}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(list(_SPECIAL))
    inner.add_tokens(list(_ADDED))
    template = resources.files("trl").joinpath("chat_templates/qwen3.jinja").read_text(encoding="utf-8")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|endoftext|>", padding_side="left",
        chat_template=template,
    )  # fmt: skip


def _sizes(size: int, **more: Any) -> dict[str, Any]:
    return {
        "vocab_size": size, "hidden_size": 8, "intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None,
        "eos_token_id": _ids(size)["<|im_end|>"], "pad_token_id": _ids(size)["<|endoftext|>"], **more,
    }  # fmt: skip


def _text(family: str, head: str, **more: Any) -> Callable[[int], Any]:
    """A text model of a family, such as ("Qwen2", "ForCausalLM")."""

    def build(size: int) -> Any:
        config = getattr(transformers, f"{family}Config")(**_sizes(size, **more))
        return getattr(transformers, f"{family}{head}")(config)

    return build


def _llava_next(size: int) -> Any:
    vision = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14, "model_type": "clip_vision_model"}  # fmt: skip
    config = transformers.LlavaNextConfig(
        text_config=_sizes(size, model_type="llama"), vision_config=vision,
        image_token_index=_ids(size)["<|image_pad|>"],
        image_grid_pinpoints=[[28, 28], [56, 28]], vision_feature_layer=-1, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlavaNextForConditionalGeneration(config)


_GEMMA2 = {"head_dim": 4, "query_pre_attn_scalar": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 4}
_ONE_LABEL = {"num_labels": 1}

MODELS: dict[str, Callable[[int], Any]] = {
    "tiny-Qwen2ForCausalLM-2.5": _text("Qwen2", "ForCausalLM"),
    "tiny-Qwen3ForCausalLM": _text("Qwen3", "ForCausalLM", head_dim=4),
    "tiny-Qwen3MoeForCausalLM": _text("Qwen3Moe", "ForCausalLM", **_EXPERTS),
    "tiny-Gemma2ForCausalLM": _text("Gemma2", "ForCausalLM", **_GEMMA2),
    "tiny-Qwen2ForSequenceClassification-2.5": _text("Qwen2", "ForSequenceClassification", **_ONE_LABEL),
    "tiny-Qwen3ForSequenceClassification": _text(
        "Qwen3", "ForSequenceClassification", head_dim=4, **_ONE_LABEL
    ),
    "tiny-LlamaForSequenceClassification-3.2": _text("Llama", "ForSequenceClassification", **_ONE_LABEL),
    # Qwen's vision models need torchvision for their processors, and have no stand-in.
    "tiny-LlavaNextForConditionalGeneration": _llava_next,
}


def fill_cache(cache: Path, *, quick: bool = False, only: str | None = None) -> None:
    """Write every stand-in, or one, into a model hub's cache, unless it is there."""
    for name, build in MODELS.items():
        if only not in (None, name):
            continue
        folder = cache / f"models--trl-internal-testing--{name}"
        snapshot = folder / "snapshots" / _REVISION
        if (folder / "refs" / "main").is_file():
            continue
        torch.manual_seed(0)
        snapshot.mkdir(parents=True, exist_ok=True)
        # The tests of tools spell out ids, and answer with a mixture of experts.
        size = QUICK_VOCABULARY if quick and "Moe" not in name else VOCABULARY
        build(size).save_pretrained(snapshot)
        tokenizer = make_tokenizer(size)
        (_processor(name, tokenizer) or tokenizer).save_pretrained(snapshot)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / "main").write_text(_REVISION, encoding="utf-8")


def _processor(name: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    """What turns text and images into a model's inputs; None for models of text alone."""
    if "ForConditionalGeneration" not in name:
        return None
    tokens = {"image_token": "<|image_pad|>", "boi_token": "<|vision_start|>", "eoi_token": "<|vision_end|>"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>",
        padding_side="left", extra_special_tokens=tokens,
    )  # fmt: skip
    pinpoints = [[28, 28], [56, 28]]
    images = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}, image_grid_pinpoints=pinpoints
    )
    return transformers.LlavaNextProcessor(
        images,
        tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        image_token="<|image_pad|>",
        num_additional_image_tokens=1,
        chat_template=_VISION_TEMPLATE.replace("IMAGE", "<|image_pad|>"),
    )


_VISION_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def load_dataset(path: str, name: str | None = None, *, split: str | None = None) -> Any:
    """In place of `datasets.load_dataset`: lines of the Zen of Python as prompts, with images on request."""
    conversational = (name or "").startswith("conversational")
    prompts: list[Any] = list(_ZEN)
    if conversational:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    columns: dict[str, list[Any]] = {"prompt": prompts}
    if path.endswith("image"):
        from PIL import Image

        random = np.random.default_rng(0)
        pictures = [
            Image.fromarray(random.integers(0, 255, (32, 32, 3), dtype=np.uint8))
            for _ in range(2 * len(_ZEN))
        ]
        if "multi" in path:
            columns["images"] = [pictures[i : i + 1 + i % 2] for i in range(len(_ZEN))]
        else:
            columns["image"] = pictures[: len(_ZEN)]
    whole = Dataset.from_dict(columns)
    parts = DatasetDict(
        train=whole.select(range(_TRAIN_ROWS)), test=whole.select(range(_TRAIN_ROWS, len(_ZEN)))
    )
    return parts if split is None else parts[split]
