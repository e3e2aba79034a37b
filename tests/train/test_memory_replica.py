"""The replica in memory belongs to its run and to its user alone."""

import os
from pathlib import Path

import pytest

from penstock.base.errors import RunFolderError
from penstock.train import memory_replica
from penstock.train.memory_replica import memory_folder, open_memory, remove_memory


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "memory").mkdir()
    monkeypatch.setattr(memory_replica, "MEMORY", tmp_path / "memory")
    return tmp_path / "memory"


def test_each_run_has_a_folder_of_its_own_for_this_user_alone(tmp_path: Path, memory: Path) -> None:
    one, other = open_memory(tmp_path / "runs" / "one"), open_memory(tmp_path / "runs" / "other")
    assert open_memory(tmp_path / "runs" / "one") == one != other
    assert {path.name for path in memory.iterdir()} == {one.name, other.name}
    assert one.stat().st_mode & 0o777 == 0o700
    (one / "step-000001").mkdir()
    remove_memory(tmp_path / "runs" / "one")
    remove_memory(tmp_path / "runs" / "one")  # which is gone
    assert [*memory.iterdir()] == [other]


@pytest.mark.parametrize("planted", ["open to others", "a link", "a file"])
def test_a_folder_that_others_may_have_planted_is_refused(planted: str, tmp_path: Path) -> None:
    folder = memory_folder(tmp_path / "run")
    if planted == "open to others":
        folder.mkdir()
        folder.chmod(0o777)
    elif planted == "a link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "elsewhere")
    else:
        folder.touch()
    with pytest.raises(RunFolderError, match=os.path.basename(folder)):
        open_memory(tmp_path / "run")


def test_a_machine_without_such_memory_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_replica, "MEMORY", tmp_path / "nowhere")
    with pytest.raises(RunFolderError, match="No such file or directory; fix: checkpoint.memory_every=0"):
        open_memory(tmp_path / "run")
