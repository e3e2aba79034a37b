"""A whole expert block on one GPU, forward and backward: router to combine, without the router's matrix product.

    python -m benchmarks.kernels.expert_block --output expert_block.json

Ways to run it, for DeepSeek-V2-Lite at 8,192 tokens unless options say otherwise:

    reference              the definitions of penstock.kernels.reference; counts come to the host
    torch, weighted sum    topk, argsort, index_select, grouped_mm, eager SwiGLU, back to slots, outputs times weights
                           in float32, as published model code has it
    torch, weighted bmm    the same with a small matrix product for each token at the end, in bfloat16
    torch, weighted early  the same with the weights on the activation, before the down projection, as ours has it
    ours                   route, order_rows, expert_ffn with the gather fused, unpermute

`kept` is what forward leaves allocated for backward, without the output; `peak` is what a step allocates beyond its
inputs, gradients included. Logits are random and the same for all.
"""

from functools import partial

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from benchmarks import record
from benchmarks.kernels.measure import Ways, decibels, passes_in_turns
from penstock.kernels import permute, reference, topk
from penstock.kernels.expert_ffn import expert_ffn
from penstock.kernels.reference import RouterRule


def main() -> None:
    options = record.parser(
        __doc__,
        tokens=8192,
        hidden=2048,
        width=(1408, "of one expert's feed-forward network"),
        experts=64,
        top_k=6,
        skew=(0.0, "standard deviation of the experts' popularity (logits)"),
        rounds=(20, "timed steps of each block"),
    ).parse_args()
    torch.manual_seed(0)
    T, D, E, width = options.tokens, options.hidden, options.experts, options.width
    normal = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    logits_TE = torch.randn(T, E, device="cuda") + options.skew * torch.randn(E, device="cuda")
    inputs = (normal(T, D), logits_TE, normal(E, 2 * width, D) / D**0.5, normal(E, D, width) / width**0.5)
    leaves, rule = [leaf.requires_grad_() for leaf in inputs], RouterRule(top_k=options.top_k)
    ways: Ways = {
        "reference": partial(reference_block, *leaves, rule),
        **{f"torch, weighted {at}": partial(torch_block, *leaves, rule, at) for at in ("sum", "bmm", "early")},
        "ours": partial(our_block, *leaves, rule),
    }
    truth = ways["reference"]().detach()
    blocks = passes_in_turns(ways, leaves, normal(T, D), options.rounds)
    for name, row in blocks.items():
        row |= {f"{kind}_mib": 1024 * row.pop(f"{kind}_gib") for kind in ("kept", "peak")}
        if name != "reference":
            row["output_db"] = decibels(ways[name]().detach(), truth)
    for name, row in blocks.items():
        row["ours_times_as_fast"] = row["ms"] / blocks["ours"]["ms"]
        row["ours_keeps"] = blocks["ours"]["kept_mib"] / row["kept_mib"]
        record.show({"block": name, **row})
    shape = {key: value for key, value in vars(options).items() if isinstance(value, int | float)}
    record.write(options, {"shape": shape, "blocks": blocks}, triton=triton.__version__)


def reference_block(x_TD: Tensor, logits_TE: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, rule: RouterRule) -> Tensor:
    routed = reference.route(logits_TE, None, rule, 1)
    order = reference.order_rows(routed.experts_TK, logits_TE.shape[1])
    x_RD = reference.permute(x_TD, order)
    weights_R = routed.weights_TK.flatten()[order.slots_R]
    y_RD = reference.expert_ffn(x_RD, gate_up_EFD, down_EDF, order.counts_E, weights_R)
    return reference.unpermute(y_RD, order)


def torch_block(
    x_TD: Tensor, logits_TE: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, rule: RouterRule, weighted: str
) -> Tensor:
    weights_TK, experts_TK = logits_TE.softmax(-1).topk(rule.top_k, dim=-1)
    slots_R = experts_TK.flatten().argsort(stable=True)
    counts_E = torch.zeros(logits_TE.shape[1], dtype=torch.int32, device=x_TD.device)
    counts_E.index_add_(0, experts_TK.flatten(), torch.ones_like(slots_R, dtype=torch.int32))
    ends_E = counts_E.cumsum(0, dtype=torch.int32)
    x_RD = x_TD.index_select(0, slots_R // rule.top_k)
    gate_RF, up_RF = F.grouped_mm(x_RD, gate_up_EFD.transpose(1, 2), offs=ends_E).chunk(2, dim=-1)
    h_RF = F.silu(gate_RF) * up_RF
    if weighted == "early":
        h_RF = h_RF * weights_TK.flatten().index_select(0, slots_R).to(h_RF.dtype)[:, None]
    y_RD = F.grouped_mm(h_RF, down_EDF.transpose(1, 2), offs=ends_E)
    y_TKD = torch.empty_like(y_RD).index_copy_(0, slots_R, y_RD).view(*experts_TK.shape, -1)
    if weighted == "early":
        return y_TKD.sum(1)
    if weighted == "bmm":
        return torch.bmm(weights_TK[:, None].to(y_TKD.dtype), y_TKD)[:, 0]
    return (y_TKD * weights_TK[:, :, None]).sum(1).to(y_TKD.dtype)


def our_block(x_TD: Tensor, logits_TE: Tensor, gate_up_EFD: Tensor, down_EDF: Tensor, rule: RouterRule) -> Tensor:
    routed = topk.route(logits_TE, None, rule, 1)
    order = permute.order_rows(routed.experts_TK, logits_TE.shape[1])
    weights_R = routed.weights_TK.flatten().index_select(0, order.slots_R)
    given = (x_TD, gate_up_EFD, down_EDF, order.counts_E, weights_R, order.slots_R // rule.top_k)
    return permute.unpermute(expert_ffn(*given, places_TK=order.places_TK), order)


if __name__ == "__main__":
    main()
