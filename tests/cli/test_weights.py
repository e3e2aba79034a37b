"""`penstock export`, `import` and `sample`: weights in and out, text from them, or one line why not."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.run import Data
from penstock.models.build import build_model
from penstock.train import saved_weights
from penstock.train.run_folder import RunFolder
from tests.cli import answers
from tests.models.families import save_huggingface
from tests.models.huggingface.family_models import VARIANTS
from tests.train.test_loop import start
from tests.train.tiny_run import byte_run, random_model, save_run, tiny_run


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps that saved the second and the last."""
    _, folder = start(tiny_run(tmp_path_factory.mktemp("runs")))
    return folder.path


exported = partial(answers.outcome, "export")


def test_the_newest_checkpoint_is_written_in_the_precision_of_the_run(run_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    assert exported(run_folder, folder) == (
        0,
        f"wrote {folder}: the weights of step 4 of {run_folder}, in fp32\n"
        "the tokenizer is not exported: the tokens of data.source=synthetic-learnable stand for no text\n",
        "",
    )
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


def test_another_checkpoint_and_precision_can_be_chosen(run_folder: Path, tmp_path: Path) -> None:
    code, out, _ = exported(run_folder, tmp_path / "out", "--step", 2, "--precision", "bf16")
    assert (code, "step 2 of" in out, "in bf16" in out) == (0, True, True)
    exported(run_folder, tmp_path / "last", "--precision", "bf16")
    name = "model.layers.0.mlp.down_proj.weight"
    # Steps 2 and 4.
    early, late = (load_file(tmp_path / folder / "model.safetensors")[name] for folder in ("out", "last"))
    assert str(early.dtype) == "torch.bfloat16"
    assert not early.equal(late)


@pytest.mark.parametrize("place", ["read_manifest", "check_there", "CheckpointFiles"])
def test_a_checkpoint_that_its_run_removes_meanwhile_is_replaced_by_the_newest(
    place: str, byte_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(byte_folder, tmp_path / "run"))
    (old,) = (folder / "checkpoints").iterdir()
    real = getattr(saved_weights, place)

    def rotate(*given: Any, **named: Any) -> Any:
        if old.is_dir():
            old.rename(old.with_name(f"step-{int(old.name[5:]) + 1:06}"))  # its content matters to no reader
        return real(*given, **named)

    with monkeypatch.context() as patch:
        patch.setattr(saved_weights, place, rotate)
        code, out, err = exported(folder, tmp_path / "out")
    assert (code, "the weights of step 2 of" in out, err) == (0, True, "")
    old.with_name("step-000002").rename(old)
    with monkeypatch.context() as patch:
        patch.setattr(saved_weights, place, rotate)
        assert sampled(folder, "def ", "--tokens", 4) == sampled(byte_folder, "def ", "--tokens", 4)
    old.with_name("step-000002").rename(old)
    with monkeypatch.context() as patch:
        patch.setattr(saved_weights, place, rotate)
        code, _, err = exported(folder, tmp_path / "of-step", "--step", 1)
    line = f"error: there is no checkpoint of step 1 in {folder / 'checkpoints'}; allowed: 2\n"
    assert (code, err, (tmp_path / "of-step").exists()) == (2, line, False)


def test_transformers_encodes_and_generates_what_sample_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    transformers = pytest.importorskip("transformers")
    run = load_run("debug-2l", [f'record.folder="{tmp_path}"'])
    folder, out = save_run(run, random_model(run)), tmp_path / "out"
    assert exported(folder, out)[1].startswith(f"wrote {out}: the weights of step 1 of {folder}, in fp32, and")
    assert main(["sample", str(folder), "def ", "--tokens", "5"]) == 0
    printed = capsys.readouterr().out
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert (model.config.eos_token_id, model.generation_config.eos_token_id, tokenizer.eos_token_id) == (256, 256, 256)
    tokens = model.generate(**tokenizer("def ", return_tensors="pt"), max_new_tokens=5, do_sample=False)
    assert len(tokens[0]) == len("def ") + 5  # bytes
    assert tokenizer.decode(tokens[0], skip_special_tokens=True) + "\n" == printed


def test_what_cannot_be_exported_is_one_line(run_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.toml").write_text((run_folder / "config.toml").read_text())
    out = tmp_path / "out"
    cases = {
        (tmp_path, out): f"error: {tmp_path} is not the folder of a run; fix: give one, such as runs/debug",
        (run_folder, tmp_path): f"error: {tmp_path} exists already; fix: give the name of a new folder",
        (tmp_path / "empty", out): f"error: {tmp_path}/empty has no checkpoint yet; fix: wait for the first",
        (run_folder, out, "--step", 3): "error: there is no checkpoint of step 3 in ",
    }
    for arguments, line in cases.items():
        code, printed, err = exported(*arguments)
        assert (code, printed, err.count("\n")) == (2, "", 1)
        assert err.startswith(line)
    assert not out.exists()


SYNTHETIC = "data.source=synthetic-learnable"  # text is not needed


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A folder of dense weights."""
    torch.manual_seed(1)
    save_huggingface(build_model(tiny_run(tmp_path, model=VARIANTS["qwen3"]), torch.device("cpu")), Path("theirs"))
    return Path("theirs")


def test_what_was_imported_trains_and_leaves_again(theirs: Path) -> None:
    short = ("training.steps=2", "schedule.warmup_steps=0", "training.sequence_length=12", "training.precision=fp32")
    text = (SYNTHETIC, "evaluation.rows=0", "optimizer.learning_rate=0", "device=cpu")  # weights do not change
    out = answers.printed("import theirs --output mine", *short, *text)
    assert "next:  penstock train mine/run.toml" in out
    assert main(["train", "mine/run.toml", "--name", "still"]) == 0
    for source in ("mine", "runs/still"):
        assert main(["export", source, f"out-{Path(source).name}", "--precision", "fp32"]) == 0
        out = load_file(f"out-{Path(source).name}/model.safetensors")
        assert all(torch.equal(out[name], tensor) for name, tensor in load_file("theirs/model.safetensors").items())


def test_a_config_alone_becomes_a_run_file(theirs: Path) -> None:
    (theirs / "model.safetensors").unlink()
    model = VARIANTS["qwen3"]
    for number, source in enumerate((theirs, theirs / "config.json")):
        out = answers.printed("import", source, "--output", f"mine{number}", "--config-only", SYNTHETIC)
        assert out.startswith(f"wrote mine{number}: ") and ", qwen3, without weights\nnext:  penstock train mine" in out
        assert [path.name for path in Path(f"mine{number}").iterdir()] == ["run.toml"]
        run = load_run(f"mine{number}/run.toml")
        assert (run.model, run.name, run.training.initial_weights) == (model, f"mine{number}", "")
    answers.printed(
        "import", theirs, "--output", "cut", "--config-only", "model.layers=1", "model.dense_layers=1", SYNTHETIC
    )
    assert load_run("cut/run.toml").model.layers == 1
    first = "theirs is a Hugging Face model, not a run; fix: import it first: penstock import theirs --output NAME"
    assert answers.refused("train", "theirs", "--dry-run") == f"{first} --config-only"


def test_prediction_that_the_files_lack_is_left_out_in_one_line(tmp_path: Path) -> None:
    """As `transformers` saves DeepSeek-V3: config.json says one layer, and no tensor has its name."""
    model = build_model(tiny_run(tmp_path, model=VARIANTS["deepseek-v3"]), torch.device("cpu"))
    save_huggingface(model, Path("theirs"))
    config = Path("theirs/config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": 1}))
    out = answers.printed("import theirs --output mine", SYNTHETIC)
    assert out.startswith("without multi-token prediction: the files have 0 of 1 layers\nwrote mine")
    assert load_run("mine/run.toml").model.mtp_layers == 0


def test_an_export_may_be_compared_with_transformers(theirs: Path) -> None:
    assert main(["import", "theirs", "--output", "mine", "--copies", "4", "--chosen", "2", SYNTHETIC]) == 0
    assert load_run("mine/run.toml").model.family == "qwen3-moe"
    # In fp32 logits are close.
    code, out, _ = answers.outcome("export", "mine", "out", "--precision", "fp32", "--verify")
    assert code == 0 and "transformers computes the same logits: " in out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("nothing", "--output", "mine"), "cannot read nothing/config.json; got No such file or directory; fix: "),
        (("theirs", "--output", "theirs"), "theirs exists already; fix: give the name of a new folder"),
        (("theirs", "--output", "mine", "model.rms_norm_eps=0.1"), "the weights decide the model; fix: leave out "),
        (("theirs", "--output", "mine", "--preset", "mixtral-8x7b-1l"), "weights do not belong to this model: "),
        (("theirs", "--output", "mine", "--copies", "2", "--chosen", "3"), "a dense model cannot be made one "),
        (("theirs", "--output", "mine", "trainng.steps=2"), "trainng is an unknown key"),
    ],
)
def test_what_is_wrong_is_one_line_and_nothing_is_left(theirs: Path, words: tuple[str, ...], line: str) -> None:
    assert answers.refused("import", *words, SYNTHETIC).startswith(line)
    assert [path.name for path in Path().iterdir()] == ["theirs"]


@pytest.fixture(scope="module")
def byte_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = byte_run(tmp_path_factory.mktemp("runs"))
    return save_run(run, random_model(run))


sampled = partial(answers.outcome, "sample")


def test_the_text_goes_on_and_is_the_same_each_time(byte_folder: Path) -> None:
    code, out, err = sampled(byte_folder, "def ", "--tokens", 20)
    assert (code, err) == (0, "")
    assert out.startswith("def ") and out.endswith("\n") and len(out) > len("def \n")
    assert sampled(byte_folder, "def ", "--tokens", 20)[1] == out
    assert sampled(byte_folder, "def ", "--tokens", 20, "--temperature", 2, "--seed", 3)[1] != out


def test_a_text_of_nothing_begins_a_document_and_a_long_one_fills_the_context(byte_folder: Path) -> None:
    assert sampled(byte_folder, "", "--tokens", 3)[0] == 0
    code, out, _ = sampled(byte_folder, "a" * 31, "--tokens", 9)  # a context of 32
    assert code == 0
    assert len(out) <= 31 + 2  # one token more, and the end of the line


def test_what_cannot_be_sampled_is_one_line(byte_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    RunFolder(tmp_path / "empty").write_config(byte_run(tmp_path))
    synthetic = byte_run(tmp_path, data=Data(source="synthetic-random"), name="synthetic")
    cases = {
        (tmp_path, "a"): f"error: {tmp_path} is not the folder of a run",
        (tmp_path / "empty", "a"): f"error: {tmp_path / 'empty'} has no checkpoint yet",
        (byte_folder, "a", "--step", 7): "error: there is no checkpoint of step 7 in",
        (byte_folder, "a" * 32): "error: the text leaves no room in the context of the run; got 32 tokens; allowed: at",
        (byte_folder, "\udcff"): "error: the text is not UTF-8; got '\\udcff'",
        (save_run(synthetic, random_model(synthetic)), "a"): "error: the tokens of data.source=synthetic-random stand",
        (byte_folder, "a", "--top-p", 2): "error: Invalid value for '--top-p'",
        (byte_folder, "a", "--temperature", -1): "error: Invalid value for '--temperature'",
    }
    for arguments, line in cases.items():
        code, out, err = sampled(*arguments)
        assert (code, out, err.count("\n")) == (2, "", 1), arguments
        assert err.startswith(line), err
