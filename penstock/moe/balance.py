"""The router's decision, and expert balance: losses, capacity, forced balance, the meter of load, quantile balancing.

An auxiliary loss is not returned by the model. `attach` hangs it on the routing weights: they pass unchanged, and in
backward the loss gets a gradient of 1. So it works on every pipeline stage and under recomputation, and it must be
scaled like the main loss, by the share of the global batch.

With f_e the fraction of slots that expert e received and P_e the mean of its normalized scores, the loss of a set of
tokens is E * sum_e f_e P_e, which is 1 if both are even (Switch Transformer, arXiv 2101.03961; per sequence:
DeepSeek-V3, section 2.1.2). Under tensor and context parallelism f is counted over all ranks that share a row and P
over the rank's own tokens: the ranks' losses, and their gradients, add up to those of the whole row.

Quantile balancing gives each expert the bias with which it would have had its even share of the step's tokens. A token
takes the K experts with the highest choice scores. Its margin for an expert is the expert's choice score minus
that of the K-th best other expert: above 0 for those that it takes. If an expert's bias alone were lower by c, the
tokens with a margin above c would take it. So each bias is lowered by the c that as many margins exceed as the even
share, K / E of the tokens (after kexue.fm/archives/11619, "quantile balancing", and Kimi K3). There is no rate: an
expert without tokens gets its share in a few steps, however far its scores are behind. With K = 1, an even share of one
token and margins 0.3, -0.1, -0.2 of an expert, c is between 0.3 and -0.1.

A quantile of all tokens is no sum over micro-batches and ranks, but counts of margins in bins are: all layouts get one
bias. Bins are fine near 0, where balance ends, and grow with the distance: BINS_IN_OCTAVE for each power of two from
2**LOWEST to 2**HIGHEST on both sides. Inside a bin the counts are taken as evenly spread.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from penstock.config.model import Balance
from penstock.kernels.operators import LinearLoss, Operators
from penstock.kernels.reference import Routed, RouterRule, RowOrder, choice_scores
from penstock.layout.grid import Method
from penstock.parallel.axes import ALONE, Axes
from penstock.parallel.collectives import all_gather, all_reduce


@dataclass(frozen=True)
class Scope:
    """Facts of a micro-batch that routers need."""

    sequences: int = 1  # the T tokens are so many sequences of equal length, one after the other (or our part of each)
    share: float = 1.0  # of the global batch, so that the losses of micro-batches sum to their mean
    tokens_T: Tensor | None = field(default=None, compare=False)  # int64 ids; None unless a layer chooses by them


@dataclass(frozen=True)
class SortedSlots:
    """Slots of this rank sorted by expert (or part of one), with their float32 routing weights, differentiable."""

    order: RowOrder  # dropped slots stand last
    weights_R: Tensor


@dataclass(frozen=True)
class Routing:
    """The experts of each token."""

    weights_TK: Tensor  # float32, differentiable; 0 for a dropped slot
    experts_TK: Tensor  # int64 expert ids; E (one past the last) for a dropped slot
    sorted: SortedSlots | None = None  # the slots sorted for the layer's dispatcher, if that has been done

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, for `Routing.of`."""
        tensors = (self.weights_TK, self.experts_TK)
        return tensors if self.sorted is None else (*tensors, *self.sorted.order, self.sorted.weights_R)

    @classmethod
    def of(cls, weights_TK: Tensor, experts_TK: Tensor, *rest: Tensor) -> "Routing":
        """The inverse of `tensors`."""
        if not rest:
            return cls(weights_TK, experts_TK)
        slots_R, places_TK, counts_E, weights_R = rest
        return cls(weights_TK, experts_TK, SortedSlots(RowOrder(slots_R, places_TK, counts_E), weights_R))


class StepMeter(nn.Module):
    """Figures of the passes of a step, as buffers on the device, which the host reads once a step."""

    @torch.no_grad()
    def reset(self) -> None:
        for buffer in self.buffers():
            buffer.zero_()


def reset_meters(modules: Iterable[nn.Module]) -> None:
    """Begin a step: reset every meter."""
    for model in modules:
        for module in model.modules():
            if isinstance(module, StepMeter):
                module.reset()


class LoadMeter(StepMeter):
    """Load of one layer."""

    slots_E: Tensor  # slots that chose each expert, dropped ones too
    dropped: Tensor  # slots over capacity
    auxiliary_loss: Tensor  # sum over micro-batches
    margins_EU: Tensor | None  # tokens by their margin for each expert (`margin_counts`); None if unused

    def __init__(self, experts: int, bins: int = 0) -> None:
        super().__init__()
        self.register_buffer("slots_E", torch.zeros(experts, dtype=torch.int64), persistent=False)
        self.register_buffer("dropped", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("auxiliary_loss", torch.zeros((), dtype=torch.float32), persistent=False)
        margins_EU = torch.zeros(experts, bins, dtype=torch.int64) if bins else None
        self.register_buffer("margins_EU", margins_EU, persistent=False)


@dataclass(frozen=True)
class LayerLoad:
    """One layer's load in a step, as `LoadMeter` has it."""

    layer: int  # multi-token prediction layers count on after the last decoder layer
    slots_E: Tensor
    dropped: Tensor
    auxiliary_loss: Tensor
    plans: Tensor | None = None  # `ReplicaMeter.facts` (penstock/moe/dispatch/balanced.py); None without replicas


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, mass_BE: Tensor, z_B: Tensor, loss: LinearLoss) -> Tensor:
        ctx.save_for_backward(loss.dmass_BE, loss.dz_B)
        return carrier.view_as(carrier)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return gradient, *ctx.saved_tensors, None  # the loss has a gradient of 1, whatever the carrier's is


def attach(carrier: Tensor, routed: Routed, loss: LinearLoss) -> Tensor:
    """Return `carrier` unchanged, and add `loss` to the loss that is differentiated through it."""
    attached: Tensor = _Attach.apply(carrier, routed.mass_BE, routed.z_B, loss)
    return attached


@dataclass(frozen=True)
class SlotCounts:
    """Slots that a balance loss counts, int64, summed over all ranks whose tokens belong to it."""

    counts_BE: Tensor  # of each sequence of the micro-batch
    # Since the step began, this micro-batch included, over the ranks of the stage. So early micro-batches see a part
    # of the step only, as in Megatron-Core and in arXiv 2501.11873, and the loss depends on their number.
    step_slots_E: Tensor


def slot_counts(counts_BE: Tensor, meter: LoadMeter, balance: Balance, axes: Axes) -> SlotCounts:
    """Sum the counts of the balance loss over ranks; no collective if the loss needs none."""
    slots_E = meter.slots_E
    if balance.aux_loss == "global-batch":
        slots_E = all_reduce(slots_E, axes.stage)
    elif balance.aux_loss != "none":
        counts_BE = all_reduce(counts_BE, axes.sequence)
    return SlotCounts(counts_BE, slots_E)


@torch.no_grad()
def auxiliary_loss(
    routed: Routed, tokens: int, balance: Balance, scope: Scope, load: SlotCounts, operators: Operators
) -> LinearLoss:
    """Balance loss plus router z-loss of this rank's tokens, scaled by their share of the global batch."""
    slots_BE, factor = load.counts_BE, balance.aux_loss_coef * scope.share / tokens
    z_factor = balance.z_loss_coef * scope.share / tokens
    if balance.aux_loss == "sequence":
        factor *= scope.sequences / len(slots_BE)
    elif balance.aux_loss == "global-batch":
        slots_BE = load.step_slots_E[None]
    else:
        slots_BE = slots_BE.sum(0, keepdim=True)  # 1 x E: one set of tokens
    return operators.balance_loss(routed.mass_BE, routed.z_B, slots_BE, factor, z_factor)


def capacity(tokens: int, top_k: int, experts: int, factor: float) -> int:
    """Most slots that one expert takes: its even share times the factor, rounded up, at least one."""
    return max(1, math.ceil(tokens * top_k * factor / experts))


def drop_over_capacity(
    routing: Routing, experts: int, limit: int, sequences: int = 1, axes: Axes = ALONE, method: Method = "ulysses"
) -> Routing:
    """Drop the slots with the smallest weights of every expert that has more than `limit` over ranks that share rows.

    Of equal weights those of earlier rows and positions stay, so these ranks drop what one rank would: tokens that
    follow nothing, such as the first of documents, are often equal. Slots that were dropped before stay dropped. In the
    result dropped slots have expert id E and weight 0. `method` places positions (penstock/layout/grid.py).
    """
    weights_TK = _in_rows(routing.weights_TK.detach().float(), sequences, axes, method)
    experts_TK = _in_rows(routing.experts_TK, sequences, axes, method)
    T = experts_TK.shape[0]  # of all ranks
    weights_TE = torch.full((T, experts + 1), -1.0, device=experts_TK.device)  # -1: the token did not choose it
    weights_TE.scatter_(1, experts_TK, weights_TK)  # dropped slots go to the last column
    # The bits of weights, which are not negative, have the order of the weights; behind them the place of the token.
    keys_TE = weights_TE.view(torch.int32).long() * T + torch.arange(T - 1, -1, -1, device=experts_TK.device)[:, None]
    best_cE = keys_TE.topk(min(limit, T), dim=0).indices  # tokens of each expert
    kept_TE = torch.zeros_like(weights_TE, dtype=torch.bool).scatter_(0, best_cE, True)
    kept_TE[:, experts] = False
    kept_TK = _of_rank(kept_TE.gather(1, experts_TK), sequences, axes, method)
    return Routing(routing.weights_TK * kept_TK, routing.experts_TK.masked_fill(~kept_TK, experts))


def _in_rows(part_TK: Tensor, sequences: int, axes: Axes, method: Method) -> Tensor:
    """Slots of all ranks that share rows, row by row and position by position."""
    context, tensor = axes.context.size, axes.tensor.size
    parts = all_gather(part_TK, axes.sequence, dim=0).unflatten(0, (context, tensor, sequences, -1))
    parts = parts.permute(2, 0, 1, 3, 4).flatten(2, 3)  # B x context x P x K
    if method == "all-gather" and context > 1:  # an early and a late chunk
        early, late = parts.unflatten(2, (2, -1)).unbind(2)
        parts = torch.cat((early, late.flip(1)), dim=1)
    return parts.flatten(0, 2)


def _of_rank(whole_TK: Tensor, sequences: int, axes: Axes, method: Method) -> Tensor:
    """The inverse of `_in_rows` on this rank."""
    context, tensor = axes.context, axes.tensor
    if method == "all-gather" and context.size > 1:
        chunks = whole_TK.unflatten(0, (sequences, 2 * context.size, -1))
        part = torch.cat((chunks[:, context.rank], chunks[:, 2 * context.size - 1 - context.rank]), dim=1)
    else:
        part = whole_TK.unflatten(0, (sequences, context.size, -1))[:, context.rank]
    return part.chunk(tensor.size, dim=1)[tensor.rank].flatten(0, 1)


def spread_evenly(routing: Routing, experts: int) -> Routing:
    """Replace the choice by one that loads every expert and every rank alike. For benchmarks only.

    Slot i goes to expert i * stride mod E (`even_stride`): the K experts of a token differ, and every E consecutive
    slots use every expert once.
    """
    slots = torch.arange(routing.experts_TK.numel(), device=routing.experts_TK.device)
    return Routing(routing.weights_TK, (slots * even_stride(experts) % experts).view_as(routing.experts_TK))


def even_stride(experts: int) -> int:
    """Step from one slot's expert to the next one's: near the golden section of their number, and coprime to it."""
    return next(s for s in range(max(1, round(experts * 0.618)), 2 * experts + 1) if math.gcd(s, experts) == 1)


LOWEST, HIGHEST = -16, 4  # margins beyond count in the outermost bins
BINS_IN_OCTAVE = 4
SIDE = (HIGHEST - LOWEST) * BINS_IN_OCTAVE
BINS = 2 * SIDE


@torch.no_grad()
def margin_counts(logits_TE: Tensor, bias_E: Tensor, rule: RouterRule) -> Tensor:
    """How many tokens have a margin in each bin: int64, E x BINS, the lowest first. The host waits for nothing."""
    choice_TE = choice_scores(logits_TE.float(), bias_E, rule)
    last_T1, next_T1 = choice_TE.topk(rule.top_k + 1, dim=-1).values[:, -2:].split(1, dim=1)  # taken, and not taken
    margin_TE = choice_TE - torch.where(choice_TE >= last_T1, next_T1, last_T1)
    octave_TE = margin_TE.abs().log2().clamp(LOWEST, HIGHEST) - LOWEST  # of a margin of 0: the lowest
    bin_TE = (octave_TE * BINS_IN_OCTAVE).long().clamp(max=SIDE - 1)
    bin_TE = torch.where(margin_TE > 0, SIDE + bin_TE, SIDE - 1 - bin_TE)
    bin_TE += torch.arange(margin_TE.shape[1], device=bin_TE.device) * BINS
    counts = torch.zeros(margin_TE.shape[1] * BINS, dtype=torch.int64, device=bin_TE.device)
    return counts.scatter_add_(0, bin_TE.flatten(), torch.ones_like(bin_TE).flatten()).view(-1, BINS)


def quantile_shift(margins_EU: Tensor, top_k: int) -> Tensor:
    """By how much each expert's bias is too high, float32; 0 if no token was counted."""
    share = margins_EU.sum(1, keepdim=True).double() * top_k / len(margins_EU)
    above_EU = margins_EU.flip(1).cumsum(1).flip(1).double()  # margins in a bin and in those above it
    bin_E1 = (above_EU >= share).sum(1, keepdim=True).clamp(min=1) - 1  # the highest with enough of them
    here_E1 = margins_EU.gather(1, bin_E1).double()
    missing_E1 = share - (above_EU.gather(1, bin_E1) - here_E1)  # of the even share, above the bin
    edge_U = _edges(margins_EU.device)
    low_E1, high_E1 = edge_U[bin_E1], edge_U[bin_E1 + 1]
    shift_E1 = high_E1 - (high_E1 - low_E1) * (missing_E1 / here_E1.clamp(min=1)).clamp(0, 1)
    return torch.where(share > 0, shift_E1, 0.0)[:, 0].float()


def _edges(device: torch.device) -> Tensor:
    """Where bins begin, and where the last ends."""
    steps = torch.arange(1, SIDE + 1, dtype=torch.float64, device=device)
    above = torch.exp2(steps / BINS_IN_OCTAVE + LOWEST)
    return torch.cat((-above.flip(0), above.new_zeros(1), above))
