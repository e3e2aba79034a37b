"""What shells are told that could come next: verbs, options, presets, fields, clusters; and how quickly."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer._click.shell_completion import CompletionItem
from typer._completion_classes import BashComplete

from penstock.cli.main import VERBS, app, main
from penstock.cli.verbs import Verb
from penstock.config.presets.registry import PRESETS

PENSTOCK = str(Path(sys.executable).with_name("penstock"))  # the installed program


def proposals(line: str) -> list[CompletionItem]:
    """What is proposed for the last word of a line."""
    *words, begun = line.split(" ")
    return BashComplete(typer.main.get_command(app), {}, "penstock", "_PENSTOCK_COMPLETE").get_completions(words, begun)


def offered(line: str) -> list[str]:
    return [proposal.value for proposal in proposals(line)]


def asked(capsys: pytest.CaptureFixture[str]) -> str:
    """What a shell gets that asks; what it asks stands in the environment."""
    with pytest.raises(SystemExit) as end:
        main([])
    captured = capsys.readouterr()
    assert (end.value.code, captured.err) == (0, "")  # completion ends the process
    return captured.out


# What is proposed


@pytest.mark.parametrize(
    ("line", "words"),
    [
        # A target is a preset; behind it come fields, and the values of a field of few values.
        ("train ", list(PRESETS)),
        ("train debug-", ["debug-softmax"]),
        ("train debug training.st", ["training.steps="]),
        ("train debug nothing", []),
        ("train debug training.precision=", ["training.precision=bf16", "training.precision=fp32"]),
        ("train debug training.precision=f", ["training.precision=fp32"]),
        ("train debug training.steps=", []),
        # Options are offered once, and the value of an option is no argument.
        ("train debug --res", ["--resume", "--restarts"]),
        ("train debug --resume --res", ["--restarts"]),
        ("train --processes 4 debu", ["debug", "debug-softmax"]),
        ("train --processes=4 debug seed", ["seed="]),
        ("train --name ", []),
        # A cluster has the devices that were typed; an option with two values takes two.
        ("plan deepseek-v3 --on 512xMI3", ["512xMI300X", "512xMI325X", "512xMI350X", "512xMI355X"]),
        ("plan --on 8xH200 --compare debug debug-softmax deb", ["debug", "debug-softmax"]),
        ("plan --on 8xH200 --compare debug debug-s", ["debug-softmax"]),
        # A verb of verbs offers them.
        ("config ex", ["explain"]),
        ("config explain model.moe.top", ["model.moe.top_k"]),
        ("launch kubernetes --vendor ", ["nvidia", "amd"]),
    ],
)
def test_words_are_proposed_for_the_last_word(line: str, words: list[str]) -> None:
    assert offered(line) == words


def test_a_proposal_has_its_meaning() -> None:
    (preset,) = proposals("train deepseek-v2-l")
    assert preset.help == "DeepSeek-V2-Lite: 15.7 B parameters, 2.7 B active"
    field = next(item for item in proposals("train debug seed=3 training.") if item.value == "training.steps=")
    assert field.help == "Optimizer steps."
    assert "8xH200" in offered("plan --on ")
    assert offered("export ") == offered("data pack ") == [], "the shell proposes files"


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_something_to_offer(verb: Verb) -> None:
    assert offered(f"{verb.name} --h")[-1] == "--help"


# What shells see


@pytest.mark.parametrize(
    ("shell", "variables", "told"),
    [
        ("bash", {"COMP_WORDS": "penstock tr", "COMP_CWORD": "1"}, "train\ntrace\n"),
        ("bash", {"COMP_WORDS": "penstock train debug-", "COMP_CWORD": "2"}, "debug-softmax\n"),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "penstock train debug-"}, '"debug-softmax":"The same with a softmax router'),
        ("zsh", {"_TYPER_COMPLETE_ARGS": "penstock pla"}, '"plan":"Rank layouts on a cluster by speed'),
        (
            "fish",
            {"_TYPER_COMPLETE_ARGS": "penstock train debug training.st", "_TYPER_COMPLETE_FISH_ACTION": "get-args"},
            "training.steps=\tOptimizer steps.\n",
        ),
    ],
)
def test_a_shell_gets_words_and_their_meaning(
    shell: str,
    variables: dict[str, str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {"_PENSTOCK_COMPLETE": f"complete_{shell}", **variables}.items():
        monkeypatch.setenv(name, value)
    text = asked(capsys)
    assert told in text if shell == "zsh" else text == told


@pytest.mark.parametrize(
    ("shell", "beginning"),
    [("bash", "_penstock_completion() {"), ("zsh", "#compdef penstock"), ("fish", "complete --command penstock")],
)
def test_every_shell_is_shown_its_script(
    shell: str, beginning: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    with pytest.raises(SystemExit):
        main(["--show-completion", shell])
    out = capsys.readouterr().out
    assert out.startswith(beginning)
    assert "_PENSTOCK_COMPLETE" in out


def test_completion_is_installed_where_the_shell_looks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(SystemExit):
        main(["--install-completion", "fish"])
    assert "penstock" in (tmp_path / ".config/fish/completions/penstock.fish").read_text()
    assert str(tmp_path) in capsys.readouterr().out.replace("\n", "")  # rich may break the line


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_itself_completes_and_nobody_waits_for_pytorch() -> None:
    script = """
    eval "$(_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION=1 penstock --show-completion bash)"
    COMP_WORDS=(penstock train debug-)
    COMP_CWORD=2
    _penstock_completion penstock
    printf '%s\\n' "${COMPREPLY[@]}"
    """
    path = f"{Path(PENSTOCK).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONPROFILEIMPORTTIME": "1"}  # lists imports on stderr
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "debug-softmax\n"
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "penstock.config.presets.registry" in imported
    assert not imported & {"torch", "triton", "numpy"}
