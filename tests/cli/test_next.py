"""Verbs end with the next useful command, and the command line takes every one of them."""

import json
import shlex
from pathlib import Path

from penstock.cli.output import next_line
from tests.cli import answers
from tests.promises.test_documents import parse_penstock
from tests.report.made_runs import host_folder, run_folder
from tests.train.tiny_run import byte_run, random_model, save_run

MARK = "next:  "  # of a proposed command


def _proposed(*arguments: object) -> list[str]:
    """The commands that a verb proposes; each of ours is one that the command line takes."""
    code, out, err = answers.outcome(*arguments)
    assert code == 0, arguments
    lines = [line.removeprefix(MARK) for line in (out + err).splitlines() if line.startswith(MARK)]
    for line in lines:
        program, *words = shlex.split(line)
        assert program in ("penstock", "python"), line
        if program == "penstock":
            parse_penstock(words)  # raises if the command line refuses them
    return lines


def test_words_are_quoted_for_a_shell() -> None:
    line = next_line("train", "my run", "recompute.modules=[]")
    assert line == "next:  penstock train 'my run' 'recompute.modules=[]'"


def test_a_run_leads_from_training_to_its_page(tmp_path: Path) -> None:
    run = f"{tmp_path}/runs/one"
    options = [f'record.folder="{tmp_path}/runs"', "evaluation.rows=0", "training.global_batch=1"]
    words = ["train", "debug-2l", "training.steps=1", "training.micro_batch=1", "schedule.warmup_steps=0", *options]
    assert _proposed(*words, "--name", "one", "--dry-run") == [shlex.join(["penstock", *words, "--name", "one"])]
    ends = [f"penstock sample {run} 'The '", f"penstock report {run}"]
    assert _proposed(*words, "--name", "one") == ends
    assert _proposed("train", run, "--resume") == [ends[0], f"penstock train {run} --resume training.steps=2"]


def test_a_recorded_run_leads_to_the_doctor_and_to_a_change(tmp_path: Path) -> None:
    folder = host_folder(tmp_path / "run")
    assert _proposed("trace", folder) == [f"penstock doctor {folder}"]
    change = f"penstock train {folder}/config.toml training.micro_batch=8"
    assert _proposed("doctor", folder) == [change]
    assert _proposed("doctor", folder / "profile") == [f"penstock report {folder}/profile --html report.html"]


def test_what_is_planned_checked_or_laid_out_leads_to_training(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('preset = "debug-2l"\n')
    file = tmp_path / "own.toml"
    assert _proposed("config", "validate", file, "seed=2") == [f"penstock train {file} seed=2"]
    assert _proposed("layout", file) == [f"penstock train {file} --fake-world 1 --rank 0"]
    best = tmp_path / "best.toml"
    assert _proposed("plan", file, "--on", "1xH200", "--only", "ep=1", "--top", 1) == [
        f"penstock plan {file} --on 1xH200 --only ep=1 --write best.toml"
    ]
    assert _proposed("plan", file, "--on", "1xH200", "--top", 1, "--write", best) == [f"penstock train {best}"]


def test_text_leads_from_a_tokenizer_to_packing_and_training(tmp_path: Path) -> None:
    text, tokenizer, prefix = (tmp_path / name for name in ("text.jsonl", "tokenizer.json", "packed"))
    text.write_text(json.dumps({"text": "the penstock feeds the turbine " * 20}) + "\n")
    made = _proposed("data", "tokenizer", "train", text, "--vocabulary", 270, "--output", tokenizer)
    assert made == [f"penstock data pack {text} --output packed/text --tokenizer {tokenizer}"]
    assert _proposed("data", "pack", text, "--output", prefix, "--tokenizer", tokenizer, "--processes", 1) == [
        f"penstock train debug data.source=packed data.files={prefix} model.vocab_size=270"
    ]


def test_a_tokenizer_leads_to_packing_with_the_options_that_its_text_needed(tmp_path: Path) -> None:
    text, tokenizer, cache = (tmp_path / name for name in ("text.jsonl", "tokenizer.json", "cache"))
    text.write_text(json.dumps({"content": "the penstock feeds the turbine " * 20}) + "\n{}\n")
    options = ["--text-field", "content", "--corrupt", "skip", "--cache", f"{cache}"]
    (line,) = _proposed("data", "tokenizer", "train", text, *options, "--vocabulary", 270, "--output", tokenizer)
    words = shlex.split(line)
    assert words == [
        *("penstock", "data", "pack", f"{text}", *options, "--output", "packed/text", "--tokenizer", f"{tokenizer}")
    ]
    assert answers.outcome(*words[1:], "--processes", 1)[0] == 0


def test_weights_lead_to_transformers_and_a_page_to_a_browser(tmp_path: Path) -> None:
    run = byte_run(tmp_path)
    folder, out = save_run(run, random_model(run)), tmp_path / "out"
    (line,) = _proposed("export", folder, out)
    python, flag, code = shlex.split(line)
    assert (python, flag) == ("python", "-c") and f"'{out}'" in code
    compile(code, "next", "exec")  # it is Python
    page = run_folder(tmp_path / "other")
    assert _proposed("report", page, "--no-plan") == [f"python -m webbrowser {page}/report.html"]
