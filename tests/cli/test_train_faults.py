"""What a run finds after a fault: damaged checkpoints and metrics, another process, a changed configuration."""

import errno
import json
import os
import shlex
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from penstock.config.load import dump_toml
from penstock.models.huggingface.tensor_file import fingerprint
from penstock.train import checkpoint
from penstock.train.manifest import FACTS, MANIFEST, _seal
from penstock.train.run_folder import locked
from tests.cli import answers
from tests.cli.test_train import everything, metrics_of
from tests.train.tiny_run import tiny_run

printed = partial(answers.printed, "train")
refused = partial(answers.refused, "train", starts=True)

LAST = Path("runs/tiny/checkpoints/step-000004")


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the finished run."""
    return tmp_path_factory.mktemp("finished")


@pytest.fixture(autouse=True)
def a_finished_run(in_a_folder_of_its_own: None, kept: Path) -> None:
    """Four steps, with checkpoints after the second and the last; the first test makes them."""
    if not any(kept.iterdir()):
        Path("tiny.toml").write_text(dump_toml(tiny_run(Path("runs"))), encoding="utf-8")
        printed("tiny.toml")
        shutil.copytree(".", kept, dirs_exist_ok=True)
    shutil.copytree(kept, ".", dirs_exist_ok=True)


def test_a_run_whose_first_save_found_no_space_begins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = metrics_of("runs/tiny")
    options = ("--name", "full", "checkpoint.every=1", "checkpoint.asynchronous=true")
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_parts", no_space)  # in the background: a step more is trained meanwhile
        assert "cannot write runs/full/checkpoints/step-000001" in refused("tiny.toml", *options)
    assert [line["step"] for line in metrics_of("runs/full")] == [1, 2]
    assert "runs/full has no checkpoint: it begins at its first step" in printed("runs/full", "--resume")
    assert [line["loss"] for line in metrics_of("runs/full")] == [line["loss"] for line in wanted]


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


WITHOUT_HELD_OUT = ("data.validation_share=0", "evaluation.rows=0", "evaluation.every=0", "checkpoint.every=0")


def test_a_record_that_cannot_be_read_ends_the_run_with_its_steps_saved_and_a_command_that_goes_on() -> None:
    texts = [{"text": f"def f{n}(x):\n    return x + {n}\n"} for n in range(60)]
    texts[32] = {"text": None}  # read in the third step
    Path("docs.jsonl").write_text("".join(json.dumps(text) + "\n" for text in texts), encoding="utf-8")
    options = ("data.source=jsonl", 'data.files=["docs.jsonl"]', "model.vocab_size=257", *WITHOUT_HELD_OUT)
    code, _, err = answers.outcome("train", "tiny.toml", "--name", "text", *options)
    assert (code, err) == (
        2,
        "error: docs.jsonl:33: field 'text' is not text; got NoneType; fix: data.corrupt=skip leaves out records that "
        "cannot be read\n"
        "newest checkpoint: step 2 of 4, runs/text/checkpoints/step-000002\n"
        "next:  penstock train runs/text --resume data.corrupt=skip\n",
    )
    printed(*shlex.split(err.splitlines()[-1])[3:])
    printed("tiny.toml", "--name", "skipping", *options, "data.corrupt=skip")
    assert metrics_of("runs/text") == metrics_of("runs/skipping")
    message = answers.refused("train", "tiny.toml", "--dry-run", *options)
    assert "1 of 60 sampled records cannot be read; docs.jsonl:33: field 'text' is not text; got NoneType" in message
    assert "; 1 of 60 sampled records cannot be read, such as docs" in printed(
        "tiny.toml", "--dry-run", *options, "data.corrupt=skip"
    )


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10  # one bit
    path.write_bytes(content)


def forge(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the facts of a checkpoint, with checksums that fit."""
    facts = json.loads((folder / FACTS).read_text())
    change(facts)
    (folder / FACTS).write_text(json.dumps(facts))
    manifest = json.loads((folder / MANIFEST).read_text())
    del manifest["seal"]
    manifest["files"][FACTS] = fingerprint(folder / FACTS)
    (folder / MANIFEST).write_text(json.dumps({**manifest, "seal": _seal(manifest)}))


DAMAGE: dict[str, Callable[[], object]] = {
    "flipped facts": lambda: flip(LAST / FACTS),
    "flipped manifest": lambda: flip(LAST / MANIFEST),
    "flipped tensors": lambda: flip(LAST / "tensors-00000-00000.safetensors"),
    "no manifest": lambda: (LAST / MANIFEST).unlink(),
    "no tensors": lambda: (LAST / "tensors-00000-00000.safetensors").unlink(),
    "random state": lambda: forge(LAST, lambda facts: facts["random"].update(torch="00")),
    "no random state": lambda: forge(LAST, lambda facts: facts.pop("random")),
    "place in the data": lambda: forge(LAST, lambda facts: facts["loader"].update(tokens="many")),
    "no model": lambda: forge(LAST, lambda facts: facts.pop("model")),
    "tokens seen": lambda: forge(LAST, lambda facts: facts["notes"].update(tokens_seen="many")),
    "facts of another shape": lambda: forge(LAST, lambda facts: facts.update(loader=[1])),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_run_goes_on_from_the_checkpoint_before_a_damaged_one_and_says_so(damage: str, kept: Path) -> None:
    DAMAGE[damage]()
    text = printed("runs/tiny", "--resume", "training.steps=5")
    (line,) = [line for line in text.splitlines() if "it is " in line]
    assert line.startswith(str(LAST))
    assert line.endswith(f"; it is {LAST}.damaged now, and the run goes on from step 2")
    assert Path(f"{LAST}.damaged").is_dir()
    if not (whole := kept.with_name("whole")).exists():
        printed("tiny.toml", "training.steps=5", "--name", "whole")
        shutil.copytree("runs/whole", whole)
    assert metrics_of("runs/tiny") == metrics_of(f"{whole}")


def test_a_damaged_checkpoint_ends_the_run_if_it_shall_not_fall_back() -> None:
    flip(LAST / FACTS)
    before = everything()
    message = refused("runs/tiny", "--resume", "training.steps=5", "checkpoint.fall_back=false")
    assert f"{LAST}/facts.json is damaged" in message
    assert message.endswith(f"fix: delete {LAST} to go on from the checkpoint before it")
    assert everything() == before


def test_a_run_without_any_whole_checkpoint_says_what_is_wrong_with_the_newest() -> None:
    shutil.rmtree(LAST.with_name("step-000002"))
    (LAST / MANIFEST).unlink()
    before = everything()
    message = refused("runs/tiny", "--resume", "training.steps=5")
    assert message.startswith(f"{LAST} is not a Penstock checkpoint; got no manifest.json")
    assert "; fix: delete " in message
    assert everything() == before


def test_a_checkpoint_of_another_model_is_no_damage() -> None:
    forge(LAST, lambda facts: facts["model"].update({"model.layers": 7}))
    before = everything()
    assert "is of another model" in refused("runs/tiny", "--resume", "training.steps=5")
    assert everything() == before


def test_two_processes_do_not_train_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.train.run_folder.locked", partial(locked, wait_seconds=0.1))
    with locked(Path("runs/tiny")):
        before = everything()
        message = refused("runs/tiny", "--resume", "training.steps=5")
        assert message.startswith(f"runs/tiny is in use: another process trains in it; got process {os.getpid()} on ")
        assert everything() == before
    printed("runs/tiny", "--resume", "training.steps=5")


def test_metrics_that_were_deleted_are_told_and_damaged_ones_do_not_stop_a_run() -> None:
    path = Path("runs/tiny/metrics.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:50], *lines[2:]]))
    text = printed("runs/tiny", "--resume", "training.steps=5")
    assert "runs/tiny/metrics.jsonl: left out 1 lines that are damaged or repeated" in text
    assert [line["step"] for line in metrics_of("runs/tiny")] == [1, 4, 5]
    path.unlink()
    text = printed("runs/tiny", "--resume", "training.steps=6")
    assert "runs/tiny/metrics.jsonl has no figures of steps 1 to 5: its lines are lost" in text
    assert [line["step"] for line in metrics_of("runs/tiny")] == [6]


def test_a_folder_in_the_place_of_metrics_is_one_line() -> None:
    Path("runs/tiny/metrics.jsonl").unlink()
    Path("runs/tiny/metrics.jsonl").mkdir()
    assert "runs/tiny/metrics.jsonl; got Is a directory" in refused("runs/tiny", "--resume", "training.steps=5")


def test_options_that_were_edited_between_two_starts_are_told() -> None:
    path = Path("runs/tiny/config.toml")
    path.write_text(path.read_text().replace("learning_rate = 0.01", "learning_rate = 0.02"))
    text = printed("runs/tiny", "--resume", "training.steps=5")
    assert "changed since step 4: training.steps 4 -> 5, optimizer.learning_rate 0.01 -> 0.02" in text
    assert "changed since" not in printed("runs/tiny", "--resume", "training.steps=5")


def test_lines_of_metrics_are_on_disk_before_the_checkpoint_of_their_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def note(descriptor: int) -> None:
        synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
        fsync(descriptor)

    monkeypatch.setattr("os.fsync", note)
    printed("tiny.toml", "--name", "again")
    assert synced.index("runs") < synced.index("metrics.jsonl")  # the name of the folder comes first
    for number, name in enumerate(synced):
        if name.startswith("tensors-"):
            assert "metrics.jsonl" in synced[max(0, number - 2) : number]


def test_a_finished_run_is_only_cleaned_of_what_a_kill_behind_its_last_checkpoint_left() -> None:
    left = LAST.with_name(".step-000002.removed-77")
    left.mkdir()
    before = everything()
    assert "runs/tiny is finished: all 4 steps are done" in printed("runs/tiny", "--resume")
    assert everything() == before and not left.exists()
    left.mkdir()
    with locked(Path("runs/tiny")):  # its process lives, and deletes it itself
        assert "is finished: all 4 steps are done" in printed("runs/tiny", "--resume")
    assert left.exists()
