"""Documents prove themselves: links lead somewhere, commands are real, what repeats the code is generated.

Pages are rendered by cmark-gfm, as GitHub does it: its links are the ones that are followed, and no Markdown may stay
as it was typed.

A fenced block marked `bash` holds commands. Each line must be a command that this file knows how to check:

    make TARGET           the target exists
    penstock ...          verb, arguments and options exist; the presets and overrides of `train` are loaded as well
    git, cd, pip, ...     shown as they are (`SHOWN_ONLY`)

and anything else is refused. A block marked `bash run` is executed too, line by line, in an empty folder, and must
succeed. The README's lines are executed by a shell; `penstock` elsewhere starts warm (tests/warm.py). Blocks marked
`text`, `toml` or `python` are not commands. A block with a title, such as `toml title="book.toml"`, is the file of that
name in the folder where the document's commands run, and the reader's own `book.txt` is there, too.
"""

import os
import re
import subprocess
import sys
import tomllib
from html import unescape
from pathlib import Path

import pytest
import typer
from cmarkgfm import github_flavored_markdown_to_html
from typer.core import TyperGroup

from penstock.cli.main import app, main
from tests import warm
from tests.shown_commands import BLOCK, Command, commands_in, write_files
from tools import documents

SHOWN_ONLY = {"source", "git", "cd", "pip", "tensorboard", "python", "torchrun"}
LINK = re.compile(r'(?:href|src)="(?P<target>[^"]+)"')
CODE = re.compile(r"<(pre|code)\b.*?</\1>", re.DOTALL)
TABLE = re.compile(r"^<!--table.*?^<!--/table-->$", re.DOTALL | re.MULTILINE)
FREE_LINE = re.compile(r" *\||\[[\w-]+\]: ")
"""Rows of tables and targets of links, which cannot be wrapped."""
LONGEST_LINE = 160
PATH = re.compile(r"`(?P<path>(?:penstock|tests|tools|docs|benchmarks|\.ci)/[\w./-]*)(?::\d+)?`")
FILES = documents.markdown_files()
LONG = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in (
            *("index", "ladder", "metrics", "own-model", "plan", "preflight"),
            *("report", "start", "trace", "weights", "workflow"),
        )
    ),
)
"""Documents whose commands take longest, or are among those of README.md, which test_core_packages.py runs.

Only the slow tests run them all; others describe those that train.
"""


def name_of(path: Path) -> str:
    """Path of a document below the root."""
    return path.relative_to(documents.ROOT).as_posix()


def all_commands() -> list[Command]:
    """Every command of every document."""
    return [c for path in FILES for c in commands_in(path.read_text(encoding="utf-8"), name_of(path))]


def heading_names(text: str) -> set[str]:
    """Anchors of a document's headings, as Markdown viewers make them."""
    without_code = BLOCK.sub("", text)
    titles = re.findall(r"^#+ +(.*)$", without_code, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def dead_links(path: Path) -> list[str]:
    """Links and paths of a document that lead nowhere."""
    text = path.read_text(encoding="utf-8")
    found = []
    targets = [unescape(match["target"]) for match in LINK.finditer(github_flavored_markdown_to_html(text))]
    for target in (one for one in targets if not one.startswith(("http://", "https://", "mailto:"))):
        name, _, anchor = target.partition("#")
        there = (path.parent / name).resolve() if name else path
        if not there.exists():
            found.append(f"{target}: no such file")
        elif anchor and anchor not in heading_names(there.read_text(encoding="utf-8")):
            found.append(f"{target}: no such heading")
    found += [f"{m['path']}: no such file" for m in PATH.finditer(text) if not (documents.ROOT / m["path"]).exists()]
    return found


def markdown_left(text: str) -> list[str]:
    """Markdown that GitHub does not render: swallowed by HTML, or links and tables that look as they were typed."""
    page = github_flavored_markdown_to_html(text)  # leaves HTML out, with a note
    swallowed = page.count("raw HTML omitted") != 2 * len(TABLE.findall(BLOCK.sub("", text)))
    seen = unescape(re.sub(r"<[^>]*>", "", CODE.sub("", page)))
    return ["HTML"] * swallowed + [mark for mark in ("](", "][", "|--") if mark in seen]


def parse_penstock(words: list[str]) -> None:
    """Let the command line read the words without doing anything. Raises a TyperException for wrong ones."""
    context = typer.main.get_command(app).make_context("penstock", list(words))
    # A group keeps what comes after its own options; its verb reads that.
    while isinstance(context.command, TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, verb, rest = context.command.resolve_command(context, rest)
        assert verb is not None, "an unknown verb is an error by itself"
        verb = verb.load() if hasattr(verb, "load") else verb  # whose files need not be there
        context = verb.make_context(name, rest, parent=context)  # parses, and runs nothing


def fault(command: Command) -> str | None:
    """Why a command is wrong, or None."""
    program, *arguments = command.words
    if program in SHOWN_ONLY:
        return None
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (documents.ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        return next((f"no target {a}" for a in arguments if "=" not in a and a not in targets), None)
    if program != "penstock":
        return f"{program} is not a program that documents may show"
    try:
        parse_penstock(arguments)
    except typer.TyperException as error:
        return error.format_message()
    return None


def in_a_shell(command: Command, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Execute a line as it stands."""
    words = ["bash", "-c", command.line]
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def started_warm(command: Command, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Execute a line; without a shell and PyTorch's import if it is `penstock` and words alone."""
    if not command.line.startswith("penstock ") or set(command.line.split("#")[0]) & set("|&;<>$`*?(){}"):
        return in_a_shell(command, folder, environment)
    return warm.run(warm.penstock, command.words[1:], folder=folder, environment=environment)


def test_every_link_and_path_leads_somewhere() -> None:
    assert {name_of(path): dead for path in FILES if (dead := dead_links(path))} == {}


def test_github_renders_every_line_and_editors_show_it() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        assert markdown_left(text) == [], path
        raw = TABLE.sub("", BLOCK.sub("", text)).splitlines()
        free = name_of(path) in documents.GENERATED
        assert free or [line for line in raw if len(line) > LONGEST_LINE and not FREE_LINE.match(line)] == [], path
        assert name_of(path) != "README.md" or max(map(len, text.splitlines())) <= LONGEST_LINE


@pytest.mark.parametrize(
    "text",
    [
        "ends at\n<!--= a.json b .1f -->2.5<!--/--> bits ([page](a.md))",
        "reaches [1.85][a] times",
        "a <b>[1](a.md)</b>",
        "<div>\n[1](a.md)\n</div>",
        "text\n| a | b |\n|--|",
    ],
)
def test_markdown_that_github_does_not_render_is_seen(text: str) -> None:
    assert markdown_left(text) != []
    assert markdown_left("[1.85][a] `x[0](y)`\n<!--table a b-->\n| a |\n|--|\n<!--/table-->\n\n[a]: b.json") == []


def test_the_readme_clones_the_address_of_the_project() -> None:
    project = tomllib.loads((documents.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    address = project.get("urls", {}).get("Repository", "ADDRESS")
    readme = (documents.ROOT / "README.md").read_text(encoding="utf-8")
    assert f"git clone {address} penstock && cd penstock" in readme
    assert len(readme.splitlines()) <= 130


def test_every_command_is_one_that_exists() -> None:
    assert {str(command): wrong for command in all_commands() if (wrong := fault(command))} == {}


@pytest.mark.parametrize("command", [c for c in all_commands() if c.starts_a_run], ids=str)
def test_every_training_command_describes_a_run(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([*command.words[1:], "--dry-run"]) == 0, capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", [c for c in all_commands() if c.words[:2] == ["penstock", "launch"]], ids=str)
def test_every_job_that_is_shown_fits_its_machines(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.words[1:]) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=pytest.mark.slow) if name_of(path) in LONG else path
        for path in FILES
        if any(command.runs for command in commands_in(path.read_text(encoding="utf-8")))
    ],
    ids=name_of,
)
def test_every_block_marked_run_runs(path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    execute = in_a_shell if path.name == "README.md" else started_warm
    text = path.read_text(encoding="utf-8")
    write_files(text, tmp_path)
    for command in commands_in(text):
        if command.runs:
            result = execute(command, tmp_path, environment)
            assert result.returncode == 0, f"{command.line}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("name", documents.GENERATED)
def test_a_generated_document_is_fresh(name: str) -> None:
    assert (documents.ROOT / name).read_text(encoding="utf-8") == documents.GENERATED[name](), "run `make docs`"


@pytest.mark.parametrize(
    "line", ["make bread", "penstock bake", "penstock train --oven debug", "penstock config show", "rm -rf x"]
)
def test_a_command_that_does_not_exist_is_seen(line: str) -> None:
    assert fault(commands_in(f"```bash\n{line}\n```\n")[0]) is not None


@pytest.mark.parametrize(
    "text", ["[a](gone.md)", "[a](#gone)", "`penstock/base/gone.py`", "# Title\n[a](#titles)", "![a](gone.png)"]
)
def test_a_dead_link_is_seen(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.md").write_text(text)
    assert len(dead_links(tmp_path / "a.md")) == 1
    (tmp_path / "b.md").write_text("# A b, c\n[a](b.md#a-b-c) [b](https://x.org) `penstock/base/shapes.py:3`")
    assert dead_links(tmp_path / "b.md") == []


def test_comments_and_continued_lines_are_understood() -> None:
    text = "```bash run\nX=1 .venv/bin/penstock train \\\n  debug  # quick\n# only a comment\n```\n```text\nrm x\n```\n"
    commands = commands_in(text)
    assert [command.words for command in commands] == [["penstock", "train", "debug"]]
    assert commands[0].runs


ORDERS = [path for path in sorted(Path("penstock").rglob("__init__.py")) if "Reading order" in path.read_text()]


@pytest.mark.parametrize("path", ORDERS, ids=str)
def test_a_reading_order_names_what_is_there(path: Path) -> None:
    order = path.read_text().partition("Reading order")[2]
    for name in re.findall(r"`(\w+)`", order):
        assert (path.parent / f"{name}.py").is_file() or (path.parent / name).is_dir(), f"{path} names {name}"
