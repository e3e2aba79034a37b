"""QK-clip: logits are measured as attention sees them, and the factors bring them down to the limit."""

from dataclasses import replace

import pytest
import torch

from penstock.config.load import load_run
from penstock.kernels.attention import largest_logits
from penstock.models.attention import GroupedQueryLayer
from penstock.parallel.launch.environment import Environment
from penstock.train.setup import prepare
from penstock.train.step import train_step
from tests.closeness import assert_close, assert_equal
from tests.distributed.case import DOCUMENTS, GQA, MUON
from tests.distributed.one_loss import BASE

GATED = (*GQA, "model.attention.output_gate=true", "model.attention.qkv_bias=true")
MODELS = {
    "latent": (),
    "queries by a latent": ("model.attention.q_lora_rank=32",),
    "grouped, gate, biases, documents": (*GATED, *DOCUMENTS),
}


@pytest.mark.parametrize("name", MODELS)
def test_heads_above_the_limit_have_it_as_their_largest_logit_after_the_step(name: str) -> None:
    overrides = (*BASE, *MODELS[name], *MUON, "model.layers=2", "optimizer.muon.qk_clip=1000")
    session = prepare(load_run("debug", overrides), Environment(color=False, threads=1, world_size=1))
    batch = session.state.batches.next_batch()
    first = session.model.whole.blocks["0"].attention  # what it reads does not change
    rule, measured = session.rule, []
    for _ in range(3):  # steps without an update, of which the second one clips
        train_step(session.model, session.state.optimizer, batch, rule, 0.0)
        measured.append(first.logits.largest_H.clone())
        rule = replace(rule, qk_clip=float(measured[0].mean()))
    session.state.batches.close()
    before, same, after = measured
    assert_equal(same, before)
    limit = float(before.mean())
    if isinstance(first, GroupedQueryLayer):  # heads that share a key shrink together
        group = before.view(-1, first.config.heads // first.config.kv_heads)
        assert_close(after, (group * (limit / group.amax(1, keepdim=True)).clamp(max=1)).flatten())
    else:
        assert_close(after, before.clamp(max=limit))


@pytest.mark.parametrize("with_mask", [False, True])
def test_the_largest_logit_is_that_of_each_head_among_the_pairs_that_are_seen(
    with_mask: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.kernels.attention.SCORES", 2 * 4 * 7 * 3)  # three positions of queries at a time
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(2, 7, 4, 8, generator=generator), torch.randn(2, 7, 2, 8, generator=generator)
    causal = torch.ones(7, 7).tril().bool()
    allowed = causal & (torch.rand(2, 7, 7, generator=generator) < 0.5) if with_mask else None
    found = largest_logits(q, k, 0.3, allowed)
    for head in range(4):
        scores = torch.einsum("bsn,btn->bst", q[:, :, head], k[:, :, head // 2]) * 0.3
        seen = scores[causal.expand(2, -1, -1) if allowed is None else allowed]
        assert_close(found[head], seen.max())
