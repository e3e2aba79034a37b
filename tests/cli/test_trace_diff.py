"""`penstock trace diff` and `penstock trace replay` from the outside."""

import json
from fractions import Fraction
from pathlib import Path

import pytest

from penstock.cli.main import main
from tests.trace.tiny import event, kernel, launch, tiny, trace_of, write


@pytest.fixture
def pair(tmp_path: Path) -> tuple[str, str]:
    """Two traces: in the second, the product of every step takes 15 us more."""
    slower = tiny()
    for one in slower["traceEvents"]:
        if one["name"] == "ampere_bf16_gemm":
            one["dur"] += 15
    return str(write(tmp_path / "a.json.gz", tiny())), str(write(tmp_path / "b.json", slower))


def test_a_diff_says_what_got_slower(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *pair]) == 0
    printed = capsys.readouterr().out
    assert "for a step (medians of 2 and 2)" in printed
    assert "slower: +0.015 ms in 1 row" in printed
    line = next(line for line in printed.splitlines() if "aten::mm" in line)
    assert line.split()[:3] == ["+15.0*", "40.0", "55.0"]
    assert "belong to no step and are not compared" in printed


def test_rows_of_json_add_up_to_the_change_exactly(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *pair, "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert sum(Fraction(row["change_us"]) for row in tree["rows"]) == Fraction(tree["change_us"])
    assert tree["change_us"] == tree["b"]["total_us"] - tree["a"]["total_us"]
    assert {row["verdict"] for row in tree["rows"] if row["operator"] == "aten::mm"} == {"slower"}


def test_a_trace_against_itself_is_zero(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", pair[0], pair[0], "--json"]) == 0
    tree = json.loads(capsys.readouterr().out)
    assert {row["change_us"] for row in tree["rows"]} == {0}
    assert {row["verdict"] for row in tree["rows"]} == {"same"}


def test_a_rank_that_is_not_there_is_refused(pair: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *pair, "--rank", "7"]) == 2
    assert "has no trace of this rank; got 7" in capsys.readouterr().err


def test_a_file_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", "no.json", "no.json"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    dims = {"Input type": ["float", "float"], "Input Dims": [[4, 8], [8, 3]], "Concrete Inputs": ["", ""]}
    events = [event("cpu_op", "aten::mm", 0, 9, **dims), launch(3, correlation=1), kernel("gemm", 20, 5, correlation=1)]
    return str(write(tmp_path / "trace.json", trace_of(*events)))


def test_a_script_is_written_or_printed(recorded: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "replayed.py"
    assert main(["trace", "replay", recorded, "--op", "aten::mm", "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\nnext:  python {out}\n"
    assert main(["trace", "replay", recorded, "--op", "mm"]) == 0
    assert capsys.readouterr().out == out.read_text()


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
def test_what_cannot_be_replayed_is_one_line(
    options: list[str], error: str, recorded: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "replay", recorded, *options]) == 2
    printed = capsys.readouterr().err
    assert error in printed
    assert printed.count("\n") == 1
