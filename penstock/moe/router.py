"""Router: hidden states to expert choices, in float32 even if the model computes in bfloat16.

1. Logits for each expert, plus a learned bias if there is one.
2. Choice and weights by the layer's rule (`penstock.kernels.reference.route`); or a fixed choice for each token id.
3. Auxiliary losses, attached to the weights.
4. In training, forced balance (benchmarks) or capacity, if configured. Evaluation and sampling are dropless: a token's
   experts then depend on no other token, and so not on the micro-batch that it is in.
"""

from collections.abc import Iterable
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from penstock.config.model import Moe
from penstock.kernels.float32_products import float32_linear
from penstock.kernels.reference import Routed, RouterRule, route
from penstock.moe.balance import (
    BINS,
    LayerLoad,
    LoadMeter,
    Routing,
    Scope,
    attach,
    auxiliary_loss,
    capacity,
    drop_over_capacity,
    margin_counts,
    quantile_shift,
    slot_counts,
    spread_evenly,
)
from penstock.parallel.collectives import all_reduce
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import is_recomputing, saved_as_is

HASHED_IDS = 8192  # token ids whose experts are drawn at a time


def router_rule(moe: Moe) -> RouterRule:
    router = moe.router
    return RouterRule(
        top_k=moe.top_k,
        score=router.scoring_func,
        softmax_after_top_k=router.softmax_after_top_k,
        groups=router.n_group,
        topk_group=router.topk_group,
        group_score=router.group_score,
        normalize=router.norm_topk_prob,
        scale=router.routed_scaling_factor,
    )


def hash_table(vocabulary: int, experts: int, top_k: int, generator: torch.Generator) -> Tensor:
    """K different experts for each token id, V x K float32 as all that checkpoints hold; all choices equally likely."""
    # In parts: the whole of 130,000 ids by 256 experts would take 130 MB.
    parts = (torch.rand(len(ids), experts, generator=generator) for ids in torch.arange(vocabulary).split(HASHED_IDS))
    return torch.cat([part.topk(top_k).indices.float() for part in parts])


class TopKRouter(nn.Module):
    """Chooses K experts for every token."""

    expert_bias_E: Tensor | None  # float32, added to scores for the choice only; None without bias
    table_VK: Tensor | None  # float32 whole numbers, the experts of each token id; None where scores choose

    def __init__(
        self,
        moe: Moe,
        hidden_size: int,
        layer: int,
        layer_context: LayerContext,
        hashed_ids: int = 0,  # of the vocabulary, if a table of them chooses
    ) -> None:
        super().__init__()
        self.operators = layer_context.operators
        self.axes = layer_context.axes
        self.context_method = layer_context.context_method
        self.may_run_again = bool(layer_context.recompute)  # in backward
        self.layer = layer
        self.experts = moe.experts
        self.top_k = moe.top_k
        self.balance = moe.balance
        self.rule = router_rule(moe)
        self.expert_bias_rate = moe.router.expert_bias_rate
        self.weight_ED = nn.Parameter(torch.empty(moe.experts, hidden_size, dtype=torch.float32))
        logit_bias = torch.empty(moe.experts, dtype=torch.float32) if moe.router.logit_bias else None
        self.logit_bias_E = None if logit_bias is None else nn.Parameter(logit_bias)
        bias = torch.zeros(moe.experts, dtype=torch.float32) if moe.router.expert_bias and not hashed_ids else None
        self.register_buffer("expert_bias_E", bias)
        table_VK = torch.zeros(hashed_ids, moe.top_k, dtype=torch.float32) if hashed_ids else None
        self.register_buffer("table_VK", table_VK)
        if hashed_ids:  # no loss moves the choice
            self.balance = moe.balance.model_copy(update={"aux_loss": "none", "aux_loss_coef": 0.0})
        self.meter = LoadMeter(moe.experts, BINS if moe.balance.bias_rule == "quantile" else 0)

    def forward(self, x_TD: Tensor, scope: Scope) -> Routing:
        logits_TE = float32_linear(x_TD, self.weight_ED)
        if self.logit_bias_E is not None:
            logits_TE = logits_TE + self.logit_bias_E
        routed = self._choose(logits_TE, scope)
        routing = Routing(routed.weights_TK, routed.experts_TK)
        tokens = x_TD.shape[0] * self.axes.sequence.size  # of the ranks that share rows
        # Recomputation sees tokens that were counted already; their loss is attached to the weights of forward.
        measured = self.training and torch.is_grad_enabled() and not (self.may_run_again and is_recomputing())
        if measured:
            self.meter.slots_E += routed.counts_BE.sum(0)  # before the loss: it counts this micro-batch too
            if self.meter.margins_EU is not None and self.expert_bias_E is not None:
                self.meter.margins_EU += margin_counts(logits_TE, self.expert_bias_E, self.rule)
            if self.balance.aux_loss_coef or self.balance.z_loss_coef:
                routing = self._with_losses(routed, tokens, scope)
        if self.balance.force_load_balance and self.training:
            routing = spread_evenly(routing, self.experts)
        if self.balance.capacity_factor and self.training:
            limit = capacity(tokens, self.top_k, self.experts, self.balance.capacity_factor)
            routing = drop_over_capacity(routing, self.experts, limit, scope.sequences, self.axes, self.context_method)
            if measured:
                self.meter.dropped += (routing.experts_TK == self.experts).sum()
        return routing

    def _choose(self, logits_TE: Tensor, scope: Scope) -> Routed:
        if self.table_VK is None:
            return self.operators.route(logits_TE, self.expert_bias_E, self.rule, scope.sequences)
        assert scope.tokens_T is not None, "the choice is by token ids"
        return route(logits_TE, None, self.rule, scope.sequences, self.table_VK[scope.tokens_T].long())

    def _with_losses(self, routed: Routed, tokens: int, scope: Scope) -> Routing:
        """The choice with the auxiliary losses attached to its weights."""
        load = slot_counts(routed.counts_BE, self.meter, self.balance, self.axes)
        auxiliary = auxiliary_loss(routed, tokens, self.balance, scope, load, self.operators)
        self.meter.auxiliary_loss += auxiliary.loss
        with saved_as_is() if self.may_run_again else nullcontext():
            return Routing(attach(routed.weights_TK, routed, auxiliary), routed.experts_TK)

    def load(self, plans: Tensor | None = None) -> LayerLoad:
        """This rank's load in the step, with the facts of its plans of replicas; tensors stay on their device."""
        return LayerLoad(self.layer, self.meter.slots_E, self.meter.dropped, self.meter.auxiliary_loss, plans)


@torch.no_grad()
def update_expert_bias(modules: Iterable[nn.Module], loads: Iterable[LayerLoad]) -> None:
    """Move every expert bias, once a step, by `model.moe.balance.bias_rule`. All ranks call it.

    With sign that is a fixed step against the sign of the expert's excess load (arXiv 2408.15664), with quantile as far
    as makes the expert's load even (`quantile_shift`). `loads` is the load of the global batch over all ranks.
    """
    slots = {load.layer: load.slots_E for load in loads}
    routers = (module for model in modules for module in model.modules() if isinstance(module, TopKRouter))
    for router in routers:
        margins_EU = router.meter.margins_EU
        if router.expert_bias_E is not None and margins_EU is not None:
            router.expert_bias_E -= quantile_shift(all_reduce(margins_EU, router.axes.stage), router.top_k)
        elif router.expert_bias_E is not None:
            slots_E = slots[router.layer].float()
            router.expert_bias_E += router.expert_bias_rate * torch.sign(slots_E.mean() - slots_E)  # + if too few
