"""Recorded loads decide a plan's rows as one assumed imbalance of the same size would, and replicas even them out."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock.base.errors import RunFolderError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.assumptions import Assumptions
from penstock.plan.balance import balance_cases, balance_json
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.loads import RecordedLoads, read_loads
from penstock.plan.project import project
from penstock.train.metrics import record
from tests.cli.answers import printed, refused, told_as_json
from tests.train.tiny_run import step_report

UNEVEN = ((4, 0, 3, 1, 2, 2, 2, 2), (1, 1, 1, 1, 5, 5, 1, 1))
"""Two layers of eight experts. On two ranks 8 to 8 and 4 to 12 rows, on four 4 4 4 4 and 2 2 10 2."""

ON = parse_cluster("4xH200")


def loads_of(*steps: Sequence[Sequence[int]]) -> RecordedLoads:
    return RecordedLoads("recorded", tuple(tuple(map(tuple, one)) for one in steps))


def run_of(*overrides: str) -> Run:
    return load_run(
        "deepseek-v2-lite-2l", ("model.moe.experts=8", "model.moe.top_k=2", "parallel.expert=4", *overrides)
    )


def written(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def test_the_fullest_rank_of_each_layer_decides_time_and_one_rank_over_all_layers_memory() -> None:
    loads = loads_of(UNEVEN)
    for ranks, fullest, most in ((2, (1 + 1.5) / 2, (8 + 12) / 16), (4, (1 + 2.5) / 2, (4 + 10) / 8), (1, 1, 1)):
        found = loads.of(run_of(f"parallel.expert={ranks}"))
        assert (found.fullest, found.most, found.replicas) == pytest.approx((fullest, most, 0))
    even = loads_of(UNEVEN, [[1] * 8] * 2)  # a mean of both steps
    assert even.of(run_of()).fullest == pytest.approx((1 + 2.5 + 1 + 1) / 4)
    assert loads.of(run_of("model.moe.balance.force_load_balance=true")).fullest == 1


@pytest.mark.parametrize("balance", ["bounded", "exact"])
def test_replicas_keep_the_bound(balance: str) -> None:
    run = run_of(f"dispatch.balance={balance}", "dispatch.balance_tolerance=0.02")
    found = loads_of(UNEVEN).of(run)
    assert 1 <= found.fullest <= (1.0201 if balance == "bounded" else 1.0001)
    assert found.replicas > 1 and found.busiest >= found.replicas / 4


def test_loads_project_as_an_imbalance_of_their_size() -> None:
    run, loads = run_of(), loads_of(UNEVEN)
    found = project(run, ON, Assumptions(loads=loads))
    as_number = project(run, ON, Assumptions(imbalance=loads.of(run).fullest, kept_imbalance=loads.of(run).most))
    assert found == as_number
    assert found.time.step_seconds > project(run, ON, Assumptions(imbalance=1.0)).time.step_seconds


def test_balance_is_projected_between_the_loads_and_forced_balance() -> None:
    run = run_of("training.global_batch=8", "dispatch.balance=exact")
    natural, bounded, exact, forced = balance_cases(run, ON, Assumptions(loads=loads_of(UNEVEN)))
    assert [case.name for case in (natural, bounded, exact, forced)] == ["none", "bounded", "exact", "forced"]
    assert natural.loads.fullest > bounded.loads.fullest > exact.loads.fullest >= forced.loads.fullest == 1
    assert natural.exposed_seconds == forced.exposed_seconds == 0 < bounded.exposed_seconds
    seconds = [case.step_seconds - case.exposed_seconds for case in (natural, bounded, exact, forced)]
    assert seconds[0] > seconds[1] > seconds[2] and seconds[1] > seconds[3]
    assert [row["dispatch.balance"] for row in balance_json((natural, forced))["balance"]] == ["none", "forced"]
    assert not balance_cases(run_of("parallel.expert=1"), ON, Assumptions(loads=loads_of(UNEVEN)))


def test_the_last_half_of_the_lines_with_loads_counts(tmp_path: Path) -> None:
    lines = [record(step_report(step, expert_ranks=2)) for step in range(1, 10)]  # 1, 2, 4 and 8 list slots
    loads = read_loads(written(tmp_path / "metrics.jsonl", lines))
    listed = [[layer["slots"] for layer in lines[step - 1]["layers"]] for step in (4, 8)]
    assert [[list(slots) for slots in one] for one in loads.steps_LE] == listed
    assert read_loads(tmp_path).steps_LE == loads.steps_LE
    assert lines[0]["layers"][0]["rank_load"] == pytest.approx(1.4) and lines[2]["layers"][0]["slots"] is None


BAD = {
    "no loads": ([{"step": 3, "layers": []}], "lists no loads of experts"),
    "no layer": ([{"x": [{"slots": [1, 2]}]}], "a line that is no line of metrics"),
    "negative": ([{"layers": [{"layer": 1, "slots": [3, -1]}]}], "a line that is no line of metrics"),
    "empty": ([{"layers": [{"layer": 1, "slots": [0, 0]}]}], "a line that is no line of metrics"),
    "other experts": ([{"layers": [{"layer": 1, "slots": [1, 2]}, {"layer": 2, "slots": [1]}]}], "lists no loads"),
}


@pytest.mark.parametrize(("lines", "words"), BAD.values(), ids=BAD)
def test_a_file_without_loads_is_refused(lines: list[object], words: str, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=words):
        read_loads(written(tmp_path / "metrics.jsonl", lines))


def test_the_command_line_reads_loads_of_one_layout(tmp_path: Path) -> None:
    layers = [{"layer": 1, "slots": list(one)} for one in UNEVEN]
    path = f"{written(tmp_path / 'metrics.jsonl', [{'layers': layers}])}"
    asked = ("debug", "training.micro_batch=1", "--on", "4xH200", "--routing", path)
    text = printed("plan", *asked, "--layout", "ep=4")
    assert re.search(r"experts get 1\.75 x their even share of rows, at most all \(mean of 2 layers and 1 steps", text)
    assert "dispatch.balance" in text and "forced" in text
    told = told_as_json("plan", *asked, "--layout", "ep=4")
    assert [row["dispatch.balance"] for row in told["balance"]] == ["none", "bounded", "exact", "forced"]
    assert "add --layout or --compare" in refused("plan", *asked)
    assert "--imbalance has no use for it" in refused("plan", *asked, "--layout", "ep=4", "--imbalance", "1.3")
