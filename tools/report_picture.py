"""The picture of a run's page: timeline and flame of a step that was recorded on four H200.

    python -m tools.report_picture

The recording is in tests/tune/data/recorded. Needs Chromium.
"""

import subprocess
import tarfile
import tempfile
from dataclasses import replace
from pathlib import Path

from penstock.report.frame import document, find_browser
from penstock.report.run_evidence import gather
from penstock.report.run_page import section_html, sections_of

RECORDED = Path("tests/tune/data/recorded/all-to-all.tar.xz")
PICTURE = Path("docs/pictures/report.png")
SHOWN = ("timeline", "flame")
WIDTH = 1180
FRAME = 200
"""Pixels of headings and margins around the figures of a part."""


def take_picture(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Draw a page on a light ground, `size` pixels wide and high. The browser keeps its files beside the page."""
    width, height = size
    profile = page.parent / "profile"
    command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={profile}"]
    command += ["--blink-settings=preferredColorScheme=1", "--hide-scrollbars", "--virtual-time-budget=20000"]
    command += [f"--window-size={width},{height}", f"--screenshot={picture.absolute()}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    """Read the recording and draw two parts of its page."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(RECORDED) as archive:
            archive.extractall(folder, filter="data")
        (run,) = (path for path in Path(folder).iterdir() if path.is_dir())
        found = sections_of(gather(run, plans=False))
        parts = [replace(part, cards=()) for part in found if part.name in SHOWN]  # no table of the critical path
        figures = [figure for part in parts for figure in part.figures]
        page = Path(folder) / "page.html"
        body = f"<main>{''.join(map(section_html, parts))}</main>"
        page.write_text(document("report", body, figures), encoding="utf-8")
        height = sum(figure.height for figure in figures) + FRAME * len(parts)
        take_picture(page, PICTURE, (WIDTH, height))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
