"""Choices of routers: recorded, compared between two layouts, and given to one.

A token whose K-th and next expert have nearly equal scores is a tie: another order of float32 sums may choose the other
expert, and what follows differs by more than rounding. That is no fault. To tell the two apart the layout trains again
with the choices of one process: then nothing may differ.

A layout has the tokens of a step elsewhere and in another order. Their logits tell which is which, since those of two
layouts differ by rounding only, and those of two tokens by much more.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from penstock.kernels.reference import Routed, RouterRule, choice_scores, route
from penstock.moe.balance import Routing
from penstock.moe.router import TopKRouter
from penstock.parallel.recompute import is_recomputing

_EQUAL = 1e-5  # tokens with nearer logits are taken for equal: layouts round the same logits differently
_FORCED = 64.0  # added to the scores of given experts; other scores of small models are far below

Place = tuple[int, int]
"""Step and layer of a router. Evaluation counts as a step."""


@dataclass(frozen=True)
class Choices:
    """Of the tokens of one router in one step, in any order."""

    logits_TE: Tensor
    experts_TK: Tensor
    weights_TK: Tensor
    kept_TK: Tensor  # False for slots over capacity, which are dropped
    margins_T: Tensor  # by how much a score must move to change the choice
    drop_margins_T: Tensor  # by how much a weight must move to change what is dropped

    def at(self, index_T: Tensor) -> "Choices":
        """The choices of some tokens."""
        return Choices(*(tensor[index_T] for tensor in vars(self).values()))

    def to(self, device: torch.device) -> "Choices":
        return Choices(*(tensor.to(device) for tensor in vars(self).values()))

    def sets(self) -> Tensor:
        """For each token and expert: 0, 1 if it was chosen, 2 if it was chosen and kept."""
        sets_TE = torch.zeros_like(self.logits_TE, dtype=torch.int8)
        return sets_TE.scatter(1, self.experts_TK, 1 + self.kept_TK.to(torch.int8))


@dataclass(frozen=True)
class Flip:
    """Tokens that chose other experts than in one process, in the first place where any did."""

    place: Place
    tokens: int
    margin: float  # the largest of these tokens: if it is beyond rounding, the flip has another cause
    drops_only: bool = False  # their experts are the same, and other slots are dropped
    of_equal_tokens: bool = False  # all of them are equal to other tokens of the step


class ChoiceRecorder:
    """Records what the routers of a model choose, or lets them choose what is given."""

    def __init__(self, modules: Iterable[nn.Module], given: Mapping[Place, Choices] | None = None) -> None:
        self.step = 0
        self._given = given
        self._seen: dict[Place, list[Choices]] = defaultdict(list)
        self._last: dict[int, Tensor] = {}  # by layer, logits of the call that runs
        for router in (module for model in modules for module in model.modules() if isinstance(module, TopKRouter)):
            if router.table_VK is None:  # a table of token ids chooses the same on every layout
                self._watch(router)

    def begin(self, step: int) -> None:
        """A step begins, or the evaluation behind the last one."""
        self.step = step

    def choices(self) -> dict[Place, Choices]:
        """All so far, in host memory."""
        return {router: _joined(seen).to(torch.device("cpu")) for router, seen in self._seen.items()}

    def _watch(self, router: TopKRouter) -> None:
        usual, drops = router.operators.route, router.balance.capacity_factor > 0

        def choose(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int) -> Routed:
            given = self._given_to(router, logits_TE)
            if given is None:
                routed = usual(logits_TE, bias_E, rule, sequences)
            else:
                bias_TE = torch.zeros_like(logits_TE).scatter(1, given.experts_TK, _FORCED)
                routed = route(logits_TE, bias_TE if bias_E is None else bias_TE + bias_E, rule, sequences)
            if not is_recomputing():
                margins_T = _margins(choice_scores(logits_TE.detach(), bias_E, rule), rule)
                kept_TK = torch.ones_like(routed.experts_TK, dtype=torch.bool)
                never_T = torch.full_like(margins_T, float("inf"))
                experts_TK, weights_TK = routed.experts_TK.clone(), routed.weights_TK.detach().float()
                choices = Choices(logits_TE.detach().clone(), experts_TK, weights_TK, kept_TK, margins_T, never_T)
                self._seen[self.step, router.layer].append(choices)
            self._last[router.layer] = logits_TE.detach()
            return routed

        def drop(_: nn.Module, __: object, routing: Routing) -> Routing:
            given = self._given_to(router, self._last[router.layer])
            if given is not None:  # in the order of this rank's own choice
                same_TKK = routing.experts_TK[:, :, None] == given.experts_TK[:, None]
                kept_TK = (same_TKK & given.kept_TK[:, None]).any(2)
                experts_TK = routing.experts_TK.masked_fill(~kept_TK, router.experts)
                routing = replace(routing, weights_TK=routing.weights_TK * kept_TK, experts_TK=experts_TK)
            if not is_recomputing():
                kept_TK = routing.experts_TK < router.experts
                seen = self._seen[self.step, router.layer]
                margins_T = _drop_margins(seen[-1], kept_TK)
                seen[-1] = replace(seen[-1], kept_TK=kept_TK, drop_margins_T=margins_T)
                if given is not None and torch.is_grad_enabled():
                    router.meter.dropped += (~kept_TK).sum()
            return routing

        router.operators = replace(router.operators, route=choose)
        if drops:
            router.register_forward_hook(drop)
            if self._given is not None:
                router.balance = router.balance.model_copy(update={"capacity_factor": 0.0})

    def _given_to(self, router: TopKRouter, logits_TE: Tensor) -> Choices | None:
        """The given choices of these tokens, in their order."""
        given = None if self._given is None else self._given.get((self.step, router.layer))
        if given is None:
            return None
        given = given.to(logits_TE.device)
        return given.at(_distances(logits_TE.detach(), given.logits_TE).argmin(1))


def first_flip(got: Iterable[Mapping[Place, Choices]], expected: Mapping[Place, Choices]) -> Flip | None:
    """The first place in which tokens of any rank chose other experts than in one process, or None.

    A token that chooses another expert moves the cut between slots that are kept and dropped, so the margins of those
    count only where no token chose another one. A token that is equal to others is at the cut if one of them is.
    """
    flips = []
    for rank_choices in got:
        for router, choices in rank_choices.items():
            logits_TE = expected[router].logits_TE
            nearest_T = _distances(choices.logits_TE, logits_TE).argmin(1)
            is_equal_T = ((_distances(logits_TE, logits_TE) < _EQUAL).sum(1) > 1)[nearest_T]  # to another token
            wanted = expected[router].at(nearest_T)
            ours_TE, theirs_TE = choices.sets(), wanted.sets()
            for drops_only, differ_T, margins_T in (
                (False, ((ours_TE > 0) != (theirs_TE > 0)).any(1), wanted.margins_T),
                (True, (ours_TE != theirs_TE).any(1), wanted.drop_margins_T.masked_fill(is_equal_T, 0.0)),
            ):
                if differ_T.any():
                    are_equal = drops_only and bool(is_equal_T[differ_T].all())
                    margin = float(margins_T[differ_T].max())
                    flips.append(Flip(router, int(differ_T.sum()), margin, drops_only, are_equal))
    first = min(((flip.place, flip.drops_only) for flip in flips), default=None)
    there = [flip for flip in flips if (flip.place, flip.drops_only) == first]
    if first is None:
        return None
    tokens, margin = sum(flip.tokens for flip in there), max(flip.margin for flip in there)
    return Flip(first[0], tokens, margin, first[1], all(flip.of_equal_tokens for flip in there))


def least_margin(choices: Mapping[Place, Choices]) -> float:
    """Of all tokens."""
    margins = (float(choice.margins_T.min()) for choice in choices.values() if len(choice.margins_T))
    return min(margins, default=float("inf"))


def _joined(seen: list[Choices]) -> Choices:
    return Choices(*(torch.cat(tensors) for tensors in zip(*(vars(choices).values() for choices in seen), strict=True)))


def _distances(logits_TE: Tensor, others_NE: Tensor) -> Tensor:
    # By differences, not products: those of equal logits would be lost in rounding.
    return torch.cdist(logits_TE.float(), others_NE.float(), compute_mode="donot_use_mm_for_euclid_dist")


def _drop_margins(chosen: Choices, kept_TK: Tensor) -> Tensor:
    """Of each token: how far the weight of a slot is from the cut of its expert, of all tokens of a call."""
    tokens, experts = chosen.logits_TE.shape

    def of_experts(slots_TK: Tensor, other: float) -> Tensor:
        weights_TK = chosen.weights_TK.masked_fill(~slots_TK, other)
        return chosen.weights_TK.new_full((tokens, experts), other).scatter(1, chosen.experts_TK, weights_TK)

    least_kept_E = of_experts(kept_TK, float("inf")).amin(0)
    most_dropped_E = of_experts(~kept_TK, float("-inf")).amax(0)
    beyond_TK = torch.where(kept_TK, most_dropped_E[chosen.experts_TK], least_kept_E[chosen.experts_TK])
    return (chosen.weights_TK - beyond_TK).abs().amin(1)


def _margins(scores_TE: Tensor, rule: RouterRule) -> Tensor:
    """Of each token: how far the last chosen score is from the next one, or group scores are if those are nearer."""
    margins = []
    if rule.groups > 1:
        grouped_TQE = scores_TE.view(len(scores_TE), rule.groups, -1)
        best = grouped_TQE.topk(1 if rule.group_score == "max" else 2, dim=-1).values
        groups_TQ = best.sum(-1)
        margins.append(_gap(groups_TQ, rule.topk_group))
        last_T1 = groups_TQ.topk(rule.topk_group, dim=1).values[:, -1:]
        kept_TQ = groups_TQ >= last_T1
        scores_TE = grouped_TQE.masked_fill(~kept_TQ[..., None], float("-inf")).flatten(1)
    margins.append(_gap(scores_TE, rule.top_k))
    return torch.stack(margins).amin(0)


def _gap(scores_TE: Tensor, chosen: int) -> Tensor:
    if chosen == scores_TE.shape[1]:
        return scores_TE.new_full((len(scores_TE),), float("inf"))
    best = scores_TE.topk(chosen + 1, dim=1).values
    return (best[:, -2] - best[:, -1]).float()
