"""Documents that repeat what the code says are written by this file, so that they cannot say something else.

`GENERATED` maps a document to the function that writes it whole. Figures from measurements are quoted in hand-written
documents by links, whose definitions name a file of benchmarks/results, the way to a number in it and its format
(`tools.tables`); only the text of the link is written:

    reaches [1.85][a] times the speed

    [a]: benchmarks/results/one-gpu.json "numbers.ratio .2f"

Whole tables stand between markers, each alone on its line, that name a result and one of `TABLES`. With `table?` the
result may be missing, and the table says so:

    <!--table kernels-h200.json pointwise-->
    ...
    <!--/table-->

`make docs` writes everything; tests/promises/test_documents.py and test_results.py fail when a document is stale.
"""

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config.explain import reference_markdown
from tools import tables
from tools.commands_page import commands_json, commands_page
from tools.config_defaults import config_defaults
from tools.families_page import families_page
from tools.grafana import dashboard
from tools.hardware_page import hardware_page
from tools.known_errors import known_errors_json
from tools.models_page import models_page
from tools.other_names import other_names_json
from tools.pages import decisions, environment_page, glossary, metrics_page, rules_page

TABLES = tables.TABLES
ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path("benchmarks/results")
FIGURE = re.compile(
    r'^\[(?P<name>[\w-]+)\]: \S*benchmarks/results/(?P<file>\S+) "(?P<way>.+) (?P<format>\S+)"$', re.MULTILINE
)
TABLE = re.compile(
    r"^<!--(?P<mark>table\??) (?P<file>\S+) (?P<name>\S+)-->\n.*?^<!--/table-->$", re.DOTALL | re.MULTILINE
)
NOT_MEASURED = "Not measured yet."
SKIPPED = {"runs", "build", "dist", "node_modules"}
"""Folders without documents of ours, and so are those whose name begins with a dot."""


GENERATED: dict[str, Callable[[], str]] = {
    "docs/commands.md": commands_page,
    "docs/config.md": reference_markdown,
    "docs/decisions/README.md": decisions,
    "docs/environment.md": environment_page,
    "docs/families.md": families_page,
    "docs/glossary.md": glossary,
    "docs/grafana.json": dashboard,
    "docs/hardware.md": hardware_page,
    "docs/metrics.md": metrics_page,
    "docs/models.md": models_page,
    "docs/rules.md": rules_page,
    "penstock/cli/commands.json": commands_json,
    "penstock/models/huggingface/config_defaults.json": config_defaults,
    "penstock/config/other_names.json": other_names_json,
    "penstock/plan/known_errors.json": known_errors_json,
}


def markdown_files(root: Path = ROOT) -> list[Path]:
    """Every Markdown file of the repository, generated ones included."""

    paths = []
    for folder, subfolders, names in os.walk(root):
        # Assigned in place: os.walk does not go into folders that are taken out, such as the thousands of .venv.
        subfolders[:] = [name for name in subfolders if name not in SKIPPED and not name.startswith(".")]
        paths += [Path(folder, name) for name in names if name.endswith(".md") and not name.startswith(".")]
    return sorted(paths)


def _result(file: str, root: Path) -> Any:
    """What a file of benchmarks/results holds."""
    path = root / RESULTS / file
    if not path.is_file():
        raise LookupError(f"{RESULTS / file} is not there")
    return json.loads(path.read_text(encoding="utf-8"))


def with_measurements(text: str, root: Path = ROOT) -> str:
    """The text with every marked figure and table as the results have it today.

    Raises:
        LookupError: a result is not there, lacks a number, or no function makes the table.
    """
    return with_tables(with_figures(text, root), root)


def with_tables(text: str, root: Path = ROOT) -> str:
    """The text with every marked table made anew; see `with_measurements`."""

    def renewed(match: re.Match[str]) -> str:
        if match["name"] not in TABLES:
            raise LookupError(f"no table {match['name']}; there are {', '.join(TABLES)}")
        is_missing = match["mark"] == "table?" and not (root / RESULTS / match["file"]).is_file()
        try:
            table = NOT_MEASURED if is_missing else TABLES[match["name"]](_result(match["file"], root))
        except LookupError as error:
            raise LookupError(f"{match['file']} does not give the table {match['name']}: {error}") from error
        return f"<!--{match['mark']} {match['file']} {match['name']}-->\n{table}\n<!--/table-->"

    return TABLE.sub(renewed, text)


def with_figures(text: str, root: Path = ROOT) -> str:
    """The text with every quoted figure made anew; see `with_measurements`."""
    for quoted in FIGURE.finditer(text):
        name, file = quoted["name"], quoted["file"]
        try:
            figure = tables.shown(tables.walk(_result(file, root), quoted["way"]), quoted["format"])
        except LookupError as error:
            raise LookupError(f"[{name}]: {file}: {error}") from error
        text, count = re.subn(rf"(?<!\w)\[[^\[\]]*\]\[{name}\]", f"[{figure}][{name}]", text)
        if not count:
            raise LookupError(f"[{name}] is defined and not used")
    return text


def main() -> int:
    """Write what is stale and say so; 1 if a figure or table cannot be made."""
    for name, write in GENERATED.items():
        (ROOT / name).parent.mkdir(parents=True, exist_ok=True)
        (ROOT / name).write_text(write(), encoding="utf-8")
        print(f"wrote {name}")
    for path in markdown_files():
        name = path.relative_to(ROOT).as_posix()
        if name in GENERATED:
            continue
        try:
            before = path.read_text(encoding="utf-8")
            after = with_measurements(before)
        except LookupError as error:
            print(f"{name}: {error}", file=sys.stderr)
            return 1
        if after != before:
            path.write_text(after, encoding="utf-8")
            print(f"renewed the measurements of {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
