"""Evidence of a run is read once, and missing evidence has a reason and a fix."""

from pathlib import Path

import pytest

from penstock.base.errors import HardwareError, RunFolderError, TraceError
from penstock.report.run_evidence import gather
from tests.report.made_runs import exchanging, host_folder, piped_folder, run_folder, traced_folder, with_world
from tests.trace.synthetic import make


def test_a_run_without_a_trace_is_told_how_to_record_one(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run"))
    assert found.answer is None and "run/config.toml profile.start=5 profile.steps=2" in found.lacks.trace
    assert "--on names the devices" in found.lacks.plan
    assert "nothing else to judge by" in found.lacks.verdict
    assert len(found.lines) == 12


def test_the_device_of_a_start_finds_its_hardware_file(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run", device="NVIDIA H200"))
    assert found.projection is not None and found.projection.cluster.hardware.name == "H200"
    assert found.verdict is not None and found.judged.source == "plan"
    assert found.starts[0]["command"] == "penstock train debug"


def test_a_missing_plan_has_a_reason(tmp_path: Path) -> None:
    known = gather(run_folder(tmp_path / "known", device="NVIDIA H200"), plans=False)
    assert known.projection is None and "--no-plan" in known.lacks.plan
    unknown = gather(run_folder(tmp_path / "unknown", device="Some CPU"))
    assert "no hardware file is of Some CPU" in unknown.lacks.plan
    folder = with_world(run_folder(tmp_path / "odd", "parallel.pipeline=2", "training.global_batch=8"), 2)
    assert "no plan on 3 x H200" in gather(folder, on="3xH200").lacks.plan


def test_the_user_overrides_the_hardware(tmp_path: Path) -> None:
    found = gather(run_folder(tmp_path / "run", device="NVIDIA H200"), on="1xMI300X")
    assert found.projection is not None and found.projection.cluster.hardware.name == "MI300X"
    with pytest.raises(HardwareError):
        gather(run_folder(tmp_path / "other"), on="1xNOTHING")


def test_traces_of_devices_are_judged(tmp_path: Path) -> None:
    found = gather(traced_folder(tmp_path / "run"))
    assert [one.rank for one in found.ranks] == [0, 1, 2, 3] and not found.is_host
    assert found.verdict is not None and found.verdict.bottleneck == "communication"
    assert found.projection is not None and found.lacks.plan == ""


def test_traces_of_a_cpu_are_read_but_not_judged(tmp_path: Path) -> None:
    found = gather(host_folder(tmp_path / "run", ranks=2))
    assert found.is_host and len(found.ranks) == 2
    assert found.verdict is None and "a recording of a CPU (AMD EPYC)" in found.lacks.verdict
    assert found.judged.host is not None and found.judged.host.operators[0].name == "aten::addmm"


def test_traces_without_a_run_are_enough(tmp_path: Path) -> None:
    found = gather(make(exchanging()).write(tmp_path / "traces"))
    assert found.run is None and found.lines == () and found.verdict is not None
    assert "no metrics" in found.lacks.steps


def test_a_pipeline_that_was_recorded_has_both_sides(tmp_path: Path) -> None:
    found = gather(piped_folder(tmp_path / "run"), on="2xH200")
    assert found.projection is not None and found.projection.time.playback is not None
    assert [one.rank for one in found.ranks] == [0, 1]


def test_an_empty_folder_and_a_damaged_trace_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="holds no trace"):
        gather(tmp_path)
    folder = run_folder(tmp_path / "run")
    (folder / "profile").mkdir()
    (folder / "profile" / "rank-0.json").write_text('{"traceEvents": [')
    with pytest.raises(TraceError):
        gather(folder)


@pytest.mark.parametrize("file", ["metrics.jsonl", "starts.jsonl"])
def test_a_damaged_file_of_a_run_is_refused(tmp_path: Path, file: str) -> None:
    folder = run_folder(tmp_path / "run")
    (folder / file).write_text("{\n{}\n")
    with pytest.raises(RunFolderError, match="is no JSON"):
        gather(folder)
