"""All pictures of the documents, drawn anew by the tools that make them.

    make pictures                                     all: minutes, because a run is trained and a search is made
    python -m tools.pictures report.png plan.svg      these

`MAKERS` says which tool makes which picture of docs/pictures; the docstring of the tool says from what. Needs Chromium
and the extra `pictures`.
"""

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module

MAKERS: Mapping[str, str] = {
    "live-view.svg": "run_pictures",
    "loss-curve.svg": "run_pictures",
    "plan.svg": "plan_picture",
    "report.png": "report_picture",
    "tune.png": "tune_picture",
    "folding.svg": "concept_pictures",
    "schedules.png": "concept_pictures",
    "projection-step-time.svg": "projection_picture",
    "projection-memory.svg": "projection_picture",
    "float8-curves-1b.svg": "float8_picture",
    "float8-curves-bytes.svg": "float8_picture",
    "float8-curves-calm.svg": "float8_picture",
    "float8-curves-head.svg": "float8_picture",
    "optimizer-formats.svg": "float8_picture",
}
"""The tool that makes each: a module of tools/ with a `main` that draws all its pictures."""


def main(names: Sequence[str]) -> None:
    """Draw pictures; a tool that makes several runs once.

    Args:
        names: files of docs/pictures; none for all.
    """
    unknown = [name for name in names if name not in MAKERS]
    if unknown:
        sys.exit(f"no tool makes {', '.join(unknown)}; there are: {', '.join(MAKERS)}")
    # Some draw with matplotlib, which is imported only for these.
    for tool in dict.fromkeys(MAKERS[name] for name in names or MAKERS):
        import_module(f"tools.{tool}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
