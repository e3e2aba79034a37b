"""Packages that only some sources need, and that most people do not install."""

from importlib import import_module
from types import ModuleType

from penstock.base.errors import DataError


def require(module: str, *, extra: str, purpose: str) -> ModuleType:
    """Returns a module of a package that may be missing.

    Args:
        module: its dotted name.
        extra: name of the extra of Penstock that installs it.
        purpose: what needs it, as the beginning of a sentence.

    Raises:
        DataError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise DataError(
            f"{purpose} needs the package {module.partition('.')[0]}, which is not installed",
            fix=f"pip install 'penstock[{extra}]'",
        ) from error
