"""Scripts written from traces: they hold what was recorded, and they run."""

import os
import subprocess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

from penstock.base.errors import TraceError
from penstock.trace.events import Trace
from penstock.trace.replay import DTYPES, recorded_arguments, replay_script
from tests import warm
from tests.trace.tiny import decoded, event, kernel, launch, load_trace, operator, read, trace_of

BF16, FP8, LONG = "c10::BFloat16", "c10::Float8_e4m3fn", "long int"


def shapes(kinds: list[str], dims: list[Any], strides: list[Any] | None = None, texts: list[str] | None = None) -> Any:
    return {
        "Input type": kinds,
        "Input Dims": dims,
        "Input Strides": strides or [[] for _ in kinds],
        "Concrete Inputs": texts or ["" for _ in kinds],
    }


def script(*calls: tuple[str, Any], op: str, **question: Any) -> str:
    """The script for one of some operators, each of which launched a kernel that ran ten times its place."""
    events = []
    for at, (name, args) in enumerate(calls, start=1):
        events += [
            event("cpu_op", name, 100.0 * at, 20, **args),
            launch(100.0 * at + 5, correlation=at),
            kernel(f"some_{name.rpartition(':')[2]}_kernel", 100.0 * at + 30, 10.0 * at, correlation=at),
        ]
    return replay_script(decoded(*events), op, **question)


def run(text: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Execute a script, for a short time, in a process of its own, which need not import PyTorch."""
    path = folder / "replayed.py"
    path.write_text(text.replace("min_run_time=0.2", "min_run_time=0.001"), encoding="utf-8")
    return warm.run(warm.script, str(path), folder=folder, environment=os.environ | {"OMP_NUM_THREADS": "1"})


def refusal(*calls: tuple[str, Any], op: str, **question: Any) -> str:
    with pytest.raises(TraceError) as caught:
        script(*calls, op=op, **question)
    return str(caught.value)


MM = ("aten::mm", shapes([BF16, BF16], [[4, 8], [8, 3]], [[8, 1], [1, 8]]))
ADDMM = (
    "aten::addmm",
    shapes([BF16, BF16, BF16, "Scalar", "Scalar"], [[3], [4, 8], [8, 3], [], []], texts=["", "", "", "1", "0.5"]),
)
GROUPED = (
    "aten::_grouped_mm",
    shapes([BF16, BF16, "int", "", ""], [[11, 16], [3, 16, 32], [3], [], []], [[16, 1], [512, 32, 1], [1], [], []]),
)


def test_a_script_holds_the_sizes_strides_and_dtypes_of_the_trace() -> None:
    text = script(MM, op="aten::mm")
    assert "tensor(torch.bfloat16, (4, 8), (8, 1))" in text
    assert "tensor(torch.bfloat16, (8, 3), (1, 8))" in text
    assert "10.0 us in the trace" in text


def test_an_operator_is_found_without_its_namespace_and_by_its_kernel() -> None:
    assert script(MM, op="mm") == script(MM, op="aten::mm")
    assert "It launched some_mm_kernel." in script(ADDMM, MM, op="some_mm")


def test_the_shape_with_most_time_is_taken_unless_one_is_named() -> None:
    other = ("aten::mm", shapes([BF16, BF16], [[5, 8], [8, 3]]))
    assert "(5, 8)" in script(MM, other, op="aten::mm")
    assert "(4, 8)" in script(MM, other, op="aten::mm", shape="4x8 8x3")
    assert "allowed: 5x8 8x3; 4x8 8x3" in refusal(MM, other, op="aten::mm", shape="9x9")


def test_even_offsets_of_groups_end_at_the_last_row_and_counts_can_be_given() -> None:
    assert "torch.tensor([4, 8, 11], dtype=torch.int32" in script(GROUPED, op="aten::_grouped_mm")
    assert "torch.tensor([9, 9, 11], dtype=torch.int32" in script(GROUPED, op="aten::_grouped_mm", counts=(9, 0, 2))
    for counts in ((9, 3), (9, 0, 3), (9, -1, 3)):
        assert "3 experts with at most 11 rows" in refusal(GROUPED, op="aten::_grouped_mm", counts=counts)


def test_offsets_of_a_weight_gradient_count_columns() -> None:
    call = ("aten::_grouped_mm", shapes([BF16, BF16, "int"], [[16, 12], [12, 32], [3]]))
    assert "torch.tensor([4, 8, 12]" in script(call, op="aten::_grouped_mm")


def split(at: float, sizes: list[int]) -> dict[str, Any]:
    args = shapes([BF16, "ScalarList", "Scalar"], [[sum(sizes), 16], [], []], texts=["", str(sizes), "0"])
    return event("cpu_op", "aten::split_with_sizes", at, 3, **args)


@pytest.mark.parametrize(
    ("splits", "given", "offsets", "source"),
    [
        ([(40, [1, 1, 9]), (80, [7, 0, 4]), (90, [6, 5])], None, [7, 7, 11], "real, from the nearest split"),
        ([(80, [7, 5]), (85, [7, 5, 1])], None, [4, 8, 11], "even, because the trace"),
        ([(80, [7, 0, 4])], (1, 2, 3), [1, 3, 6], None),
    ],
)
def test_rows_of_experts_come_from_the_nearest_split_that_fits_unless_counts_are_given(
    splits: list[tuple[float, list[int]]], given: Any, offsets: list[int], source: str | None
) -> None:
    name, args = GROUPED
    product = [event("cpu_op", name, 100, 20, **args), launch(105, correlation=1), kernel("gmm", 130, 9, correlation=1)]
    trace = decoded(*(split(*one) for one in splits), *product)
    text = replay_script(trace, name, counts=given)
    assert f"torch.tensor({offsets}, dtype=torch.int32" in text
    assert ("Rows of each expert:" in text) == (source is not None) and (source or "") in text


def test_an_absurd_number_of_experts_is_refused_at_once() -> None:
    call = ("aten::_grouped_mm", shapes([BF16, BF16, "int"], [[12, 16], [3, 16, 32], [10**12]]))
    assert "damaged in this trace" in refusal(call, op="_grouped_mm")


def test_counts_are_refused_where_there_are_no_experts() -> None:
    assert "leave --counts out" in refusal(MM, op="aten::mm", counts=(1, 2))


@pytest.mark.parametrize(
    ("name", "args", "below"),
    [
        ("aten::embedding", shapes([BF16, LONG], [[70, 8], [5]]), "(5,), (1,), below=70"),
        ("aten::index_select", shapes([BF16, "Scalar", LONG], [[8, 90], [], [5]], texts=["", "1", ""]), "below=90"),
        ("aten::gather", shapes([BF16, "Scalar", LONG], [[8, 90], [], [5, 2]], texts=["", "-1", ""]), "below=90"),
        ("aten::nll_loss_forward", shapes([BF16, LONG], [[5, 33], [5]]), "below=33"),
        ("aten::add", shapes([LONG, LONG], [[7], [7]]), "below=7"),
        ("aten::where", shapes(["bool", BF16], [[7], [7]]), "tensor(torch.bool, (7,), (1,), below=2)"),
    ],
)
def test_integers_are_in_range_of_what_they_index(name: str, args: Any, below: str) -> None:
    assert below in script((name, args), op=name)


def test_every_dtype_is_one_of_pytorch() -> None:
    assert all(isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in DTYPES.values())


@pytest.mark.parametrize(
    ("name", "args", "says"),
    [
        (
            "aten::topk",
            shapes([BF16, "Scalar"], [[4, 8], []]),
            "argument 1 of aten::topk is a number whose value is not",
        ),
        ("aten::mm", {}, "has no shapes"),
        ("aten::index", shapes([BF16, ""], [[4, 8], []]), "do not record its list of indices"),
        ("aten::cat", shapes(["TensorList", "Scalar"], [[], []], texts=["", "0"]), "sizes in its lists"),
        ("symm_mem::one_shot_all_reduce", shapes([BF16], [[4]]), "memory of other ranks"),
        ("aten::mm", shapes([BF16, BF16], [[4, 8]]), "differ in length"),
        ("aten::mm", shapes([BF16, BF16], [[4, "x"], [8, 3]]), "is damaged"),
    ],
)
def test_what_the_trace_does_not_hold_is_said_in_one_line(name: str, args: Any, says: str) -> None:
    assert says in refusal((name, args), op=name)


def test_an_unknown_name_is_refused_with_one_that_is_near() -> None:
    assert "did you mean aten::addmm" in refusal(ADDMM, op="aten::adm")


@pytest.mark.parametrize(
    "name", ["c10d::allreduce_", "nccl:all_to_all", "record_param_comms", "_RmsNorm", "_GroupedGemm"]
)
def test_collectives_and_autograd_functions_are_refused_with_what_can_be_replayed(name: str) -> None:
    found = refusal((name, shapes([BF16], [[4, 8]])), op=name)
    assert "cannot be replayed" in found and "operators of PyTorch or of another library" in found and "\n" not in found


def test_a_node_of_the_backward_graph_is_refused_with_what_is_inside() -> None:
    inside = trace_of(operator("MmBackward0", 0, 50), operator("aten::mm", 10, 20, **MM[1]))
    trace = read(inside)
    with pytest.raises(TraceError, match="name an operator inside it: aten::mm"):
        replay_script(trace, "MmBackward0")


def recorded(work: Any) -> Trace:
    """What torch's profiler writes of some work on this CPU."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        work()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return load_trace(path)


def a_step() -> None:
    """Operators of all kinds: keyword-only numbers, lists, indices, fp8, numbers for tensors, views."""
    x = torch.randn(6, 16, dtype=torch.bfloat16)
    torch.addmm(x[0], x[:, :8], torch.randn(16, 8, dtype=torch.bfloat16).t(), beta=0.5)
    torch.cat([x.float(), x.float()], 1)
    F.embedding(torch.tensor([5, 2]), x)
    x.float().to(torch.float8_e4m3fn)
    torch.add(x, 1.5, alpha=2)
    torch.topk(x.float(), 3)
    x.float().masked_fill(x > 0, float("-inf"))
    F.grouped_mm(x, torch.randn(2, 16, 24, dtype=torch.bfloat16), offs=torch.tensor([2, 6], dtype=torch.int32))
    left, right = torch.randn(16, 16).to(torch.float8_e4m3fn), torch.randn(16, 16).to(torch.float8_e4m3fn).t()
    torch.ops.aten._scaled_mm(left, right, torch.tensor(1.0), torch.tensor(1.0), out_dtype=torch.bfloat16)
    F.scaled_dot_product_attention(*(torch.randn(1, 2, 8, 16) for _ in range(3)), is_causal=True)
    torch.empty(7, 3)
    torch._foreach_add_([x.float(), x.float()], 2.0)


OPS = ["addmm", "cat", "embedding", "_to_copy", "add", "topk", "masked_fill", "_grouped_mm", "_scaled_mm"]
OPS += ["scaled_dot_product_attention", "empty", "_foreach_add_", "copy_"]


def test_scripts_of_operators_run_and_print_their_time(tmp_path: Path) -> None:
    trace = recorded(a_step)
    scripts = [replay_script(trace, f"aten::{op}") for op in OPS]
    found = run("\n".join(f"exec({text!r}, {{}})" for text in scripts), tmp_path)
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert [line.split(":", 3)[2] for line in lines] == OPS
    assert all("us on cpu" in line and ", 0.0 us in the trace" not in line for line in lines)


def test_a_scripts_argument_is_laid_out_as_recorded(tmp_path: Path) -> None:
    text = replay_script(recorded(lambda: torch.randn(4, 6).t()[1:].clone()), "aten::clone")
    assert "tensor(torch.float32, (5, 4), (1, 6))" in text
    assert "aten::clone" in run(text, tmp_path).stdout


def test_a_library_that_is_not_imported_is_named(tmp_path: Path) -> None:
    found = run(script(("vllm::moe_forward", shapes([BF16], [[4, 8]])), op="vllm::moe_forward"), tmp_path)
    assert found.returncode == 1
    assert "this PyTorch has no vllm::moe_forward" in found.stderr


def test_an_argument_that_was_not_recorded_ends_the_script_with_a_line(tmp_path: Path) -> None:
    trace = recorded(lambda: torch.einsum("ij,kj->ik", torch.ones(2, 3), torch.ones(2, 3)))
    found = run(replay_script(trace, "einsum"), tmp_path)
    assert found.returncode == 1
    assert "no overload of aten::einsum takes what the trace holds" in found.stderr


def test_a_recorded_value_comes_back_as_it_was() -> None:
    args = shapes(
        ["TensorList", "ScalarList", "Scalar", "double", FP8],
        [[[2, 3], [4]], [], [], [], [5]],
        [[[3, 1], [1]], [], [], [], [2]],
        ["", "[True, False]", "-inf", "", ""],
    )
    assert recorded_arguments("aten::some", args, list_dtype="bfloat16") == [
        "(tensor(torch.bfloat16, (2, 3), (3, 1)), tensor(torch.bfloat16, (4,), (1,)), )",
        "[True, False]",
        'float("-inf")',
        "torch.tensor(1, dtype=torch.float64)",
        "tensor(torch.float8_e4m3fn, (5,), (2,))",
    ]
