"""A run in 8 bits: phases, products behind their functions, work, rows that travel packed."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import penstock.kernels.float8
from penstock.base.spans import Span
from penstock.kernels.float8 import expert_ffn, quantized
from penstock.kernels.float8.operators import Float8Rule
from penstock.kernels.float8.quantized import BLOCKWISE, MXFP8
from penstock.models.linear import Float8Weight, float8_linear, float8_network
from penstock.moe.dispatch.contract import WireFormat
from penstock.trace.calls import calls_of
from penstock.trace.events import NONE, Trace
from penstock.trace.experts import PACKED_ITEM, grouped_products, packed_row_bytes, received_rows
from penstock.trace.kernel_names import FLOAT8_GEMM, Category, generic_category, specific_category
from penstock.trace.phases import find_phases
from penstock.trace.tables import OperatorCall
from penstock.trace.tree import NODE, place
from penstock.trace.work import Roofline, RooflineRow, roofline, work_of
from tests.trace.test_phases import named
from tests.trace.test_replay import BF16, recorded, shapes
from tests.trace.test_roofline import EXPERTS, call, tensors, work
from tests.trace.test_tree import names_at
from tests.trace.tiny import decoded, event, kernel, launch, operator, span, started

RULE = Float8Rule(dense=BLOCKWISE, experts=BLOCKWISE)


# ------------------------------------------------------------------------------------------------------------- phases


def float8_kernels() -> Iterator[str]:
    for path in Path(penstock.kernels.float8.__path__[0]).glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel"):
                yield node.name


def test_every_kernel_of_8_bits_has_a_part_of_its_own() -> None:
    kernels = list(float8_kernels())
    assert len(kernels) >= 12
    assert [name for name in kernels if specific_category(name) is None] == [FLOAT8_GEMM]
    assert generic_category(FLOAT8_GEMM) is Category.PRODUCTS


@pytest.mark.parametrize("around", [span(Span.EXPERTS, 190, 70), span("other", 190, 70)])
def test_a_product_of_matrices_among_experts_is_their_weight_gradient(around: dict[str, Any]) -> None:
    node = operator(NODE + "_Float8ExpertFfnBackward", 200, 50, **{"Sequence number": 8, "Fwd thread id": 1})
    trace = decoded(around, node, *started(205, 1, "float8_rows_kernel"), *started(220, 2, FLOAT8_GEMM))
    assert named(trace) == [("experts input gradient", "backward"), ("experts weight gradient", "backward")]


# --------------------------------------------------------------------------------------------- products and their work

X, W = (64, 256), (512, 256)
GATE_UP, DOWN = (768, 256), (256, 384)


def linear(start: float, sequence: int = NONE) -> dict[str, Any]:
    numbered = {} if sequence == NONE else {"Sequence number": sequence}
    return operator("_Float8Linear", start, 5, **numbered, **shapes([BF16, BF16, ""], [[*X], [*W], []]))


def network(start: float) -> dict[str, Any]:
    dims: list[Any] = [[*X], [*GATE_UP], [*DOWN], [64, 768]]
    return operator("_Float8Network", start, 5, **shapes([BF16] * 4, dims))


def step() -> Trace:
    """A linear layer, a network and a linear layer that quantizes for itself; the first one's backward."""
    forward = [
        linear(0, sequence=4),
        *started(10, 1, FLOAT8_GEMM, lasts=20),
        *started(50, 2, FLOAT8_GEMM, lasts=30),
        network(60),
        *started(70, 3, "swiglu_float8_kernel", lasts=5),
        *started(100, 4, FLOAT8_GEMM, lasts=15),
        *started(150, 5, "quantize_kernel"),
        linear(160),
        *started(170, 6, FLOAT8_GEMM, lasts=20),
    ]
    numbers = {"Sequence number": 4, "Fwd thread id": 1}
    backward = [
        operator(NODE + "_Float8LinearBackward", 300, 90, **numbers),
        operator("_Float8LinearBackward", 301, 88, **numbers, **shapes([BF16], [[64, 512]])),
        *started(310, 7, "quantize_kernel", lasts=10),
        *started(330, 8, FLOAT8_GEMM, lasts=20),
        *started(350, 9, FLOAT8_GEMM, lasts=20),
    ]
    return decoded(*forward, *backward)


def row_of(found: Roofline, name: str) -> RooflineRow:
    (row,) = (row for row in found.rows if row.operator == name)
    return row


def test_products_belong_to_the_functions_that_asked_for_them() -> None:
    trace = step()
    forward = ["_Float8Linear", *["_Float8Network"] * 3, None, "_Float8Linear"]
    assert names_at(trace, place(trace).operator) == [*forward, *["_Float8LinearBackward"] * 3]


def test_products_of_other_threads_or_regions_have_no_function() -> None:
    elsewhere = started(10, 1, FLOAT8_GEMM)
    elsewhere[0]["tid"] = 99
    trace = decoded(linear(0), *elsewhere, span("other", 20, 30), *started(25, 2, FLOAT8_GEMM))
    assert names_at(trace, place(trace).operator) == [None, None]


def test_products_of_a_captured_pass_belong_to_the_functions_of_the_eager_pass() -> None:
    eager = [one for at in range(16) for one in (linear(100 * at), *started(100 * at + 10, at + 1, FLOAT8_GEMM, 20))]
    graph = event("cuda_runtime", "cudaGraphLaunch", 5000, 5, correlation=99)
    captured = [kernel(FLOAT8_GEMM, 6000 + 30 * at, 20, correlation=99) for at in range(16)]
    trace = decoded(*eager, graph, *captured)
    row = row_of(roofline(trace, find_phases(trace).placement), "_Float8Linear")
    assert (row.count, row.inferred, row.kernel_us) == (32, True, pytest.approx(640))


def test_dense_products_reach_a_share_of_the_peak_of_8_bits() -> None:
    found = roofline(step())
    names = ("_Float8Linear", "_Float8Network", "_Float8LinearBackward")
    dense, both, backward = (row_of(found, name) for name in names)
    assert (dense.count, dense.flops, dense.kernel_us) == (2, 2 * 64 * 512 * 256, pytest.approx(40))
    assert (both.count, both.flops, both.kernel_us) == (1, 2 * 64 * 256 * (768 + 384), pytest.approx(50))
    assert (backward.flops, backward.kernel_us) == (2 * 2 * 64 * 512 * 256, pytest.approx(50))
    assert found.chip is not None and found.chip.fp8 is not None
    large = work(call("_Float8Linear", *tensors((8192, 4096), (4096, 4096))))
    assert large.dtype == "fp8"
    assert large.bytes == 8192 * 4096 + 4096 * 4096 + 2 * 8192 * 4096


def test_experts_in_8_bits_compute_as_much_as_in_16_and_move_less() -> None:
    small = OperatorCall(name="_Float8ExpertFfn", shapes=EXPERTS.shapes, types=EXPERTS.types)
    backward = call("_Float8ExpertFfnBackward", *tensors((16, 8)), made_by=small)
    assert work(small).flops == work(EXPERTS).flops
    assert work(small, used_rows=0.5).flops == work(EXPERTS).flops / 2
    assert work(small).bytes < work(EXPERTS).bytes
    assert (work(backward).flops, work(backward).dtype) == (2 * work(small).flops, "fp8")


def test_a_function_of_another_library_that_has_the_same_name_is_not_ours() -> None:
    others = tensors((512, 256), (64, 256), *[(4,)] * 12)
    assert work_of(call("_Float8Linear", *others)) is None
    assert work_of(call("_Float8LinearBackward", *tensors((64, 512)))) is None


# ------------------------------------------------------------------------------------------------ rows on their way


@given(st.integers(1, 20_000))
def test_a_row_is_as_long_as_it_is_packed_by_either_recipe(width: int) -> None:
    found = int(packed_row_bytes(np.array([width]))[0])
    assert found == quantized.row_bytes(width, BLOCKWISE) == quantized.row_bytes(width, MXFP8)


def test_packed_rows_are_moved_by_numbers_of_eight_bytes() -> None:
    seen: list[int] = []

    def out(rows: torch.Tensor) -> torch.Tensor:
        seen.append(rows.itemsize)
        return rows

    wire_format = WireFormat(recipe=BLOCKWISE)
    wire_format.encode(torch.randn(4, 256)).move(out, out)
    assert seen == [PACKED_ITEM]


@pytest.mark.parametrize(
    ("dtype", "numbers", "dispatch", "rows"),
    [
        ("Long", 6 * 288 // 8, "auto", 6.0),  # 256 values, 8 bytes of scales, rounded up to 288
        ("BFloat16", 6 * 256, "auto", 6.0),
        ("BFloat16", 6 * 256, "none", 6.0),
        ("Long", 6 * 288 // 8, "none", np.nan),  # nothing is packed: these are counts
    ],
)
def test_rows_that_came_in_8_bits_are_counted_with_their_scales(
    dtype: str, numbers: int, dispatch: str, rows: float
) -> None:
    args = {"Collective name": "all_to_all", "dtype": dtype, "In msg nelems": numbers, "Out msg nelems": numbers}
    args |= {"Process Group Name": "5", "Process Group Ranks": "[0, 1]", "Group size": 2}
    experts = shapes([BF16, BF16, BF16, "int", "float"], [[12, 256], [3, 64, 256], [3, 256, 32], [3], [12]])
    trace = decoded(
        launch(5, correlation=1),
        event("kernel", "ncclDevKernel_SendRecv(x)", 9, 9, stream=20, correlation=1, **args),
        event("cpu_op", "_Float8ExpertFfn", 50, 9, **experts),
        launch(52, correlation=2),
        kernel("float8_rows_kernel", 60, 9, correlation=2),
        penstock={"config": {"float8": {"dispatch": dispatch}}},
    )
    calls = calls_of({0: trace})
    assert received_rows(trace, calls, np.array([0]), grouped_products(trace)) == pytest.approx([rows], nan_ok=True)


def profiled() -> Trace:
    """Our functions by their definitions, which have the names of those with kernels."""

    def matrix(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)

    def weight(*shape: int) -> Float8Weight:
        return Float8Weight(parameter_FD=matrix(*shape), cached=None, main_grad=None, weight_grads=None, rule=RULE)

    def work() -> None:
        x_TD, counts_e = matrix(12, 64), torch.tensor([4, 0, 8], dtype=torch.int32)
        experts = matrix(3, 64, 64), matrix(3, 64, 32)
        expert_ffn.expert_ffn(x_TD, *experts, counts_e, torch.rand(12), float8=RULE).sum().backward()
        float8_linear(x_TD, weight(32, 64)).sum().backward()
        float8_network(x_TD, weight(64, 64), weight(64, 32)).sum().backward()

    return recorded(work)


def test_models_of_work_read_the_recorded_arguments_of_our_functions() -> None:
    host = profiled().host
    for name in ("_Float8ExpertFfn", "_Float8Linear", "_Float8Network"):
        args = host.args(int(np.flatnonzero(host.called(name))[0]))
        dims = tuple(tuple(one) for one in args["Input Dims"])
        assert work(OperatorCall(name=name, shapes=dims, types=tuple(args["Input type"]))).flops > 0
