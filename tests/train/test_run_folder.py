"""A run folder is there whole or not at all, has one owner, and goes on as what it was."""

import json
from pathlib import Path

import pytest

from penstock.base.errors import CheckpointError, RunFolderError
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.config.schema import leaves
from penstock.train import run_folder
from penstock.train.run_folder import (
    changes_since,
    check_is_free,
    check_name,
    check_same_run,
    create_run_folder,
    find_run_folder,
    free_name,
)
from tests.train.tiny_run import tiny_run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return tiny_run(tmp_path / "runs")


def test_a_new_folder_holds_the_resolved_configuration(run: Run) -> None:
    named, folder = create_run_folder(run, number_if_taken=True)
    assert folder.path == Path(run.record.folder) / "tiny"
    assert folder.exists
    assert sorted(path.name for path in folder.path.iterdir()) == [".lock", "checkpoints", "config.toml"]
    assert load_run(str(folder.path)) == named == run


def test_a_name_that_is_taken_gets_a_number(run: Run) -> None:
    names = [create_run_folder(run, number_if_taken=True)[1].path.name for _ in range(3)]
    assert names == ["tiny", "tiny-2", "tiny-3"]
    assert load_run(str(Path(run.record.folder) / "tiny-3")).name == "tiny-3"
    (Path(run.record.folder) / "tiny-4").write_text("")  # a file takes its name too
    assert free_name(Path(run.record.folder), "tiny") == "tiny-5"


def test_the_number_is_no_change_of_a_run_that_goes_on(run: Run) -> None:
    named = run.model_copy(update={"name": "tiny-2", "seed": run.seed + 1})
    saved = json.loads(json.dumps(leaves(run)))
    assert changes_since(saved, named) == [f"seed {run.seed} -> {run.seed + 1}"]


def test_a_chosen_name_that_is_taken_is_refused(run: Run) -> None:
    create_run_folder(run, number_if_taken=False)
    with pytest.raises(RunFolderError, match="tiny exists already; fix: --resume"):
        check_is_free(Path(run.record.folder), "tiny")
    with pytest.raises(RunFolderError, match="exists already"):
        create_run_folder(run, number_if_taken=False)
    assert [path.name for path in Path(run.record.folder).iterdir()] == ["tiny"]


def test_two_runs_that_start_at_once_get_two_folders(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def late_look(parent: Path, name: str) -> str:
        chosen = free_name(parent, name)
        if chosen == "tiny":
            (parent / "tiny").mkdir()
            (parent / "tiny" / "config.toml").write_text("")
        return chosen

    monkeypatch.setattr(run_folder, "free_name", late_look)
    monkeypatch.setattr(run_folder, "check_is_free", lambda parent, name: None)
    assert create_run_folder(run, number_if_taken=True)[1].path.name == "tiny-2"


@pytest.mark.parametrize("name", ["", "a/b", "..", ".hidden", "-x", "a b", "\N{LATIN SMALL LETTER E WITH ACUTE}"])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    with pytest.raises(RunFolderError, match="becomes a folder"):
        check_name(name)


def test_the_newest_run_of_a_name_is_found(run: Run) -> None:
    parent = Path(run.record.folder)
    for name in ("tiny", "tiny-2", "tiny-10", "tiny-x", "other-11"):
        (parent / name).mkdir(parents=True)
        (parent / name / "config.toml").write_text("")
    (parent / "tiny-11").mkdir()  # not the folder of a run
    assert find_run_folder(parent, "tiny", newest=True).path.name == "tiny-10"
    assert find_run_folder(parent, "tiny", newest=False).path.name == "tiny"
    for newest in (True, False):
        with pytest.raises(RunFolderError, match="there is no run gone in .*; fix: leave out --resume"):
            find_run_folder(parent, "gone", newest=newest)


def test_how_a_run_goes_on_may_change(run: Run) -> None:
    _, folder = create_run_folder(run, number_if_taken=True)
    free = ["training.steps=9", "optimizer.learning_rate=1.0", "checkpoint.every=1", "training.sequence_length=8"]
    free += ["model.moe.balance.aux_loss_coef=0.5", "model.moe.router.expert_bias_rate=0.0"]
    check_same_run(run, load_run(str(folder.path), free), folder)


@pytest.mark.parametrize(
    ("override", "field"),
    [
        ("model.layers=3", "model.layers"),
        ("model.moe.top_k=3", "model.moe.top_k"),
        ("seed=1", "seed"),
        ("data.document_mask=true", "data.document_mask"),
        ("training.precision=bf16", "training.precision"),
        ("record.folder=elsewhere", "record.folder"),
    ],
)
def test_what_a_run_is_may_not_change(override: str, field: str, run: Run) -> None:
    _, folder = create_run_folder(run, number_if_taken=True)
    cure = "start a new run" if field.startswith("model.") else f"penstock train --from {folder.path} .*{field}="
    with pytest.raises(
        CheckpointError, match=f"cannot be resumed with another {field}; got .*; allowed: .*; fix: .*{cure}"
    ):
        check_same_run(run, load_run(str(folder.path), [override]), folder)
