"""`import penstock` is fast and offers the names of docs/api.md, also to type checkers."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import penstock

ROOT = Path(__file__).parents[1]
LAZY = vars(penstock)["_MODULES"]
SCRIPT = """
import sys, penstock
assert not [name for name in sys.modules if name.startswith(("penstock.", "torch", "pydantic"))]
penstock.load_run, penstock.PenstockError, penstock.analyse_files
assert "torch" not in sys.modules
"""

STEP = """
import sys
import penstock.cli.train
from penstock import load_run
from penstock.train.setup import prepare
from penstock.train.step import train_step
session = prepare(load_run("debug-2l", ["checkpoint.enabled=false", "training.sequence_length=16"]))
batch = session.state.batches.next_batch()
train_step(session.model, session.state.optimizer, batch, session.rule, 1e-3)
session.state.batches.close()
slow = {"sympy", "torch._dynamo", "torch._inductor", "torch.distributed.tensor", "torch.distributed.fsdp"}
assert not slow & sys.modules.keys(), slow & sys.modules.keys()
"""


def test_a_step_without_shards_loads_neither_the_compiler_nor_sympy_which_take_as_long_as_pytorch() -> None:
    subprocess.run([sys.executable, "-c", STEP], check=True)


def test_the_import_loads_no_module_and_names_without_pytorch_do_not_load_it() -> None:
    subprocess.run([sys.executable, "-c", SCRIPT], check=True)


def test_type_checkers_see_the_names_that_are_imported_lazily() -> None:
    tree = ast.parse((ROOT / "penstock" / "__init__.py").read_text())
    guarded = [node for part in tree.body if isinstance(part, ast.If) for node in part.body]
    imports = [node for node in guarded if isinstance(node, ast.ImportFrom)]
    assert {name.asname: node.module for node in imports for name in node.names} == {
        name: f"penstock.{module}" for name, module in LAZY.items()
    }


def test_every_name_is_there_and_on_the_page() -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    assert {name for name in LAZY if not re.search(rf"\b{name}\b", page)} == set()
    assert all(getattr(penstock, name).__name__ == name for name in LAZY)
    assert set(LAZY) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="module 'penstock' has no attribute 'load_runs'"):
        vars(penstock)["__getattr__"]("load_runs")
