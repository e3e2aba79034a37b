"""Ranks that are started again find the run of their launch and go on with it."""

import multiprocessing
import re
import signal
import threading
import time
from pathlib import Path

import pytest

from tests.cli.test_train import at_step, in_a_folder_of_its_own, metrics_of, printed, process_as_it_was, refused

__all__ = ["in_a_folder_of_its_own", "process_as_it_was"]  # fixtures that every test here uses


def be_the_only_rank(monkeypatch: pytest.MonkeyPatch, *, launch: str, restarts: int = 0) -> None:
    """What torchrun would say to this process."""
    for name, value in {
        "RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": launch, "TORCHELASTIC_RESTART_COUNT": str(restarts),
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)


def test_a_run_says_what_is_in_force_in_its_environment(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    lines = printed(capsys, "tiny.toml").splitlines()
    assert lines[0].startswith("environment: ")
    assert "OMP_WAIT_POLICY=PASSIVE" in lines[0]
    assert not [line for line in lines[1:] if line.startswith("environment")]


@pytest.mark.often("options1")
@pytest.mark.parametrize("options", [(), ("--name", "first")])
def test_a_launch_that_starts_again_goes_on_with_its_run(
    options: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    printed(capsys, "tiny.toml", "--name", "whole")
    be_the_only_rank(monkeypatch, launch="job-7")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, 2, signal.SIGTERM)
        printed(capsys, "tiny.toml", *options, code=143)
    be_the_only_rank(monkeypatch, launch="job-7", restarts=1)
    printed(capsys, "tiny.toml", *options)
    name = options[1] if options else "tiny"
    assert metrics_of(f"runs/{name}") == metrics_of("runs/whole")
    assert sorted(path.name for path in Path("runs").iterdir()) == sorted([name, "whole"])
    assert "is finished" in printed(capsys, "tiny.toml", *options)


def test_another_launch_starts_another_run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for launch in ("job-7", "job-8"):
        be_the_only_rank(monkeypatch, launch=launch)
        printed(capsys, "tiny.toml")
    assert {path.name: (path / "launch").read_text() for path in Path("runs").iterdir()} == {
        "tiny": "job-7", "tiny-2": "job-8",
    }  # fmt: skip


def test_a_restart_that_does_not_know_its_run_starts_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    be_the_only_rank(monkeypatch, launch="none", restarts=1)
    assert "a restart does not know with which run it goes on" in refused(capsys, "tiny.toml")
    assert not Path("runs").exists()


def test_a_rank_that_is_killed_is_started_again_and_loses_nothing(
    capsys: pytest.CaptureFixture[str], warm_ranks: None
) -> None:
    longer = ("training.steps=40", "checkpoint.every=10")
    printed(capsys, "tiny.toml", *longer, "--name", "whole")

    others = multiprocessing.active_children()  # of the pool that other tests share

    def kill_after_the_first_checkpoint() -> None:
        while not Path("runs/broken/checkpoints/step-000010/manifest.json").exists():
            time.sleep(0.001)
        for child in set(multiprocessing.active_children()).difference(others):
            child.kill()

    watcher = threading.Thread(target=kill_after_the_first_checkpoint, daemon=True)
    watcher.start()
    text = printed(capsys, "tiny.toml", *longer, "--name", "broken", "--processes", "1", "--restarts", "1")
    watcher.join(timeout=10)
    assert re.search(r"rank 0 \(process \d+\) was ended by SIGKILL; restart 1 of 1", text)
    assert metrics_of("runs/broken") == metrics_of("runs/whole")
