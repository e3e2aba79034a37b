"""Figures as PNG or SVG, drawn by a headless Chromium with the code that draws the page.

Plotly's own exporter (kaleido) needs such a browser too, so the browser is called directly: it opens a document that
turns its figures into image data inside the document, and prints the resulting document.
"""

import re
import subprocess
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from html import escape, unescape
from pathlib import Path
from typing import Literal
from urllib.parse import unquote

from penstock.base.errors import PicturesError
from penstock.plan.projection import Plan
from penstock.report.figure import Figure
from penstock.report.frame import as_script, document, find_browser, write_whole
from penstock.report.page import plan_figures
from penstock.train.run_lock import temporary_folder

WIDTH_PIXELS = 1000
PATIENCE_SECONDS = 60.0  # time limit for drawing; a timeline of 8,192 passes takes 3 s

_IMAGE = re.compile(
    r'id="(?P<name>[^"]+)"[^>]*? data-image="data:image/(?:png|svg\+xml)(?P<packed>;base64)?,(?P<data>[^"]*)"'
)
_TROUBLE = re.compile(r'data-trouble="(?P<text>[^"]*)"')


def write_images(figures: Sequence[Figure], folder: Path, *, kind: Literal["png", "svg"] = "svg") -> list[Path]:
    """Write each figure to a file of its name, in light colours.

    Raises a PicturesError if there is no browser or no Plotly, or if the browser did not draw.
    """
    browser = find_browser()
    texts = {figure.name: [escape(figure.title), escape(figure.caption)] for figure in figures}
    scale = 2 if kind == "png" else 1  # device pixels per pixel
    export = {"theme": "light", "format": kind, "width": WIDTH_PIXELS, "scale": scale, "words": texts}
    # An empty box for each figure: export.js draws into it and leaves the image in its attribute `data-image`.
    boxes = "".join(f'<div class="figure" id="{escape(figure.name)}"></div>' for figure in figures)
    body = f'{boxes}<script type="application/json" id="export">{as_script(export)}</script>'
    drawn = open_in_browser(browser, document("export", body, figures, script="export.js"))
    images = {  # PNG is in base64, SVG is percent-encoded text
        unescape(match["name"]): (b64decode(match["data"]) if match["packed"] else unquote(match["data"]).encode())
        for match in _IMAGE.finditer(drawn)
    }
    missing = [figure.name for figure in figures if figure.name not in images]
    if missing:
        trouble = _TROUBLE.search(drawn)
        raise PicturesError(
            f"{browser} did not draw {', '.join(missing)}", got=trouble["text"] if trouble else "no answer"
        )
    paths = [folder / f"{figure.name}.{kind}" for figure in figures]
    for figure, path in zip(figures, paths, strict=True):
        write_whole(path, images[figure.name])
    return paths


def write_image(plan: Plan, path: Path, *, more: Sequence[Figure] = ()) -> list[Path]:
    """Write each figure of a plan next to a path: `plan.svg` gives `plan-memory.svg`, `plan-step-time.svg`, ...

    `path` ends in .png or .svg; `more` are further figures. Raises as `write_images`, or if nothing fits.
    """
    figures = [replace(figure, name=f"{path.stem}-{figure.name}") for figure in (*plan_figures(plan), *more)]
    if not figures:
        raise PicturesError(f"no layout of {plan.model} fits, so there is nothing to draw", fix="see --explain refused")
    return write_images(figures, path.parent, kind="png" if path.suffix == ".png" else "svg")


def open_in_browser(browser: str, html: str, *options: str) -> str:
    """The HTML document after its scripts have run. Raises a PicturesError if the browser fails or takes too long."""
    with temporary_folder("pictures") as folder:
        path = folder / "document.html"
        path.write_text(html, encoding="utf-8")
        # No sandbox: the document is ours, and the sandbox needs rights that containers lack.
        command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--dump-dom"]
        # Virtual time lets scripts run to their end, up to 20 s on the page's clock, before the document is printed.
        command += [f"--user-data-dir={folder}/profile", "--virtual-time-budget=20000", *options, path.as_uri()]
        try:
            result = subprocess.run(command, capture_output=True, timeout=PATIENCE_SECONDS, check=True)
        except subprocess.TimeoutExpired as error:
            raise PicturesError(f"{browser} did not finish within {PATIENCE_SECONDS:.0f} s") from error
        except (OSError, subprocess.CalledProcessError) as error:
            raise PicturesError(f"{browser} failed", got=error) from error
    return result.stdout.decode()
