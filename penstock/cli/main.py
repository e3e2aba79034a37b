"""Verbs of the command line, exit codes, and the form of errors.

`penstock --install-completion` lets the shell complete verbs, presets and fields (penstock/cli/signatures.py).

Exit codes: 0 when done, 2 with one line on stderr for an error that the user can mend, 130 when interrupted, 141 when
the reader of the output is gone. A verb may return another code. Any other exception is a bug: it keeps its traceback
and exits with 1.
"""

import os
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from errno import EACCES, EDQUOT, EIO, ELOOP, EMFILE, ENAMETOOLONG, ENFILE, ENOSPC, EPERM, EROFS
from typing import Annotated, Any

import typer

from penstock import __version__
from penstock.base.errors import WRONG_INPUT, PenstockError, asked, did_you_mean
from penstock.base.interrupts import INTERRUPTED, raise_again
from penstock.base.numbers import printable
from penstock.cli.verbs import Verb, group_of, on_one_screen
from penstock.parallel.launch.environment import prepare_environment

PIPE_CLOSED = 141  # exit code when the reader of standard output is gone, as with `| head -1`: that of SIGPIPE

# Causes of an OSError outside the program: the disk is full, the folder is read-only, ...
OF_THE_MACHINE = (ENOSPC, EDQUOT, EROFS, EACCES, EPERM, ENAMETOOLONG, ELOOP, EMFILE, ENFILE, EIO)

LONGEST_MESSAGE = 2000  # characters of an error; a longer one repeats a long value, so its middle is cut

VERBS = (
    Verb("init", "penstock.cli.init", "init", "Write a commented run file for this machine and a text."),
    Verb("train", "penstock.cli.train", "train", "Train a model: a preset, a TOML file, or a run folder."),
    Verb("sample", "penstock.cli.sample", "sample", "Print text from the weights of a run."),
    Verb("evaluate", "penstock.cli.evaluate", "evaluate", "Print loss and bits per byte of weights on text."),
    Verb("import", "penstock.cli.import_weights", "import_", "Start a run from weights with Hugging Face names."),
    Verb("export", "penstock.cli.export", "export", "Write a run's weights under Hugging Face names."),
    Verb("launch", "penstock.cli.launch", "app", "Print a job script for Slurm, or a manifest for Kubernetes."),
    Verb("data", "penstock.cli.data", "app", "Show what batches hold, pack text, train tokenizers.", computes=False),
    Verb("config", "penstock.cli.config", "app", "List, show, explain, compare and check configurations."),
    Verb("layout", "penstock.cli.layout", "layout", "Show the contents of each rank, on any number of ranks."),
    Verb("plan", "penstock.cli.plan", "plan", "Rank layouts on a cluster by speed; say why others are refused."),
    Verb(
        "trace", "penstock.cli.trace", "app", "Show where the time of a step went, from profiler traces.", False, False
    ),
    Verb(
        "doctor", "penstock.cli.doctor", "doctor", "Name the bottleneck of a run, and the gain of each remedy.", False
    ),
    Verb("report", "penstock.cli.report", "report", "Write one HTML page of a run, planned beside measured."),
    Verb("ladder", "penstock.cli.ladder", "ladder", "Measure what each optimization is worth, on this machine."),
    Verb("tune", "penstock.cli.tune", "tune", "Find the fastest configuration of a run here, by short trials."),
    Verb("prove", "penstock.cli.prove", "prove", "Train random layouts beside one process; shrink what differs."),
    Verb("preflight", "penstock.cli.preflight", "preflight", "Check this machine, and report faults."),
    Verb("calibrate", "penstock.cli.calibrate", "calibrate", "Measure this machine, for plans of runs on it."),
    Verb("kernels", "penstock.cli.kernels", "app", "List which kernels will run and why; measure them on this GPU."),
)

app = typer.Typer(cls=on_one_screen(group_of(*VERBS)), rich_markup_mode=None, add_completion=False)


@app.callback(invoke_without_command=True)
def penstock(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Pretrain mixture-of-experts language models."""
    if show_version:
        print(f"penstock {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, or that of the process without `arguments`, and return the exit code."""
    try:
        raise_again()  # `__main__` lets Ctrl-C end the imports at once
        prepare_environment()
        outcome = _command(arguments).main(arguments, prog_name="penstock", standalone_mode=False)
        sys.stdout.flush()
    except typer.TyperException as error:  # wrong usage
        return _refuse(f"{_shown(error.format_message().rstrip('.'))} (see --help)")
    except PenstockError as error:
        return _refuse(str(error), error.exit_code, error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        _print_nowhere()
        return PIPE_CLOSED
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):  # of which typer makes an exit with 1
            raise
        _print_nowhere()
        return PIPE_CLOSED
    except OSError as error:
        if error.errno not in OF_THE_MACHINE:
            raise
        _print_nowhere()
        where = "" if error.filename is None else f": {error.filename}"
        return _refuse(f"{error.strerror}{where}", error=error)
    except MemoryError as error:
        return _refuse("the memory of this machine, or what this process may have of it, is used up", error=error)
    return outcome if isinstance(outcome, int) else 0  # verbs return an exit code, or None


def _command(arguments: Sequence[str] | None) -> Any:
    """The program; options of completion only if no verb is named, since typer needs time to make them."""
    command = typer.main.get_command(app)
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0].startswith("-"):
        command.params += typer.main.get_install_completion_arguments()
    return command


_PROPOSED = re.compile(r"\.? (Did you mean |\(Possible options: )(?P<names>.+)[?)]$")
_NAME = re.compile(r"[^\s,']+")
_CHOICES = re.compile(r"'(?P<got>[^']*)' is not one of (?P<choices>.+)$")


def _shown(message: str) -> str:
    """A message of typer, with proposals in the form of all other errors."""
    message = message.replace("Value error, ", "")  # of pydantic, which checks choices for typer
    if match := _PROPOSED.search(message):
        return f"{message[: match.start()]}; fix: {asked(_NAME.findall(match['names']))}"
    if match := _CHOICES.search(message):
        fix = did_you_mean(match["got"], _NAME.findall(match["choices"]))
        return message if fix is None else f"{message}; fix: {fix}"
    return message


def _refuse(message: str, code: int = WRONG_INPUT, error: BaseException | None = None) -> int:
    """Print the line of an error, and its notes below; returns the exit code."""
    line = printable(" ".join(message.split()))  # a value in a message may have line breaks and control characters
    if len(line) > LONGEST_MESSAGE:
        line = f"{line[: LONGEST_MESSAGE // 2]} ... {line[-LONGEST_MESSAGE // 2 :]}"
    print(f"error: {line}", file=sys.stderr)
    causes = [] if error is None else [error, *([error.__cause__] if error.__cause__ else [])]
    notes = next((vars(cause)["__notes__"] for cause in causes if "__notes__" in vars(cause)), ())
    for note in notes:
        print(printable(note), file=sys.stderr)
    return code


def _print_nowhere() -> None:
    """Drop buffered output: Python would try to write it again at exit, and complain."""
    with suppress(OSError, ValueError):  # A replacement of standard output, as in tests, has no file.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
