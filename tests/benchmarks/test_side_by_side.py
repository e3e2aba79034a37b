"""Measurements side by side: which job gets which GPU, and when."""

import json
from pathlib import Path

import pytest

from benchmarks import side_by_side
from benchmarks.side_by_side import Job, jobs_in
from tests.parallel.launch.ranks import wait_for_end

WAIT = "until test -e {folder}/go; do sleep 0.05; done"


def write(path: Path, *tables: dict[str, object]) -> Path:
    """A file of jobs."""
    file = path / "jobs.toml"
    text = ("\n".join(f"{key} = {json.dumps(value)}" for key, value in table.items()) for table in tables)
    file.write_text("".join(f"[[jobs]]\n{one}\n" for one in text), encoding="utf-8")
    return file


def logs(path: Path) -> dict[str, str]:
    return {file.stem: file.read_text(encoding="utf-8").strip() for file in path.glob("*.log")}


def test_jobs_have_gpus_of_their_own_or_that_of_another_job(tmp_path: Path) -> None:
    show = "echo $CUDA_VISIBLE_DEVICES"
    jobs = write(
        tmp_path,
        {"name": "first", "command": f"{show}; {WAIT}"},
        {"name": "other", "command": f"{show}; touch {{folder}}/go; {WAIT}"},
        {"name": "beside", "command": f"{show}; test -e {{folder}}/go", "beside": "first", "after": ["first"]},
        {"name": "both", "command": f"{show} {{gpu}}", "gpus": 2},
    )
    side_by_side.main([f"{jobs}", "--folder", f"{tmp_path}", "--gpus", "2"])
    assert logs(tmp_path) == {"first": "0", "other": "1", "beside": "0", "both": "0,1 0"}


def test_a_gpu_is_kept_for_a_job_only_if_that_can_begin(tmp_path: Path) -> None:
    jobs = write(
        tmp_path,
        {"name": "first", "command": "true"},
        {
            "name": "third",
            "command": "test -e {folder}/second.log && echo third",
            "beside": "first",
            "after": ["second"],
        },
        {"name": "second", "command": "true", "after": ["first"]},
    )
    side_by_side.main([f"{jobs}", "--folder", f"{tmp_path}", "--gpus", "1"])
    assert logs(tmp_path)["third"] == "third"


def test_what_can_never_begin_is_not_waited_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = write(tmp_path, {"name": "large", "command": "true", "gpus": 2})
    side_by_side.main([f"{jobs}", "--folder", f"{tmp_path}", "--gpus", "1"])
    assert capsys.readouterr().out == "not begun: large\n"


def test_gpus_are_those_that_the_queue_may_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    jobs = write(tmp_path, {"name": "both", "command": "echo $CUDA_VISIBLE_DEVICES {gpu}", "gpus": 2})
    side_by_side.main([f"{jobs}", "--folder", f"{tmp_path}", "--gpus", "2"])
    assert logs(tmp_path) == {"both": "4,6 0"}


def test_a_table_may_stand_for_several_jobs(tmp_path: Path) -> None:
    jobs = write(
        tmp_path, {"each": ["a", "b"], "name": "tune-{each}", "command": "run {each}", "after": ["look-{each}"]}
    )
    assert jobs_in([jobs]) == [
        Job(name=f"tune-{each}", command=f"run {each}", after=(f"look-{each}",)) for each in ("a", "b")
    ]


def test_a_job_is_ended_with_all_that_it_started(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    jobs = write(
        tmp_path,
        {"name": "hangs", "command": "sleep 1000 & echo $!; sleep 1000", "seconds": 0.3},
        {"name": "next", "command": "echo 1 > {folder}/next.json", "after": ["hangs"]},
        {"name": "never", "command": "true", "after": ["unknown"]},
    )
    side_by_side.main([f"{jobs}", "--folder", f"{tmp_path}", "--gpus", "1", "--seconds", "1000"])
    if begun := (tmp_path / "hangs.log").read_text():
        wait_for_end(int(begun))  # it would sleep longer than a test may take
    assert (tmp_path / "next.json").read_text() == "1\n"
    assert capsys.readouterr().out.endswith("not begun: never\n")


def test_every_file_of_jobs_is_one() -> None:
    files = sorted(Path(side_by_side.__file__).with_name("jobs").glob("*.toml"))
    assert files
    for file in files:
        names = [job.name for job in jobs_in([file])]
        assert len(names) == len({*names})
        assert {name for job in jobs_in([file]) for name in (*job.after, job.beside) if name} <= {*names}


@pytest.mark.parametrize("name", ["one", "one/{each}"])
def test_jobs_without_names_of_their_own_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="names of their own"):
        jobs_in([write(tmp_path, {"each": ["a", "b"], "name": name, "command": "true"})])


@pytest.mark.parametrize("gpus", [{"gpus": 0}, {"gpus": 2, "beside": "first"}])
def test_a_job_has_one_gpu_or_more_and_beside_another_one(tmp_path: Path, gpus: dict[str, object]) -> None:
    jobs = write(tmp_path, {"name": "first", "command": "true"}, {"name": "second", "command": "true", **gpus})
    with pytest.raises(ValueError, match="second: a job has one GPU or more, and beside another one"):
        jobs_in([jobs])


def test_only_names_jobs_and_their_order(tmp_path: Path) -> None:
    jobs = write(
        tmp_path,
        {"each": ["a", "b"], "name": "one-{each}", "command": "date +%s%N"},
        {"name": "last", "command": "true", "after": ["one-a"]},
        {"name": "two", "command": "date +%s%N", "after": ["one-a", "last"]},
    )
    side_by_side.main([f"{jobs}", "--only", "two", "one-*", "--folder", f"{tmp_path}", "--gpus", "1"])
    found = logs(tmp_path)
    assert found.keys() == {"one-a", "one-b", "two"}
    assert int(found["one-a"]) < int(found["two"]) and int(found["one-a"]) < int(found["one-b"])
    with pytest.raises(ValueError, match="no job is named three; allowed: one-a, one-b, last, two"):
        side_by_side.main([f"{jobs}", "--only", "three", "--folder", f"{tmp_path}", "--gpus", "1"])


def test_a_job_beside_another_needs_that_one(tmp_path: Path) -> None:
    jobs = write(tmp_path, {"name": "first", "command": "true"}, {"name": "x", "command": "true", "beside": "first"})
    with pytest.raises(ValueError, match="others run on the GPU of first; fix: name them too"):
        side_by_side.main([f"{jobs}", "--only", "x", "--folder", f"{tmp_path}", "--gpus", "1"])
