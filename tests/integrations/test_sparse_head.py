"""The sparse head of real model families, against TRL's fused head and the model's own logits."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from packed_models import SIZES
from torch import Tensor
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ModernBertDecoderConfig,
    ModernBertDecoderForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RecurrentGemmaConfig,
    RecurrentGemmaForCausalLM,
    xLSTMConfig,
    xLSTMForCausalLM,
)
from trl.trainer.utils import maybe_gather_lm_head_ctx
from trl_head import fuse_head, needs_fused_head

from tether.errors import ConfigError
from tether.integrations.sparse_head import add_sparse_head

VOCABULARY, LENGTH, KEPT = SIZES["vocab_size"], 9, 3
TEMPERATURE = 0.7

EXPERTS: dict[str, Any] = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.01,
}

FAMILIES: dict[str, Callable[[], Any]] = {
    "untied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=False)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)),
    "soft cap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=3.0)),
    "logit scale": lambda: CohereForCausalLM(CohereConfig(**SIZES, logit_scale=0.25)),
    "logits scaling": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=0.5)),
    "bias": lambda: PhiForCausalLM(
        PhiConfig(**{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")})
    ),
    "experts": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4)),
}


def _build(family: str) -> Any:
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        head = model.get_output_embeddings()
        head.weight.mul_(8)
        if head.bias is not None:
            head.bias.normal_()
    return model


def _extended(model: Any, temperature: float = TEMPERATURE) -> Any:
    fuse_head(model, temperature)
    add_sparse_head(model, temperature, maybe_gather_lm_head_ctx)
    return model


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    """Three rows, the first padded on the left, the last on the right; the last 5 positions are labelled."""
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (3, LENGTH))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    mask[2, -2:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :-5] = -100
    return {"input_ids": ids, "attention_mask": mask}, labels


def _flat_gradient(model: Any) -> Tensor:
    gradients = [p.grad.flatten().float() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return torch.cat(gradients)


def _dense(model: Any, inputs: dict[str, Tensor], temperature: float = TEMPERATURE) -> Tensor:
    """From the model's own logits, all of them."""
    return (model(**inputs).logits[:, :-1].float() / temperature).log_softmax(-1)


@needs_fused_head
@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_gradients_are_those_of_trl_and_of_the_dense_logits(family: str) -> None:
    model = _extended(_build(family))
    inputs, labels = _batch()
    counted = labels[:, 1:] != -100
    weights = torch.randn(2, *counted.shape)

    fused = model(**inputs, labels=labels, fused_lm_head=True)
    (weights[0] * fused.log_probs + weights[1] * fused.entropy).sum().backward()
    fused_gradient = _flat_gradient(model)

    ours = model(**inputs, labels=labels, support_top_k=KEPT)
    torch.testing.assert_close(ours.log_probs, fused.log_probs, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.entropy, fused.entropy, atol=1e-5, rtol=1e-5)
    (weights[0] * ours.log_probs + weights[1] * ours.entropy).sum().backward()
    scale = fused_gradient.abs().max().item()
    torch.testing.assert_close(_flat_gradient(model), fused_gradient, atol=1e-5 * scale, rtol=1e-4)

    dense = _dense(model, inputs)
    sampled = dense.gather(-1, labels[:, 1:, None].clamp_min(0)).squeeze(-1)
    torch.testing.assert_close(ours.log_probs[counted], sampled[counted], atol=1e-5, rtol=1e-5)
    assert (ours.log_probs[~counted] == 0).all()
    entropy = -(dense.exp() * dense).sum(-1)
    torch.testing.assert_close(ours.entropy[counted], entropy[counted], atol=1e-5, rtol=1e-5)


CAPPED: dict[str, Callable[[], Any]] = {
    "RecurrentGemma": lambda: RecurrentGemmaForCausalLM(
        RecurrentGemmaConfig(
            **{k: v for k, v in SIZES.items() if k != "head_dim"} | {"num_hidden_layers": 3},
            lru_width=32,
            logits_soft_cap=3.0,
        )
    ),
    "xLSTM": lambda: xLSTMForCausalLM(
        xLSTMConfig(
            vocab_size=VOCABULARY, hidden_size=64, num_hidden_layers=2, num_heads=2, qk_dim_factor=1.0,
            output_logit_soft_cap=3.0,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", CAPPED)
def test_a_soft_cap_of_another_name_is_the_same_cap(family: str) -> None:
    """Of models that TRL's own head does not know."""
    torch.manual_seed(0)
    model = CAPPED[family]().eval()
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(60)
    inputs, labels = _batch()
    inputs["attention_mask"][:] = 1
    dense = _dense(model, inputs)
    add_sparse_head(model, TEMPERATURE, maybe_gather_lm_head_ctx)
    ours = model(**inputs, labels=labels, support_top_k=KEPT)
    counted = labels[:, 1:] != -100
    sampled = dense.gather(-1, labels[:, 1:, None].clamp_min(0)).squeeze(-1)
    torch.testing.assert_close(ours.log_probs[counted], sampled[counted], atol=1e-5, rtol=1e-5)
    assert sampled[counted].min() < -3.0  # of weights that reach the cap


class ScaledForCausalLM(Qwen3ForCausalLM):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = output.logits / 4
        return output


BETWEEN: dict[str, Callable[[], Any]] = {
    "layers": lambda: ModernBertDecoderForCausalLM(
        ModernBertDecoderConfig(
            **{k: v for k, v in SIZES.items() if k not in ("num_key_value_heads", "head_dim")},
            cls_token_id=1, sep_token_id=2,
        )
    ),
    "a scale of a name that nobody knows": lambda: ScaledForCausalLM(Qwen3Config(**SIZES)),
}  # fmt: skip


@pytest.mark.parametrize("family", BETWEEN)
def test_what_lies_between_hidden_states_and_logits_is_refused(family: str) -> None:
    """The responses would be drawn from one distribution and trained on another."""
    torch.manual_seed(0)
    model = BETWEEN[family]()
    add_sparse_head(model, TEMPERATURE, maybe_gather_lm_head_ctx)
    inputs, labels = _batch()
    with pytest.raises(ConfigError, match="has more than its output embeddings between"):
        model(**inputs, labels=labels, support_top_k=KEPT)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sharpness", [0.0, 1e-3, 1.0, 100.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_rounding_is_no_layer_in_between(family: str, sharpness: float, dtype: torch.dtype) -> None:
    model = _build(family).to(dtype)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    add_sparse_head(model, TEMPERATURE, maybe_gather_lm_head_ctx)
    inputs, labels = _batch()
    assert model(**inputs, labels=labels, support_top_k=KEPT).log_probs.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_support_is_the_top_of_the_dense_distribution_and_the_label(family: str) -> None:
    model = _extended(_build(family))
    inputs, labels = _batch()
    support = model(**inputs, labels=labels, support_top_k=KEPT).support(LENGTH - 1)
    dense = _dense(model, inputs)
    for row, position in (labels[:, 1:] != -100).nonzero().tolist():
        label = int(labels[row, position + 1])
        expected = set(dense[row, position].topk(KEPT).indices.tolist()) | {label}
        kept = [i for i in support.ids[row, position].tolist() if i >= 0]
        assert len(kept) == len(set(kept))
        assert set(kept) == expected
        log_probs = support.log_probs[row, position][support.ids[row, position] >= 0]
        torch.testing.assert_close(log_probs, dense[row, position][kept], atol=1e-5, rtol=1e-5)
        rest = dense[row, position][[i for i in range(VOCABULARY) if i not in expected]].exp().sum()
        assert support.log_tail[row, position].exp().item() == pytest.approx(rest.item(), abs=1e-5)
    uncounted = labels[:, 1:] == -100
    assert (support.ids[uncounted] == -1).all()
    assert (support.log_tail[uncounted] == 0).all()  # all mass outside of nothing


@pytest.mark.parametrize("family", FAMILIES)
def test_given_support_is_evaluated_differentiably(family: str) -> None:
    model = _extended(_build(family))
    inputs, labels = _batch()
    counted = labels[:, 1:] != -100
    ids = torch.randint(0, VOCABULARY, (3, 5, 1)) + torch.arange(0, 40, 10)
    ids = (ids % VOCABULARY).int()
    ids[0, 0, 2] = -1
    ours = model(**inputs, labels=labels, support_ids=ids)
    weights = torch.randn(ours.support_log_probs.shape)
    held = counted[..., None] & (ours.support_ids >= 0)
    assert (ours.support_ids[:, -5:][counted[:, -5:]] == ids[counted[:, -5:]]).all()
    (torch.where(held, ours.support_log_probs, 0.0) * weights).sum().backward()
    gradient = _flat_gradient(model)

    dense = _dense(model, inputs).gather(-1, ours.support_ids.clamp_min(0).long())
    torch.testing.assert_close(ours.support_log_probs[held], dense[held], atol=1e-5, rtol=1e-5)
    (torch.where(held, dense, 0.0) * weights).sum().backward()
    expected = _flat_gradient(model)
    torch.testing.assert_close(gradient, expected, atol=1e-5 * expected.abs().max().item(), rtol=1e-4)


@needs_fused_head
@pytest.mark.parametrize("family", ["untied", "tied", "soft cap", "logit scale"])
def test_bfloat16_weights_are_multiplied_in_float32(family: str) -> None:
    """Against a float32 product of the very bfloat16 numbers; TRL's own rounds each logit to bfloat16."""
    model = _extended(_build(family).to(torch.bfloat16), temperature=1.0)
    inputs, labels = _batch()
    counted = labels[:, 1:] != -100
    ours = model(**inputs, labels=labels, support_top_k=KEPT)
    hidden = model.base_model(**inputs).last_hidden_state[:, :-1].float()
    logits = hidden @ model.get_output_embeddings().weight.float().t()
    config = model.config
    logits = logits * getattr(config, "logit_scale", 1.0)
    if getattr(config, "final_logit_softcapping", None):
        logits = config.final_logit_softcapping * (logits / config.final_logit_softcapping).tanh()
    expected = logits.log_softmax(-1).gather(-1, labels[:, 1:, None].clamp_min(0)).squeeze(-1)
    torch.testing.assert_close(ours.log_probs[counted], expected[counted], atol=1e-5, rtol=1e-5)
    fused = model(**inputs, labels=labels, fused_lm_head=True)
    assert (fused.log_probs - ours.log_probs).abs().max() < 0.1
    assert ours.log_probs.dtype == ours.support_log_probs.dtype == torch.float32
    ours.log_probs.sum().backward()
    assert model.get_output_embeddings().weight.grad.isfinite().all()


@pytest.mark.parametrize("family", ["untied", "soft cap", "experts"])
def test_generation_is_what_it_was(family: str) -> None:
    prompt = torch.tensor([[5, 6, 7]])

    def sample(model: Any) -> list[list[int]]:
        torch.manual_seed(2)
        return model.generate(prompt, max_new_tokens=12, do_sample=True).tolist()

    untouched, extended = _build(family), _extended(_build(family))
    assert sample(extended) == sample(untouched)
    with pytest.raises(ValueError, match="support_tpo_k"):  # generate still checks names against the forward
        extended.generate(prompt, support_tpo_k=3)


def _mixtral() -> Any:
    return MixtralForCausalLM(MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2))


@needs_fused_head
@pytest.mark.parametrize("build", [FAMILIES["experts"], _mixtral], ids=["qwen3 moe", "mixtral"])
def test_load_balancing_loss_of_experts_is_trls(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = _extended(build())
    inputs, labels = _batch()
    asked = {**inputs, "labels": labels, "output_router_logits": True}
    fused = model(**asked, fused_lm_head=True)
    fused.aux_loss.backward()
    expected = _flat_gradient(model)
    ours = model(**asked, support_top_k=KEPT)
    assert ours.aux_loss.item() == pytest.approx(fused.aux_loss.item(), rel=1e-6)
    ours.aux_loss.backward()
    torch.testing.assert_close(_flat_gradient(model), expected)
    assert expected.abs().max() > 1e-4
    assert model(**inputs, labels=labels, support_top_k=KEPT).aux_loss is None


def test_no_label_at_all_gives_zeros_that_still_reach_the_model() -> None:
    model = _extended(_build("untied"))
    inputs, labels = _batch()
    nothing = torch.full_like(labels, -100)
    for keywords in ({"support_top_k": KEPT}, {"support_ids": torch.full((3, 5, 2), -1)}):
        output = model(**inputs, labels=nothing, **keywords)
        assert (output.log_probs == 0).all()
        (output.log_probs.sum() + output.entropy.sum()).backward()
        assert all((p.grad == 0).all() for p in model.parameters() if p.grad is not None)
        assert model.lm_head.weight.grad is not None
        assert model.model.layers[0].mlp.up_proj.weight.grad is not None
        model.zero_grad()


def test_every_id_kept_leaves_no_tail() -> None:
    model = _extended(_build("untied"))
    inputs, labels = _batch()
    output = model(**inputs, labels=labels, support_top_k=10 * VOCABULARY)
    counted = labels[:, 1:] != -100
    assert (output.support_log_tail[counted] == -math.inf).all()
    total = output.support_log_probs[counted].logsumexp(-1)
    torch.testing.assert_close(total, torch.zeros_like(total), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    "keywords", [{"support_top_k": KEPT}, pytest.param({"fused_lm_head": True}, marks=needs_fused_head)]
)
def test_a_model_may_be_given_to_a_second_trainer(keywords: dict[str, Any]) -> None:
    """Extending twice, with another temperature, is extending with the last one."""
    inputs, labels = _batch()
    twice = _extended(_extended(_build("soft cap"), temperature=1.3))
    once = _extended(_build("soft cap"))
    first = once(**inputs, labels=labels, **keywords).log_probs
    assert torch.equal(twice(**inputs, labels=labels, **keywords).log_probs, first)
    assert torch.equal(twice(**inputs).logits, once(**inputs).logits)
