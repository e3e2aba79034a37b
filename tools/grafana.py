"""docs/grafana.json: a dashboard of a run's Prometheus endpoint, to be imported into Grafana (Dashboards, New, Import).

It is made from the names that the endpoint exports, so a panel cannot ask for what is not told. `$run` is the name of
the run, chosen at the top; where the endpoint's data lie is asked at the import.
"""

import json
from collections.abc import Iterator
from typing import Any

from penstock.train.sinks import EXPORTED, EXPORTED_OF_LAYER, RUN_INFO, SAVED_STEP, STEP_TIME, WANTED_STEPS

WIDTH, HEIGHT, ACROSS = 8, 7, 24
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}

STEPS, TOKENS = EXPORTED["step"], EXPORTED["tokens_seen"]
LEFT = f'({WANTED_STEPS}{{run="$run"}} - {STEPS}{{run="$run"}})'

PANELS: tuple[tuple[str, str, tuple[tuple[str, str], ...]], ...] = (
    ("Loss", "none", (("train", EXPORTED["loss"]), ("held out", EXPORTED["evaluation_loss"]))),
    ("Tokens per second and device", "none", (("", EXPORTED["tokens_per_second_per_device"]),)),
    ("Model FLOPs utilization", "percentunit", (("", EXPORTED["model_flops_utilization"]),)),
    ("Time of a step", "s", (("", EXPORTED["step_seconds"]),)),
    ("Phases of a step", "s", (("{{phase}}", EXPORTED["phase_seconds"]),)),
    ("Time since the last step", "s", (("", f"time() - {STEP_TIME}"),)),
    ("Goodput", "percentunit", (("", EXPORTED["goodput"]),)),
    ("Wall clock by kind", "s", (("{{kind}}", EXPORTED["wall_seconds"]),)),
    ("Power", "watt", (("drawn", EXPORTED["power_watts"]), ("limit", EXPORTED["power_limit_watts"]))),
    ("Clock", "none", (("MHz", EXPORTED["clock_mhz"]), ("highest", EXPORTED["clock_limit_mhz"]))),
    ("Gradient norm", "none", (("", EXPORTED["gradient_norm"]),)),
    ("Learning rate", "sci", (("", EXPORTED["learning_rate"]),)),
    ("Tokens seen", "short", (("", TOKENS),)),
    ("Memory", "bytes", (("peak", EXPORTED["peak_memory_bytes"]), ("graphs", EXPORTED["graph_pool_bytes"]))),
    ("Fullest expert over the mean", "none", (("layer {{layer}}", EXPORTED_OF_LAYER["max_over_mean"]),)),
    (
        "Fullest expert rank over the mean",
        "none",
        (("step", EXPORTED["expert_rank_load_max_over_mean"]), ("one rank", EXPORTED["expert_rank_load_fullest"])),
    ),
    (
        "Rows left out, slots dropped",
        "none",
        (("rows", EXPORTED["rows_left_out"]), ("slots", EXPORTED["dropped_slots"])),
    ),
    ("Steps done and saved", "none", (("done", STEPS), ("saved", SAVED_STEP), ("wanted", WANTED_STEPS))),
    ("Time to the end", "s", (("", f"{LEFT} * {EXPORTED['step_seconds']}"),)),
)
"""Title, unit of Grafana, and for each curve its legend and its metric, or an expression of metrics."""


def dashboard() -> str:
    """The dashboard as JSON."""
    model = {
        "title": "Penstock run",
        "uid": "penstock-run",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-6h", "to": "now"},
        "__inputs": [{"name": "DS_PROMETHEUS", "label": "Prometheus", "type": "datasource", "pluginId": "prometheus"}],
        "templating": {"list": [_run_variable()]},
        "panels": list(_panels()),
    }
    return json.dumps(model, indent=1) + "\n"


def _run_variable() -> dict[str, Any]:
    query = f"label_values({RUN_INFO}, run)"
    return {
        "name": "run",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": query, "refId": "run"},
        "definition": query,
        "refresh": 2,
    }


def _panels() -> Iterator[dict[str, Any]]:
    for number, (title, unit, curves) in enumerate(PANELS):
        row, column = divmod(number, ACROSS // WIDTH)
        yield {
            "id": number + 1,
            "type": "timeseries",
            "title": title,
            "datasource": SOURCE,
            "gridPos": {"x": column * WIDTH, "y": row * HEIGHT, "w": WIDTH, "h": HEIGHT},
            "fieldConfig": {"defaults": {"unit": unit, "custom": {"fillOpacity": 0}}, "overrides": []},
            "targets": [
                {"refId": chr(ord("A") + place), "expr": _of_run(metric), "legendFormat": legend or title}
                for place, (legend, metric) in enumerate(curves)
            ],
        }


def _of_run(metric: str) -> str:
    """An expression in which every metric is that of the chosen run."""
    if "{" in metric:  # The first factor says it already.
        return metric + '{run="$run"}' if metric[-1] not in ")}" else metric
    return f'{metric}{{run="$run"}}'
