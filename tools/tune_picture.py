"""The picture of the page of `penstock tune`: a search on one H200.

    python -m tools.tune_picture

The trials are in benchmarks/results/tune-h200.json; what is expected of each is computed anew from those before it, and
the page is drawn anew. Needs Chromium.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.report.tune_page import write_tune_page
from penstock.tune.belief import StepEstimate, TrialCandidate
from penstock.tune.search_loop import Search, SearchSettings, TrialLimits, TrialRecord, TrialResult
from penstock.tune.trial import result_from
from tools.report_picture import take_picture

MEASURED, CASE = Path("benchmarks/results/tune-h200.json"), "short-rows"
NAME, ROWS = "deepseek-v2-lite-8l", 16
PICTURE = Path("docs/pictures/tune.png")
WIDTH, HEIGHT = 1180, 1745


class _Ended:
    """Trials of a search that has ended."""

    def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        raise NotImplementedError


def record_of(table: dict[str, Any]) -> TrialRecord:
    """A trial of whole steps, from the JSON of its search."""
    terms = table["projected_terms"]
    candidate = TrialCandidate(overrides=tuple(table["change"]), terms=terms, source=table["source"])
    fields = TrialResult.__dataclass_fields__
    result = result_from({name: value for name, value in table.items() if name in fields})
    seconds, deviation = table["expected_seconds"], table["expected_deviation"]
    return TrialRecord(
        candidate=candidate,
        result=result,
        projected=table["projected_seconds"],
        estimated=StepEstimate(seconds=seconds, deviation=deviation),
        score=result.step,
    )


def main() -> None:
    """Read the search and draw its page."""
    found = json.loads(MEASURED.read_text(encoding="utf-8"))["numbers"][CASE]["tune"]
    records = [record_of(one) for one in found["trials"]]
    search = Search(
        [one.candidate for one in records], _Ended(), SearchSettings(budget_seconds=360.0), ending=found["ending"]
    )
    search.records = records[:1]  # nothing is known before the first
    for record in records[1:]:
        search.records.append(replace(record, estimated=search.estimates()[record.candidate.key]))
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "page.html"
        write_tune_page(page, NAME, search, found["spent_seconds"], found["next"], ROWS)
        take_picture(page, PICTURE, (WIDTH, HEIGHT))
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
