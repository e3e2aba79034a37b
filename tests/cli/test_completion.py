"""What shells are told that could come next: verbs, options, presets, fields, clusters; and how quickly."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.completion import proposals
from penstock.cli.main import VERBS, main
from penstock.config.presets.registry import PRESETS

PENSTOCK = str(Path(sys.executable).with_name("penstock"))


def offered(line: str) -> list[str]:
    """Words that are proposed for the last word of a line."""
    verb, *words = line.removeprefix("penstock ").split(" ")
    return [word for word, _ in proposals(verb, words[:-1], words[-1])]


def asked(capsys: pytest.CaptureFixture[str]) -> str:
    """What a shell gets that asks; what it asks stands in the environment."""
    with pytest.raises(SystemExit) as end:
        main([])
    captured = capsys.readouterr()
    assert (end.value.code, captured.err) == (0, "")
    return captured.out


# What is proposed


def test_a_target_is_a_preset_with_a_word_on_it() -> None:
    assert offered("penstock train ") == list(PRESETS)
    assert offered("penstock train debug-") == ["debug-softmax"]
    assert dict(proposals("train", (), "deepseek-v2-l")) == {
        "deepseek-v2-lite": "DeepSeek-V2-Lite: 15.7 B parameters, 2.7 B active"
    }


def test_what_comes_after_a_target_is_a_field_with_its_meaning() -> None:
    assert offered("penstock train debug training.st") == ["training.steps="]
    assert ("training.steps=", "Optimizer steps.") in proposals("train", ("debug", "seed=3"), "training.")
    assert offered("penstock train debug nothing") == []


def test_a_field_of_few_values_offers_them() -> None:
    assert offered("penstock train debug training.precision=") == ["training.precision=bf16", "training.precision=fp32"]
    assert offered("penstock train debug training.precision=f") == ["training.precision=fp32"]
    assert offered("penstock train debug training.steps=") == []


def test_options_are_offered_once() -> None:
    assert offered("penstock train debug --res") == ["--resume", "--restarts"]
    assert offered("penstock train debug --resume --res") == ["--restarts"]


def test_the_value_of_an_option_is_no_argument() -> None:
    assert offered("penstock train --processes 4 debu") == ["debug", "debug-softmax"]
    assert offered("penstock train --processes=4 debug seed") == ["seed="]
    assert offered("penstock train --name ") == [], "only its user knows the name"


def test_a_cluster_is_offered_with_the_devices_that_were_typed() -> None:
    assert offered("penstock plan deepseek-v3 --on 512xMI3") == ["512xMI300X", "512xMI325X", "512xMI355X"]
    assert "8xH200" in offered("penstock plan --on ")


def test_an_option_with_two_values_takes_two() -> None:
    assert "debug" in offered("penstock plan --on 8xH200 --compare debug ")
    assert offered("penstock plan --on 8xH200 --compare debug debug-softmax deb") == ["debug", "debug-softmax"]


def test_a_verb_of_verbs_offers_them() -> None:
    assert offered("penstock config ex") == ["explain"]
    assert offered("penstock config explain model.moe.top") == ["model.moe.top_k"]
    assert offered("penstock launch kubernetes --vendor ") == ["nvidia", "amd"]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_every_verb_has_something_to_offer(verb: object) -> None:
    assert "--help" in [word for word, _ in proposals(verb.name, (), "--h")]  # type: ignore[attr-defined]


# What shells see


def test_bash_gets_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    for words, place, found in (("penstock tr", 1, "train\ntrace\n"), ("penstock train debug-", 2, "debug-softmax\n")):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", f"{place}")
        assert asked(capsys) == found


def test_zsh_gets_words_with_their_meaning(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_zsh")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "penstock train debug-")
    text = asked(capsys)
    assert '"debug-softmax":"The same with a softmax router' in text
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "penstock pla")
    assert '"plan":"Rank layouts on a cluster by speed' in asked(capsys)


def test_fish_gets_words_with_their_meaning(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_fish")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "penstock train debug training.st")
    assert asked(capsys) == "training.steps=\tOptimizer steps.\n"


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
    assert str(tmp_path) in capsys.readouterr().out.replace("\n", "")


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
    environment = {**os.environ, "PATH": path, "PYTHONPROFILEIMPORTTIME": "1"}
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "debug-softmax\n"
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "penstock.config.presets.registry" in imported
    assert not imported & {"torch", "triton", "numpy"}
