"""What TROLL reports of tokens whose tails it cannot see."""

from __future__ import annotations

import pytest
import torch

from tether.losses import project_tokens, troll
from tether.projection import SparseLogProbs, kl_categorical


def test_the_support_proves_some_tokens_inside_and_leaves_others_open() -> None:
    generator = torch.Generator().manual_seed(2)
    old_logits = 4 * torch.randn(2, 40, 60, generator=generator)
    distance = 10 ** (-2 + 2 * torch.rand(2, 40, 1, generator=generator))
    new_logits = old_logits + distance * torch.randn(2, 40, 60, generator=generator)
    ids = old_logits.argmax(-1)
    old = SparseLogProbs.from_logits(old_logits, top_k=8, keep_ids=ids)
    new = SparseLogProbs.at_ids(new_logits, old.ids)
    rows = [d.log_softmax(-1).gather(-1, ids[..., None]).squeeze(-1) for d in (new_logits, old_logits)]
    mask = torch.ones(2, 40)
    metrics = troll(*rows, torch.ones(2), mask, response_ids=ids, new=new, old=old).metrics
    tokens = project_tokens(new, old, ids, mask)
    truth = kl_categorical(new_logits, old_logits)
    assert tokens.certified is not None
    assert tokens.uncertain is not None
    assert (truth[tokens.certified] <= 0.05).all()
    assert not (tokens.certified & (tokens.projected | tokens.uncertain)).any()
    fractions = [metrics[name].item() for name in ("certified", "projected", "uncertain")]
    assert min(fractions) > 0.1
    assert sum(fractions) == pytest.approx(1.0)
