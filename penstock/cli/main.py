"""The command line's verbs, its exit codes, and how errors are shown.

Exit codes: 0 when done, 2 with one line on stderr when the user has something to mend, 130 when interrupted. A verb may
return another code. What is neither is a fault of ours: it keeps its traceback and exits with 1.
"""

import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from penstock.base.errors import WRONG_INPUT, PenstockError
from penstock.cli.verbs import Verb, group_of
from penstock.parallel.launch.environment import prepare_environment

VERBS = (
    Verb("train", "penstock.cli.train", "train", "Train a model: a preset, a TOML file, or a run folder."),
    Verb("export", "penstock.cli.export", "export", "Write a run's weights under Hugging Face names."),
    Verb("launch", "penstock.cli.launch", "app", "Print a job script for Slurm, or a manifest for Kubernetes."),
    Verb("config", "penstock.cli.config", "app", "List, show, explain, compare and check configurations."),
    Verb("layout", "penstock.cli.layout", "layout", "Show who holds what on any number of ranks, starting none."),
    Verb("plan", "penstock.cli.plan", "plan", "Say which layout fits a cluster, how fast it is, and why others not."),
    Verb("trace", "penstock.cli.trace", "app", "Say where the time of a step went, from a profiler's files."),
    Verb("doctor", "penstock.cli.doctor", "doctor", "Say which wall stands before a run, and what would win most."),
    Verb("ladder", "penstock.cli.ladder", "ladder", "Measure what each optimization is worth, on this machine."),
    Verb("calibrate", "penstock.cli.calibrate", "calibrate", "Measure this machine, for plans of runs on it."),
    Verb("kernels", "penstock.cli.kernels", "app", "List which kernels will run and why; measure them on this GPU."),
)

app = typer.Typer(cls=group_of(*VERBS), add_completion=False)


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context,
    show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Pretrain mixture-of-experts language models."""
    if show_version:
        print(f"penstock {_version()}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: what comes after `penstock`; None takes it from the process.

    Returns:
        The exit code.
    """
    try:
        prepare_environment()
        outcome = typer.main.get_command(app).main(arguments, prog_name="penstock", standalone_mode=False)
    except typer.TyperException as error:
        return _refuse(f"{error.format_message().rstrip('.')} (see --help)")
    except PenstockError as error:
        return _refuse(str(error), error.exit_code)
    return outcome if isinstance(outcome, int) else 0


def _refuse(message: str, code: int = WRONG_INPUT) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return code


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        return "(not installed: running from source)"
