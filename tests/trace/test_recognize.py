"""Communication of unknown libraries: by what is around a kernel, and by the user's file of names."""

from pathlib import Path
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.trace.analysis import analyse_files
from penstock.trace.events import GpuKind, Trace
from penstock.trace.load import decode_trace
from penstock.trace.phases import find_phases
from penstock.trace.recognize import PhaseNames, read_phase_names
from penstock.trace.timeline import timeline_of
from tests.cli.answers import outcome, printed, told_as_json
from tests.trace.tiny import decoded, operator, ran, span, text_of, trace_of, write

GEMM = "nvjet_sm90_tst_128x256"
MAIN, SIDE = 7, 20


def computing(lasts: float = 100) -> list[dict[str, Any]]:
    """A product on the main stream, from 1,000 us on."""
    return [operator("aten::mm", 0, 10), *ran(GEMM, 2, 1000, lasts, MAIN)]


def kinds(trace: Trace) -> dict[str, GpuKind]:
    return {trace.gpu.name(row): GpuKind(trace.gpu.kind[row]) for row in range(len(trace.gpu))}


@pytest.mark.parametrize("around", [span("dispatch(tokens=4096)", 20, 20), operator("FusedDispatch", 20, 20)])
def test_an_unknown_kernel_inside_a_dispatch_on_a_stream_of_its_own_hides_behind_computing(
    around: dict[str, Any],
) -> None:
    trace = decoded(*computing(), around, *ran("acme_xyz", 22, 1010, 80, SIDE))
    assert kinds(trace)["acme_xyz"] is GpuKind.COMMUNICATION
    spent = timeline_of(trace.gpu)
    assert (spent.communication_us, spent.exposed_communication_us) == (80, 0)  # all of it beside the product
    assert {row.name for row in find_phases(trace).rows()} == {"dispatch", "matrix products"}
    assert trace.notes == ("1 kernels count as communication by what is around them: acme_xyz (0.080 ms)",)


def test_an_annotation_around_backward_is_no_recomputation() -> None:
    node = operator("autograd::engine::evaluate_function: FusedCombineBackward", 10, 60, **{"Sequence number": 3})
    trace = decoded(*computing(), node, span("moe.combine", 20, 20), *ran("acme_xyz", 22, 1010, 80, SIDE))
    assert [(row.name, row.pass_) for row in find_phases(trace).rows()] == [
        ("matrix products", "forward"),
        ("combine", "backward"),
    ]


SIGNS = {
    "annotation and stream": ("acme_xyz", "dispatch()", "", SIDE, True),
    "annotation and no operator": ("acme_xyz", "dispatch()", "", MAIN, True),
    "annotation and an operator": ("acme_xyz", "dispatch()", "aten::index", SIDE, False),
    "stream, and the name says it": ("acme_send_rows", "", "", SIDE, True),
    "stream, and the name says nothing": ("acme_xyz", "", "", SIDE, False),
    "no operator, and the name says it": ("acme_send_rows", "", "", MAIN, False),
    "a copy with all signs": ("acme_row_copy", "dispatch()", "", SIDE, True),
    "a copy on the main stream": ("acme_row_copy", "dispatch()", "", MAIN, False),
    "a norm with all signs": ("acme_rms_norm", "dispatch()", "", SIDE, False),
    "another annotation": ("acme_xyz", "combine losses", "", SIDE, False),
}


@pytest.mark.parametrize(("name", "around", "by", "stream", "talks"), SIGNS.values(), ids=SIGNS)
def test_two_signs_of_three_decide(name: str, around: str, by: str, stream: int, talks: bool) -> None:
    spans = [span(around, 20, 20)] if around else []
    operators = [operator(by, 21, 10)] if by else []
    trace = decoded(*computing(), *spans, *operators, *ran(name, 22, 1010, 80, stream))
    assert (kinds(trace)[name] is GpuKind.COMMUNICATION) == talks


@pytest.mark.parametrize(("beside", "talks"), [([], True), (ran("aten_like_gemm", 40, 1300, 5, SIDE), False)])
def test_an_unknown_kernel_between_collectives_on_their_stream_communicates(
    beside: list[dict[str, Any]], talks: bool
) -> None:
    around = ran("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", 30, 1200, 50, SIDE)
    trace = decoded(*computing(), *ran("acme_xyz", 22, 1010, 80, SIDE), *around, *beside)
    assert (kinds(trace)["acme_xyz"] is GpuKind.COMMUNICATION) == talks


def test_the_larger_part_of_a_kernels_time_decides_for_all_of_it() -> None:
    inside = [span("dispatch()", 20, 20), *ran("acme_xyz", 22, 1010, 80, SIDE)]
    assert set(kinds(decoded(*computing(), *inside, *ran("acme_xyz", 90, 1200, 20, MAIN))).values()) == {0, 1}
    trace = decoded(*computing(), *inside, *ran("acme_xyz", 90, 1200, 200, MAIN))
    assert kinds(trace)["acme_xyz"] is GpuKind.COMPUTE


# ---------------------------------------------------------------------------------------------------------------- names


def names_of(tmp_path: Path, text: str) -> PhaseNames:
    path = tmp_path / "names.toml"
    path.write_text(text)
    return read_phase_names(path)


def test_a_file_of_names_decides_before_all_else(tmp_path: Path) -> None:
    names = names_of(
        tmp_path,
        """
        'acme::rows_(out|back)' = "dispatch"
        'ROWS_OTHER' = "combine"
        '^nvjet' = "attention"
        'ncclDevKernel' = "elementwise"
        """,
    )
    events = [
        *computing(),
        *ran("void acme::rows_back<int>(float*)", 20, 1010, 80, SIDE),
        *ran("rows_other", 40, 1100, 40, SIDE),
        *ran("ncclDevKernel_AllReduce_Sum(args)", 60, 1200, 40, SIDE),
    ]
    trace = decode_trace(text_of(trace_of(*events)), names=names)
    assert [(row.name, row.kernel_us) for row in find_phases(trace).rows(by_layer=False)] == [
        ("attention", 100),
        ("dispatch", 80),
        ("combine", 40),
        ("elementwise", 40),
    ]
    assert list(kinds(trace).values()) == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("'a' = ", "is not TOML"),
        ("", "names no kernel; fix: write a line"),
        ("'a' = \"dispach\"", "'a' has no such phase; got dispach; allowed: data, zero, embed"),
        ("'a(' = \"dispatch\"", "'a(' is no regular expression: missing ), unterminated subpattern"),
        ("a = 1", "'a' needs the name of a phase; got 1"),
        ('a.b = "dispatch"', "'a' needs the name of a phase; got {'b': 'dispatch'}; fix: put patterns with dots"),
    ],
)
def test_a_wrong_file_of_names_is_one_line(tmp_path: Path, text: str, error: str) -> None:
    with pytest.raises(TraceError) as caught:
        names_of(tmp_path, text)
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_of_names_that_is_not_there_is_said(tmp_path: Path) -> None:
    (tmp_path / "names.toml").write_text("")
    with pytest.raises(TraceError, match=r"there is no file .*name\.toml; fix: did you mean .*names\.toml"):
        read_phase_names(tmp_path / "name.toml")


def test_long_unknown_kernels_are_listed_until_a_file_names_them(tmp_path: Path) -> None:
    events = [
        *computing(1000),
        *ran("void acme::zorbl<int>(int)", 20, 2000, 40, MAIN),
        *ran("tiny_zorbl", 40, 2040, 9, MAIN),
    ]
    path = write(tmp_path / "trace.json", trace_of(*events))
    (row,) = analyse_files([path]).ranks[0].unknown  # 9 of 1,049 us are below 2 %
    assert (row.name, row.kernel_us, row.count, row.streams) == ("acme::zorbl", 40, 1, (MAIN,))
    assert row.share == pytest.approx(40 / 1049)
    named = analyse_files([path], names=names_of(tmp_path, "'zorbl' = \"activation\""))
    assert named.ranks[0].unknown == ()
    assert named.ranks[0].phases.other_share == 0


def test_diff_doctor_and_report_take_the_file_of_names_too(tmp_path: Path) -> None:
    names, trace, page = tmp_path / "names.toml", tmp_path / "rank-0.json", tmp_path / "page.html"
    names.write_text("'^acme' = \"combine\"")
    twice = tmp_path / "other" / "rank-0.json"
    for path, lasts in ((trace, 300), (twice, 600)):
        write(path, trace_of(*computing(), *ran("acme_xyz", 22, 1100, lasts, MAIN)))
    option = ("--names", names)
    assert told_as_json("doctor", trace)["wall"] == "compute"
    assert told_as_json("doctor", trace, *option)["wall"] == "communication"
    text = printed("trace diff", trace, twice, *option)
    assert "combine forward" in text and "combine" not in printed("trace diff", trace, twice)
    for words, wall in (((), "compute"), (option, "communication")):
        outcome("report", trace, "--html", page, *words)
        assert f'class="wall {wall}"' in page.read_text()
