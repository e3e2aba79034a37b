"""Plotly's script, as the package `plotly` brings it; of the package itself nothing is imported.

The script is 4.8 MB. It goes into a page compressed, and is unpacked by the browser (`DecompressionStream`: Chrome 80,
Safari 16.4, Firefox 113, or newer), so a page is 2 MB and opens without a network.
"""

import gzip
from base64 import b64encode
from importlib.util import find_spec
from pathlib import Path

from penstock.base.errors import PicturesError

SCRIPT = "package_data/plotly.min.js"


def packed_plotly() -> str:
    """Plotly's script, gzipped, in base64.

    Raises:
        PicturesError: the package is not installed.
    """
    # Without a time of day in its head the same page is the same file.
    return b64encode(gzip.compress(plotly_script().read_bytes(), mtime=0)).decode()


def plotly_script() -> Path:
    """Where Plotly's script is.

    Raises:
        PicturesError: the package is not installed.
    """
    spec = find_spec("plotly")
    folders = spec.submodule_search_locations if spec is not None else None
    scripts = [Path(folder) / SCRIPT for folder in folders or () if (Path(folder) / SCRIPT).is_file()]
    if not scripts:
        raise PicturesError("pictures need plotly, which is not installed", fix="pip install plotly")
    return scripts[0]
