"""Work of operators from shapes, and what of the roof was reached."""

import re
from pathlib import Path
from typing import Any

import pytest

import penstock
import penstock.plan
from penstock.trace.tables import OperatorCall
from penstock.trace.tree import NODE
from penstock.trace.work import MODELS, CallWork, roofline, work_of
from tests.trace.tiny import decoded, operator, started

BF16, FLOAT, LONG = "c10::BFloat16", "float", "long int"


def call(
    name: str, *arguments: tuple[Any, str], plain: tuple[str, ...] = (), made_by: OperatorCall | None = None
) -> OperatorCall:
    shapes, types = tuple(one[0] for one in arguments), tuple(one[1] for one in arguments)
    return OperatorCall(name=name, shapes=shapes, types=types, plain=plain, made_by=made_by)


def tensors(*shapes: tuple[int, ...]) -> tuple[tuple[Any, str], ...]:
    return tuple((shape, BF16) for shape in shapes)


def work(one: OperatorCall, **options: float) -> CallWork:
    found = work_of(one, **options)
    assert found is not None, "no model"
    return found


IMAGES, FILTERS = (10, 64, 56, 56), (64, 64, 3, 3)
MASK = ("",) * 10 + ("[True, True, False]",)
EXPERTS = call("_ExpertFfn", *tensors((16, 8), (4, 12, 8), (4, 8, 6)), ((4,), LONG), ((32,), FLOAT), ((32,), LONG))


@pytest.mark.parametrize(
    ("one", "flops"),
    [
        (call("aten::mm", *tensors((3, 5), (5, 7))), 2 * 3 * 5 * 7),
        (call("aten::addmm", *tensors((640,), (888, 2880), (2880, 640))), 2 * 888 * 640 * 2880),
        (call("aten::bmm", *tensors((4, 3, 5), (4, 5, 7))), 4 * 2 * 3 * 5 * 7),
        (call("aten::_grouped_mm", *tensors((30, 5), (4, 5, 7)), ((4,), "int")), 2 * 30 * 5 * 7),
        (call("aten::_grouped_mm", *tensors((5, 30), (30, 7)), ((4,), "int")), 2 * 30 * 5 * 7),
        (EXPERTS, 2 * 32 * 8 * (12 + 6)),
        (call("_ExpertFfnBackward", *tensors((16, 8)), made_by=EXPERTS), 4 * 32 * 8 * (12 + 6)),
        (call("aten::convolution_backward", *tensors(IMAGES, IMAGES, FILTERS), plain=MASK), 4.6242e9),
        (
            call("aten::miopen_convolution", *tensors(IMAGES, FILTERS), plain=("", "", "", *["[1, 1]"] * 3, "1")),
            2.3121e9,
        ),
    ],
)
def test_products_count_two_flops_for_each_multiplication(one: OperatorCall, flops: float) -> None:
    assert work(one).flops == pytest.approx(flops, rel=1e-4)


def test_rows_that_hold_no_tokens_are_no_work() -> None:
    assert work(EXPERTS, used_rows=0.5).flops == work(EXPERTS).flops / 2


def test_a_causal_mask_halves_attention_and_backward_has_five_products_for_two() -> None:
    shapes = ((2, 4, 64, 24), (2, 4, 64, 24), (2, 4, 64, 16))
    forward = call("aten::_cudnn_attention_forward", *tensors(*shapes))
    causal = call("aten::_cudnn_attention_forward", *tensors(*shapes), plain=("",) * 10 + ("True",))
    backward = call("aten::_cudnn_attention_backward", *tensors((2, 4, 64, 16), *shapes))
    scores = 2 * 4 * 64 * 64
    assert work(forward).flops == 2 * scores * (24 + 16)
    assert work(causal).flops == scores * (24 + 16)
    assert work(backward).flops == 2 * scores * (3 * 24 + 2 * 16)


def test_elementwise_operators_move_what_they_read_and_write() -> None:
    assert work(call("aten::add", *tensors((6, 5), (6, 5)))).bytes == 3 * 30 * 2
    assert work(call("aten::copy_", ((6, 5), FLOAT), ((6, 5), BF16))).bytes == 30 * (4 + 2)
    assert work(call("aten::mul", *tensors((6, 1), (6, 5)))).bytes == (6 + 30 + 30) * 2


def test_the_optimizer_reads_four_tensors_of_a_parameter_and_writes_three() -> None:
    lists = (((8, 8), (8,)), "TensorList")
    assert work(call("aten::_fused_adamw_", lists, lists, lists, lists)).bytes == 7 * 72 * 4


@pytest.mark.parametrize(
    "one", [call("vllm::moe_forward", *tensors((888, 3072))), call("aten::mm"), call("aten::mm", ((), ""), ((), ""))]
)
def test_an_operator_without_a_model_or_shapes_has_no_work(one: OperatorCall) -> None:
    assert work_of(one) is None


def product(start: float, number: int, lasts: float) -> list[dict[str, Any]]:
    args = {"Input Dims": [[4096, 8192], [8192, 1024]], "Input type": [BF16, BF16], "Concrete Inputs": ["", ""]}
    return [operator("aten::mm", start, 10, **args), *started(start + 1, number, "nvjet", lasts=lasts)]


def test_calls_on_the_same_shapes_are_one_row_with_what_they_reached() -> None:
    found = roofline(decoded(*product(0, 1, 100), *product(200, 2, 150), *started(400, 3, "rogue", lasts=50)))
    (row,) = found.rows
    flops = 2 * 4096 * 8192 * 1024
    assert (row.operator, row.count, row.kernel_us, row.bound) == ("aten::mm", 2, pytest.approx(250), "compute")
    assert row.flops_per_second == pytest.approx(2 * flops / 250e-6)
    assert row.reached == pytest.approx(2 * flops / 989e12 / 250e-6)
    assert found.modelled_share == pytest.approx(250 / 300)


def test_gradients_of_a_python_function_take_the_shapes_of_its_forward() -> None:
    number = {"Sequence number": 3}
    forward = {"Input Dims": list(EXPERTS.shapes), "Input type": list(EXPERTS.types)}
    backward = {"Input Dims": [[16, 8]], "Input type": [BF16]}
    trace = decoded(
        operator("_ExpertFfn", 0, 10, **forward, **number),
        *started(2, 1, "rows_kernel"),
        operator(NODE + "_ExpertFfnBackward", 100, 20, **number),
        operator("_ExpertFfnBackward", 101, 18, **backward, **number),
        *started(102, 2, "weights_kernel"),
    )
    rows = {row.operator: row.flops for row in roofline(trace).rows}
    assert rows["_ExpertFfnBackward"] == 2 * (rows["_ExpertFfn"] or 0)


def test_models_of_our_functions_name_autograd_functions_that_exist() -> None:
    """Recordings of older versions also have the name of a norm that was merged into another."""
    texts = [path.read_text(encoding="utf-8") for path in Path(penstock.__path__[0]).rglob("*.py")]
    function = re.compile(r"^class (_\w+)\((?:torch\.autograd\.Function|_\w+)\)", re.MULTILINE)  # or a subclass
    ours = {name for text in texts for name in function.findall(text)}
    named = {name.removesuffix("Backward") for name in MODELS if name.startswith("_")}
    assert named - ours == {"_RmsNormBeside"}
