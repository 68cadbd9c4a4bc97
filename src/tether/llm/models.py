"""Loading a causal language model and its tokenizer so that training can rely on both."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from tether.errors import CheckpointError, ConfigError, MissingDependencyError, warn
from tether.experiments.checkpoints import fingerprint
from tether.experiments.files import dump_json
from tether.experiments.runs import METRICS_FILE

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

Quantization = Literal["none", "nf4"]

EMBEDDED = {"embedded": "embedded", "embedded-llama": "embedded_llama"}
"""The models that ship with Tether: the name `load_model_and_tokenizer` knows each under, and its folder."""

ADAPTER = "adapter_config.json"
"""What tells a folder of adapters from one of a model."""

_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_PAD_CANDIDATES = ("<|endoftext|>", "<pad>", "<|pad|>", "[PAD]", "<|finetune_right_pad_id|>", "<|fim_pad|>")


def embedded_model_path(name: str = "embedded") -> Path:
    """Give the folder of a model that ships with Tether, in Hugging Face's format.

    Args:
        name: ``"embedded"`` (Qwen3 architecture) or ``"embedded-llama"``: half a million parameters each, the
            same tokenizer, tasks and training.

    Raises:
        ConfigError: No model of that name ships with Tether.
        CheckpointError: The installation lacks the model's files.

    >>> (embedded_model_path("embedded-llama") / "model.safetensors").is_file()
    True
    """
    if name not in EMBEDDED:
        raise ConfigError(f"No model {name!r} ships with Tether. There are {', '.join(EMBEDDED)}.")
    path = Path(__file__).with_name(EMBEDDED[name])
    if not (path / "model.safetensors").is_file():
        raise CheckpointError(
            f"The model {name!r} is missing from {path}. Install tether-rl again, or train it with "
            "recipes/embedded_model.py."
        )
    return path


def model_fingerprint(name_or_path: str | Path) -> str | None:
    """What tells a model's files from others at the same place; None where there is no such folder here.

    It is made of the names, sizes and SHA-256 of all files in the folder but hidden ones and model cards, so
    a copy has it too.

    >>> model_fingerprint("embedded") == model_fingerprint(embedded_model_path())
    True
    """
    name = str(name_or_path)
    folder = embedded_model_path(name) if name in EMBEDDED else Path(name).expanduser()
    if not folder.is_dir():
        return None
    files = [path for path in folder.iterdir() if path.is_file()]
    counted = [path for path in files if not path.name.startswith(".") and path.suffix != ".md"]
    listed = {path.name: fingerprint(path) for path in sorted(counted)}
    return hashlib.sha256(dump_json(listed).encode()).hexdigest()


def load_model_and_tokenizer(
    name_or_path: str | Path = "embedded",
    *,
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    attn_implementation: str | None = None,
    quantization: Quantization = "none",
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and a tokenizer that fit each other and can generate in batches.

    The tokenizer pads on the left, as generation needs, and has a padding token that differs from its end
    token wherever one can be had: an existing padding-like token, or a new one on a row the embedding
    already has. The model knows the same tokens.

    Args:
        name_or_path: ``"embedded"`` or ``"embedded-llama"`` for the models that ship with Tether, a folder in
            Hugging Face's format, or a name on the hub.
        dtype: Type of the weights; ``"auto"`` keeps the type they are stored in.
        device: Where the model goes.
        attn_implementation: Passed to transformers; None lets it choose.
        quantization: ``"nf4"`` for 4-bit linear layers by bitsandbytes, to train adapters on (QLoRA); needs
            CUDA, where the model then is, whatever `device` says.

    Returns:
        The model, in evaluation mode as transformers loads it, and the tokenizer.

    Raises:
        ConfigError: A folder or hub name that does not exist; no end token; a tokenizer with more tokens
            than the model has embedding rows; an unknown `dtype`; quantization without CUDA.
        CheckpointError: A folder that is no model, or whose files cannot be read.
        MissingDependencyError: transformers, or bitsandbytes for quantization, is not installed.

    >>> model, tokenizer = load_model_and_tokenizer("embedded")
    >>> tokenizer.decode(tokenizer("374+258=").input_ids)
    '374+258='
    """
    try:
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            "Models are loaded with transformers. Install tether-rl[llm]."
        ) from error
    source = _resolve(name_or_path)
    options: dict[str, Any] = {"dtype": _checked_dtype(dtype)}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if quantization != "none":
        options |= _quantized(quantization)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left")
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise _unreadable(name_or_path, source, error) from error
    _match(model, tokenizer, str(name_or_path))
    return (model.to(device) if quantization == "none" else model), tokenizer


def read_config_and_tokenizer(name_or_path: str | Path) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """What can be known of a model without its weights.

    Raises:
        ConfigError, CheckpointError: As `load_model_and_tokenizer`.

    >>> config, tokenizer = read_config_and_tokenizer("embedded")
    >>> config.model_type, len(tokenizer)
    ('qwen3', 99)
    """
    from transformers import AutoConfig, AutoTokenizer

    source = _resolve(name_or_path)
    try:
        return AutoConfig.from_pretrained(source), AutoTokenizer.from_pretrained(source, padding_side="left")
    except (OSError, ValueError, KeyError) as error:
        raise _unreadable(name_or_path, source, error) from error


def _quantized(quantization: str) -> dict[str, Any]:
    """Options of transformers for 4-bit weights, as in QLoRA (Dettmers et al. 2023, arXiv 2305.14314)."""
    if quantization != "nf4":
        raise ConfigError(f"Unknown quantization {quantization!r}. Use 'none' or 'nf4'.")
    if not torch.cuda.is_available():
        raise ConfigError(
            "quantization='nf4' needs a CUDA device, and there is none here. Use lora_rank without "
            "quantization, or a smaller model."
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise MissingDependencyError("quantization='nf4' needs bitsandbytes: pip install bitsandbytes")
    from transformers import BitsAndBytesConfig

    four_bit = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
    )
    return {"quantization_config": four_bit, "device_map": {"": torch.cuda.current_device()}}


def _resolve(name_or_path: str | Path) -> str:
    if isinstance(name_or_path, str) and name_or_path in EMBEDDED:
        return str(embedded_model_path(name_or_path))
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} holds adapters, and not the model that they belong to. Give the model folder of a "
                "finished run, or merge them (`merge_and_unload` of peft) and save what comes out."
            )
        if (path / METRICS_FILE).is_file():
            raise CheckpointError(
                f"{path} is the folder of a run, whose model is in {path / 'model'} when it is finished."
            )
        if not (path / "config.json").is_file():
            raise CheckpointError(
                f"{path} holds no config.json, so it is no model folder. Give the folder that "
                "`save_pretrained` wrote."
            )
        return str(path)
    if isinstance(name_or_path, Path) or not _HUB_NAME.fullmatch(name_or_path):
        raise ConfigError(
            f"There is no model folder {path}. Check the path, or use one of {', '.join(EMBEDDED)} or a hub "
            "name such as 'HuggingFaceTB/SmolLM2-135M-Instruct'."
        )
    return name_or_path


def _checked_dtype(dtype: torch.dtype | str) -> torch.dtype | str:
    if isinstance(dtype, torch.dtype) or dtype == "auto":
        return dtype
    resolved = getattr(torch, dtype, None)
    if not isinstance(resolved, torch.dtype) or not resolved.is_floating_point:
        raise ConfigError(f"Unknown dtype {dtype!r}. Use 'float32', 'bfloat16', 'float16' or 'auto'.")
    return resolved


def _unreadable(name_or_path: str | Path, source: str, error: Exception) -> ConfigError | CheckpointError:
    reason = f"{type(error).__name__}: {error}"
    if Path(source).is_dir():
        return CheckpointError(
            f"The model in {source} cannot be loaded ({reason}). It needs config.json, "
            "model.safetensors and the "
            "tokenizer's files; save it again with `save_pretrained`."
        )
    return ConfigError(
        f"{str(name_or_path)!r} is neither a folder here nor a model the hub gives ({reason}). Check "
        "the spelling "
        "and the connection, or give a folder."
    )


def _match(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Refuse a pair that does not fit, then make both agree on the padding and end tokens."""
    rows = model.get_input_embeddings().weight.shape[0]
    if len(tokenizer) > rows:
        raise ConfigError(
            f"The tokenizer of {name!r} has {len(tokenizer)} tokens but the model has {rows} "
            "embedding rows; they do "
            "not belong together. Use the model's own tokenizer, or resize the embedding and save the model."
        )
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"The tokenizer of {name!r} has no end token, so no response could end. Set eos_token in its "
            "tokenizer_config.json."
        )
    if tokenizer.pad_token_id in (None, tokenizer.eos_token_id):
        _give_pad_token(tokenizer, rows)
    model.config.pad_token_id = tokenizer.pad_token_id
    generation = model.generation_config
    if generation is not None:
        generation.pad_token_id = tokenizer.pad_token_id
        # Whatever ends a turn ends a response; TRL, too, stops at every token listed here.
        generation.eos_token_id = end_tokens(model, tokenizer)


def _give_pad_token(tokenizer: PreTrainedTokenizerBase, rows: int) -> None:
    vocabulary = tokenizer.get_vocab()
    candidates = [*_PAD_CANDIDATES, tokenizer.unk_token]
    for candidate in candidates:
        if candidate in vocabulary and vocabulary[candidate] != tokenizer.eos_token_id:
            tokenizer.pad_token = candidate
            return
    if len(tokenizer) < rows:
        tokenizer.add_special_tokens({"pad_token": "<|pad|>"})
        return
    _log.info("No token is free to pad with and the embedding has no spare row: padding with the end token.")
    tokenizer.pad_token = tokenizer.eos_token


_MARKER = "the marker 7f3a"
_CONVERSATION = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": _MARKER}]


def end_of_turn_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The special token that closes an assistant's turn; None without a chat template or such a token.

    A model that was taught conversations says this token where it is done, and not always the tokenizer's
    end token: Gemma 3 ends a turn with ``<end_of_turn>`` and a document with ``<eos>``, Llama 3 with
    ``<|eot_id|>`` and ``<|end_of_text|>``. A conversation is rendered and what follows the assistant's words
    is looked at, so no list of model families is needed.

    Warns:
        TetherWarning: a template that cannot render a question and an answer, or leaves out the answer.
    """
    if tokenizer.chat_template is None:
        return None
    from jinja2 import TemplateError

    try:
        text = str(tokenizer.apply_chat_template(_CONVERSATION, tokenize=False))
    except TemplateError as error:
        warn(
            f"The chat template cannot render a question and its answer ({error}), so it is not known which "
            "token ends a turn; the tokenizer's end token is used."
        )
        return None
    _, marker, following = text.rpartition(_MARKER)
    if not marker:
        warn(
            "The chat template leaves out what the assistant said, so it is not known which token ends a "
            "turn; the tokenizer's end token is used."
        )
        return None
    ids = tokenizer(following, add_special_tokens=False)["input_ids"]
    special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return int(ids[0]) if ids and ids[0] in special else None


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Every token that ends a response: the tokenizer's, the model's own, and the chat template's.

    The tokenizer's end token comes first; no token is named twice.
    """
    generation = model.generation_config
    own = [] if generation is None else generation.eos_token_id
    listed = [
        tokenizer.eos_token_id,
        *(own if isinstance(own, list) else [own]),
        end_of_turn_token(tokenizer),
    ]
    return list(dict.fromkeys(int(token) for token in listed if token is not None))
