"""Two machines with names and addresses of their own: torchrun's rendezvous, layouts across, bad and cut links."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.cluster.hosts import Host, cluster_of, missing_rights
from tests.cluster.runs import ENDLESS, EVERY, RUN, VARIABLES, begins_of, losses_of, saved_steps, train_here, until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

STEPS = 20
SHORT = (*RUN, f"training.steps={STEPS}")
TORCHRUN = ("torchrun", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=left:29400")

Processes = Mapping[str, "subprocess.Popen[str]"]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Mapping[str, Host]]:
    """Two hosts."""
    if lacks := missing_rights():
        pytest.skip(lacks)
    with cluster_of(["left", "right"], tmp_path) as made:
        yield made


def start(hosts: Mapping[str, Host], folder: Path, *words: str, ranks: int = 2, restarts: int = 0) -> Processes:
    """Start the ranks of both hosts, as a person would; the run has the name `two`, and so has its launch."""
    options = [f"--nproc-per-node={ranks}", f"--max-restarts={restarts}", "--rdzv-id=two"]
    command = ["env", "--chdir", folder, *TORCHRUN, *options, "-m", "penstock", "train", *words, "--name", "two"]
    return {name: host.start(command, folder / f"{name}.out", VARIABLES) for name, host in hosts.items()}


def check_ends_well(processes: Processes, folder: Path) -> None:
    """Both torchruns end with 0."""
    for name, process in processes.items():
        assert process.wait(timeout=600) == 0, output(folder, name)


def output(folder: Path, name: str) -> str:
    """What torchrun has printed on a host."""
    return (folder / f"{name}.out").read_text()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The loss curve of one process."""
    return losses_of(train_here(tmp_path_factory.mktemp("alone"), STEPS, processes=1))


HIERARCHICAL = "dispatch.method=hierarchical"


@pytest.mark.parametrize(
    "words",
    [
        ("parallel.expert=4", HIERARCHICAL),
        ("parallel.pipeline=2", "parallel.expert=2"),
        ("parallel.shard=full",),
        ("parallel.context=2", "parallel.expert=4", HIERARCHICAL),
    ],
    ids=" ".join,
)
def test_a_layout_across_machines_has_the_loss_of_one_process(
    hosts: Mapping[str, Host], alone: list[float], words: tuple[str, ...], tmp_path: Path
) -> None:
    check_ends_well(start(hosts, tmp_path, *SHORT, *words), tmp_path)
    assert losses_of(tmp_path / "runs/two") == pytest.approx(alone, rel=1e-5)


def test_four_ranks_on_each_machine_exchange_tokens(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    batch = "training.global_batch=8"
    check_ends_well(start(hosts, tmp_path, *SHORT, batch, "parallel.expert=8", HIERARCHICAL, ranks=4), tmp_path)
    (tmp_path / "alone").mkdir()
    alone = losses_of(train_here(tmp_path / "alone", STEPS, 1, batch))
    assert losses_of(tmp_path / "runs/two") == pytest.approx(alone, rel=1e-5)


def test_delayed_and_lost_packets_change_no_loss(hosts: Mapping[str, Host], alone: list[float], tmp_path: Path) -> None:
    hosts["right"].power_off()
    hosts["right"].power_on(delay_seconds=0.005, loss=0.01)
    check_ends_well(start(hosts, tmp_path, *SHORT, "parallel.expert=4", HIERARCHICAL), tmp_path)
    assert losses_of(tmp_path / "runs/two") == pytest.approx(alone, rel=1e-5)


def wait_for_steps(folder: Path, steps: int) -> None:
    """Wait until the run has made so many steps."""
    until(lambda: len(losses_of(folder / "runs/two")) >= steps, f"{steps} steps", lambda: output(folder, "left"))


def wait_for_line(folder: Path, name: str, text: str) -> str:
    """Wait until a host prints a line with a text; returns the line."""
    until(lambda: text in output(folder, name), f"{name} prints {text}", lambda: output(folder, name))
    return next(line for line in output(folder, name).splitlines() if text in line)


def test_a_link_that_becomes_slow_is_named_by_the_run(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    start(hosts, tmp_path, *ENDLESS)
    wait_for_steps(tmp_path, 30)  # the first window that is judged has ended
    hosts["right"].limit("50mbit")
    line = wait_for_line(tmp_path, "left", "all ranks are late: ")
    assert "cause: network, no rank works longer, and the sum of gradients takes" in line


def test_the_doctor_names_a_slow_link(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    hosts["right"].limit("50mbit")
    check_ends_well(start(hosts, tmp_path, *SHORT, "profile.start=8"), tmp_path)
    words = [sys.executable, "-m", "penstock", "doctor", str(tmp_path / "runs/two")]
    printed = subprocess.run(words, env={**os.environ, **VARIABLES}, capture_output=True, text=True, check=True).stdout
    assert printed.startswith("communication: the network takes "), printed


def test_a_cut_link_is_an_end_on_both_sides_and_a_restart_goes_on(hosts: Mapping[str, Host], tmp_path: Path) -> None:
    words = (*ENDLESS, "parallel.expert=4", HIERARCHICAL, "host.timeout_minutes=1")
    start(hosts, tmp_path, *words)
    wait_for_steps(tmp_path, EVERY + 3)
    hosts["right"].unplug()
    cut = time.monotonic()
    wait_for_line(tmp_path, "left", "error: rank 2 on right, rank 3 on right: ended, or does not answer; got ")
    wait_for_line(tmp_path, "right", "error: rank 0 at left:")
    assert time.monotonic() - cut < 60.0 + 60.0  # the timeout, and what a busy machine adds
    before, newest = losses_of(tmp_path / "runs/two"), saved_steps(tmp_path / "runs/two")[-1]
    for host in hosts.values():
        host.power_off()
        host.power_on()
    start(hosts, tmp_path, *words)
    wait_for_steps(tmp_path, len(before) + 2)
    assert losses_of(tmp_path / "runs/two")[: len(before)] == before
    assert begins_of(tmp_path / "runs/two") == [0, newest]
