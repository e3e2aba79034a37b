"""Files that are there and may have been edited are written over only with --force."""

from pathlib import Path

import pytest

from tests.cli import answers

OWN = "# edited by hand\n"


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("plan debug-2l --on 8xH200 --write {}", "run.toml"),
        ("init {} --model debug --yes", "run.toml"),
        ("calibrate --output {}", "chip.toml"),
        ("launch slurm debug-2l --nodes 1 --gpus-per-node 1 --output {}", "job.sh"),
        ("launch kubernetes debug-2l --nodes 1 --gpus-per-node 1 --image a --claim b --output {}", "job.yaml"),
        ("data tokenizer train none.jsonl --vocabulary 300 --output {}", "tokenizer.json"),
        ("trace replay none.json --op mm --out {}", "replay.py"),
        ("ladder debug-2l --json {}", "ladder.json"),
    ],
)
def test_a_file_that_is_there_stays_as_it_is(
    words: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(OWN, encoding="utf-8")
    told = f"{name} is there already; fix: another name, or --force to write over it"
    assert told in answers.refused(words.format(name))
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [(name, OWN)]


def test_force_writes_over_it(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(OWN, encoding="utf-8")
    answers.outcome(*f"launch slurm debug-2l --nodes 1 --gpus-per-node 1 --output {script} --force".split())
    assert script.read_text(encoding="utf-8").startswith("#!/bin/bash\n")


@pytest.mark.parametrize(("place", "told"), [("gone/job.sh", "there is no folder"), (".", "is a folder")])
def test_a_place_that_takes_no_file_is_refused_before_any_work(place: str, told: str, tmp_path: Path) -> None:
    words = f"launch slurm debug-2l --nodes 1 --gpus-per-node 1 --output {tmp_path / place}"
    assert told in answers.refused(words)
