"""What a typo means is said in one way, whatever was mistyped, and only for what resembles something."""

from pathlib import Path

import pytest

from penstock.base.errors import did_you_mean, did_you_mean_path
from tests.cli import answers


@pytest.mark.parametrize(
    ("line", "meant"),
    [
        ("trian debug", "train or trace"),
        ("config explian model.moe", "explain"),
        ("launch slrum debug --nodes 1 --gpus-per-node 1", "slurm"),
        ("layout debug --wrld 4", "--world"),
        ("launch slurm debug --nodes 1 --gpus-per-node 1 --vendor nvida", "nvidia"),
        ("config show deepsek-v3", "deepseek-v3"),
        ("config show DeepSeek-v2-lit-8l", "deepseek-v2-lite-8l"),
        ("config explain modle.moe", "model.moe"),
        ("config explain topk", "model.moe.top_k"),
        ("config validate debug training.stpes=3", "training.steps"),
        ("config validate debug training.precision=bf61", "bf16"),
        ("config validate debug kernels.expertss=triton", "kernels.experts"),
        ("config validate debug kernels.experts=tritno", "triton"),
        ("plan debug --on 8xH20O", "H200"),
        ("plan debug --on 8H200", "8xH200"),
        ("plan debug --on 8xmien.toml", "mine.toml"),
        ("plan debug --on 8xH200 --explain memroy", "memory"),
        ("plan debug --on 8xH200 --layout ppp=2", "pp"),
        ("plan debug --on 8xH200 --saving convetional", "conventional"),
        ("kernels list debug --device H20O", "H200"),
        ("ladder debug --only basline", "baseline"),
        ("config show my-rum.toml", "my-run.toml"),
        ("train runs/frist --resume", "runs/first"),
        ("report runs/frist", "runs/first"),
        ("trace runs/frist", "runs/first"),
        ("doctor runs/frist", "runs/first"),
        ("trace dif a b", "diff"),
        ("train debug --name frist --resume", "runs/first"),
        ("data inspect debug data.source=text data.files=bok.txt", "book.txt"),
    ],
)
def test_a_typo_is_answered_with_what_was_meant(
    line: str, meant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "first").mkdir(parents=True)
    for name in ("my-run.toml", "mine.toml", "book.txt"):
        (tmp_path / name).touch()
    assert f"; fix: did you mean {meant}?" in answers.refused(line)


def test_what_resembles_nothing_gets_no_proposal() -> None:
    assert did_you_mean("xyzzy", ("steps", "seed")) is None


def test_letters_case_does_not_count_and_the_name_is_given_as_it_is_written() -> None:
    assert did_you_mean("h20o", ("H100", "H200")) == "did you mean H200?"


def test_a_path_in_a_folder_that_is_not_there_gets_no_proposal(tmp_path: Path) -> None:
    assert did_you_mean_path(tmp_path / "gone" / "file") is None
    (tmp_path / "metrics.jsonl").touch()
    assert did_you_mean_path(tmp_path / "metric.jsonl") == f"did you mean {tmp_path / 'metrics.jsonl'}?"
