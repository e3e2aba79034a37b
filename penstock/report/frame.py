"""Common parts of pages: the HTML document, cards of figures, key figures, tables, and atomic file writes.

A page is one HTML file with style (assets/page.css), figures as JSON, Plotly's script and assets/page.js, which draws
the figures in the colour scheme of the reader's system. Nothing is fetched, and nothing is sent.

Plotly's script is 4.8 MB. It is stored compressed and unpacked by the browser (`DecompressionStream`: Chrome 80, Safari
16.4, Firefox 113, or newer), so a page has 2 MB. Nothing else of the package `plotly` is used.
"""

import gzip
import json
import shutil
from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from html import escape
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.base.errors import PicturesError
from penstock.base.files import write_whole as write_atomically
from penstock.base.origin import origin_text
from penstock.report.figure import THEMES, Figure, plotly_json

SCRIPT = "package_data/plotly.min.js"  # in the folder of the package

BROWSERS = ("chromium", "chromium-browser", "chrome-headless-shell", "google-chrome", "google-chrome-stable", "chrome")
"""Programs that are looked for, in this order."""


def plotly_script() -> Path:
    spec = find_spec("plotly")  # finds the package without importing it
    folders = spec.submodule_search_locations if spec is not None else None
    scripts = [Path(folder) / SCRIPT for folder in folders or () if (Path(folder) / SCRIPT).is_file()]
    if not scripts:
        raise PicturesError("pictures need plotly, which is not installed", fix="pip install plotly")
    return scripts[0]


def find_browser() -> str:
    """A browser that can draw without a window. Raises a PicturesError without one."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name)) is not None), None)
    if browser is None:
        raise PicturesError(
            "PNG and SVG are drawn by Chromium, and there is none on PATH",
            allowed=", ".join(BROWSERS),
            fix="install one (Debian, Ubuntu: apt install chromium), or write the page (--html), which needs none",
        )
    return browser


# ---------------------------------------------------------------------------------------------------------------- frame

_SAVE = '<div class="save"><button value="svg">SVG</button> <button value="png">PNG</button></div>'


def document(title: str, body: str, figures: Sequence[Figure], script: str = "page.js") -> str:
    """A whole HTML document with its style, figures and scripts.

    In `body`, a figure is an element `<div class="figure" id=NAME>`; `script` is the asset that draws them. The last
    line of the page names the command that wrote it, the date, and Penstock's version and commit.
    """
    packed = b64encode(gzip.compress(plotly_script().read_bytes(), mtime=0)).decode()  # mtime=0: equal files
    names = [figure.name for figure in figures]
    assert len(set(names)) == len(names), f"pictures have the same name: {names}"
    pictures = {"themes": THEMES, "figures": {figure.name: plotly_json(figure) for figure in figures}}
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{escape(title)}</title>
<style>
{asset("page.css")}</style>
<body>
{body}
<footer class="faint">{escape(origin_text())}</footer>
<script type="application/json" id="pictures">{as_script(pictures)}</script>
<script type="text/plain" id="plotly">{packed}</script>
<script>
{asset("draw.js")}{asset(script)}</script>
</body>
</html>
"""


def as_script(value: Mapping[str, Any]) -> str:
    # `</script>` would end the element; in JSON `<` is only in strings, where the escape is equivalent.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


@cache
def asset(name: str) -> str:
    return (files("penstock.report") / "assets" / name).read_text(encoding="utf-8")


def card(figure: Figure, *, is_wide: bool = False) -> str:
    """A figure with its title and caption; `is_wide` overrides the figure's own width."""
    width = ' class="wide"' if figure.is_wide or is_wide else ""
    hint = f" {figure.hint}" if figure.hint else ""
    return f"""<section{width}>{_SAVE}<h2>{escape(figure.title)}</h2><p class="faint">{escape(figure.caption)}{hint}</p>
<div class="figure" id="{escape(figure.name)}" style="min-height:{figure.height}px"></div></section>
"""


def scrolling(table: str) -> str:
    """A table that can be wider than the page."""
    return f'<div class="scroll">{table}</div>'


def table(columns: Mapping[str, str], rows: Iterable[Sequence[str]], *, name: str = "") -> str:
    """A table of HTML cells with the class `name`. `columns` has the class of cells (or "") by head."""

    def line(tag: str, cells: Iterable[str], kinds: Iterable[str]) -> str:
        return "".join(
            f"<{tag}{kind and f' class={kind}'}>{cell}</{tag}>" for cell, kind in zip(cells, kinds, strict=True)
        )

    heads = line("th", columns, ("text" if kind in ("text", "reason") else "" for kind in columns.values()))
    body = "".join(f"<tr>{line('td', row, columns.values())}</tr>" for row in rows)
    start = f'<table class="{name}">' if name else "<table>"
    return scrolling(f"{start}<thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>")


def key_figures(facts: Mapping[str, str], over: str = "") -> str:
    """The head of a page: texts by name. The fact `over` is marked as exceeding its limit."""
    cells = (
        f"<div><dt>{escape(name)}</dt><dd{' class=over' if name == over else ''}>{escape(text)}</dd></div>"
        for name, text in facts.items()
    )
    return f"<dl>{''.join(cells)}</dl>"


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically. Raises a PicturesError if it cannot be written."""
    try:
        write_atomically(path, content)
    except OSError as error:
        raise PicturesError("the file cannot be written", got=f"{path}: {error.strerror}") from error
