"""The eager definition of every operator.

A kernel must equal its definition here, output and all gradients. The functions run on any device and dtype, are
written to be read and not for speed, and may synchronize with the host. The letters of names are those of
`penstock.base.shapes`; an expert's rows are contiguous and experts are in order, so `counts_e` describes a layout
completely.

A slot is one (token, choice) pair; its number is `token * K + choice`. An expert id of E (one past the last) marks a
dropped slot: it has no row of its own and weight 0.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import count_values, counts_on_host

IGNORED_LABEL = -100  # of a position that is not counted in the loss


@dataclass(frozen=True, kw_only=True)
class RouterRule:
    """How scores become choices."""

    top_k: int
    score: Literal["softmax", "sigmoid", "sqrt-softplus"] = "softmax"  # over the experts, or of each
    softmax_after_top_k: bool = False  # choose by logits; softmax over the chosen only (score must be softmax)
    groups: int = 1  # of equal size; 1 means no groups
    topk_group: int = 1  # groups that a token may choose from
    group_score: Literal["max", "top2"] = "max"  # a group's best (DeepSeek-V2), or the sum of its best two (V3)
    normalize: bool = False  # divide the chosen weights by their sum
    scale: float = 1.0  # factor on the final weights


class Routed(NamedTuple):
    """Results of the router; those in float32 are differentiable."""

    weights_TK: Tensor  # float32
    experts_TK: Tensor  # int64, best first
    counts_BE: Tensor  # int64, slots of each sequence on each expert
    mass_BE: Tensor  # float32, normalized scores of each expert, summed over the sequence's tokens
    z_B: Tensor  # float32, logsumexp(logits)**2 summed over the sequence's tokens


def route(
    logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule, sequences: int, experts_TK: Tensor | None = None
) -> Routed:
    """Scores, group limit, top-k, weights, and the sums for balance losses, in float32.

    `bias_E`, float32, is added to the scores for the choice only, never to the weights (DeepSeek-V3). The T tokens are
    B = `sequences` sequences of equal length, one after the other. With `experts_TK` (int64) the choice is given.
    """
    logits_TE = logits_TE.float()
    E = logits_TE.shape[1]
    scores_TE = _scores(logits_TE, rule)
    if experts_TK is None:
        choice_TE = choice_scores(logits_TE.detach(), bias_E, rule)  # a choice has no gradient
        if rule.groups > 1:
            choice_TE = choice_TE.masked_fill(~_kept_groups(choice_TE, rule), float("-inf"))
        experts_TK = choice_TE.topk(rule.top_k, dim=-1, sorted=True).indices
    if rule.softmax_after_top_k:
        weights_TK = logits_TE.gather(1, experts_TK).softmax(-1)
    else:
        weights_TK = scores_TE.gather(1, experts_TK)
    if rule.normalize:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + 1e-20)  # the 1e-20 of DeepSeek-V3's model code
    chosen_TE = torch.zeros_like(scores_TE, dtype=torch.int64).scatter_(1, experts_TK, 1)
    shares_TE = scores_TE if rule.score == "softmax" else scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    return Routed(
        weights_TK * rule.scale,
        experts_TK,
        chosen_TE.view(sequences, -1, E).sum(1),
        shares_TE.view(sequences, -1, E).sum(1),
        logits_TE.logsumexp(-1).square().view(sequences, -1).sum(1),
    )


def choice_scores(logits_TE: Tensor, bias_E: Tensor | None, rule: RouterRule) -> Tensor:
    """What the experts of a token are chosen by, before the limit to groups."""
    choice_TE = logits_TE if rule.softmax_after_top_k else _scores(logits_TE, rule)
    return choice_TE if bias_E is None else choice_TE + bias_E


def _scores(logits_TE: Tensor, rule: RouterRule) -> Tensor:
    match rule.score:
        case "softmax":
            return logits_TE.softmax(-1)
        case "sigmoid":
            return logits_TE.sigmoid()
    # F.softplus is linear above 20, so by the definition; the bound keeps the gradient of the root finite.
    return torch.logaddexp(logits_TE, torch.zeros_like(logits_TE)).clamp(min=1e-37).sqrt()


def _kept_groups(choice_TE: Tensor, rule: RouterRule) -> Tensor:
    """Boolean mask T x E of the experts whose group is among the token's best."""
    T, E = choice_TE.shape
    grouped_TQE = choice_TE.view(T, rule.groups, E // rule.groups)
    if rule.group_score == "max":
        group_scores_TQ = grouped_TQE.amax(-1)
    else:
        group_scores_TQ = grouped_TQE.topk(2, dim=-1).values.sum(-1)
    kept = group_scores_TQ.topk(rule.topk_group, dim=-1).indices
    kept_TQ = torch.zeros_like(group_scores_TQ, dtype=torch.bool).scatter_(1, kept, True)
    return kept_TQ.repeat_interleave(E // rule.groups, dim=1)  # T x Q -> T x E: experts of a group are neighbours


class RowOrder(NamedTuple):
    """Position of each slot's row when rows are sorted by expert."""

    slots_R: Tensor  # int64, R = T x K: the slot of each place; dropped slots come last
    places_TK: Tensor  # int64, the inverse: the place of each slot's row
    counts_E: Tensor  # int32, rows of each expert; dropped slots are not counted


def order_rows(experts_TK: Tensor, experts: int) -> RowOrder:
    """Sort slots by expert, stable in the slot number.

    With experts_TK = [[1, 0], [1, 2]] and 3 experts, slots 0..3 go to experts 1, 0, 1, 2: slots_R = [1, 0, 2, 3],
    places_TK = [[1, 0], [2, 3]], counts_E = [1, 2, 1].
    """
    flat_R = experts_TK.reshape(-1)
    slots_R = flat_R.argsort(stable=True)
    places_R = torch.empty_like(slots_R).scatter_(0, slots_R, torch.arange(slots_R.numel(), device=slots_R.device))
    counts_E = count_values(flat_R, experts + 1)[:experts].int()  # the last bin holds dropped slots
    return RowOrder(slots_R, places_R.view_as(experts_TK), counts_E)


def permute(x_TD: Tensor, order: RowOrder) -> Tensor:
    """Copy each token's row to the places of its slots; rows of dropped slots are zero. Returns x_RD."""
    top_k = order.places_TK.shape[1]
    x_RD = x_TD[order.slots_R // top_k]
    return torch.where(_is_used(order)[:, None], x_RD, 0)


def unpermute(y_RD: Tensor, order: RowOrder, weights_TK: Tensor | None = None) -> Tensor:
    """Sum each token's rows, times its weights if given, in float32. Returns y_TD in the dtype of y_RD."""
    y_RD = torch.where(_is_used(order)[:, None], y_RD, 0)  # not a product with the mask, because 0 times NaN is NaN
    y_TKD = y_RD[order.places_TK].float()
    if weights_TK is not None:
        y_TKD = y_TKD * weights_TK[:, :, None]
    return y_TKD.sum(1).to(y_RD.dtype)


def add_token_rows(main_grad_VD: Tensor, tokens: Tensor, drows: Tensor) -> None:
    """Add the gradient of each looked-up row, in the shape of `tokens` and D, to the row of its id.

    The order of the sum is fixed on a GPU, and on a CPU with one thread.
    """
    main_grad_VD.index_put_((tokens,), drows.to(main_grad_VD.dtype), accumulate=True)


def _is_used(order: RowOrder) -> Tensor:
    """Boolean mask R: the row belongs to an expert. Rows past the last expert's hold anything, NaN too."""
    return torch.arange(order.slots_R.numel(), device=order.slots_R.device) < order.counts_E.sum()


def grouped_gemm(x_RD: Tensor, w_eFD: Tensor, counts_e: Tensor, index_R: Tensor | None = None) -> Tensor:
    """Each expert's rows times the transpose of its matrix: y_RF, zero in rows past the last expert's.

    The rows stand expert by expert; or in any order, if `index_R` gives the row of `x` for each place (the gather).
    Counts are int32; they may be zero, and may sum to less than R.
    """
    rows_RD = x_RD if index_R is None else x_RD[index_R]
    pieces, start = [], 0
    for expert, count in enumerate(counts_on_host(counts_e, rows_RD.shape[0])):
        pieces.append(rows_RD[start : start + count] @ w_eFD[expert].T)
        start += count
    pieces.append(rows_RD.new_zeros(rows_RD.shape[0] - start, w_eFD.shape[1]))
    return torch.cat(pieces)


def add_bias(y_RF: Tensor, bias_eF: Tensor, counts_e: Tensor, weights_R: Tensor | None = None) -> Tensor:
    """Each expert's bias added to its rows in float32, times `weights_R` if given; rows past the last one's stay."""
    counts = counts_on_host(counts_e, y_RF.shape[0])
    used = sum(counts)
    bias_RF = torch.cat([bias_F.float().expand(count, -1) for bias_F, count in zip(bias_eF, counts, strict=True)])
    if weights_R is not None:
        bias_RF = bias_RF * weights_R[:used, None]
    return torch.cat(((y_RF[:used] + bias_RF).to(y_RF.dtype), y_RF[used:]))


@dataclass(frozen=True, kw_only=True)
class ExpertRule:
    """Activation of an expert, and position of the routing weight."""

    weighs_input: bool = False  # the routing weight multiplies the input of the expert (Llama 4), not its output
    limit: float | None = None  # bound of gate above and of up on both sides (gpt-oss); None for SwiGLU
    alpha: float = 1.0  # factor inside the sigmoid; read only with a limit
    up_offset: float = 1.0  # added to up after the clamp; read only with a limit
    is_gelu: bool = False  # the tanh form of GELU in place of SiLU, without a limit (Gemma)
    is_gated: bool = True  # False: relu(x)**2 of one projection, without a gate and a limit (Nemotron-H)

    @property
    def projections(self) -> int:
        """Projections before the activation, stacked in one matrix: gate and up, or one."""
        return 2 if self.is_gated else 1


SWIGLU = ExpertRule()


def activate(gate_up_RF: Tensor, rule: ExpertRule) -> Tensor:
    """silu(gate) * up; with a limit (up + offset) * gate * sigmoid(alpha * gate), gate and up clamped before.

    At a limit and beyond the gradient is 0. Without a gate, the square of a ReLU.
    """
    if not rule.is_gated:
        return F.relu(gate_up_RF).square()
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    if rule.limit is None:
        return (F.gelu(gate_RF, approximate="tanh") if rule.is_gelu else F.silu(gate_RF)) * up_RF
    # The gradient of `hardtanh` at a limit is 0 in every version of PyTorch, that of `clamp` was 1 before 2.15.
    gate_RF, up_RF = F.hardtanh(gate_RF, -math.inf, rule.limit), F.hardtanh(up_RF, -rule.limit, rule.limit)
    return (up_RF + rule.up_offset) * gate_RF * torch.sigmoid(rule.alpha * gate_RF)


def swiglu(gate_up_RF: Tensor, weights_R: Tensor | None = None, rule: ExpertRule = SWIGLU) -> Tensor:
    """`activate` times the row's routing weight if given, in float32, in the given dtype; gate first, 2 F -> F wide.

    A weight on the input is applied here before the activation, because the product before it is linear.
    """
    wide_RF = gate_up_RF.float()
    if weights_R is not None and rule.weighs_input:
        wide_RF = wide_RF * weights_R[..., None]
    h_RF = activate(wide_RF, rule)
    if weights_R is not None and not rule.weighs_input:
        h_RF = h_RF * weights_R[..., None]
    return h_RF.to(gate_up_RF.dtype)


def swiglu_gradients(
    gate_up_RF: Tensor, weights_R: Tensor | None, dh_RF: Tensor, rule: ExpertRule
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Gradients of `swiglu` by autograd: of gate and up, of the weights (None without), and the output again."""
    with torch.enable_grad():
        inputs = [gate_up_RF := gate_up_RF.detach().requires_grad_()]
        if weights_R is not None:
            inputs.append(weights_R := weights_R.detach().requires_grad_())
        h_RF = swiglu(gate_up_RF, weights_R, rule)
    d_gate_up_RF, *rest = torch.autograd.grad(h_RF, inputs, dh_RF)
    return d_gate_up_RF, rest[0] if rest else None, h_RF.detach()


def expert_ffn(
    x_ND: Tensor,
    gate_up_eFD: Tensor,
    down_eDF: Tensor,
    counts_e: Tensor,
    weights_R: Tensor | None = None,
    index_R: Tensor | None = None,
    *,
    places_TK: Tensor | None = None,
    biases: tuple[Tensor, Tensor | None] | None = None,
    rule: ExpertRule = SWIGLU,
) -> Tensor:
    """The whole feed-forward network of each expert over its rows: y_RD, zero in rows past the last expert's.

    `gate_up_eFD` are both projections stacked, 2 F x D for each expert; counts and `index_R` are as in `grouped_gemm`,
    `places_TK` is the index's inverse, which only kernels need. Routing weights (float32) on outputs are applied before
    the down projection, which is linear, and to its bias. The second of the biases is None where the caller adds it.
    Raises KernelError for biases with weights on the input.
    """
    check_biases(biases is not None, rule)
    gate_up_bias_eF, down_bias_eD = biases or (None, None)
    gate_up_RF = grouped_gemm(x_ND, gate_up_eFD, counts_e, index_R)
    if gate_up_bias_eF is not None:
        gate_up_RF = add_bias(gate_up_RF, gate_up_bias_eF, counts_e)
    y_RD = grouped_gemm(swiglu(gate_up_RF, weights_R, rule), down_eDF, counts_e)
    return y_RD if down_bias_eD is None else add_bias(y_RD, down_bias_eD, counts_e, weights_R)


def check_biases(has_biases: bool, rule: ExpertRule) -> None:
    """Raise KernelError for biases with weights on the input, which would have to weight the bias too."""
    if has_biases and rule.weighs_input:
        raise KernelError(
            "expert_ffn: experts with biases cannot have their inputs weighted",
            fix="set model.moe.router.apply_probs_on_input=false, or model.moe.bias=false",
        )


def rms_norm(x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0) -> Tensor:
    """Returns x / sqrt(mean(x**2) + epsilon), in float32, times weight, in the wider dtype of x and weight.

    `offset` is added to the weight in float32: 1 for weights that are centred at zero.
    """
    x_float = x_TD.float()
    normed = (x_float * torch.rsqrt(x_float.square().mean(-1, keepdim=True) + epsilon)).to(x_TD.dtype)
    if not offset:
        return weight_D * normed
    return ((weight_D.float() + offset) * normed.float()).to(torch.promote_types(x_TD.dtype, weight_D.dtype))


def rms_norm_beside(x_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0) -> tuple[Tensor, Tensor]:
    """(norm of a residual stream, the stream itself); the gradients of x are summed."""
    return rms_norm(x_TD, weight_D, epsilon, offset), x_TD


def add_rms_norm(
    x_TD: Tensor, residual_TD: Tensor, weight_D: Tensor, epsilon: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(norm of the residual sum, the sum x + residual)."""
    sum_TD = x_TD + residual_TD
    return rms_norm(sum_TD, weight_D, epsilon, offset), sum_TD


def add_three(x_TD: Tensor, y_TD: Tensor, z_TD: Tensor) -> Tensor:
    """(x + y) + z in float32, rounded once; all in one shape."""
    dtype = torch.promote_types(torch.promote_types(x_TD.dtype, y_TD.dtype), z_TD.dtype)
    return (x_TD.float() + y_TD.float() + z_TD.float()).to(dtype)


def fan_out(x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same tensor for three readers, whose gradients are summed."""
    return x_TD, x_TD, x_TD


def rotate(x_BSHN: Tensor, cos_BSP: Tensor, sin_BSP: Tensor) -> Tensor:
    """Rotary position embedding on interleaved pairs (x0, x1), (x2, x3), ...: (x0 cos - x1 sin, x0 sin + x1 cos).

    Cosine and sine of each pair's angle are float32, P / 2 wide; their B may be 1. Only the first P features of a head
    are rotated.
    """
    rotary = 2 * cos_BSP.shape[-1]
    even, odd = x_BSHN[..., :rotary].float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos_BSP[:, :, None], sin_BSP[:, :, None]
    x_BSHP = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x_BSHN.dtype)
    return torch.cat((x_BSHP, x_BSHN[..., rotary:]), dim=-1) if rotary < x_BSHN.shape[-1] else x_BSHP


def mla_heads(
    q_BSHN: Tensor, kv_BSHN: Tensor, k_rope_BSP: Tensor, cos_BSP: Tensor, sin_BSP: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotary embedding and assembly of latent attention's heads (DeepSeek-V2, section 2.1): q_BSHN, k_BSHN, v_BSHM.

    Of the last dims, queries are [no position | rotary], `kv_BSHN` [key without position | value], and the keys that
    come out [key without position | rotated key that all heads share].
    """
    rotary = k_rope_BSP.shape[-1]
    plain = q_BSHN.shape[-1] - rotary
    q_plain, q_rotary = q_BSHN.split([plain, rotary], dim=-1)
    k_plain, v_BSHM = kv_BSHN.split([plain, kv_BSHN.shape[-1] - plain], dim=-1)
    k_rotary = rotate(k_rope_BSP[:, :, None], cos_BSP, sin_BSP).expand(-1, -1, q_BSHN.shape[2], -1)  # B x S x H x P
    q_rotated = torch.cat((q_plain, rotate(q_rotary, cos_BSP, sin_BSP)), dim=-1)
    return q_rotated, torch.cat((k_plain, k_rotary), dim=-1), v_BSHM


def linear_cross_entropy(x_TD: Tensor, head_VD: Tensor, labels_T: Tensor, z_weight: float = 0.0) -> Tensor:
    """Output projection and cross entropy, summed (not averaged) over the counted tokens; a float32 scalar.

    Positions with IGNORED_LABEL are not counted; `z_weight` is a factor on logsumexp(logits)**2 of each counted token.
    """
    logits_TV = (x_TD @ head_VD.T).float()
    loss = F.cross_entropy(logits_TV, labels_T, ignore_index=IGNORED_LABEL, reduction="sum")
    if z_weight:
        loss = loss + z_weight * (logits_TV.logsumexp(-1).square() * (labels_T != IGNORED_LABEL)).sum()
    return loss


def logits_gradient(
    logits_TV: Tensor, labels_T: Tensor, logsumexp_T: Tensor, first_label: int = 0, z_weight: float = 0.0
) -> Tensor:
    """Gradient of `linear_cross_entropy` with respect to its logits, in their dtype.

    The columns may be a part of the vocabulary, from label `first_label` on; logsumexp (float32) is of all of it.
    """
    factor_T = 1.0 + 2.0 * z_weight * logsumexp_T  # of the softmax: cross entropy and z-loss
    slopes_TV = (logits_TV.float() - logsumexp_T[:, None]).exp_().mul_(factor_T[:, None])
    slopes_TV.masked_fill_((labels_T == IGNORED_LABEL)[:, None], 0.0)
    column_T = labels_T - first_label
    here_T = (column_T >= 0) & (column_T < logits_TV.shape[1])
    slopes_TV.scatter_add_(1, torch.where(here_T, column_T, 0)[:, None], -here_T[:, None].float())
    return slopes_TV.to(logits_TV.dtype)
