"""What cannot be packed is refused: by what a model says of itself, or by a check at its first pass."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from packed_models import FAMILIES, SIZES, UNFIT, batch, make
from transformers import LlamaConfig, LlamaForCausalLM

from tether.errors import ConfigError, InvalidInputError
from tether.integrations.packing import PackedLayout, add_packing


def test_padding_between_tokens_is_refused() -> None:
    mask = torch.tensor([[1, 1, 1, 0], [1, 0, 1, 0]])
    with pytest.raises(InvalidInputError, match="Row 1 of the attention mask has padding between"):
        PackedLayout.of(mask)
    with pytest.raises(InvalidInputError, match=re.escape("matrix [B, W], got (1, 2, 4)")):
        PackedLayout.of(mask[None])


class Forgetful(LlamaForCausalLM):
    """A model that takes position ids and does not look at them."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__(config)
        original = self.model.forward

        def forward(*args: Any, position_ids: Any = None, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        self.model.forward = forward


def test_a_model_that_ignores_position_ids_is_found_out_at_the_first_pass() -> None:
    torch.manual_seed(0)
    model = Forgetful(LlamaConfig(**SIZES))
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    add_packing(model)
    ids, mask = batch()
    with pytest.raises(ConfigError, match=r"LlamaModel cannot train on packed.*when another one stands befo"):
        model.base_model(input_ids=ids, attention_mask=mask, pack_sequences=True)
    assert [module.training for module in model.modules()] == modes
    model.base_model(input_ids=ids, attention_mask=mask)  # as ever


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("autocast", [False, True])
def test_rounding_is_not_taken_for_a_leak_nor_a_leak_for_rounding(dtype: torch.dtype, autocast: bool) -> None:
    ids, mask = batch()
    for family in FAMILIES:
        torch.manual_seed(0)
        model = FAMILIES[family]().to(dtype)
        add_packing(model)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model.base_model(input_ids=ids, attention_mask=mask, pack_sequences=True)
    forgetful = Forgetful(LlamaConfig(**SIZES)).to(dtype)
    add_packing(forgetful)
    with pytest.raises(ConfigError), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        forgetful.base_model(input_ids=ids, attention_mask=mask, pack_sequences=True)


@pytest.mark.parametrize("kind", UNFIT)
def test_models_whose_sequences_would_mix_are_refused(kind: str) -> None:
    build, reason = UNFIT[kind]
    with pytest.raises(ConfigError, match=reason) as refused:
        add_packing(build())
    assert "troll_pack_sequences=False" in str(refused.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_type_ids": torch.zeros(7, 13)}, "also token_type_ids"),
        ({"output_hidden_states": True}, "also output_hidden_states"),
        ({"input_ids": None, "inputs_embeds": torch.zeros(7, 13, 32)}, "also inputs_embeds"),
        ({"attention_mask": None}, "one of them missing"),
    ],
)
def test_what_is_not_packed_is_refused(changes: dict[str, Any], message: str) -> None:
    model = make("Qwen3")
    ids, mask = batch()
    with pytest.raises(ConfigError, match=message):
        model.base_model(**{"input_ids": ids, "attention_mask": mask, **changes}, pack_sequences=True)
