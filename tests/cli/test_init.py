"""`penstock init`: asked or told, what it writes loads, trains, and was never there before."""

import json
import sys
from pathlib import Path

import pytest
import torch

from penstock.cli import init as verb
from penstock.cli.init import tokens_of
from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.presets.debug import debug
from penstock.config.presets.registry import preset
from penstock.config.run import Run
from tests.cli import answers

ALL = ("--model", "debug", "--on", "here", "--data", "notes", "--tokenizer", "bytes", "--tokens", "10k")


@pytest.fixture(autouse=True)
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


# Told


def test_five_options_are_five_answers(capsys: pytest.CaptureFixture[str]) -> None:
    run = written(*ALL)
    assert capsys.readouterr().out == "wrote mine.toml\nnext:  penstock train mine.toml\n"
    assert (run.name, run.data.source, run.data.files, run.data.tokenizer) == ("mine", "text", ("notes",), "bytes")
    assert run.training.steps == 20  # 10,000 tokens, 512 in each step
    assert run.schedule.warmup_steps == 2, "a warm-up of 20 steps would be all of it"
    assert run.model == debug().model


def test_what_was_written_trains_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    written(*ALL, "training.steps=2", "record.tensorboard=false")
    assert main(["train", "mine.toml"]) == 0
    assert "done: 2 steps" in capsys.readouterr().out


def test_the_file_explains_itself() -> None:
    written(*ALL)
    lines = Path("mine.toml").read_text().splitlines()
    assert lines[1] == (
        "# Written by: penstock init mine.toml --model debug --on here --data notes --tokenizer bytes --tokens 10k"
    )
    assert lines[lines.index("version = 1") + 1].startswith('preset = "debug"')
    assert lines[lines.index("steps = 20") - 1] == "# Optimizer steps; 10.2 k tokens in all, 512 in each."
    settings = [line for line in lines if " = " in line and not line.startswith("#")]
    comments = [lines[lines.index(line) - 1] for line in settings[2:]]
    assert all(comment.startswith("# ") for comment in comments), "every field says what it means"


def test_yes_takes_the_usual_answers() -> None:
    assert written("--yes").model_copy(update={"name": "debug"}) == debug()


def test_overrides_win() -> None:
    run = written("--yes", "optimizer.learning_rate=1e-3", "training.steps=70", "schedule.warmup_steps=9")
    assert (run.optimizer.learning_rate, run.training.steps, run.schedule.warmup_steps) == (1e-3, 70, 9)
    assert written("--yes", "training.steps=70", "--force").schedule.warmup_steps == 7


def test_a_model_that_is_too_large_for_steps_of_a_cpu_gets_small_ones(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    run = written("--model", "qwen3-0.6b-1l", "--data", "notes", "--tokens", "100k", "--yes")
    assert (run.tokens_per_step, run.training.steps) == (4096, 25)  # 8 rows of 512
    assert "note: steps are small, 4,096 tokens: this machine has no GPU" in capsys.readouterr().out
    assert "# Note: steps are small" in Path("mine.toml").read_text()


# Text and tokenizers


def test_text_is_read_by_the_end_of_its_name() -> None:
    Path("a.jsonl").write_text("".join(json.dumps({"text": f"line {number}"}) + "\n" for number in range(200)))
    run = written("--yes", "--data", "a.jsonl", "--tokens", "10k")
    assert (run.data.source, run.data.files) == ("jsonl", ("a.jsonl",))
    assert run.evaluation.rows == debug().evaluation.rows


def test_a_dataset_is_named_and_not_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    run = written("--yes", "--data", "allenai/c4", "data.dataset_config=en")
    assert (run.data.source, run.data.dataset, run.data.streaming) == ("huggingface", "allenai/c4", True)
    assert "note: the dataset was not looked at: that needs the network" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "rows"), [("notes/1.txt", 64), ("letter.txt", 0)])
def test_the_end_of_one_document_is_evaluated_on_if_there_is_enough_of_it(
    name: str, rows: int, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("letter.txt").write_text("a")
    assert written("--yes", "--data", name, "--tokens", "10k").evaluation.rows == rows
    assert ("note: nothing is evaluated: " in capsys.readouterr().out) == (rows == 0)


def test_a_tokenizer_with_more_ids_gets_a_larger_vocabulary(capsys: pytest.CaptureFixture[str]) -> None:
    vocabulary = {"<|endoftext|>": 0} | {chr(33 + number): number + 1 for number in range(300)}  # 301 ids
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    end = {"id": 0, "content": "<|endoftext|>", "special": True}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    Path("t.json").write_text(json.dumps({"version": "1.0", "added_tokens": [end | flags], "model": model}))
    run = written("--yes", "--data", "notes", "--tokenizer", "t.json", "--tokens", "10k")
    assert run.model.vocab_size == 384  # 301 rounded up to a multiple of 128
    assert "note: model.vocab_size is 384: the tokenizer has 301 ids" in capsys.readouterr().out


# Clusters


def test_on_a_cluster_the_planner_chooses_the_layout(capsys: pytest.CaptureFixture[str]) -> None:
    run = written(
        "--model", "deepseek-v2-lite", "--on", "16xH200", "--data", "elsewhere/*.jsonl", "--tokens", "2h", "--yes"
    )  # fmt: skip
    text = Path("mine.toml").read_text()
    assert "# Planned for 16 H200 (2 nodes of 8), 150.8 GB each:" in text
    assert "penstock launch slurm mine.toml --nodes 2 --gpus-per-node 8" in text
    assert run.data.files == ("elsewhere/*.jsonl",)
    assert "elsewhere/*.jsonl is not on this machine, so it was not looked at" in capsys.readouterr().out
    tokens = run.training.steps * run.tokens_per_step
    assert 2 * 3600 * 16 * 1_000 < tokens < 2 * 3600 * 16 * 100_000, "two hours of 16 GPUs"
    assert run.model == preset("deepseek-v2-lite").model


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("1000", 1000), ("500M", 5e8), ("2B", 2e9), ("1.5T", 1.5e12), ("10 k", 1e4), ("1e9", 1e9), ("1_000,000", 1e6)],
)
def test_amounts_are_read_as_people_write_them(text: str, tokens: float) -> None:
    assert tokens_of(text) == tokens


# Refused


def test_a_model_that_this_machine_cannot_hold_is_refused() -> None:
    message = refused("new.toml", "--yes", "--model", "deepseek-v3", "--data", "notes")
    assert message.startswith("new needs 12.3 TB for weights, gradients and optimizer alone")
    message = refused("new.toml", "--yes", "--model", "deepseek-v2", "--on", "1xH100")
    assert "no layout of new fits 1 x H100" in message


def test_a_time_needs_a_known_speed() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert "say how many tokens, or name hardware" in refused("new.toml", "--yes", "--tokens", "3d")


def test_a_file_that_is_there_is_kept_unless_forced() -> None:
    Path("mine.toml").write_text("precious")
    assert refused("mine.toml", "--yes").startswith("FILE: mine.toml is there already")
    assert Path("mine.toml").read_text() == "precious"
    assert written("--yes", "--force").name == "mine"


# Asked


@pytest.fixture
def person(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A user at the terminal: answers with these lines, then end of input."""
    lines: list[str] = []

    def answer(question: str) -> str:
        sys.stdout.write(f"{question}\n")
        if not lines:
            raise EOFError
        return lines.pop(0)

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr(verb.sys.stdin, "isatty", lambda: True)
    return lines


def test_five_questions_are_asked_with_usual_answers(person: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    person += ["debug-2l", "", "notes", "", "5k"]
    run = written()
    assert (run.model.layers, run.data.files, run.training.steps) == (2, ("notes",), 10)
    out = capsys.readouterr().out
    assert out.count("?") == 5
    assert "Where? `here` is this machine, 64xMI300X a cluster [here]" in out
    assert "Such as 500M or 2B tokens, or for how long: 12h, 3d [614.4k]" in out


def test_only_what_was_not_told_is_asked(person: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    person += ["5k"]
    written(*ALL[:-2])
    assert capsys.readouterr().out.count("?") == 1


def test_a_wrong_answer_is_asked_again(person: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    person += ["debgu", "debug", "", "corpus", "notes", "", "many", "5k"]  # three wrong answers
    assert written().training.steps == 10
    out = capsys.readouterr().out
    assert "did you mean debug?" in out
    assert out.count("Which text?") == 2  # asked again after `corpus`


def test_somebody_who_leaves_gets_no_file(person: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    person += ["debug"]
    assert main(["init", "new.toml"]) == 2
    assert "no answer" in capsys.readouterr().err
    assert not Path("new.toml").exists()
