"""Writes penstock/plan/known_errors.json: how far projections were off, from two results of benchmarks."""

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[1] / "benchmarks" / "results"


def known_errors_json() -> str:
    """Speeds of runs over their projections: those that were measured here, and others' by their kind."""
    cases = json.loads((RESULTS / "projection-h200.json").read_text(encoding="utf-8"))["numbers"]["cases"]
    rows = json.loads((RESULTS / "plan-published.json").read_text(encoding="utf-8"))["numbers"]["rows"]
    measured = {
        "speeds": [round(1 + case["errors"]["step"], 4) for case in cases],
        "memories": [round(1 + case["errors"]["memory"], 4) for case in cases],
    }
    published = [
        {
            "kind": {
                "kernels": row["kernels"],
                "is_8_bit": row["is_8_bit"],
                "spans_nodes": row["nodes"] > 1,
                "is_dense": row["is_dense"],
            },
            "speed": round(1 / row["ratio"], 4),
        }
        for row in rows
    ]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in published)
    return f'{{\n  "measured": {json.dumps(measured)},\n  "published": [\n{lines}\n  ]\n}}\n'
