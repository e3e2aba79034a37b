"""Penstock pretrains mixture-of-experts language models on PyTorch, from one laptop CPU to thousands of GPUs.

The names of docs/api.md are attributes of the package: `penstock.load_run`. A name imports its module when it is first
used, so `import penstock` stays as fast as it was, and what needs no PyTorch does not wait for it. No other
`__init__.py` holds code.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from penstock.base.errors import PenstockError as PenstockError
    from penstock.config.load import load_run as load_run
    from penstock.config.run import Run as Run
    from penstock.models.build import build_model as build_model
    from penstock.plan.hardware_file import parse_cluster as parse_cluster
    from penstock.plan.project import project as project
    from penstock.plan.projection import plan_json as plan_json
    from penstock.plan.search import search as search
    from penstock.plan.search_request import SearchRequest as SearchRequest
    from penstock.trace.analysis import analyse_files as analyse_files
    from penstock.trace.analysis import analysis_json as analysis_json
    from penstock.train.setup import Session as Session
    from penstock.train.setup import prepare as prepare
    from penstock.train.step import StepResult as StepResult
    from penstock.train.step import train_step as train_step

__version__ = "0.1.0"

_MODULES = {
    "PenstockError": "base.errors",
    "Run": "config.run",
    "load_run": "config.load",
    "build_model": "models.build",
    "Session": "train.setup",
    "prepare": "train.setup",
    "StepResult": "train.step",
    "train_step": "train.step",
    "parse_cluster": "plan.hardware_file",
    "SearchRequest": "plan.search_request",
    "search": "plan.search",
    "project": "plan.project",
    "plan_json": "plan.projection",
    "analyse_files": "trace.analysis",
    "analysis_json": "trace.analysis",
}

if not TYPE_CHECKING:  # a type checker would take any name for one of the package's

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module 'penstock' has no attribute {name!r}")
        value = globals()[name] = vars(import_module(f"penstock.{_MODULES[name]}"))[name]
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
