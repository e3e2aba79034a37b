"""Environment variables: the only file that reads or sets any, so everything that a shell can change is said here.

    NO_COLOR         no colors in the terminal (any value but empty)
    OMP_NUM_THREADS  threads of a CPU operator; without it, the cores that this process may use
    GOMP_SPINCOUNT   how often a waiting thread of a CPU operator looks before it sleeps; set, unless the shell has
                     set it or OMP_WAIT_POLICY
    WORLD_SIZE       set by torchrun and by Slurm wrappers; more than 1 is refused

Two variables are set, because the libraries that read them read nothing else: GOMP_SPINCOUNT, before PyTorch is
imported (so this file imports no PyTorch), and CUBLAS_WORKSPACE_CONFIG in deterministic mode. Threads that spin for
long hold up a machine that does anything else; threads that never spin are slow to wake
(docs/decisions/0011-threads.md).
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.base.errors import DeviceError

SPIN_COUNT = "20000"
"""Some tens of microseconds, about as long as a small operator takes; GNU OpenMP's default is 300,000."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """What the environment variables say.

    Attributes:
        color: terminal output may have colors.
        threads: threads of a CPU operator, or None if nobody chose.
        world_size: processes that were started together.
    """

    color: bool
    threads: int | None
    world_size: int


def read_environment(variables: Mapping[str, str] = os.environ) -> Environment:
    """Read every variable that Penstock listens to.

    Raises:
        DeviceError: a variable that should be a number is none, or several processes were started.
    """
    world_size = _whole_number(variables, "WORLD_SIZE") or 1
    if world_size > 1:
        raise DeviceError(
            "a run trains on one device, in one process",
            got=f"WORLD_SIZE={world_size}",
            fix="start `penstock train` once, without torchrun",
        )
    return Environment(
        color=not variables.get("NO_COLOR"),
        threads=_whole_number(variables, "OMP_NUM_THREADS"),
        world_size=world_size,
    )


def _whole_number(variables: Mapping[str, str], name: str) -> int | None:
    """Value of a variable, or None if it is unset or empty."""
    text = variables.get(name, "").strip()
    if not text:
        return None
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise DeviceError(f"environment variable {name} must be a whole number", got=repr(text), allowed="1 and up")
    return int(text)


def prepare_environment() -> None:
    """Set what libraries read when they are loaded. Call before PyTorch is imported; the shell's choice stands."""
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def make_cublas_deterministic() -> None:
    """Give cuBLAS the workspace rule that deterministic algorithms ask for. Call before a GPU is used."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
