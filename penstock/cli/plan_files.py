"""Files that `penstock plan` writes: a run that trains as it is, and pictures. Whole or not at all."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.base.errors import PenstockError
from penstock.cli.outputs import check_output
from penstock.cli.plan_print import cluster_text, conclusion
from penstock.config.load import dump_toml
from penstock.plan.projection import Plan, Projection
from penstock.report.export import find_browser, write_image
from penstock.report.figure import Figure
from penstock.report.page import write_page
from penstock.report.plotly_script import plotly_script

_SUFFIXES: Mapping[str, str] = {"--write": ".toml", "--html": ".html", "--png": ".png", "--svg": ".svg"}


def check_file(path: Path, option: str, *, force: bool = False) -> None:
    """Refuse a file that could not be written, and pictures that nothing here could draw, before anything is computed.

    Args:
        path: of the file.
        option: that asks for it.
        force: write over a run.

    Raises:
        PenstockError: it has another suffix, is a folder or a run that is there, or its folder is not there.
        PicturesError: Plotly is not installed, or no browser that draws images.
    """
    if path.suffix != _SUFFIXES[option]:
        raise PenstockError(f"{option} writes a file that ends in {_SUFFIXES[option]}", got=path)
    check_output(path, option, force=force or option != "--write")
    if option != "--write":
        plotly_script()
    if option in ("--png", "--svg"):
        find_browser()


def write_run(path: Path, plan: Plan) -> None:
    """Write the run of a plan's first candidate.

    Args:
        path: of the TOML file.
        plan: with a candidate.

    Raises:
        PenstockError: there is no candidate, or the file cannot be written.
    """
    if not plan.candidates:
        raise PenstockError(f"no layout of {plan.model} fits, so {path} is not written", fix="see --explain refused")
    text = run_text(plan.candidates[0])
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    except OSError as error:
        raise PenstockError(f"the run cannot be written to {path}", got=error.strerror) from error


def run_text(projection: Projection) -> str:
    """A file that loads as the run of a projection, and says what was projected."""
    head = (f"planned by penstock for {cluster_text(projection.cluster)}", conclusion(projection))
    return "".join(f"# {line}\n" for line in head) + f"\n{dump_toml(projection.run)}"


def write_pictures(path: Path, plan: Plan, more: Sequence[Figure]) -> list[Path]:
    """Write a page of a plan, or an image of each of its pictures, by the suffix of the path.

    Args:
        path: of the page; names of images begin with its stem.
        plan: what was found.
        more: pictures of what-ifs.

    Returns:
        The files.

    Raises:
        PicturesError: what draws pictures is not installed, or a file cannot be written.
    """
    if path.suffix == ".html":
        write_page(plan, path, more=more)
        return [path]
    return write_image(plan, path, more=more)
