"""The same run as a trainer would make it whose kernels each keep what they read: for comparison with others' plans.

Published plans of memory count what separate operators save for backward. Ours save less, so to tell a difference of
models from a difference of arithmetic the plan can count both. Nothing is estimated here either: the run is changed,
two operators are put together from smaller ones, and the same meta model runs under the same ledger.

    experts    tokens are copied into the experts' order, and each of product, SwiGLU and product keeps what it read:
               K (D + 3 F) numbers a token. Ours read tokens through an index and make SwiGLU again: K 2 F, and the
               tokens that arrived, which de-duplicating dispatch has fewer of than K.
    weight     gradients of the experts are tensors of their own, added to the sums by autograd
    dispatch   `auto` is all-to-all, one row for each choice
    logits     of all tokens at once

All else that is kept is the same in both: residual sums, what products of attention and of dense networks read,
queries, keys, values and the result of attention. Kernels are ours, so a fused form that many trainers have (SwiGLU
with the routing weight, norms, attention) counts as one. A trainer that fuses less keeps more: `kernels.experts=torch`
and `kernels.all=reference` are runs of ours that show how much.
"""

from dataclasses import replace
from typing import Literal

from torch import Tensor

from penstock.config.run import Run
from penstock.kernels.grouped_gemm import grouped_gemm
from penstock.kernels.operators import Operators, torch_add_bias
from penstock.kernels.reference import SWIGLU, ExpertRule, check_biases
from penstock.kernels.swiglu import swiglu

Saving = Literal["run", "conventional"]
"""What is kept for backward: as the run's operators do, or as separate ones would."""


def conventional(run: Run) -> Run:
    """The run with the options that keep more. It trains as it is; the experts' operators are changed besides.

    Args:
        run: its configuration.
    """
    tokens = run.training.micro_batch * run.training.sequence_length
    method = "all-to-all" if run.dispatch.method == "auto" and run.dispatch.sync_free < 2 else run.dispatch.method
    return run.model_copy(
        update={
            "kernels": run.kernels.model_copy(update={"loss_chunk": tokens}),
            "dispatch": run.dispatch.model_copy(update={"method": method}),
        }
    )


def conventional_operators(operators: Operators) -> Operators:
    """The operators with experts whose parts keep what they read.

    Args:
        operators: as the run chooses them.
    """
    return replace(operators, expert_ffn=separate_expert_ffn, expert_ffn_is_ours=False, keeps_rows=False)


def separate_expert_ffn(  # noqa: PLR0913 (it stands in for an operator)
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
    """`penstock.kernels.expert_ffn.expert_ffn` as a copy and three operators, of which each saves its inputs.

    Args:
        x_ND: source rows.
        gate_up_eFD: gate and up projections stacked.
        down_eDF: down projection.
        counts_e: int32 rows of each expert.
        weights_R: float32 routing weight of each row, or None for 1.
        index_R: source row of each place, or None if x stands in the experts' order already.
        places_TK: not read; autograd finds the gradient of the copy by itself.
        biases: of gate and up, and of down; the second None where others add it.
        rule: what is computed between the products.

    Returns:
        y_RD; rows past the last expert's are zero.
    """
    check_biases(biases is not None, rule)
    x_RD = x_ND if index_R is None else x_ND.index_select(0, index_R)
    gate_up_bias_eF, down_bias_eD = biases or (None, None)
    gate_up_RF = grouped_gemm(x_RD, gate_up_eFD, counts_e)
    if gate_up_bias_eF is not None:
        gate_up_RF = torch_add_bias(gate_up_RF, gate_up_bias_eF, counts_e)
    y_RD = grouped_gemm(swiglu(gate_up_RF, weights_R, rule), down_eDF, counts_e)
    return y_RD if down_bias_eD is None else torch_add_bias(y_RD, down_bias_eD, counts_e, weights_R)
