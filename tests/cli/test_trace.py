"""`penstock trace`, `trace diff` and `trace replay` from the outside."""

import json
import subprocess
import sys
from fractions import Fraction
from functools import partial
from pathlib import Path

import pytest

from tests.cli import answers
from tests.trace.synthetic import Job, Traces, make
from tests.trace.tiny import event, kernel, launch, operator, ran, tiny, trace_of, write

JOB = Job(ranks=4, hot_rank=1, missing=((2, 5),))  # rank 1 is late; rank 2 lacks its fifth collective


@pytest.fixture(scope="module")
def traces() -> Traces:
    return make(JOB)


@pytest.fixture(scope="module")
def folder(traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traces.write(tmp_path_factory.mktemp("ranks"))


shown = partial(answers.printed, "trace")
told = partial(answers.told_as_json, "trace")
refused = partial(answers.refused, "trace")


def test_json_of_one_rank_has_the_keys_of_the_contract(folder: Path) -> None:
    answer = told(folder / "rank1_trace.json.gz")
    keys = "timeline steps phases other_share roofline collectives unmatched stragglers experts"
    assert {*keys.split()} <= set(answer)
    assert {"all", "linked", "steps"} == set(answer["timeline"])
    assert {"name", "layer", "pass", "kernel_us", "exposed_us", "share"} <= set(answer["phases"][0])
    assert "ranks" not in answer  # they are the answer itself


def test_json_of_many_ranks_has_their_tables_by_number(folder: Path, traces: Traces) -> None:
    answer = told(folder)
    assert set(answer["ranks"]) == {"0", "1", "2", "3"}
    for rank, truth in enumerate(traces.truth.timelines):
        timeline = answer["ranks"][f"{rank}"]["timeline"]["all"]
        for name, time_us in truth.items():
            assert timeline[f"{name}_us"] == pytest.approx(time_us, abs=1.0), (rank, name)


def test_json_of_collectives_is_the_truth(folder: Path, traces: Traces) -> None:
    answer = told(folder)
    assert {"rank", "group", "seq", "name", "bytes", "pure_us", "wait_us"} <= set(answer["collectives"][0])
    found = {(one["group"], one["seq"], one["rank"]): one for one in answer["collectives"]}
    whole = [one for one in traces.truth.meetings if (one.group, one.seq, 0) in found]
    assert len(whole) == len(traces.truth.meetings) - 1  # all but the missing one
    for one in whole:
        for rank, wait_us in enumerate(one.wait_us):
            assert found[one.group, one.seq, rank]["wait_us"] == pytest.approx(wait_us, abs=1.0)
    assert [one["missing"] for one in answer["unmatched"]] == [[2]]
    assert answer["stragglers"][0]["rank"] == 1
    assert answer["experts"]["fullest_rank"] == 1


def test_one_rank_of_many_is_compared_with_all(folder: Path) -> None:
    answer = told(folder, "--rank", "3")
    assert set(answer["ranks"]) == {"3"}
    assert {one["rank"] for one in answer["collectives"]} == {3}
    assert answer["stragglers"][0]["rank"] == 1


def test_a_step_is_a_part_of_the_whole(folder: Path) -> None:
    file = folder / "rank0_trace.json.gz"
    whole, step = told(file), told(file, "--step", "6")
    assert [one["number"] for one in whole["steps"]] == [5, 6]
    assert [one["number"] for one in step["steps"]] == [6]
    window = whole["steps"][1]["timeline"]
    assert step["timeline"]["all"]["compute_us"] == pytest.approx(window["compute_us"], abs=1.0)
    assert step["timeline"]["all"]["compute_us"] < 0.6 * whole["timeline"]["all"]["compute_us"]


def test_tables_say_it_for_people(folder: Path) -> None:
    text = shown(folder)
    for part in (
        "times and counts are of one step, the mean of 2 recorded ones",
        "time on the device",
        "phases of rank 0",
        "communication across ranks",
        "unmatched: 1",
        "roofline",
    ):
        assert part in text
    assert "experts: fullest rank over the mean" in text
    assert "layer" in shown(folder, "--layers")


def test_waits_of_the_host_are_added_up_over_layers_and_steps(tmp_path: Path) -> None:
    events = [kernel("some_kernel", 0, 10, correlation=1)]  # a trace without kernels is that of a CPU
    for layer in range(3):
        at = 100 * layer
        events += [
            event("user_annotation", f"layer {layer}", at, 90),
            event("user_annotation", "dispatch", at + 10, 70),
            event("cpu_op", "aten::item", at + 20, 50),
            event("cuda_runtime", "cudaStreamSynchronize", at + 30, 20),
        ]
    text = shown(write(tmp_path / "trace.json", trace_of(*events)))
    (row,) = [line.split() for line in text.splitlines() if line.startswith("cudaStreamSynchronize")]
    assert row == ["cudaStreamSynchronize", "3", "0.060", "dispatch", ">", "aten::item"]  # 3 x 20 us


def test_sheets_are_written_beside_json(folder: Path, tmp_path: Path) -> None:
    sheets = tmp_path / "sheets"
    code, out, err = answers.outcome("trace", folder, "--csv", sheets, "--json")
    assert (code, err) == (0, f"wrote {sheets}\n")
    assert json.loads(out) == told(folder)
    assert (sheets / "phases.csv").is_file()
    assert shown(folder, "--csv", tmp_path / "others") == f"wrote {tmp_path}/others\n"


def test_one_rank_says_that_it_cannot_tell_waiting(folder: Path) -> None:
    assert "one rank cannot tell waiting from transfer" in shown(folder / "rank0_trace.json.gz")


def test_long_tables_are_cut_and_say_so(tmp_path: Path) -> None:
    folder = make(Job(ranks=1, steps=15, layers=1, is_even=True)).write(tmp_path)  # 15 steps, and a table shows 12
    assert "3 more" in shown(folder)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("--rank", "9"), "no trace is of rank 9; allowed: 0, 1, 2, 3"),
        (("--step", "1"), "has no step 1; allowed: 5, 6"),
        (("--rank", "-1"), "--rank"),
    ],
)
def test_a_wrong_question_is_one_line(folder: Path, arguments: tuple[str, ...], error: str) -> None:
    assert error in refused(folder, *arguments)


def test_help_is_that_of_the_files_and_a_verb_is_no_path() -> None:
    text = shown("--help")
    assert "penstock trace diff A B" in text
    assert len(text.splitlines()) <= 25
    for verb in ("diff", "replay"):
        assert f"penstock trace {verb}" in shown(verb, "--help")


@pytest.mark.often("flags0")
@pytest.mark.parametrize("flags", [(), ("--json",), ("--layers",)])
def test_a_trace_is_read_without_what_takes_long_to_import(folder: Path, flags: tuple[str, ...]) -> None:
    slow = {"torch", "pandas", "pydantic", "rich", "importlib.metadata", "penstock.config.model"}  # 0.1 s and more each
    code = f"import sys; from penstock.cli.main import main; main(sys.argv[1:]); print({slow} & set(sys.modules))"
    command = [sys.executable, "-c", code, "trace", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_with_a_rank_the_answer_is_the_same(folder: Path) -> None:
    """What takes other values than paths goes another way, through typer's checks."""
    file = folder / "rank0_trace.json.gz"
    assert shown(file, "--rank", "0") == shown(file)
    assert told(file, "--rank", "0") == told(file)


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two traces: in the second, the product of every step takes 15 us more."""
    slower = tiny()
    for one in slower["traceEvents"]:
        if one["name"] == "ampere_bf16_gemm":
            one["dur"] += 15
    return str(write(tmp_path / "a.json.gz", tiny())), str(write(tmp_path / "b.json", slower))


def test_a_diff_says_what_got_slower(pair: tuple[str, str]) -> None:
    printed = answers.printed("trace diff", *pair)
    assert "for a step (medians of 2 and 2)" in printed
    assert "slower: +0.015 ms in 1 row" in printed
    line = next(line for line in printed.splitlines() if "aten::mm" in line)
    assert line.split()[:3] == ["+15.0*", "40.0", "55.0"]  # us; the star: more than the spread
    assert "belong to no step and are not compared" in printed


def test_rows_of_json_add_up_to_the_change_exactly(pair: tuple[str, str]) -> None:
    tree = answers.told_as_json("trace diff", *pair)
    assert sum(Fraction(row["change_us"]) for row in tree["rows"]) == Fraction(tree["change_us"])
    assert tree["change_us"] == tree["b"]["total_us"] - tree["a"]["total_us"]
    assert {row["verdict"] for row in tree["rows"] if row["operator"] == "aten::mm"} == {"slower"}


def test_a_rank_that_is_not_there_is_refused(pair: tuple[str, str]) -> None:
    assert "has no trace of this rank; got 7" in answers.refused("trace diff", *pair, "--rank", 7)


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    dims = {"Input type": ["float", "float"], "Input Dims": [[4, 8], [8, 3]], "Concrete Inputs": ["", ""]}
    events = [event("cpu_op", "aten::mm", 0, 9, **dims), launch(3, correlation=1), kernel("gemm", 20, 5, correlation=1)]
    return str(write(tmp_path / "trace.json", trace_of(*events)))


def test_a_script_is_written_or_printed(recorded: str, tmp_path: Path) -> None:
    out = tmp_path / "replayed.py"
    told = answers.printed("trace replay", recorded, "--op", "aten::mm", "--out", out)
    assert told == f"wrote {out}\nnext:  python {out}\n"
    assert answers.printed("trace replay", recorded, "--op", "mm") == out.read_text()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--op", "aten::nothing"], "no operator or kernel of this trace has this name"),
        (["--op", "mm", "--shape", "1x1"], "has no such shape"),
        (["--op", "mm", "--counts", "1,x"], "--counts takes whole numbers"),
        (["--op", "mm", "--rank", "3"], "has no trace of this rank"),
        (["--op", "mm", "--out", "/no/such/folder/x.py"], "there is no folder"),
    ],
)
def test_what_cannot_be_replayed_is_one_line(options: list[str], error: str, recorded: str) -> None:
    assert error in answers.refused("trace replay", recorded, *options)


def test_the_second_line_says_what_a_step_consists_of_and_what_to_type_next(tmp_path: Path) -> None:
    lines = shown(write(tmp_path / "rank-0.json", tiny())).splitlines()
    # Of 370 us in two steps: compute 90, exposed communication 60, exposed copies 20, idle 200.
    assert lines[1].startswith("a step of 0.185 ms: idle 54.1%, compute 24.3%, exposed communication 16.2%")
    assert "penstock doctor" in lines[1]


def test_a_diff_warns_of_another_batch(tmp_path: Path) -> None:
    paths = []
    for rows in (8, 16):
        gemm = operator("aten::mm", 0, 50) | {"args": {"Input Dims": [[rows, 4], [4, 2]]}}
        content = trace_of(gemm, *ran("gemm", 10, 60, 30))
        paths.append(write(tmp_path / f"{rows}" / "rank-0.json", content))
    printed = answers.printed("trace diff", *paths)
    assert "other sizes in B (batch, sequence or model), such as aten::mm 8x4 4x2 -> 16x4 4x2" in printed
    assert "other sizes" not in answers.printed("trace diff", paths[0], paths[0])


def test_a_diff_warns_of_another_device_and_number_of_ranks_and_explains_its_star(tmp_path: Path) -> None:
    whole = tiny()
    whole["distributedInfo"]["world_size"] = 2
    whole["deviceProperties"][0]["name"] = "NVIDIA B200"
    paths = (write(tmp_path / "a" / "rank-0.json", tiny()), write(tmp_path / "b" / "rank-0.json", whole))
    printed = answers.printed("trace diff", *paths)
    assert "warning: A is of NVIDIA H100 80GB HBM3, B of NVIDIA B200" in printed
    assert "warning: A is of 8 ranks, B of 2 ranks" in printed
    assert "A is of rank" not in printed
    assert "* every step of one trace took less than every step of the other" in printed
