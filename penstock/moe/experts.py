"""Routed experts: one feed-forward network for each, held as two stacked matrices so that one launch serves all.

In 8 bits (`LayerContext.float8.experts`) both matrices have copies, made by `refresh_float8` once an optimizer step.
Where FSDP divides the matrices there are none: whoever has gathered them for a pass quantizes them in it.

Ranks that hold a part of each expert sum what they give ("expert tensor parallelism"), so the down projection's bias is
held, whole, by the first of them alone. That of gate and up is cut as its matrix is.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.config.model import Moe
from penstock.kernels.expert_parts import GATE_UP, DeferGradient, SaveRows
from penstock.kernels.float8.expert_ffn import ExpertCopies, copy_experts, expert_ffn
from penstock.kernels.reference import SWIGLU, ExpertRule
from penstock.layout.sharding import Cut, local_shape
from penstock.moe.dispatch.contract import ExpertRows
from penstock.parallel.float8_gather import Float8Shard
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.weight_grad_store import Task, deferrable


def expert_rule(moe: Moe) -> ExpertRule:
    """The kernel's rule of a layer's configuration."""
    weighs_input, clamped = moe.router.apply_probs_on_input, moe.clamped
    if clamped is None:
        return ExpertRule(weighs_input=weighs_input)
    return ExpertRule(weighs_input=weighs_input, limit=clamped.limit, alpha=clamped.alpha)


class GroupedExperts(nn.Module):
    """The experts that this rank holds, or its part of each of them.

    Args:
        experts: of the whole layer, E.
        hidden_size: D.
        ffn_size: width of a whole expert, F.
        layer_context: kernels, and the ranks that share the experts.
        rule: what is computed between the two products, and what a routing weight multiplies.
        bias: whether both products have biases.

    Attributes:
        sums: float32 sums of the gradients of our parameters, in their order, for backward to add to instead of giving
            gradients to autograd; None leaves that to autograd. Set by whoever owns the sums.
        float8_copies: of the matrices as they were at the last `refresh_float8`. Neither parameters nor buffers:
            nothing saves, divides or moves them.
        gathered: the matrices as FSDP2 gathers them, if it does so in 8 bits.
    """

    sums: tuple[Tensor, ...] | None = None
    float8_copies: ExpertCopies | None = None
    gathered: tuple[Float8Shard, ...] = ()
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
        self.later = layer_context.later
        self.rule = rule
        grid = layer_context.axes.grid
        group, part = divmod(layer_context.axes.expert.rank, grid.expert_tensor)
        of_experts = () if grid.expert == 1 else (Cut(0, group, grid.expert),)
        of_gate_up = () if grid.expert_tensor == 1 else (Cut(1, part, grid.expert_tensor, blocks=2),)
        of_down = () if grid.expert_tensor == 1 else (Cut(2, part, grid.expert_tensor),)
        self.cuts = {
            "gate_up_eFD": of_experts + of_gate_up,
            "down_eDF": of_experts + of_down,
            "gate_up_bias_eF": of_experts + of_gate_up,
            "down_bias_eD": of_experts,
        }

        def parameter(name: str, *shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(local_shape(shape, self.cuts[name])))

        self.gate_up_eFD = parameter("gate_up_eFD", experts, 2 * ffn_size, hidden_size)
        self.down_eDF = parameter("down_eDF", experts, hidden_size, ffn_size)
        self.gate_up_bias_eF = parameter("gate_up_bias_eF", experts, 2 * ffn_size) if bias else None
        self.down_bias_eD = parameter("down_bias_eD", experts, hidden_size) if bias and part == 0 else None

    @property
    def matrix_values(self) -> int:
        """Numbers of both matrices, without biases."""
        return self.gate_up_eFD.numel() + self.down_eDF.numel()

    @property
    def is_one_function(self) -> bool:
        """Whether backward makes the pre-activation again by itself, if it is asked to."""
        return self.operators.expert_ffn_is_fused or self.float8.experts is not None

    @torch.no_grad()
    def refresh_float8(self) -> None:
        """Make the copies in 8 bits of the matrices as they are now, in the same memory if there are some already.

        To be called whenever somebody has changed the matrices. Without products in 8 bits, and where FSDP divides the
        matrices, there are no copies.
        """
        held = self.gate_up_eFD, self.down_eDF
        if self.float8.experts is None or any(isinstance(one, DTensor) for one in held):
            self.float8_copies = None
            return
        old = self.float8_copies
        into = old if old is not None and old.gate_up.forward.values.device == held[0].device else None
        self.float8_copies = copy_experts(*held, self.float8, into)
        self._copied = _versions(*held)

    def forward(self, rows: ExpertRows, *, recompute: bool = False, keep: SaveRows | None = None) -> Tensor:
        """Apply each expert to its rows, times their routing weights.

        Args:
            rows: what the dispatcher brought.
            recompute: keep no pre-activation; only if the network `is_one_function`.
            keep: where the pre-activation stands, for operators that keep it where they are told.

        Returns:
            y_RD in the dtype of the rows.
        """
        held = (self.gate_up_eFD, self.down_eDF, self.gate_up_bias_eF, self.down_bias_eD)
        parameters = tuple(parameter for parameter in held if parameter is not None)
        if self.float8.experts is not None:
            return self._ffn_in_float8(rows, recompute, keep, *parameters)
        if self.operators.expert_ffn_is_fused:
            # It puts its weight gradients off by itself; walked twice, half of its backward would be made twice.
            return self._ffn(rows, recompute, keep, rows.x_ND, rows.weights_R, *parameters)
        function = partial(self._ffn, rows, recompute, None)
        return deferrable(function, (rows.x_ND, rows.weights_R), parameters, self.later)

    def _ffn(
        self,
        rows: ExpertRows,
        recompute: bool,
        keep: SaveRows | None,
        x_ND: Tensor,
        weights_R: Tensor,
        *parameters: Tensor,
    ) -> Tensor:
        """The network, of parameters in the order in which the module has them."""
        gate_up_eFD, down_eDF, *of_biases = parameters
        ffn = partial(self.operators.expert_ffn, biases=_pair(of_biases), rule=self.rule, places_TK=rows.places_NK)
        if self.operators.expert_ffn_is_fused:
            ours = partial(ffn, recompute=recompute, accumulate_into=self.sums, put_off=self._put_off_to(rows))
            ffn = partial(ours, keep=keep, only_last=rows.only_last)
        return ffn(x_ND, gate_up_eFD, down_eDF, rows.counts_e, weights_R, rows.index_R)

    def _ffn_in_float8(self, rows: ExpertRows, recompute: bool, keep: SaveRows | None, *parameters: Tensor) -> Tensor:
        """The same in 8 bits, which puts its weight gradients off by itself."""
        gate_up_eFD, down_eDF, *of_biases = parameters
        copies = self.float8_copies
        # Somebody who has changed the matrices and did not refresh the copies gets the right numbers all the same.
        is_fresh = copies is not None and self._copied == _versions(gate_up_eFD, down_eDF)
        return expert_ffn(
            rows.x_ND,
            gate_up_eFD,
            down_eDF,
            rows.counts_e,
            rows.weights_R,
            rows.index_R,
            float8=self.float8,
            copies=copies if is_fresh else None,
            quantized=rows.quantized,
            gradients=rows.gradients,
            biases=_pair(of_biases),
            rule=self.rule,
            places_TK=rows.places_NK,
            accumulate_into=self.sums,
            put_off=self._put_off_to(rows),
            recompute=recompute,
            keep=keep,
            only_last=rows.only_last,
        )

    def _put_off_to(self, rows: ExpertRows) -> DeferGradient:
        """Leaves a weight gradient to whoever collects; or the first matrix's to the journey of the rows' gradients.

        The second matrix's could go with it, but what it reads would be held until then.
        """
        # Not the rows: the graph's nodes hold this until all of the backward pass is done.
        aside = rows.aside if self.sums is not None and rows.x_ND.requires_grad else None

        def put_off(place: int, task: Task) -> bool:
            if self.later is not None and self.later.is_collecting:
                self.later.add(task)
                return True
            if aside is None or place != GATE_UP:
                return False
            aside.add(task)
            return True

        return put_off


def _pair(of_biases: list[Tensor]) -> tuple[Tensor, Tensor | None] | None:
    """Biases of both products; the second may be another rank's."""
    if not of_biases:
        return None
    return of_biases[0], of_biases[1] if len(of_biases) > 1 else None


def _versions(*matrices: Tensor) -> tuple[tuple[int, int], ...]:
    """What is another one after torch has changed a matrix. What kernels of ours write it does not see."""
    return tuple((id(matrix), matrix._version) for matrix in matrices)
