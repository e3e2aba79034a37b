"""Imports point down only: `make lint` reads the contract in pyproject.toml; what it cannot say is checked here."""

import ast
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import FrameType

import pytest
import torch

import penstock
from tests.promises.test_packaging import PROJECT, name_of
from tools import style

BARRED = {
    "penstock/layout/": ("torch.distributed", "layouts are arithmetic on integers"),
    "penstock/config/": ("penstock.models", "a run is described without building it"),
    "penstock/trace/": ("penstock.config", "traces of other systems can be read"),
    "penstock/plan/": ("penstock.train.loop", "a plan shares objects with the run, and runs nothing"),
}
"""Folder: (what nothing in it imports, why). Folders may be future ones, which import-linter does not allow."""


@cache
def product() -> list[style.Source]:
    """The files of the package, which one process reads for all tests of this file."""
    paths = sorted((style.ROOT / "penstock").rglob("*.py"))
    return [style.parse(path.relative_to(style.ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


def imported_modules(tree: ast.AST) -> list[str]:
    """Full names of what is imported anywhere below a node; `from a import b` gives `a.b`."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


def barred_imports(source: style.Source) -> list[str]:
    """Imports that the file's folder must not have."""
    return [
        f"{source.path} imports {name}: {reason}"
        for folder, (module, reason) in BARRED.items()
        if source.path.startswith(folder)
        for name in imported_modules(source.tree)
        if f"{name}.".startswith(f"{module}.")
    ]


def deferred_imports(source: style.Source) -> list[str]:
    """First-party imports inside functions: where cycles go to hide."""
    return [
        f"{source.path}:{function.lineno} imports {name} in {function.name}"
        for function in source.functions
        for name in imported_modules(function)
        if name.split(".")[0] == "penstock"
    ]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run import-linter in a folder that holds pyproject.toml and penstock/."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_an_import_that_points_up_and_a_folder_without_a_layer_are_seen(tmp_path: Path) -> None:
    shutil.copy(style.ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(style.ROOT / "penstock", tmp_path / "penstock", ignore=shutil.ignore_patterns("__pycache__"))
    upward, elsewhere = tmp_path / "penstock/base/upward.py", tmp_path / "penstock/elsewhere/__init__.py"
    upward.write_text("from penstock.models.build import build_model\n")
    result = lint_imports(tmp_path)
    assert result.returncode == 1 and "penstock.base.upward -> penstock.models.build" in result.stdout, result.stderr
    upward.unlink()
    elsewhere.parent.mkdir()
    elsewhere.write_text('"""A folder without a layer."""\n')
    result = lint_imports(tmp_path)
    assert result.returncode == 1 and "elsewhere" in result.stdout, result.stderr


def test_no_first_party_import_hides_in_a_function() -> None:
    assert [line for source in product() for line in deferred_imports(source)] == []


def test_no_folder_imports_what_it_must_not_know() -> None:
    assert [line for source in product() for line in barred_imports(source)] == []


def test_nothing_in_the_product_imports_tests_or_tools() -> None:
    names = {name.split(".")[0] for source in product() for name in imported_modules(source.tree)}
    assert not names & {"tests", "tools", "benchmarks"}


def test_the_product_imports_only_what_it_declares() -> None:
    declared = {name_of(requirement) for requirement in PROJECT["dependencies"]}
    declared |= {"penstock", "triton", "pydantic-core", "annotated-types"}  # the last two are parts of pydantic
    found = {(name.split(".")[0], source.path) for source in product() for name in imported_modules(source.tree)}
    strange = {(name, path) for name, path in found if name not in sys.stdlib_module_names}
    assert {(name, path) for name, path in strange if name_of(name) not in declared} == set()


def test_a_deferred_import_is_seen_in_a_nested_function() -> None:
    text = "def outer():\n    def inner():\n        from penstock.base import errors\n    return inner\n"
    assert deferred_imports(style.parse("penstock/x.py", text))


@pytest.mark.parametrize("line", ["import torch.distributed as dist", "from torch import distributed"])
def test_torch_distributed_is_seen_in_a_layout(line: str) -> None:
    assert barred_imports(style.parse("penstock/layout/grid.py", line))
    assert not barred_imports(style.parse("penstock/parallel/mesh.py", line))


@pytest.mark.skipif(torch.cuda.is_available(), reason="counted on a CPU")
def test_a_step_without_options_enters_as_few_files_as_docs_reading_says() -> None:
    text = (style.ROOT / "docs/READING.md").read_text(encoding="utf-8")
    (said,) = re.findall(r"everything optional off, enters (\d+)", text)
    session = penstock.prepare(penstock.load_run("debug", ["training.global_batch=8", "training.micro_batch=8"]))
    session.step(learning_rate=1e-3)
    entered = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(frame.f_code.co_filename)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        session.step(learning_rate=1e-3)
    finally:
        sys.setprofile(before)
    files = [name for name in entered if Path(name).is_relative_to(style.ROOT / "penstock")]
    assert len(files) == int(said), sorted(files)
