"""One process trains in a folder, and what dead processes left is found."""

import os
import signal
import time
from collections.abc import Iterator
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from penstock.base.errors import RunFolderError
from penstock.train import run_folder
from penstock.train.run_folder import (
    LOCK_FILE,
    RunFolder,
    complete_folder,
    create_run_folder,
    hidden_folder,
    locked,
    training_in,
)
from tests import warm
from tests.train.tiny_run import tiny_run


def _hold(folder: str, hides: bool) -> None:
    """Hold the lock of a folder, or make a hidden one and hold that, until the process is killed."""
    with hidden_folder(Path(folder), "tiny") if hides else locked(Path(folder)):
        Path(folder, "held").touch()
        signal.pause()


@pytest.fixture
def owner(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BaseProcess]:
    """A process that holds a lock."""
    process = warm.CONTEXT.Process(target=_hold, args=(str(tmp_path), request.param), daemon=True)
    process.start()
    while not (tmp_path / "held").exists():
        time.sleep(0.01)
    yield process
    process.kill()
    process.join()


@pytest.mark.parametrize("owner", [False], indirect=True)
def test_a_folder_that_is_in_use_is_refused_until_its_owner_is_dead(owner: BaseProcess, tmp_path: Path) -> None:
    told = f"{tmp_path} is in use: another process trains in it; got process {owner.pid} on .*, since .*; fix: wait"
    for _ in range(2):
        with pytest.raises(RunFolderError, match=told), locked(tmp_path, wait_seconds=0.1):
            pass
        os.kill(owner.pid or 0, signal.SIGSTOP)  # one that is stopped still owns it
    owner.kill()
    with locked(tmp_path) as notice:  # at once, without any clean-up by the dead
        assert notice == ""


@pytest.mark.parametrize("owner", [True], indirect=True)
def test_hidden_folders_of_dead_processes_are_deleted_and_those_of_living_ones_stay(
    owner: BaseProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_folder, "STALE_SECONDS", -60.0)
    run = tiny_run(tmp_path)
    (living,) = tmp_path.glob(".tiny.*")
    create_run_folder(run, number_if_taken=True)
    assert living.is_dir()
    owner.kill()
    owner.join()
    create_run_folder(run, number_if_taken=True)
    assert not living.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["held", "tiny", "tiny-2"]


def test_a_young_hidden_folder_may_be_about_to_be_locked_and_stays(tmp_path: Path) -> None:
    (tmp_path / ".tiny.young").mkdir()
    (tmp_path / ".tiny.young" / LOCK_FILE).touch()
    create_run_folder(tiny_run(tmp_path), number_if_taken=True)
    assert (tmp_path / ".tiny.young").is_dir()


def test_a_finished_folder_of_others_has_no_lock_in_it(tmp_path: Path) -> None:
    with complete_folder(tmp_path / "weights") as draft:
        (draft / "a").touch()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["a"]


def test_what_killed_processes_left_in_a_run_folder_is_deleted_by_the_next_start(tmp_path: Path) -> None:
    _, folder = create_run_folder(tiny_run(tmp_path), number_if_taken=True)
    kept = folder.checkpoints / "step-000004"
    for path in (kept, folder.checkpoints / ".step-000002.removed-123", folder.checkpoints / ".step-000006.partial-9"):
        path.mkdir()
        (path / "tensors").touch()
    (folder.path / ".config.toml.77.draft").touch()
    with training_in(folder):
        assert list(folder.checkpoints.iterdir()) == [kept]
        assert not list(folder.path.glob("*.draft"))


def test_a_folder_that_cannot_be_locked_is_one_line(tmp_path: Path) -> None:
    with (
        pytest.raises(RunFolderError, match="cannot lock .*gone; got No such file"),
        training_in(RunFolder(tmp_path / "gone")),
    ):
        pass


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("precious")
    (tmp_path / LOCK_FILE).symlink_to(tmp_path / "victim")
    with pytest.raises(RunFolderError, match="cannot lock"), training_in(RunFolder(tmp_path)):
        pass
    assert (tmp_path / "victim").read_text() == "precious"


def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*arguments: object) -> None:
        raise OSError(run_folder.errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", no_locks)
    with training_in(RunFolder(tmp_path)) as notice:
        assert notice == f"the file system of {tmp_path} has no locks: do not train in it from two processes"
