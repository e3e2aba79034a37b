"""Errors that a user can cause and fix, and proposals for mistyped words.

An error prints as one line: what is wrong, what was got, what is allowed, how to fix it. The command line exits with
code 2, or with 75 if another rank was lost; any other exception is a bug and keeps its traceback.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path

# Exit codes.
WRONG_INPUT = 2  # the user must fix something
FAILED = 1
LOST = 75  # of a rank that lost another one, EX_TEMPFAIL: a restart may help


class PenstockError(ValueError):
    """A mistake in the user's input.

    `what` is the wrong fact, with the name of the field, file or option; `got` the offending value, if `what` does not
    have it; `fix` the command or change that fixes it.
    """

    exit_code = WRONG_INPUT
    resume_with: tuple[str, ...] = ()  # overrides with which a run that this error ended goes on
    is_of_all_ranks = False  # every rank of the run raises it, so one of them prints it

    def __init__(self, what: str, *, got: object = None, allowed: object = None, fix: str | None = None) -> None:
        self.what, self.got, self.allowed, self.fix = what, got, allowed, fix
        facts = {"got ": got, "allowed: ": allowed, "fix: ": fix}
        parts = [what, *(f"{label}{fact}" for label, fact in facts.items() if fact is not None)]
        super().__init__(" ".join("; ".join(parts).split()))


class ConfigError(PenstockError):
    """The description of a run is wrong: unknown preset or key, wrong type or range, impossible combination."""


class DataError(PenstockError):
    """Text or tokens cannot be used: missing, empty, not UTF-8, ids outside the vocabulary."""


class CheckpointError(PenstockError):
    """A checkpoint is damaged, foreign, or of another model, or cannot be written."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is not as it was saved, so an older checkpoint may serve."""


class NoSpaceError(CheckpointError):
    """A checkpoint does not fit on its disk."""


class RunFolderError(PenstockError):
    """The folder of a run exists already, or is not there when it should be."""


class DeviceError(PenstockError):
    """The machine cannot do what the run asks for."""


class HardwareError(PenstockError):
    """A description of hardware is wrong, or says nothing of what is asked."""


class TraceError(PenstockError):
    """A trace is damaged, empty, of another tool, or says nothing of what is asked."""


class LostRankError(DeviceError):
    """Another rank has ended or does not answer. Nothing can be mended here, and a restart may help."""

    exit_code = LOST


class KernelError(PenstockError):
    """An operator was given shapes or types that no backend accepts."""


class PicturesError(PenstockError):
    """A picture or page cannot be made here: a part that draws is missing, or the file cannot be written."""


class NonFiniteError(PenstockError):
    """Loss or gradients became NaN or infinite."""


def every_kind(kind: type[PenstockError] = PenstockError) -> dict[str, type[PenstockError]]:
    kinds = {kind.__name__: kind}
    for below in kind.__subclasses__():
        kinds |= every_kind(below)
    return kinds


@contextmanager
def system_errors(kind: type[PenstockError], what: str, fix: str | None = None) -> Iterator[None]:
    """Turn errors of the system (no space, no permission, ...) into an error of this kind."""
    try:
        yield
    except OSError as error:
        raise kind(what, got=error.strerror or error, fix=fix) from error


def nearest(got: object, names: Iterable[str], limit: int = 1) -> list[str]:
    """Names similar to a word, the best first; case does not count."""
    known = {name.lower(): name for name in names}
    return [known[word] for word in get_close_matches(f"{got}".lower(), known, n=limit)]


def did_you_mean(got: object, names: Iterable[str], limit: int = 1) -> str | None:
    """`did you mean train or trace?`, as the fix of an error; None if no name is similar."""
    return asked(nearest(got, names, limit))


def did_you_mean_path(got: Path) -> str | None:
    """The same for a missing file or folder, by the names beside it."""
    try:
        beside = [path.name for path in got.parent.iterdir() if not path.name.startswith(".")]
    except OSError:
        return None
    return asked([str(got.with_name(name)) for name in nearest(got.name, beside)])


def asked(names: Iterable[str]) -> str | None:
    """The question for names that are known to be similar."""
    names = list(names)
    return f"did you mean {' or '.join(names)}?" if names else None
