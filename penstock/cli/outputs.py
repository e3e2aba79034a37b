"""Files that verbs write where a user says, and that a user may have edited: over one that is there only with --force.

Pages and pictures are written over, since they are made from something else that is still there.
"""

from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import PenstockError

Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]


def check_output(path: Path, option: str, *, force: bool, makes_folder: bool = False) -> None:
    """Refuse a file that could not or should not be written, before anything is computed.

    Args:
        path: of the file.
        option: that names it.
        force: write over it.
        makes_folder: the folder is made where it is missing.

    Raises:
        PenstockError: it is a folder, its folder is not there, or it is there and `force` is not given.
    """
    if path.is_dir():
        raise PenstockError(f"{option}: {path} is a folder", fix="name a file in it")
    if path.is_file() and not force:
        raise PenstockError(f"{option}: {path} is there already", fix="another name, or --force to write over it")
    if not makes_folder and not path.absolute().parent.is_dir():
        raise PenstockError(f"{option}: there is no folder {path.parent}", fix="make it first")
