"""`penstock tune` on a real Slurm: trials of two machines with two ranks each in one job, and what disturbs them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.main import main
from penstock.plan.hardware_file import load_hardware
from tests.cluster.slurm import Slurm, missing, slurm_of
from tests.cluster.test_slurm import ENDED, output

LACKS = missing()

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900), *([pytest.mark.skip(reason=LACKS)] if LACKS else [])]

RUN = ("debug-2l", "device=cpu", "training.micro_batch=1", "training.sequence_length=64", "--budget", "1h")
FOLDER = "runs/tune-debug-2l"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Two nodes."""
    with slurm_of(2, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def submit(slurm: Slurm, folder: Path, *more: str) -> int:
    """Submit the script that `penstock launch slurm --tune` prints for two machines with two ranks each."""
    script = folder / "job.sh"
    words = ["launch", "slurm", *RUN, "--tune", "--nodes", "2", "--gpus-per-node", "2", "--output", str(script)]
    assert main(words) == 0
    return slurm.submit(script, "--steps", "6", *more, folder=folder)


def found_in(folder: Path) -> dict[str, Any]:
    """The JSON of a search."""
    found: dict[str, Any] = json.loads((folder / FOLDER / "tune.json").read_text())
    return found


def begun(folder: Path, number: int) -> bool:
    """Whether a trial has made a step."""
    metrics = folder / FOLDER / f"trials/trial-{number}/metrics.jsonl"
    return metrics.exists() and bool(metrics.read_text())


def test_trials_of_two_machines_run_in_one_job(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--trials", "3")
    assert slurm.wait_for(job, *ENDED) == "COMPLETED", output(tmp_path, job)
    found = found_in(tmp_path)
    assert [one["kind"] for one in found["trials"]] == ["ran"] * 3, output(tmp_path, job)
    assert found["ending"] == "3 trials were made"
    log = (tmp_path / FOLDER / "trials/trial-1.log").read_text()
    assert "4 x 64 tokens in 1 micro-batch on each of 4" in log, log
    (measured,) = (tmp_path / "runs/cache").glob("hardware-*-2x2.toml")
    node = load_hardware(str(measured)).node
    assert node.devices == 2 and node.link_bytes_per_second and node.network_bytes_per_second


def test_srun_alone_starts_a_search(slurm: Slurm, tmp_path: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "penstock", "tune", *RUN]
    told = slurm.run(*words, "--steps", "6", "--trials", "2", folder=tmp_path, seconds=600.0)
    assert "error: " not in told
    found = found_in(tmp_path)
    assert ([one["kind"] for one in found["trials"]], found["ending"]) == (["ran"] * 2, "2 trials were made")


def test_a_rank_that_is_killed_is_a_crash_of_its_trial_and_the_search_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--trials", "3")
    slurm.until(lambda: begun(tmp_path, 2), "the second trial trains")
    slurm.hosts["node2"].run(["pkill", "-KILL", "--newest", "-f", "trial-2"])
    assert slurm.wait_for(job, *ENDED) == "COMPLETED", output(tmp_path, job)
    kinds = [one["kind"] for one in found_in(tmp_path)["trials"]]
    assert kinds == ["ran", "crash", "ran"], output(tmp_path, job)
    assert "was ended by SIGKILL" in found_in(tmp_path)["trials"][1]["reason"]


def test_a_requeued_job_goes_on_with_nothing_measured_twice(slurm: Slurm, tmp_path: Path) -> None:
    job = submit(slurm, tmp_path, "--trials", "3")
    slurm.until(lambda: begun(tmp_path, 2), "the second trial trains")
    slurm.run("scontrol", "requeue", str(job))
    assert slurm.wait_for(job, *ENDED) == "COMPLETED", output(tmp_path, job)
    assert slurm.facts(job)["Restarts"] == "1"
    assert [one["kind"] for one in found_in(tmp_path)["trials"]] == ["ran"] * 3
    assert [path.name for path in (tmp_path / "runs").iterdir() if path.name != "cache"] == ["tune-debug-2l"]
    assert output(tmp_path, job).count("  1  the run as it is: ") == 2, "told again from its journal"
    assert len([path for path in (tmp_path / FOLDER / "trials").glob("trial-1*") if path.is_dir()]) == 1
