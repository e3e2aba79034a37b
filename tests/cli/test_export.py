"""`penstock export` says what it wrote, or in one line why not."""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.config.load import load_run
from tests.train.saved_run import random_model, save_run
from tests.train.test_loop import start
from tests.train.tiny_run import tiny_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that saved the second and the last."""
    _, folder = start(tiny_run(tmp_path_factory.mktemp("runs")))
    return folder.path


def _outcome(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = main(["export", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_newest_checkpoint_is_written_in_the_precision_of_the_run(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "out"
    assert _outcome(capsys, run_folder, folder) == (
        0,
        f"wrote {folder}: the weights of step 4 of {run_folder}, in fp32\n"
        "the tokenizer is not exported: the tokens of data.source=synthetic-learnable stand for no text\n",
        "",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_another_checkpoint_and_precision_can_be_chosen(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = _outcome(capsys, run_folder, tmp_path / "out", "--step", 2, "--precision", "bf16")
    assert (code, "step 2 of" in out, "in bf16" in out) == (0, True, True)
    _outcome(capsys, run_folder, tmp_path / "last", "--precision", "bf16")
    name = "model.layers.0.mlp.down_proj.weight"
    early, late = (load_file(tmp_path / folder / "model.safetensors")[name] for folder in ("out", "last"))
    assert str(early.dtype) == "torch.bfloat16"
    assert not early.equal(late)


def test_transformers_encodes_and_generates_what_sample_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = load_run("debug-2l", [f'record.folder="{tmp_path}"'])
    folder, out = save_run(run, random_model(run)), tmp_path / "out"
    assert _outcome(capsys, folder, out)[1].startswith(f"wrote {out}: the weights of step 1 of {folder}, in fp32, and")
    assert main(["sample", str(folder), "def ", "--tokens", "5"]) == 0
    printed = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (256, 256, 256)
    tokens = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert len(tokens[0]) == len("def ") + 5
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n" == printed


def test_what_cannot_be_exported_is_one_line(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text((run_folder / "config.toml").read_text())
    cases = {
        (
            tmp_path,
            tmp_path / "out",
        ): f"error: {tmp_path} is not the folder of a run; fix: give one, such as runs/debug",
        (run_folder, tmp_path): f"error: {tmp_path} exists already; fix: give the name of a new folder",
        (
            tmp_path / "empty",
            tmp_path / "out",
        ): f"error: {tmp_path}/empty has no checkpoint yet; fix: wait for the first",
        (run_folder, tmp_path / "out", "--step", 3): "error: there is no checkpoint of step 3 in ",
    }
    for arguments, line in cases.items():
        code, out, err = _outcome(capsys, *arguments)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(line)
    assert not (tmp_path / "out").exists()
