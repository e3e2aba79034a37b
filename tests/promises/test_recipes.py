"""The recipes of CONTRIBUTING.md are followed to the letter, in a copy of the repository: files written, diffs applied.

The first line of a block names its file. A `diff` has no line numbers: between its lines `@@`, each part stands in the
file once as its lines that begin with a space or a minus say; a part of new lines only goes to the end of the file.
"""

import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.shown_commands import BLOCK, commands_in
from tools.style import findings_of, parse

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"# (?P<path>[\w./-]+/[\w.-]+)\n(?P<text>.*)", re.DOTALL)
MOST_FILES = {"Add a dispatcher": 5, "Add a remedy to the doctor": 3, "Add a chip": 1}
"""What a recipe may touch, tests apart."""


@dataclass(frozen=True)
class Recipe:
    """One section: blocks of files in their order, and the tests of its command."""

    name: str
    blocks: tuple[tuple[str, str, str], ...]  # kind, path and text
    tests: tuple[str, ...]
    chosen: str  # word in the names of those that run

    @property
    def files(self) -> set[str]:
        return {path for _, path, _ in self.blocks}


def recipes_in(text: str) -> Iterator[Recipe]:
    # The section behind them tells of smaller changes.
    for section in re.findall(r"^### (Add .*?)(?=^### |\Z)", text, flags=re.MULTILINE | re.DOTALL):
        named = [(block["kind"], NAMED.fullmatch(block["body"])) for block in BLOCK.finditer(section)]
        blocks = tuple((kind, match["path"], match["text"]) for kind, match in named if match)
        (command,) = (one for one in commands_in(section) if one.words[:3] == ["python", "-m", "pytest"])
        *tests, option, chosen = command.words[3:]
        assert option == "-k"
        yield Recipe(section.partition("\n")[0], blocks, tuple(tests), chosen)


def patched(text: str, diff: str) -> str:
    """A file with a diff applied."""
    for part in diff.split("@@\n"):
        lines = part.splitlines(keepends=True)
        before = "".join(line[1:] for line in lines if line[0] in " -")
        after = "".join(line[1:] for line in lines if line[0] in " +")
        if not before:
            text += after
            continue
        assert text.count(before) == 1, f"stands {text.count(before)} times in the file:\n{before}"
        text = text.replace(before, after)
    return text


RECIPES = {recipe.name: recipe for recipe in recipes_in((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))}


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository in which every recipe was followed."""
    folder = tmp_path_factory.mktemp("recipes") / "penstock"
    for name in ("penstock", "tests", "tools"):
        shutil.copytree(ROOT / name, folder / name)  # with what Python has compiled of it
    for name in ("benchmarks", "docs", "examples", "pyproject.toml", "README.md"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").unlink()
    shutil.copytree(ROOT / "docs", folder / "docs", ignore=shutil.ignore_patterns("pictures"))
    for recipe in RECIPES.values():
        for kind, name, body in recipe.blocks:
            path = folder / name
            assert path.exists() == (kind == "diff"), f"{name}: a diff is for a file that is there"
            path.write_text(patched(path.read_text(encoding="utf-8"), body) if kind == "diff" else body)
    run(folder, "tools.config_defaults")
    return folder


def test_there_is_a_recipe_for_each_thing_that_people_add() -> None:
    added = ("preset", "family", "kernels", "dispatcher", "chip", "remedy")
    assert len(RECIPES) == len(added) and all(word in name for word, name in zip(added, RECIPES, strict=True))


@pytest.mark.parametrize("name", MOST_FILES)
def test_a_recipe_touches_few_files(name: str) -> None:
    assert len({path for path in RECIPES[name].files if not path.startswith("tests/")}) <= MOST_FILES[name]


def test_what_the_recipes_write_passes_the_checks_of_style(followed: Path) -> None:
    written = sorted(path for recipe in RECIPES.values() for path in recipe.files if path.endswith(".py"))
    for words in (["check", "--quiet", *written], ["format", "--check", "--quiet", *written]):
        assert run(followed, "ruff", *words) == ""
    sources = [parse(path, (followed / path).read_text(encoding="utf-8")) for path in written]
    assert [finding for source in sources for finding in findings_of(source)] == []


def test_the_commands_of_the_recipes_pass_where_all_of_them_were_followed(followed: Path) -> None:
    recipes = [one for name, one in RECIPES.items() if name != "Add a dispatcher"]  # ranks are left to the slow test
    paths, chosen = [path for one in recipes for path in one.tests], " or ".join(one.chosen for one in recipes)
    printed = run(followed, "pytest", "-v", "-p", "no:cacheprovider", "-m", "not slow", *paths, "-k", chosen)
    passed = [line.lower() for line in printed.splitlines() if "PASSED" in line]
    assert [one.name for one in recipes if not any(one.chosen.lower() in line for line in passed)] == []


@pytest.mark.slow
def test_types_layers_and_the_tests_of_all_that_was_touched_hold_where_the_recipes_were_followed(
    followed: Path,
) -> None:
    run(followed, "tools.documents")
    run(followed, "pyrefly", "check")
    touched = ("config/presets", "models/huggingface", "moe/test_choose.py", "plan/test_transfers.py")
    tests = [f"tests/{name}" for name in (*touched, "tune/test_doctor.py")]
    run(followed, "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *tests)
    run(followed, "pytest", "-q", "-p", "no:cacheprovider", *RECIPES["Add a dispatcher"].tests, "-k", "returned")


def test_a_part_of_a_diff_that_does_not_stand_in_the_file_once_is_refused() -> None:
    assert patched("a\nb\n", " a\n+c\n") == "a\nc\nb\n"
    assert patched("a\n", "+b\n@@\n-a\n+d\n") == "d\nb\n"
    for diff in (" x\n+c\n", " a\n+c\n"):
        with pytest.raises(AssertionError, match="times in the file"):
            patched("a\na\n", diff)


def run(folder: Path, *module: str) -> str:
    """What `python -m MODULE` prints in a folder, where it must succeed; its `penstock` is that of the folder."""
    words = [sys.executable, "-m", *module]
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{shlex.join(words)}\n{result.stdout}{result.stderr}"
    return result.stdout
