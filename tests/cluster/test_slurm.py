"""The printed script on a real Slurm: two machines with two ranks each train, are disturbed, and go on.

A disturbed run must equal one that nothing has disturbed, in every figure of every step.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.runs import ENDLESS, EVERY, RUN, STEPS, figures_of, losses_of, print_script, saved_steps, train_here
from tests.cluster.slurm import Slurm, missing, slurm_of

LACKS = missing()

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    *([pytest.mark.skip(reason=LACKS)] if LACKS else []),  # such a mark is one line for all tests
]

BEGUN = EVERY + 3  # steps before a disturbance
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED")


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """Three nodes, of which a job needs two."""
    with slurm_of(3, tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def undisturbed(slurm: Slurm, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a job that nothing has disturbed."""
    folder = tmp_path_factory.mktemp("undisturbed")
    job = slurm.submit(print_script(folder / "job.sh"), folder=folder)
    assert slurm.wait_for(job, *ENDED) == "COMPLETED", output(folder, job)
    return folder / "runs/debug"


def output(folder: Path, job: int | str) -> str:
    """What a job has printed so far."""
    path = folder / f"slurm-{job}.out"
    return path.read_text() if path.exists() else ""


@contextmanager
def losing_second_node(slurm: Slurm, job: int) -> Iterator[str]:
    """The second node of a job, which will be lost; it is repaired at the end."""
    name = slurm.nodes_of(job)[1]
    try:
        yield name
    finally:
        slurm.repair(name)


@contextmanager
def training(slurm: Slurm, folder: Path, *options: str) -> Iterator[int]:
    """A job that has made some steps, and is ended at the end."""
    job = slurm.submit(print_script(folder / "job.sh", *options, run=ENDLESS), folder=folder)
    try:
        slurm.until(lambda: len(losses_of(folder / "runs/debug")) >= BEGUN, f"{BEGUN} steps")
        yield job
    finally:
        slurm.run("scancel", str(job))
        slurm.wait_for(job, *ENDED)


def check_goes_on(slurm: Slurm, folder: Path, job: int, undisturbed: Path, step: int) -> None:
    """The job goes on from a step after one requeue, and makes the steps of the undisturbed run."""
    run = folder / "runs/debug"
    slurm.until(lambda: len(losses_of(run)) >= step + 3, f"the job goes on from step {step}")
    assert slurm.facts(job)["Restarts"] == "1"
    assert [path.name for path in (folder / "runs").iterdir()] == ["debug"]
    check_is_same(folder, undisturbed)


def check_is_same(folder: Path, undisturbed: Path) -> None:
    """The steps so far are those of the undisturbed run, which is made again with more steps if it has too few."""
    figures = figures_of(folder / "runs/debug")
    if len(figures) > STEPS:
        (folder / "again").mkdir()
        undisturbed = train_here(folder / "again", len(figures), processes=4)
    assert figures == figures_of(undisturbed)[: len(figures)]


def test_two_machines_compute_what_one_process_computes(undisturbed: Path, tmp_path: Path) -> None:
    together, alone = losses_of(undisturbed), losses_of(train_here(tmp_path, STEPS, processes=1))
    assert len(together) == STEPS
    assert together[:20] == pytest.approx(alone[:20], rel=1e-5)
    assert together == pytest.approx(alone, rel=0.02)  # sums have another order, so tokens near a tie change experts
    assert together[-1] < together[0] - 1.0


def test_srun_alone_starts_ranks_that_compute_the_same(slurm: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    words = ["srun", "--nodes=2", "--ntasks-per-node=2", "--gpus-per-node=2", "penstock", "train", *RUN]
    slurm.run(*words, folder=tmp_path, seconds=240.0)
    assert figures_of(tmp_path / "runs/debug") == figures_of(undisturbed)


def test_a_signal_stops_the_run_and_the_script_resumes_it(slurm: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    run = tmp_path / "runs/debug"
    with training(slurm, tmp_path) as job:
        slurm.run("scancel", "--signal=TERM", str(job))
        assert slurm.wait_for(job, *ENDED) == "FAILED"
    step = saved_steps(run)[-1]
    assert step == len(losses_of(run)) >= BEGUN
    assert f"stopped by SIGTERM after step {step} of" in output(tmp_path, job)
    steps = max(STEPS, step + 1)
    again = slurm.submit("job.sh", "--resume", f"training.steps={steps}", folder=tmp_path)
    assert slurm.wait_for(again, *ENDED) == "COMPLETED", output(tmp_path, again)
    assert len(losses_of(run)) == steps
    check_is_same(tmp_path, undisturbed)


def test_a_preempted_job_saves_leaves_and_goes_on(slurm: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    with training(slurm, tmp_path) as job:
        urgent = slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true", folder=tmp_path)
        assert slurm.wait_for(urgent, *ENDED) == "COMPLETED"
        step = saved_steps(tmp_path / "runs/debug")[-1]
        assert f"stopped by SIGTERM after step {step} of" in output(tmp_path, job)
        check_goes_on(slurm, tmp_path, job, undisturbed, step)


def test_a_job_is_requeued_at_its_time_limit(slurm: Slurm, undisturbed: Path, tmp_path: Path) -> None:
    with training(slurm, tmp_path, "--time=20", "--until-done") as job:
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # so the signal is due
        slurm.wait_for(job, "PENDING")
        step = saved_steps(tmp_path / "runs/debug")[-1]
        assert f"stopped by SIGTERM after step {step} of" in output(tmp_path, job)
        slurm.run("scontrol", "update", f"JobId={job}", "TimeLimit=20")
        check_goes_on(slurm, tmp_path, job, undisturbed, step)


def test_a_lost_machine_costs_the_steps_since_the_newest_checkpoint(
    slurm: Slurm, undisturbed: Path, tmp_path: Path
) -> None:
    with training(slurm, tmp_path) as job, losing_second_node(slurm, job) as name:
        slurm.hosts[name].power_off()
        check_goes_on(slurm, tmp_path, job, undisturbed, len(losses_of(tmp_path / "runs/debug")))
        assert name not in slurm.nodes_of(job)


def test_the_ranks_of_a_killed_slurmd_save_before_the_job_goes_on(
    slurm: Slurm, undisturbed: Path, tmp_path: Path
) -> None:
    with training(slurm, tmp_path) as job, losing_second_node(slurm, job) as name:
        slurm.kill_daemon(name)
        slurm.until(lambda: "stopped by SIGTERM" in output(tmp_path, job), "the run stops")
        check_goes_on(slurm, tmp_path, job, undisturbed, saved_steps(tmp_path / "runs/debug")[-1])
        assert name not in slurm.nodes_of(job)


def test_each_task_of_an_array_is_a_run(slurm: Slurm, tmp_path: Path) -> None:
    script = print_script(tmp_path / "job.sh", run=(*RUN, "training.steps=5", "schedule.warmup_steps=5"))
    array = slurm.submit("--array=0-1", script, "seed=%a", "--name=seed-%a", folder=tmp_path)
    for task in range(2):
        assert slurm.wait_for(f"{array}_{task}", *ENDED) == "COMPLETED", output(tmp_path, f"{array}_{task}")
        assert len(losses_of(tmp_path / f"runs/seed-{task}")) == 5
    assert losses_of(tmp_path / "runs/seed-0") != losses_of(tmp_path / "runs/seed-1")
