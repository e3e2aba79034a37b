"""`penstock init`: what it writes loads, trains, and was never there before."""

import json
from pathlib import Path

import pytest
import torch

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.presets.debug import debug
from penstock.config.run import Run
from tests.cli import answers

pytestmark = pytest.mark.usefixtures("text")


@pytest.fixture
def text(in_a_folder_of_its_own: None) -> None:
    """Notes enough that some of them are held out."""
    Path("notes").mkdir()
    for number in range(200):
        Path(f"notes/{number}.txt").write_text(f"note {number}\n" * 20)


def written(*arguments: str, file: str = "mine.toml") -> Run:
    assert main(["init", file, *arguments]) == 0
    return load_run(file)


def refused(*arguments: str) -> str:
    before = sorted(Path().iterdir())
    message = answers.refused("init", *arguments, starts=True)
    assert sorted(Path().iterdir()) == before, "nothing is written"
    return message


def test_a_file_has_the_preset_the_text_and_the_overrides(capsys: pytest.CaptureFixture[str]) -> None:
    run = written("--data", "notes", "training.steps=12")
    assert capsys.readouterr().out == "wrote mine.toml\nnext:  penstock train mine.toml\n"
    assert (run.name, run.data.source, run.data.files, run.data.tokenizer) == ("mine", "text", ("notes",), "bytes")
    assert run.schedule.warmup_steps == 1, "a tenth of the steps; the preset has 20"
    assert run.model == debug().model


def test_the_written_file_trains_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    written("--data", "notes", "training.steps=2", "record.tensorboard=false")
    assert main(["train", "mine.toml"]) == 0
    assert "done: 2 steps" in capsys.readouterr().out


def test_the_file_explains_itself() -> None:
    written("--data", "notes", "training.steps=20")
    lines = Path("mine.toml").read_text().splitlines()
    assert lines[lines.index("version = 1") + 1].startswith('preset = "debug"')
    assert lines[lines.index("steps = 20") - 1] == "# 10.2 k tokens in all, 512 in each step."
    settings = [line for line in lines if " = " in line and not line.startswith("#")]
    comments = [lines[lines.index(line) - 1] for line in settings[2:]]
    assert all(comment.startswith("# ") for comment in comments), "every field says what it means"


@pytest.mark.parametrize(
    ("model", "override"),
    [
        ("debug", "parallel.expert=2"),
        ("llama3.1-8b-1l", "model.attention.rope.llama3=none"),
        ("qwen3-0.6b-1l", "seed=3"),
    ],
)
def test_the_file_says_the_whole_run(model: str, override: str) -> None:
    fields = ["name=mine", "data.source=text", 'data.files=["notes"]', override]
    if torch.cuda.is_available():
        pytest.skip("the layout is planned")
    if model != "debug":
        fields += ["training.micro_batch=1", "training.global_batch=8", "training.sequence_length=512"]
    assert written("--model", model, "--data", "notes", override) == load_run(model, fields)


def test_without_options_the_preset_is_debug() -> None:
    assert written().model_copy(update={"name": "debug"}) == debug()


def test_overrides_win() -> None:
    run = written("optimizer.learning_rate=1e-3", "training.steps=70", "schedule.warmup_steps=9")
    assert (run.optimizer.learning_rate, run.training.steps, run.schedule.warmup_steps) == (1e-3, 70, 9)
    assert (
        written("training.micro_batch=2", "data.source=synthetic-random", "--force").data.source == "synthetic-random"
    )


def test_steps_of_a_large_model_are_small_on_a_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = written("--model", "qwen3-0.6b-1l", "--data", "notes")
    assert run.tokens_per_step == 4096  # 8 rows of 512


def test_text_is_read_by_the_end_of_its_name() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(200)))
    run = written("--data", "a.jsonl")
    assert (run.data.source, run.data.files) == ("jsonl", ("a.jsonl",))


def test_a_dataset_is_named_and_not_looked_at() -> None:
    run = written("--data", "allenai/c4", "data.dataset_config=en")
    assert (run.data.source, run.data.dataset, run.data.streaming) == ("huggingface", "allenai/c4", True)


def test_a_text_without_enough_to_hold_out_is_refused_with_the_fix() -> None:
    Path("letter.txt").write_text("a")
    assert "evaluation.rows" in refused("new.toml", "--data", "letter.txt")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused_with_the_fix() -> None:
    vocabulary = {"<|endoftext|>": 0} | {chr(33 + number): number + 1 for number in range(300)}  # 301 ids
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    Path("t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [end | flags], "model": model}))
    assert "a vocabulary of 301 or more" in refused("new.toml", "--data", "notes", "--tokenizer", "t.json")
    assert written("--data", "notes", "--tokenizer", "t.json", "model.vocab_size=384").model.vocab_size == 384


def test_a_model_that_this_machine_cannot_hold_is_refused() -> None:
    message = refused("new.toml", "--model", "deepseek-v3", "--data", "notes")
    assert message.startswith("new needs 12.3 TB for weights, gradients and optimizer alone")
    assert "penstock plan MODEL --on 64xMI300X --write" in message


def test_an_existing_file_is_kept_unless_forced() -> None:
    Path("mine.toml").write_text("precious")
    assert refused("mine.toml").startswith("FILE: mine.toml is there already")
    assert Path("mine.toml").read_text() == "precious"
    assert written("--force").name == "mine"
