"""docs/metrics.md: every figure that a run tells: its unit, its meaning, and its name at the Prometheus endpoint."""

from collections.abc import Mapping

from penstock.train.metrics import FIELDS, LAYER_FIELDS, PHASE_FIELDS, MetricField
from penstock.train.prometheus import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER

_OPENING = """# Metrics

`metrics.jsonl` in the folder of a run holds one JSON object a line, one line each `record.every` steps and for each
step that evaluates. Every other sink ([sinks.md](sinks.md)) tells the same figures: TensorBoard and W&B as
`train/loss`, `phase/forward`, `layer 01/entropy`; the Prometheus endpoint under the names of the last column, where
`phase_seconds` has a label `phase`, `mtp_losses` a label `depth`, the parts of `layers` a label `layer`, and all a
label `run`.
"""


def metrics_page() -> str:
    """The whole page."""
    phases = {str(phase): MetricField("s", doc) for phase, doc in PHASE_FIELDS.items()}
    sections = {
        "## Fields of a line": _table(FIELDS, EXPORTED),
        "## `layers`": _table(LAYER_FIELDS, EXPORTED_OF_LAYER),
        "## `phase_seconds`": _table(phases),
        "## Only at the Prometheus endpoint": _table(ENDPOINT_FIELDS),
    }
    body = "\n".join(f"{title}\n\n{table}\n" for title, table in sections.items())
    return f"{_OPENING}\n{body}\nWritten by `make docs` from [penstock/train](../penstock/train); change it there.\n"


def _table(fields: Mapping[str, MetricField], exported: Mapping[str, str] | None = None) -> str:
    """Rows of Markdown, with the endpoint's names in a last column if there are any."""
    rows = [f"| `{name}` | {field.unit} | {field.doc} |" for name, field in fields.items()]
    head, line = "| field | unit | meaning |", "|---|---|---|"
    if exported is not None:
        names = (exported.get(name) for name in fields)
        rows = [f"{row} {'' if name is None else f'`{name}`'} |" for row, name in zip(rows, names, strict=True)]
        head, line = f"{head} Prometheus |", f"{line}---|"
    return "\n".join((head, line, *rows))
