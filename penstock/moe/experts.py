"""Routed experts: the FFNs of all experts of a rank as two stacked matrices, so that grouped GEMMs serve all of them.

With `LayerContext.float8.experts` both matrices have 8-bit copies, which `refresh_float8` makes once an optimizer step.
Under FSDP there are no copies: the gathered matrices are quantized in each pass.

With expert tensor parallelism each rank computes a part of each expert and `combine` sums the parts. So only the first
of these ranks holds the down projection's bias; the bias of gate and up is cut like its matrix.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.config.model import Moe
from penstock.kernels.expert_ffn import expert_ffn as fused_ffn
from penstock.kernels.expert_kernels import REFERENCE, TORCH
from penstock.kernels.expert_parts import SaveRows
from penstock.kernels.float8.expert_ffn import ExpertCopies, copy_experts, expert_ffn
from penstock.kernels.operators import torch_expert_ffn
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.layout.sharding import Cut, local_shape
from penstock.moe.dispatch.contract import ExpertRows
from penstock.parallel.async_transfer import deferrable
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.shard import Float8Shard, is_dtensor

ACTIVATIONS: Mapping[str, ExpertRule] = MappingProxyType(
    {"silu": SWIGLU, "gelu": ExpertRule(is_gelu=True), "relu2": ExpertRule(is_gated=False)}
)
"""Rule of each `model.hidden_act`."""


def expert_rule(moe: Moe, activation: ExpertRule = SWIGLU) -> ExpertRule:
    weighs_input, clamped = moe.router.apply_probs_on_input, moe.clamped
    if clamped is None:
        return replace(activation, weighs_input=weighs_input)
    return ExpertRule(weighs_input=weighs_input, limit=clamped.limit, alpha=clamped.alpha, up_offset=clamped.up_offset)


def shared_rule(moe: Moe, activation: ExpertRule = SWIGLU) -> ExpertRule:
    return replace(expert_rule(moe, activation), weighs_input=False) if moe.clamp_shared else activation


class GroupedExperts(nn.Module):
    """The experts of this rank, or its part of each of them."""

    # Float32 gradient sums of the parameters, set by the optimizer: backward adds to them instead of returning
    # gradients to autograd. None leaves gradients to autograd.
    sums: tuple[Tensor, ...] | None = None
    # Of the last `refresh_float8`; neither parameters nor buffers, so they are not saved, sharded or moved.
    float8_copies: ExpertCopies | None = None
    gathered: tuple[Float8Shard, ...] = ()  # the shards that FSDP2 gathers in 8 bits, if it does
    _copied: tuple[tuple[int, int], ...] = ()

    def __init__(
        self,
        experts: int,
        hidden_size: int,
        ffn_size: int,
        layer_context: LayerContext,
        *,
        rule: ExpertRule = SWIGLU,
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.operators = layer_context.operators
        self.float8 = layer_context.float8
        self.in_mxfp4 = layer_context.experts_in_mxfp4
        self.weight_grads = layer_context.weight_grads
        self.rule = rule
        grid = layer_context.axes.grid
        self.is_balanced = layer_context.dispatch.balance != "none" and grid.expert > 1
        group, part = divmod(layer_context.axes.expert.rank, grid.expert_tensor)
        of_experts = () if grid.expert == 1 else (Cut(0, group, grid.expert, axis="expert"),)
        # Gate and up are stacked, and each is cut by itself.
        cut_by_tensor = partial(Cut, index=part, count=grid.expert_tensor, axis="expert_tensor")
        of_gate_up = () if grid.expert_tensor == 1 else (cut_by_tensor(1, blocks=rule.projections),)
        of_down = () if grid.expert_tensor == 1 else (cut_by_tensor(2),)
        self.cuts = {
            "gate_up_eFD": of_experts + of_gate_up,
            "down_eDF": of_experts + of_down,
            "gate_up_bias_eF": of_experts + of_gate_up,
            "down_bias_eD": of_experts,
        }

        self.shapes: dict[str, tuple[int, ...]] = {}  # FSDP2 holds the stacks as matrices of e F and of e D rows

        def parameter(name: str, *shape: int) -> nn.Parameter:
            self.shapes[name] = local_shape(shape, self.cuts[name])
            return nn.Parameter(torch.empty(self.shapes[name]))

        self.gate_up_eFD = parameter("gate_up_eFD", experts, rule.projections * ffn_size, hidden_size)
        self.down_eDF = parameter("down_eDF", experts, hidden_size, ffn_size)
        self.gate_up_bias_eF = parameter("gate_up_bias_eF", experts, rule.projections * ffn_size) if bias else None
        self.down_bias_eD = parameter("down_bias_eD", experts, hidden_size) if bias and part == 0 else None

    def resident_weights(self) -> tuple[Tensor, ...]:
        """The parameters as `forward` reads them, if they are here before it is called: FSDP2 gathers them then."""
        held = dict(self.named_parameters(recurse=False))
        return tuple(held.values()) if all(weight.shape == self.shapes[name] for name, weight in held.items()) else ()

    @property
    def is_one_function(self) -> bool:
        """Whether one autograd function computes the network and can recompute the pre-activation by itself."""
        is_rounded = self.float8.experts is not None or self.in_mxfp4
        return self.operators.expert_ffn_is_fused or is_rounded or self.is_balanced

    @torch.no_grad()
    def refresh_float8(self) -> None:
        """Quantize the matrices after each change of them, into the same memory; no copies under FSDP or in 16 bits."""
        held = self.gate_up_eFD, self.down_eDF
        if self.float8.experts is None or any(is_dtensor(weight) for weight in held):
            self.float8_copies = None
            return
        old = self.float8_copies
        into = old if old is not None and old.gate_up.forward.values.device == held[0].device else None
        self.float8_copies = copy_experts(*held, self.float8, into)
        self._copied = _versions(*held)

    def forward(self, rows: ExpertRows, *, recompute: bool = False, keep: SaveRows | None = None) -> Tensor:
        """Apply each expert to its rows, times their routing weights. Returns y_RD in the dtype of the rows.

        `recompute` saves no pre-activation (only if the network `is_one_function`); `keep` allocates its memory.
        """
        held = self.named_parameters(recurse=False)
        parameters = tuple(
            weight if weight.shape == self.shapes[name] else weight.view(self.shapes[name]) for name, weight in held
        )
        if not self.is_one_function:
            function, inputs = partial(self._ffn, self.operators.expert_ffn, rows), (rows.x_ND, rows.weights_R)
            if self.weight_grads is None:
                return function(*inputs, *parameters)
            return deferrable(function, inputs, parameters, self.weight_grads)
        # It defers its weight gradients by itself: by `deferrable`, half of its backward would run twice.
        put_off = None if self.weight_grads is None else self.weight_grads.add
        options: dict[str, Any] = {"accumulate_into": self.sums, "put_off": put_off}
        options |= {"recompute": recompute, "keep": keep, "only_last": rows.only_last, "replicas": rows.replicas}
        options["in_mxfp4"] = self.in_mxfp4
        ffn = self.operators.expert_ffn
        if not self.operators.expert_ffn_is_fused:  # replicas and MXFP4 need the fused one
            ffn = partial(fused_ffn, kernels=TORCH if ffn is torch_expert_ffn else REFERENCE)
        if self.float8.experts is not None:
            # Stale copies are not used: results stay right if a caller changed the matrices without a refresh.
            copies = self.float8_copies if self._copied == _versions(self.gate_up_eFD, self.down_eDF) else None
            options |= {"float8": self.float8, "copies": copies, "quantized": rows.quantized}
            ffn = expert_ffn
        return self._ffn(partial(ffn, **options), rows, rows.x_ND, rows.weights_R, *parameters)

    def _ffn(
        self, ffn: Callable[..., Tensor], rows: ExpertRows, x_ND: Tensor, weights_R: Tensor, *parameters: Tensor
    ) -> Tensor:
        gate_up_eFD, down_eDF, *of_biases = parameters
        # With expert tensor parallelism only the first rank has the bias of down.
        biases = (of_biases[0], of_biases[1] if len(of_biases) > 1 else None) if of_biases else None
        operands = x_ND, gate_up_eFD, down_eDF, rows.counts_e, weights_R, rows.index_R
        return ffn(*operands, biases=biases, rule=self.rule, places_TK=rows.places_NK)


def _versions(*matrices: Tensor) -> tuple[tuple[int, int], ...]:
    """Changes when torch writes a matrix in place. Writes by our own kernels do not show."""
    return tuple((id(matrix), matrix._version) for matrix in matrices)
