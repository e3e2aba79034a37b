"""docs/metrics.md: every metric of a run: its unit, its meaning, and its name at the Prometheus endpoint."""

from collections.abc import Mapping

from penstock.train.goodput import KINDS
from penstock.train.metrics import FIELDS, LAYER_FIELDS, PHASE_FIELDS, MetricField
from penstock.train.prometheus import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER

_OPENING = """# Metrics

Written by `make docs` from [penstock/train](../penstock/train); change it there.

A run writes its metrics to `runs/NAME/metrics.jsonl`: one JSON object per line, one line every `record.every` steps and
for each step with an evaluation. This program prints the last loss of a run:

```bash run
penstock train debug-2l training.steps=20 --name first
python -c "import json; print(json.loads(open('runs/first/metrics.jsonl').readlines()[-1])['loss'])"
```

The other sinks ([sinks.md](sinks.md)) get the same metrics. In TensorBoard and W&B they are named `train/loss`,
`phase/forward`, `layer 01/entropy` and so on. The Prometheus endpoint uses the names of the last column; all metrics
there have a label `run`, `phase_seconds` a label `phase`, `mtp_losses` a label `depth`, `wall_seconds` a label `kind`,
and the fields of `layers` a label `layer`.
"""


def metrics_page() -> str:
    """The whole page."""
    phases = {str(phase): MetricField("s", doc) for phase, doc in PHASE_FIELDS.items()}
    sections = {
        "## Fields of a line": _table(FIELDS, EXPORTED),
        "## `layers`": _table(LAYER_FIELDS, EXPORTED_OF_LAYER),
        "## `phase_seconds`": _table(phases),
        "## `wall_seconds`": _table({kind: MetricField("s", doc) for kind, doc in KINDS.items()}),
        "## Only at the Prometheus endpoint": _table(ENDPOINT_FIELDS),
    }
    body = "\n".join(f"{title}\n\n{table}\n" for title, table in sections.items())
    return f"{_OPENING}\n{body}"


def _table(fields: Mapping[str, MetricField], exported: Mapping[str, str] | None = None) -> str:
    """Rows of Markdown, with the endpoint's names in a last column if there are any."""
    rows = [f"| `{name}` | {field.unit} | {field.doc} |" for name, field in fields.items()]
    head, line = "| field | unit | meaning |", "|---|---|---|"
    if exported is not None:
        names = (exported.get(name) for name in fields)
        rows = [f"{row} {'' if name is None else f'`{name}`'} |" for row, name in zip(rows, names, strict=True)]
        head, line = f"{head} Prometheus |", f"{line}---|"
    return "\n".join((head, line, *rows))
