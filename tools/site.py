"""What MkDocs is told about our documents beyond mkdocs.yml, so that the same Markdown reads well in a checkout.

- Figures link to the results of benchmarks/results, which become files of the site.
- Other links out of docs/ lead somewhere in a checkout (tests/promises/test_documents.py); a site has no code and
  shows their text.
- A fence says `bash run` if its commands are tried by the tests; MkDocs knows the first word only.
- `\\|` is how a table's cell spells a bar in code; Python-Markdown would show the backslash.
"""

import re
from html import escape
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.structure.files import File, Files

RESULT = re.compile(r"\.\./(?P<target>(?:\.\./)*benchmarks/results/[\w.-]+\.json)")
LINK = re.compile(r"(?P<before>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?\)")
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
BARRED = re.compile(r"`(?P<code>[^`\n]*\\\|[^`\n]*)`")


def on_files(files: Files, *, config: Any, **_: Any) -> Files:
    """Called by MkDocs with all files of the site."""
    root = Path(config.docs_dir).parent
    for path in sorted(root.glob("benchmarks/results/*.json")):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page, before it is made HTML."""
    folder = PurePosixPath(page.file.src_uri).parent
    ends = [0, *(place for fence in FENCE.finditer(markdown) for place in fence.span()), len(markdown)]
    pieces = [markdown[begin:end] for begin, end in pairwise(ends)]
    # Pieces outside of fences and inside of them take turns.
    return "".join(
        piece.replace("```bash run", "```bash", 1) if number % 2 else for_site(piece, folder)
        for number, piece in enumerate(pieces)
    )


def for_site(text: str, folder: PurePosixPath) -> str:
    """Markdown without fenced blocks, as the site shows it."""
    return with_bars(without_ways_out(RESULT.sub(r"\g<target>", text), folder))


def with_bars(text: str) -> str:
    """Markdown whose code shows bars that a table's cell had to escape."""

    def shown(match: re.Match[str]) -> str:
        return f"<code>{escape(match['code']).replace(chr(92) + '|', '&#124;')}</code>"

    return BARRED.sub(shown, text)


def without_ways_out(text: str, folder: PurePosixPath) -> str:
    """Markdown whose links to files outside of docs/ are their text, and the path where the text is another.

    Args:
        text: no fenced blocks.
        folder: of the page, below docs/.
    """

    def shown(match: re.Match[str]) -> str:
        target = match["target"]
        if "://" in target or target.startswith("mailto:") or not _leaves(folder, target):
            return match[0]
        return match["text"]

    return LINK.sub(shown, text)


def _leaves(folder: PurePosixPath, target: str) -> bool:
    depth = len(folder.parts)
    for part in PurePosixPath(target).parts:
        depth += -1 if part == ".." else 1
        if depth < 0:
            return True
    return False
