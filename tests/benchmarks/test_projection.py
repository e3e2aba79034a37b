"""Runs that the plan is held against: they are what the issue asks for, and their figures are read and shown right."""

import json
from argparse import Namespace
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from benchmarks import projection
from benchmarks.projection_cases import CASES, FROZEN, MADE, Case, named
from benchmarks.projection_compare import compared, summary
from penstock.config.load import load_run
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project
from tools import documents

STEPS = 9  # of a run
METHOD = "dispatch.method=all-to-all"  # the host reads row counts, so loads count


def test_cases_are_runs_that_differ_and_half_of_them_waited_for_the_freeze() -> None:
    runs = [case.run(STEPS) for case in CASES]
    for case, run in zip(CASES, runs, strict=True):
        assert (run.training.steps, run.evaluation.rows, run.checkpoint.enabled) == (STEPS, 0, False)
        assert case.processes % (run.parallel.pipeline * run.parallel.tensor * run.parallel.context) == 0
    assert named([CASES[0].name], "") == CASES[:1] and named([], "") == CASES
    assert {*named([], MADE), *named([], FROZEN)} == set(CASES)
    assert len({(case.target, *case.overrides) for case in CASES}) == len({case.name for case in CASES}) == len(CASES)
    chosen = Counter(case.chosen for case in CASES)
    assert len(CASES) >= 16 and chosen[FROZEN] >= chosen[MADE]
    assert {case.processes for case in CASES} == {1, 2, 4}
    assert {run.parallel.expert for run in runs} == {1, 2, 4}
    assert {run.training.micro_batch for run in runs} == {1, 2, 4, 8}
    assert {run.dispatch.sync_free for run in runs} == {0, 1, 2}
    assert {run.pipeline.schedule for run in runs if run.parallel.pipeline == 2} >= {"1f1b", "interleaved"}
    assert {run.model.hidden_size for run in runs} >= {2048, 7168}
    assert {run.model.layers for run in runs} >= {27, 14, 4}
    assert len({run.recompute.modules for run in runs}) >= 5


@pytest.mark.slow
def test_two_real_ranks_say_how_uneven_they_were(tmp_path: Path) -> None:
    sizes = ("training.global_batch=8", "training.sequence_length=32", "parallel.expert=2", METHOD, "device=cpu")
    case = Case(name="tiny", target="debug-2l", overrides=sizes, processes=2, chosen=MADE)
    options = Namespace(steps=3, warm_up=1, timeout=120.0, commit="0123abc")
    row = projection.measured(options, case, tmp_path)
    assert row["reason"] == "" and len(row["figures"]["step_seconds"]) == 2
    for load in ("expert_rank_load_max_over_mean", "expert_rank_load_fullest"):
        assert 1 <= row["figures"][load] < 2


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [("lite", "deepseek-v2-lite"), ("qwen3", "qwen3-30b-a3b")])
def test_the_plan_of_a_whole_model_on_one_gpu_is_what_was_measured(name: str, target: str) -> None:
    """State and sums of gradients are in host memory."""
    path = documents.ROOT / documents.RESULTS / "whole-host-h200.json"
    found = json.loads(path.read_text(encoding="utf-8"))["numbers"][name]
    plan = project(load_run(target, [*found["overrides"], "graphs.capture=none"]), parse_cluster("1xH200"))
    assert plan.time.tokens_per_second_per_device == pytest.approx(found["median_after_first"], rel=0.10)
    assert plan.memory.total - plan.memory.reserve == pytest.approx(found["peak_memory_gb"] * 1e9, rel=0.03)
    assert plan.memory.host == pytest.approx(found["peak_host_memory_gb"] * 1e9, rel=0.01)


def test_steps_that_wait_for_their_host_take_what_the_plan_says() -> None:
    """Eager runs of two GPUs, in which the device is at most 2 % of the passes behind the host but for one."""
    presets = {"DeepSeek": "deepseek-v2-lite-8l", "Qwen3-30": "qwen3-30b-a3b-7l"}
    presets |= {"Llama-3.": "llama3.1-8b-4l", "ERNIE-4.": "ernie-4.5-21b-a3b-7l"}
    path = documents.ROOT / documents.RESULTS / "graphs-auto-h200x2.json"
    errors = {}
    for name, row in json.loads(path.read_text(encoding="utf-8"))["numbers"].items():
        eager = (*row["overrides"], "graphs.capture=none", "dispatch.sync_free=0")
        plan = project(load_run(presets[name[:8]], eager), parse_cluster("2xH200"))
        errors[name] = plan.time.step_seconds / row["eager"]["step_seconds"] - 1
    assert max(map(abs, errors.values())) < 0.12, errors  # two hosts of one kind differ by a third
    assert median(map(abs, errors.values())) < 0.08, errors


def measured(chosen: str = MADE, **changes: Any) -> dict[str, Any]:
    """A row of the file: a small run on two H200."""
    loads = {"expert_rank_load_max_over_mean": 1.1, "expert_rank_load_fullest": 1.05}
    figures = {"step_seconds_median": 0.05, "peak_memory_bytes": 10**9} | loads
    overrides = ["training.global_batch=8", "training.precision=bf16", "parallel.expert=2", METHOD]
    row = {"name": "small", "target": "debug", "overrides": overrides, "processes": 2, "commit": "0123abc"}
    return row | {"chosen": chosen, "reason": "", "figures": figures} | changes


def test_a_projection_stands_beside_its_measurement_with_its_error() -> None:
    found = compared(measured(), "H200", STEPS)
    projected, errors = found["projected"], found["errors"]
    assert errors["step"] == pytest.approx(projected["step_seconds"] / 0.05 - 1)
    assert errors["memory"] == pytest.approx(projected["peak_memory_bytes"] / 1e9 - 1)
    assert projected["step_seconds"] > 0 and projected["peak_memory_bytes"] > 10**6
    assert sum(projected["terms"].values()) == pytest.approx(projected["step_seconds"], rel=1e-6)
    json.dumps(found, allow_nan=False)


def test_what_the_run_recorded_of_its_router_counts() -> None:
    skewed = measured()
    skewed["figures"] |= {"expert_rank_load_max_over_mean": 2.0, "expert_rank_load_fullest": 1.9}
    even, uneven = (compared(row, "H200", STEPS)["projected"] for row in (measured(), skewed))
    assert uneven["peak_memory_bytes"] > even["peak_memory_bytes"]
    assert uneven["step_seconds"] >= even["step_seconds"]


def with_errors(step: float, memory: float, chosen: str) -> dict[str, Any]:
    projected = {"step_seconds": 0.05 * (1 + step), "peak_memory_bytes": 10**9 * (1 + memory)}
    return measured(chosen, projected=projected, errors={"step": step, "memory": memory})


def test_errors_are_summed_up_for_all_and_for_each_half() -> None:
    rows = [with_errors(0.02, -0.06, MADE), with_errors(-0.12, 0.01, FROZEN), measured(figures=None, reason="lost")]
    found = summary(rows)
    assert {name: sizes["runs"] for name, sizes in found.items()} == {"all": 2, "made": 1, "frozen": 1}
    assert found["all"]["step_median"] == pytest.approx(0.07)
    assert (found["all"]["step_largest"], found["all"]["step_beyond"]) == (0.12, 1)
    assert (found["made"]["memory_largest"], found["made"]["memory_beyond"]) == (0.06, 1)
    assert found["frozen"]["memory_beyond"] == 0


def test_tables_show_every_run_and_why_one_was_not_measured(tmp_path: Path) -> None:
    lost = measured(FROZEN, name="lost", figures=None, reason="a | b")
    rows = [with_errors(0.02, -0.06, MADE), with_errors(-0.12, 0.01, FROZEN), lost]
    numbers = {"cases": rows, "errors": summary(rows), "projected_by": {"commit": "4567def", "hardware": "H200"}}
    environment = {"device": "NVIDIA H200", "torch": "2.11", "steps": STEPS, "warm_up_steps": 3}
    result = {"command": "x", "commit": "0123abc", "environment": environment, "numbers": numbers}
    shown = documents.TABLES["projection"](result)
    assert f"| small | 2 | {MADE} | 1.10 | 50.0 ms | 51.0 ms | +2.0% | 1.0 GB | 0.9 GB | -6.0% |" in shown
    assert f"| lost | 2 | {FROZEN} | a / b |" in shown
    assert "by commit `4567def`" in shown
    for name in ("projection", "projection-errors", "projection-runs"):
        lines = [line for line in documents.TABLES[name](result).splitlines() if line.startswith("|")]
        assert len({line.count("|") for line in lines}) == 1, name
    errors = documents.TABLES["projection-errors"](result)
    assert "| used to develop the time model | 1 | 2.0% | 2.0% | 0 | 6.0% | 6.0% | 1 |" in errors


def test_cases_of_other_files_are_joined_where_they_were_measured(tmp_path: Path) -> None:
    def file(name: str, *rows: dict[str, Any], **numbers: Any) -> Path:
        path = tmp_path / name
        whole = {"command": f"{name} --only a", "commit": name, "environment": {"steps": 9}}
        path.write_text(json.dumps(whole | {"numbers": {"cases": rows, **numbers}}), encoding="utf-8")
        return path

    old, new = {"step_seconds": [1.0]}, {"step_seconds": [2.0]}
    made, frozen, failed = ("lite-8-layers", "moonlight-6-layers", "kimi-k2-3-layers")
    output = file("whole", {"name": made, "figures": old}, {"name": failed, "figures": old}, errors={"all": 1})
    parts = [
        file("one", {"name": frozen, "figures": new, "chosen": MADE}),
        file("two", {"name": failed, "figures": None}, {"name": made, "figures": new}),
    ]
    projection.join(Namespace(output=output, join=parts))
    joined = json.loads(output.read_text(encoding="utf-8"))
    assert [(row["name"], row["chosen"]) for row in joined["numbers"]["cases"]] == (
        [(made, MADE), (frozen, FROZEN), (failed, FROZEN)]
    )
    assert [row["figures"] for row in joined["numbers"]["cases"]] == [new, new, old]
    assert joined["numbers"]["errors"] == {"all": 1} and joined["commit"] == "two"
