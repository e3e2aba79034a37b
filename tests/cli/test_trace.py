"""`penstock trace` from the outside."""

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cli import answers
from tests.trace.synthetic import Job, Traces, make
from tests.trace.tiny import event, kernel, trace_of, write

JOB = Job(ranks=4, hot_rank=1, missing=((2, 5),))


@pytest.fixture(scope="module")
def traces() -> Traces:
    return make(JOB)


@pytest.fixture(scope="module")
def folder(traces: Traces, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return traces.write(tmp_path_factory.mktemp("ranks"))


shown = partial(answers.printed, "trace")


def told(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(shown(capsys, *arguments, "--json"))
    return answer


refused = partial(answers.refused, "trace")


def test_json_of_one_rank_has_the_keys_of_the_contract(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, folder / "rank1_trace.json.gz")
    keys = {
        "timeline",
        "steps",
        "phases",
        "other_share",
        "roofline",
        "collectives",
        "unmatched",
        "stragglers",
        "experts",
    }
    assert keys <= set(answer)
    assert {"all", "linked"} == set(answer["timeline"])
    assert {"name", "layer", "pass", "kernel_us", "exposed_us", "share"} <= set(answer["phases"][0])
    assert "ranks" not in answer


def test_json_of_many_ranks_has_their_tables_by_number(
    folder: Path, traces: Traces, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = told(capsys, folder)
    assert set(answer["ranks"]) == {"0", "1", "2", "3"}
    for rank, truth in enumerate(traces.truth.timelines):
        timeline = answer["ranks"][f"{rank}"]["timeline"]["all"]
        for name, time_us in truth.items():
            assert timeline[f"{name}_us"] == pytest.approx(time_us, abs=1.0), (rank, name)


def test_json_of_collectives_is_the_truth(folder: Path, traces: Traces, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, folder)
    assert {"rank", "group", "seq", "name", "bytes", "pure_us", "wait_us"} <= set(answer["collectives"][0])
    found = {(one["group"], one["seq"], one["rank"]): one for one in answer["collectives"]}
    whole = [one for one in traces.truth.meetings if (one.group, one.seq, 0) in found]
    assert len(whole) == len(traces.truth.meetings) - 1
    for one in whole:
        for rank, wait_us in enumerate(one.wait_us):
            assert found[one.group, one.seq, rank]["wait_us"] == pytest.approx(wait_us, abs=1.0)
    assert [one["missing"] for one in answer["unmatched"]] == [[2]]
    assert answer["stragglers"][0]["rank"] == 1
    assert answer["experts"]["fullest_rank"] == 1


def test_one_rank_of_many_is_compared_with_all(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = told(capsys, folder, "--rank", "3")
    assert set(answer["ranks"]) == {"3"}
    assert {one["rank"] for one in answer["collectives"]} == {3}
    assert answer["stragglers"][0]["rank"] == 1


def test_a_step_is_a_part_of_the_whole(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = folder / "rank0_trace.json.gz"
    whole, step = told(capsys, file), told(capsys, file, "--step", "6")
    assert [one["number"] for one in whole["steps"]] == [5, 6]
    assert [one["number"] for one in step["steps"]] == [6]
    window = whole["steps"][1]["timeline"]
    assert step["timeline"]["all"]["compute_us"] == pytest.approx(window["compute_us"], abs=1.0)
    assert step["timeline"]["all"]["compute_us"] < 0.6 * whole["timeline"]["all"]["compute_us"]


def test_tables_say_it_for_people(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, folder)
    for part in (
        "times are sums over 2 recorded steps",
        "time on the device",
        "phases of rank 0",
        "communication across ranks",
        "unmatched: 1",
        "roofline",
    ):
        assert part in text
    assert "experts: fullest rank over the mean" in text
    assert "layer" in shown(capsys, folder, "--layers")


def test_waits_of_the_host_are_added_up_over_layers_and_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [kernel("some_kernel", 0, 10, correlation=1)]
    for layer in range(3):
        at = 100 * layer
        events += [
            event("user_annotation", f"layer {layer}", at, 90),
            event("user_annotation", "dispatch", at + 10, 70),
            event("cpu_op", "aten::item", at + 20, 50),
            event("cuda_runtime", "cudaStreamSynchronize", at + 30, 20),
        ]
    text = shown(capsys, write(tmp_path / "trace.json", trace_of(*events)))
    (row,) = [line.split() for line in text.splitlines() if line.startswith("cudaStreamSynchronize")]
    assert row == ["cudaStreamSynchronize", "3", "0.060", "dispatch", ">", "aten::item"]


def test_one_rank_says_that_it_cannot_tell_waiting(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "one rank cannot tell waiting from transfer" in shown(capsys, folder / "rank0_trace.json.gz")


def test_long_tables_are_cut_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make(Job(ranks=1, steps=15, layers=1, is_even=True)).write(tmp_path)
    assert "3 more" in shown(capsys, folder)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (("/nowhere/trace.json",), "cannot read /nowhere/trace.json: No such file or directory"),
        (("--rank", "9"), "no trace is of rank 9; allowed: 0, 1, 2, 3"),
        (("--step", "1"), "has no step 1; allowed: 5, 6"),
        (("--rank", "-1"), "--rank"),
    ],
)
def test_a_wrong_question_is_one_line(
    folder: Path, arguments: tuple[str, ...], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = () if arguments[0].startswith("/") else (folder,)
    assert error in refused(capsys, *paths, *arguments)


def test_no_path_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Missing argument" in refused(capsys)


def test_help_is_that_of_the_files(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")
    assert "penstock trace diff A B" in text
    assert len(text.splitlines()) <= 25


@pytest.mark.parametrize("verb", ["diff", "replay"])
def test_a_verb_is_no_path(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"penstock trace {verb}" in shown(capsys, verb, "--help")


@pytest.mark.often("flags0")
@pytest.mark.parametrize("flags", [(), ("--json",), ("--layers",)])
def test_a_trace_is_read_without_what_takes_long_to_import(folder: Path, flags: tuple[str, ...]) -> None:
    slow = {"torch", "pandas", "pydantic", "rich", "importlib.metadata", "penstock.config.model"}
    code = f"import sys; from penstock.cli.main import main; main(sys.argv[1:]); print({slow} & set(sys.modules))"
    command = [sys.executable, "-c", code, "trace", str(folder), *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_with_a_rank_the_answer_is_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What takes other values than paths goes another way, through typer's checks."""
    file = folder / "rank0_trace.json.gz"
    assert shown(capsys, file, "--rank", "0") == shown(capsys, file)
    assert told(capsys, file, "--rank", "0") == told(capsys, file)


def test_wrong_flags_are_one_line(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such option: --jsn" in refused(capsys, folder, "--jsn")
    assert "Missing argument" in refused(capsys, "--json")
