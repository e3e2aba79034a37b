"""`penstock doctor` from the outside: traces, and the folders of runs."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from penstock.config.load import RUN_FILE, dump_toml, load_run
from penstock.plan.hardware_file import load_hardware, write_hardware
from penstock.report.run_evidence import gather
from penstock.report.run_page import run_page
from penstock.trace.analysis import analyse_files
from penstock.tune.doctor.diagnosis import ms_text
from penstock.tune.doctor.run_facts import recording_command
from tests.cli import answers
from tests.report.made_runs import host_folder, host_trace
from tests.trace.synthetic import Job, make
from tests.trace.tiny import write

LINE = {
    "step_seconds": 0.25,
    "tokens_per_second_per_device": 2048.0,
    "peak_memory_bytes": 9_000_000_000,
    "phase_seconds": {"forward": 0.1, "data": 0.001},
}
told = partial(answers.told_as_json, "doctor")
shown = partial(answers.printed, "doctor")
refused = partial(answers.refused, "doctor")


def run_folder(path: Path, *overrides: str, steps: int = 4, rest: str = "") -> Path:
    path.mkdir()
    run = load_run("debug", overrides)
    (path / RUN_FILE).write_text(dump_toml(run))
    speed = run.tokens_per_step / LINE["step_seconds"]  # type: ignore[operator]
    lines = [json.dumps({"step": step} | LINE | {"tokens_per_second_per_device": speed}) for step in range(steps)]
    (path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines) + rest)
    return path


def test_traces_alone_have_a_verdict(tmp_path: Path) -> None:
    answer = told(make(Job(hot_rank=2)).write(tmp_path))
    assert answer["wall"] == "communication"
    assert "rank 2 (its experts)" in answer["verdict"]
    gains = [one["gain_us"] for one in answer["remedies"]]
    assert gains == sorted(gains, reverse=True)
    assert all(one["rule"] and one["source"] and one["change"] for one in answer["remedies"])


def test_text_has_the_conclusion_first(tmp_path: Path) -> None:
    folder = make(Job(stall_us=1_300.0)).write(tmp_path)
    lines = shown(folder).splitlines()
    assert lines[0].startswith("host: the device is idle")
    assert any(line.startswith("gains do not add up") for line in lines)


def test_a_run_is_judged_by_its_traces_metrics_and_plan(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "training.global_batch=64")
    make(Job(ranks=1, stall_us=1_300.0)).write(folder / "profile")  # the host is late in every step
    answer = told(folder, "--on", "1xH200")
    assert answer["wall"] == "host"
    changes = [one["change"] for one in answer["remedies"]]
    assert 'graphs.capture="full"' in changes
    assert "training.micro_batch=8" in changes
    whats = " ".join(one["what"] for one in answer["evidence"])
    assert "by the plan" in whats
    assert "of it forward, first rank" in whats
    assert 9_000_000_000 in [one["bytes"] for one in answer["evidence"]]  # of metrics.jsonl


def test_a_run_without_traces_is_judged_by_its_plan(tmp_path: Path) -> None:
    answer = told(run_folder(tmp_path / "run"), "--on", "1xH200")
    assert answer["wall"] == "host"
    assert any(line.startswith("no trace: ") for line in answer["missing"])
    assert any("times are those of the plan" in line for line in answer["missing"])


def test_a_run_that_nobody_knows_the_place_of_says_so(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    assert "neither a trace nor a plan" in refused(folder)
    make(Job(ranks=1)).write(folder / "profile")
    missing = told(folder)["missing"]
    assert isinstance(missing, list)


def test_a_run_that_does_not_fit_is_told_what_would_make_it_fit(tmp_path: Path) -> None:
    hardware = load_hardware("H200")
    little = hardware.memory.model_copy(update={"capacity_bytes": hardware.memory.capacity_bytes // 2000})  # 75 MB
    write_hardware(tmp_path / "little.toml", replace(hardware, memory=little))
    folder = run_folder(tmp_path / "run", "training.micro_batch=16", "training.global_batch=16", steps=0)
    answer = told(folder, "--on", f"1x{tmp_path / 'little.toml'}")
    assert answer["wall"] == "memory"
    freed = [one["gain_bytes"] for one in answer["remedies"] if one["gain_bytes"]]
    assert freed
    assert freed == sorted(freed, reverse=True)
    more = little.model_copy(update={"capacity_bytes": 22 * little.capacity_bytes})
    write_hardware(tmp_path / "more.toml", replace(hardware, memory=more))
    for name, rule, proposed in (("more", "fits-by-plan", "train"), ("little", "frees-memory", "plan")):
        text = shown(folder, "--on", f"1x{tmp_path / f'{name}.toml'}")
        assert rule in text
        assert text.splitlines()[-1].startswith(f"next:  penstock {proposed} {folder / RUN_FILE} ")


def test_a_cut_last_line_of_metrics_is_left_out_and_another_that_is_no_json_is_an_error(tmp_path: Path) -> None:
    assert told(run_folder(tmp_path / "cut", rest='{"step": 5, "lo'), "--on", "1xH200")["wall"] == "host"
    damaged = run_folder(tmp_path / "run", rest="nonsense\n{}\n")
    assert "line 5, is no JSON" in refused(damaged, "--on", "1xH200")
    assert "abacus" in refused(tmp_path / "cut", "--on", "1xabacus")


def test_a_toml_file_is_judged_as_a_run_that_is_planned(tmp_path: Path) -> None:
    path = tmp_path / "best.toml"
    path.write_text(dump_toml(load_run("debug")))
    answer = told(path, "--on", "1xH200")
    assert answer["wall"] == "host"
    assert "the run is only planned: no step is recorded" in answer["missing"]


def test_a_place_that_is_no_run_is_told_what_a_run_is(tmp_path: Path) -> None:
    error = refused(tmp_path, "--on", "1xH200")
    assert f"one folder with {RUN_FILE} in it, or one TOML file" in error


def test_text_json_and_page_say_the_same_gain_and_step(tmp_path: Path) -> None:
    folder = make(Job(stall_us=1_300.0)).write(tmp_path)
    verdict = told(folder)
    first = verdict["remedies"][0]
    text = shown(folder)
    row = text[text.index("gains ms per step, at most") :].splitlines()[1]
    spent = f"imes are of the traces, per step: {verdict['total_us'] / 1e3:,.2f} ms, the mean of 2 steps and of ranks"
    assert row.split()[0] == ms_text(first["gain_us"])
    assert spent in text
    # A step lasts from the host's first work for it, where nothing was queued, to the next step's.
    ranks = analyse_files([folder]).ranks
    per_step_us = [rank.spent.total_us / len(rank.steps) for rank in ranks]
    assert verdict["total_us"] == pytest.approx(sum(per_step_us) / len(ranks))
    page = run_page(gather(folder, plans=False))
    assert f"<td>{ms_text(first['gain_us'])} ms</td>" in page
    assert spent in page


def test_a_run_on_a_cpu_has_a_wall_its_operators_and_a_change_that_the_run_takes(tmp_path: Path) -> None:
    folder = host_folder(tmp_path / "run", ranks=1)
    text = shown(folder)
    assert text.startswith("host: no operator runs in 67.0% of the step")  # 330 of 1,000 us
    assert "the operator aten::addmm, 1 times, by itself" in text and "larger-passes" in text
    assert text.splitlines()[-1] == f"next:  penstock train {folder}/config.toml training.micro_batch=8"
    found = told(folder)
    assert (found["wall"], found["total_us"]) == ("host", 1000)
    assert not {"graphs", "dispatch"} & {one["change"].partition(".")[0] for one in found["remedies"]}


@pytest.mark.parametrize(
    ("sums_us", "waits", "wall"), [((700.0, 560.0), 140.0, "communication"), ((30.0, 30.0), 0.0, "host")]
)
def test_on_cpus_transfers_are_told_from_waiting_for_a_late_rank(
    sums_us: tuple[float, float], waits: float, wall: str, tmp_path: Path
) -> None:
    folder = host_folder(tmp_path / "run", ranks=2)
    for rank, sum_us in enumerate(sums_us):
        write(folder / "profile" / f"rank-{rank}.json.gz", host_trace(rank, sum_us) | {"host_name": "laptop"})
    found = told(folder)
    assert found["wall"] == wall
    times = {one["what"]: one["milliseconds"] for one in found["evidence"]}
    waited = times["of it waiting for ranks that come later"]
    late = times.get("of it waiting for ranks whose host is late, which counts as the host's", 0.0)
    assert waited == pytest.approx(waits / 2 / 1e3)  # the mean of the two ranks
    assert times["exposed communication, mean of ranks"] >= late


def test_another_chip_than_the_runs_is_said_to_be_another_machine(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / "starts.jsonl").write_text('{"device": "NVIDIA H200"}\n')
    (note,) = told(folder, "--on", "1xMI300X")["notes"]
    assert note.startswith("two machines are compared: the run was on NVIDIA H200, and the plan is of 1 x MI300X")
    assert told(folder, "--on", "1xH200")["notes"] == []


def test_a_run_without_a_trace_is_told_the_command_that_records_one(tmp_path: Path) -> None:
    folder = run_folder(tmp_path / "run", "training.steps=12", "schedule.warmup_steps=2")
    error = refused(folder)
    assert f"fix: record one: penstock train {folder}/config.toml profile.start=5 profile.steps=2; or say" in error
    (folder / "checkpoints" / "step-000012").mkdir(parents=True)  # the run is finished: 12 steps
    command = recording_command(folder)
    # Some steps after the 12th.
    assert command == f"penstock train {folder} --resume training.steps=19 profile.start=17 profile.steps=2"
    assert f"fix: record some steps: {command}" in answers.refused("trace", folder)


def test_help_fits_a_screen() -> None:
    assert len(shown("--help").splitlines()) <= 25
