"""What `make train` installs is enough: every verb runs in a process that can import nothing else.

The process sees the standard library and a folder with links to the core dependencies of pyproject.toml and to what
these require. It runs the commands of README.md that are marked `bash run`, and one for each verb that is not among
them; each must do its work, or say in one line what this machine lacks.
"""

import json
import os
import subprocess
import sys
import tomllib
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from penstock.cli.main import VERBS
from tests import fresh_machine
from tests.shown_commands import commands_in
from tools import style

MORE = (
    "train runs/first --resume training.steps=22",
    "sample runs/first def",
    "evaluate runs/first --data runs/first/config.toml",
    "import weights --output back",
    "config diff deepseek-v2 deepseek-v3",
    "layout deepseek-v3 parallel.pipeline=16 parallel.expert=64 --world 2048",
    "launch slurm deepseek-v2-lite parallel.expert=8 --nodes 4 --gpus-per-node 8",
    "data inspect debug-2l",
    "kernels list debug",
    "plan debug-2l --on 2xH200 --layout ep=2 training.global_batch=8 --write best.toml --html plan.html",
)
"""Commands of verbs, and ways through them, that README.md does not run."""

ELSEWHERE = {
    "ladder": "trains what `train` trains, many times",
    "tune": "trains what `train` trains, many times",
    "prove": "trains what `train` trains, in processes that it starts",
    "init": "plans for this machine, as `plan` does",
    "preflight": "measures this machine for half a minute",
    "calibrate": "measures this machine for half a minute",
}
"""Verbs that are only imported here, and why."""

SLOW = "plan deepseek-v3"
"""The command that takes long; the plan of MORE goes the same way, and tests/fresh_machine.py runs it."""

REFUSED = (
    ("export runs/first again --verify", "pip install transformers"),
    ("train debug-2l record.wandb=offline --name w", "pip install 'penstock[wandb]'"),
    ("train debug-2l record.prometheus_port=9000 --name p", "pip install 'penstock[prometheus]'"),
    ("train debug-2l data.source=parquet data.files=a.parquet --name t", "pip install 'penstock[parquet]'"),
    ("train debug-2l data.source=huggingface data.dataset=a --name h", "pip install 'penstock[huggingface]'"),
    (
        "train debug-2l data.source=huggingface data.dataset=a data.streaming=true --name r",
        "needs the package datasets, which is not installed; fix: pip install 'penstock[huggingface]'",
    ),
    *(
        [("train debug-2l data.source=jsonl data.files=a.jsonl.zst --name z", "pip install 'penstock[zstd]'")]
        if sys.version_info < (3, 14)  # from then on Python reads .zst by itself
        else []
    ),
    ("train debug-2l data.tokenizer=a.model --name s", "pip install 'penstock[sentencepiece]'"),
    ("train debug-2l data.tokenizer=a.tiktoken --name k", "pip install 'penstock[tiktoken]'"),
)
"""Commands that need a package more, and what they say."""

PROGRAM = """
import io, json, sys, time
from contextlib import redirect_stderr, redirect_stdout
from importlib import import_module
from penstock.cli.main import VERBS, main

commands = json.loads(sys.stdin.read())
for verb in VERBS:
    import_module(verb.module)
for words in commands:
    printed, begin = io.StringIO(), time.monotonic()
    with redirect_stdout(printed), redirect_stderr(printed):
        code = main(words)
    print(json.dumps((code, time.monotonic() - begin, printed.getvalue())), flush=True)
"""


def core_distributions() -> list[str]:
    """Names of the core dependencies and of all that they require, without extras and without Triton."""
    project = tomllib.loads((style.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting, found = [Requirement(line) for line in project["dependencies"]], set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name in found | {"triton"} or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found.add(name)
        waiting += [Requirement(line) for line in distribution(name).requires or []]
    return sorted(found)


def link_packages(folder: Path, names: list[str]) -> None:
    """A folder in which these distributions, and no others, can be imported."""
    folder.mkdir()
    for files in map(distribution, names):
        for top in {file.parts[0] for file in files.files or []} - {"..", "__pycache__"}:
            if not (folder / top).exists():  # namespace packages come from several
                (folder / top).symlink_to(Path(str(files.locate_file(top))))


def in_core_environment(commands: list[list[str]], folder: Path) -> list[tuple[int, float, str]]:
    """Run commands one after the other in one process: exit code, seconds and output of each."""
    packages = folder / "packages"
    link_packages(packages, core_distributions())
    environment = {**os.environ, "PYTHONPATH": f"{style.ROOT}{os.pathsep}{packages}"}
    environment.pop("TRITON_INTERPRET", None)  # no kernel is interpreted: Triton is not there
    command = [sys.executable, "-S", "-c", PROGRAM]  # -S: without the packages of this interpreter
    told = {"cwd": folder, "env": environment, "input": json.dumps(commands)}
    result = subprocess.run(command, **told, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return [json.loads(line) for line in result.stdout.splitlines()]


@pytest.mark.timeout(900)
def test_every_verb_runs_with_the_core_dependencies_alone(tmp_path: Path) -> None:
    readme = [c for c in commands_in((style.ROOT / "README.md").read_text(encoding="utf-8")) if c.runs]
    lines = [c.words[1:] for c in readme if SLOW not in " ".join(c.words)]
    lines += [line.split() for line in MORE]
    left_out = {verb.name for verb in VERBS} - {words[0] for words in lines}
    assert left_out == set(ELSEWHERE), "a verb is missing in MORE"
    refused = [line.split() for line, _ in REFUSED]
    outcomes = in_core_environment(lines + refused, tmp_path)
    for words, (code, seconds, text) in zip(lines, outcomes, strict=False):
        assert code == 0, f"penstock {' '.join(words)} ({seconds:.1f} s)\n{text}"
    assert (tmp_path / "runs/first/report.html").stat().st_size > 10**6  # bytes; it holds the library that draws
    assert (tmp_path / "best.toml").is_file() and (tmp_path / "plan.html").is_file()
    for (line, advice), (code, _, text) in zip(REFUSED, outcomes[len(lines) :], strict=True):
        assert code == 2 and advice in text.splitlines()[-1], f"penstock {line}\n{text}"
    assert not any((tmp_path / "runs" / name).exists() for name in "wpthskrz") and not (tmp_path / "again").exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_first_pages_works_after_make_train(capsys: pytest.CaptureFixture[str]) -> None:
    assert fresh_machine.main([]) == 0, capsys.readouterr().out
