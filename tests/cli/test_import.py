"""`penstock import` as a user types it: a folder in, the start of a run out, or one line and nothing left behind."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.models.build import build_model
from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.saved import save_huggingface
from tests.train.tiny_run import tiny_run

SYNTHETIC = "data.source=synthetic-learnable"


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of dense weights beside the present one."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(1)
    save_huggingface(build_model(tiny_run(tmp_path, model=VARIANTS["qwen3"]), torch.device("cpu")), Path("theirs"))
    return Path("theirs")


def test_what_was_imported_trains_and_leaves_again(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = ("training.steps=2", "schedule.warmup_steps=0", "training.sequence_length=12", "training.precision=fp32")
    text = (SYNTHETIC, "evaluation.rows=0", "optimizer.learning_rate=0", "device=cpu")
    assert main(["import", "theirs", "--output", "mine", *short, *text]) == 0
    assert "next:  penstock train mine/run.toml" in capsys.readouterr().out
    assert main(["train", "mine/run.toml", "--name", "still"]) == 0
    for source in ("mine", "runs/still"):
        assert main(["export", source, f"out-{Path(source).name}", "--precision", "fp32"]) == 0
        out = load_file(f"out-{Path(source).name}/model.safetensors")
        assert all(torch.equal(out[name], tensor) for name, tensor in load_file("theirs/model.safetensors").items())


def test_an_export_may_be_compared_with_transformers(theirs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["import", "theirs", "--output", "mine", "--copies", "4", "--chosen", "2", SYNTHETIC]) == 0
    assert load_run("mine/run.toml").model.family == "qwen3-moe"
    assert main(["export", "mine", "out", "--precision", "fp32", "--verify"]) == 0
    assert "transformers computes the same logits: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ("nothing", "--output", "mine"),
            "error: cannot read nothing/config.json; got No such file or directory; fix: ",
        ),
        (("theirs", "--output", "theirs"), "error: theirs exists already; fix: give the name of a new folder"),
        (
            ("theirs", "--output", "mine", "model.rms_norm_eps=0.1"),
            "error: the weights decide the model; fix: leave out ",
        ),
        (("theirs", "--output", "mine", "--preset", "mixtral-8x7b-1l"), "error: weights do not belong to this model: "),
        (("theirs", "--output", "mine", "--copies", "2", "--chosen", "3"), "error: a dense model cannot be made one "),
        (("theirs", "--output", "mine", "trainng.steps=2"), "error: trainng is an unknown key"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_left(
    theirs: Path, words: tuple[str, ...], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["import", *words, SYNTHETIC]) == 2
    assert capsys.readouterr().err.startswith(line)
    assert [path.name for path in Path().iterdir()] == ["theirs"]
