"""Ranks that are started on this machine: real processes over gloo, two at a time."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.config.load import load_run
from penstock.parallel.launch.environment import Environment, LaunchFacts
from penstock.parallel.launch.local import LocalLaunch, facts_of_run, processes_to_start, run_processes
from tests.parallel.launch.ranks import add_up, when

SHELL = Environment(color=False, threads=None, world_size=1)


def launch(
    word: str, folder: Path, *, restarts: int = 0, ranks: int = 2, fewer: tuple[int, ...] = ()
) -> tuple[int, list[str]]:
    """Exit code of the ranks, and what the launcher said."""
    said: list[str] = []
    facts = LaunchFacts(world=ranks, local_world=ranks, cores=2)
    plan = LocalLaunch(processes=ranks, restarts=restarts, fewer=fewer, name="launch-1", facts=facts, say=said.append)
    others = set(multiprocessing.active_children())  # of the pool that other tests share
    code = run_processes(add_up, [word, str(folder)], plan)
    assert set(multiprocessing.active_children()) == others
    return code, said


def notes(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.glob("attempt-*"))}


def test_ranks_add_up_and_end_well(tmp_path: Path) -> None:
    before = dict(os.environ)
    assert launch("add", tmp_path) == (0, [])
    assert notes(tmp_path) == {"attempt-0-0": "3.0 2 launch-1 lo", "attempt-0-1": "3.0 2 launch-1 lo"}
    assert {name: os.environ.get(name) for name in before} == before
    assert "GLOO_SOCKET_IFNAME" not in os.environ


@pytest.mark.usefixtures("warm_ranks")
def test_a_rank_that_dies_is_started_again_with_the_others(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, (said,) = launch("die-once", tmp_path, restarts=1)
    assert code == 0 and re.fullmatch(r"rank 1 \(process \d+\) was ended by SIGKILL; restart 1 of 1", said)
    assert list(notes(tmp_path)) == ["attempt-0-0", "attempt-0-1", "attempt-1-0", "attempt-1-1"]
    assert set(notes(tmp_path).values()) == {"3.0 2 launch-1 lo"}
    assert "ChildFailedError" not in capfd.readouterr().err


@pytest.mark.usefixtures("warm_ranks")
def test_after_the_restarts_fewer_ranks_go_on_and_with_a_signal_all_again(tmp_path: Path) -> None:
    # Rank 0 of the two that are left is still starting: SIGTERM ends it at once.
    when(lambda: len(list(tmp_path.glob("ready-*"))) == 2, lambda: os.kill(os.getpid(), signal.SIGUSR1))
    code, said = launch("lose-one", tmp_path, ranks=3, restarts=1, fewer=(2, 1))
    assert code == 0
    died = r"rank 1 \(process \d+\) was ended by SIGKILL; "
    assert re.fullmatch(died + "restart 1 of 1", said[0])
    assert re.fullmatch(died + "the run goes on with 2 of 3 ranks", said[1])
    assert said[2:] == ["all 3 ranks start again, as SIGUSR1 asked"]
    worlds = {name: note.split()[1] for name, note in notes(tmp_path).items()}
    assert worlds == {
        f"attempt-{attempt}-{rank}": str(world) for attempt, world in enumerate((3, 3, 2, 3)) for rank in range(world)
    }


@pytest.mark.usefixtures("warm_ranks")
def test_a_signal_for_more_ranks_changes_nothing_while_all_run(tmp_path: Path) -> None:
    handler = signal.getsignal(signal.SIGUSR1)

    def ask_for_more_and_stop() -> None:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)

    when(lambda: len(list(tmp_path.glob("ready-*"))) == 2, ask_for_more_and_stop)
    assert launch("wait", tmp_path) == (143, [])
    assert signal.getsignal(signal.SIGUSR1) is handler


@pytest.mark.often("mistake-of-one*")
@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(
    ("word", "line"), [("mistake", "error: the text is bad"), ("mistake-of-one", "error: the text of rank 1 is bad")]
)
def test_a_mistake_is_one_line_and_nothing_is_restarted(
    word: str, line: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert launch(word, tmp_path, restarts=3) == (2, [])
    assert [text for text in capfd.readouterr().err.splitlines() if not text.startswith("[W")] == [line]
    assert len(notes(tmp_path)) == 2


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_reaches_the_ranks_and_their_code_comes_out(number: signal.Signals, code: int, tmp_path: Path) -> None:
    handler = signal.getsignal(number)  # the launcher must put it back
    when(lambda: len(list(tmp_path.glob("ready-*"))) == 2, lambda: os.kill(os.getpid(), number))
    assert launch("wait", tmp_path, restarts=3) == (code, [])
    assert len(notes(tmp_path)) == 2
    assert signal.getsignal(number) is handler


@pytest.mark.slow
def test_ranks_that_torchrun_restarts_meet_again(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "tests.parallel.launch.ranks", "die-once", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert list(notes(tmp_path)) == ["attempt-0-0", "attempt-0-1", "attempt-1-0", "attempt-1-1"]
    assert len(set(notes(tmp_path).values())) == 1, "a restart keeps the name of its launch"


def test_one_rank_for_each_gpu_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    run, on_cpu = load_run("debug", ["training.global_batch=32"]), load_run("debug", ["device=cpu"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert [processes_to_start(run, SHELL, asked) for asked in (None, 1, 4)] == [1, 1, 4]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert [processes_to_start(run, SHELL, asked) for asked in (None, 1, 4)] == [8, 1, 4]
    assert [processes_to_start(on_cpu, SHELL, asked) for asked in (None, 12)] == [1, 12]
    with pytest.raises(DeviceError, match="more than the GPUs of this machine; got 9; allowed: 8"):
        processes_to_start(run, SHELL, 9)


def test_a_small_batch_takes_as_many_gpus_as_divide_it_and_a_rank_starts_no_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    assert processes_to_start(load_run("debug"), SHELL, None) == 1
    assert processes_to_start(load_run("debug", ["training.micro_batch=1"]), SHELL, None) == 4
    rank = Environment(color=False, threads=None, world_size=1, started_by="torchrun")
    assert processes_to_start(load_run("debug"), rank, None) == 1
    with pytest.raises(DeviceError, match="torchrun has started the processes already; got --processes 2"):
        processes_to_start(load_run("debug"), rank, 2)


def test_the_run_adds_its_facts_to_the_machines() -> None:
    machine = LaunchFacts(vendor="nvidia", world=4, local_world=4)
    run = load_run("debug", ["training.deterministic=true"])
    facts = facts_of_run(run, machine)
    assert (facts.vendor, facts.world, facts.deterministic) == ("nvidia", 4, True)
    assert facts_of_run(load_run("debug", ["device=cpu"]), machine).vendor == "cpu"
