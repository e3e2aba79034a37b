"""The documents are a site whose links all lead somewhere, and every page can be found from the first."""

import re
import subprocess
from pathlib import Path, PurePosixPath

import pytest
from mkdocs.commands.build import build
from mkdocs.config import load_config

from penstock.base.errors import PicturesError
from penstock.report.frame import find_browser
from tools.documents import ROOT
from tools.pictures import MAKERS
from tools.site import with_bars, without_ways_out


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The pages; a warning is an error."""
    folder = tmp_path_factory.mktemp("site")
    build(load_config(str(ROOT / "mkdocs.yml"), strict=True, site_dir=str(folder)))  # strict: a warning is an error
    return folder


def test_the_site_builds_without_a_warning(site: Path) -> None:
    start = (site / "start.html").read_text(encoding="utf-8")
    assert "penstock report runs/first" in re.sub(r"<[^>]*>", "", start)
    assert "../README.md" not in (site / "coming-from.html").read_text(encoding="utf-8")


def test_figures_lead_to_their_results(site: Path) -> None:
    targets = re.findall(r'href="([^"]*\.json)"', (site / "decisions/0171-muon.html").read_text(encoding="utf-8"))
    assert targets and all((site / "decisions" / target).is_file() for target in targets)


def test_a_page_of_the_site_fetches_nothing(site: Path) -> None:
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not any(mark in text for mark in ('src="http', "src='http", 'rel="stylesheet" href="http')), page.name


def test_a_page_opened_from_a_folder_can_be_searched(site: Path, tmp_path: Path) -> None:
    try:
        command = [find_browser(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    except PicturesError as error:
        pytest.skip(f"{error}")
    command += [f"--user-data-dir={tmp_path}", "--virtual-time-budget=20000"]
    page = f"{(site / 'decisions/0017-symmetric-dispatch.html').as_uri()}?q=dispatcher"
    shown = subprocess.run([*command, page], check=True, capture_output=True, text=True).stdout
    assert re.search(r"md-search-result__meta[^>]*>\d+ matching documents", shown)


def test_lines_of_code_wrap_on_every_page(site: Path) -> None:
    style = (site / "site.css").read_text(encoding="utf-8")
    assert "pre > code { white-space: pre-wrap;" in style
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert all("site.css" in page.read_text(encoding="utf-8") for page in pages)


def test_every_picture_is_shown_and_has_a_tool_that_makes_it() -> None:
    assert {path.name for path in (ROOT / "docs/pictures").iterdir()} == {*MAKERS}
    for tool in {*MAKERS.values()}:
        assert "def main(" in (ROOT / "tools" / f"{tool}.py").read_text(encoding="utf-8"), tool
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"))]
    for name in MAKERS:
        assert any(f"pictures/{name})" in text for text in texts), name


@pytest.mark.parametrize(
    ("text", "folder", "shown"),
    [
        ("[code](../penstock/a.py)", ".", "code"),
        ("[page](plan.md#here)", ".", "[page](plan.md#here)"),
        ("[up](../plan.md)", "decisions", "[up](../plan.md)"),
        ("[code](../../tests/a.py)", "decisions", "code"),
        ("[far](https://a.b/../c)", ".", "[far](https://a.b/../c)"),
    ],
)
def test_a_link_out_of_the_documents_is_its_text(text: str, folder: str, shown: str) -> None:
    assert without_ways_out(text, PurePosixPath(folder)) == shown


def test_an_escaped_bar_in_code_is_a_bar() -> None:
    assert with_bars(r"| `Et\|<t` | `a` |") == "| <code>Et&#124;&lt;t</code> | `a` |"
