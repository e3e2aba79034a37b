"""An HTTP endpoint for Prometheus: `curl http://127.0.0.1:PORT/metrics` shows the last step of the run.

A report is stored by one assignment, and a thread of the endpoint writes the answer, so requests cost the run nothing.
Names follow Prometheus' conventions: the program first, base units last, `_total` for counters. The counters of a
resumed run start with its earlier steps, which Prometheus takes for a restart.
"""

import time
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any

from penstock.train.metrics import FIELDS, LAYER_FIELDS, MetricField, record
from penstock.train.observer import Observer, RunStart, StepReport

EXPORTED: Mapping[str, str] = MappingProxyType(
    {
        "step": "penstock_steps_total",
        "loss": "penstock_loss_nats",
        "mtp_losses": "penstock_mtp_loss_nats",
        "gradient_norm": "penstock_gradient_norm",
        "learning_rate": "penstock_learning_rate",
        "tokens_seen": "penstock_tokens_total",
        "tokens_per_second_per_device": "penstock_device_tokens_per_second",
        "step_seconds": "penstock_step_seconds",
        "phase_seconds": "penstock_phase_seconds",
        "model_flops_utilization": "penstock_model_flops_utilization_ratio",
        "peak_memory_bytes": "penstock_peak_memory_bytes",
        "peak_host_memory_bytes": "penstock_peak_host_memory_bytes",
        "power_watts": "penstock_power_watts",
        "power_limit_watts": "penstock_power_limit_watts",
        "clock_mhz": "penstock_clock_megahertz",
        "clock_limit_mhz": "penstock_clock_limit_megahertz",
        "goodput": "penstock_goodput_ratio",
        "wall_seconds": "penstock_wall_seconds",
        "graph_pool_bytes": "penstock_graph_pool_bytes",
        "expert_load_max_over_mean": "penstock_expert_load_max_over_mean_ratio",
        "expert_rank_load_max_over_mean": "penstock_expert_rank_load_max_over_mean_ratio",
        "expert_rank_load_fullest": "penstock_expert_rank_load_fullest_ratio",
        "balance_load_before": "penstock_balance_load_before_ratio",
        "balance_load_after": "penstock_balance_load_after_ratio",
        "balance_replicas": "penstock_balance_replicas",
        "balance_slots_needed": "penstock_balance_slots_needed",
        "dropped_slots": "penstock_dropped_slots",
        "rows_left_out": "penstock_left_out_rows",
        "records_skipped": "penstock_skipped_records",
        "auxiliary_loss": "penstock_auxiliary_loss",
        "forced_balance": "penstock_forced_balance",
        "evaluation_loss": "penstock_evaluation_loss_nats",
        "evaluation_bits_per_byte": "penstock_evaluation_bits_per_byte",
    }
)
"""Names of the fields of `penstock.train.metrics.FIELDS`; `phase_seconds` has a label `phase`, `mtp_losses` a
`depth`, `wall_seconds` a `kind`.
"""

EXPORTED_OF_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "max_over_mean": "penstock_layer_expert_load_max_over_mean_ratio",
        "entropy": "penstock_layer_expert_load_entropy_ratio",
        "dropped_slots": "penstock_layer_dropped_slots",
        "auxiliary_loss": "penstock_layer_auxiliary_loss",
        "rank_load": "penstock_layer_expert_rank_load_ratio",
        "balance_load_before": "penstock_layer_balance_load_before_ratio",
        "balance_load_after": "penstock_layer_balance_load_after_ratio",
        "balance_replicas": "penstock_layer_balance_replicas",
    }
)
"""Names of the entries of `layers`, which have a label `layer`; `slots` has none, being a list."""

RUN_INFO = "penstock_run_info"
WANTED_STEPS = "penstock_wanted_steps"
STEP_TIME = "penstock_step_timestamp_seconds"
SAVED_STEP = "penstock_saved_step"
SAVED_TIME = "penstock_checkpoint_timestamp_seconds"

ENDPOINT_FIELDS: Mapping[str, MetricField] = MappingProxyType(
    {
        RUN_INFO: MetricField(
            "", "Always 1; its labels are the model's family, the device, the ranks, and the run's name."
        ),
        WANTED_STEPS: MetricField("steps", "Steps that the run asks for."),
        STEP_TIME: MetricField("s", "When the last step ended, since 1970; of a run that hangs it stays behind."),
        SAVED_STEP: MetricField("steps", "Step of the newest checkpoint of this process; absent before the first."),
        SAVED_TIME: MetricField("s", "When that was handed to the writer, since 1970."),
    }
)
"""Metrics that only the endpoint has."""

_LABELS = {"phase_seconds": "phase", "mtp_losses": "depth", "wall_seconds": "kind"}


class PrometheusEndpoint(Observer):
    """Observer that answers HTTP requests; port 0 takes a free one.

    Raises OSError if the port is taken, or the address is none of this machine.
    """

    def __init__(self, address: str, port: int) -> None:
        client: Any = import_module("prometheus_client")
        self._core: Any = import_module("prometheus_client.core")
        self._run = ""
        self._figures: dict[str, Any] = {}  # by field; replaced and not changed, as the server's thread reads it
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        self.port = int(self._server.server_port)

    def started(self, start: RunStart) -> None:
        self._run = start.run.name
        info = {"model": start.run.model.family, "device": start.device_name, "ranks": f"{start.ranks}"}
        self._figures = {RUN_INFO: info, WANTED_STEPS: start.run.training.steps}

    def stepped(self, report: StepReport) -> None:
        """Store the figures of a step; those of an evaluation stay until the next one."""
        self._figures = self._figures | record(report) | {STEP_TIME: time.time()}

    def saved(self, step: int) -> None:
        self._figures = self._figures | {SAVED_STEP: step, SAVED_TIME: time.time()}

    def closed(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Metric families of prometheus_client; its thread calls this for each request."""
        figures = self._figures  # once: the training thread may replace it meanwhile
        for name, field in ENDPOINT_FIELDS.items():
            if name == RUN_INFO and name in figures:
                info = {"run": self._run, **figures[name]}
                yield self._core.InfoMetricFamily(name.removesuffix("_info"), field.doc, info)
            elif name in figures:
                yield self._family(name, field.doc, figures[name])
        for key, name in EXPORTED.items():
            if key in figures:
                yield self._family(name, FIELDS[key].doc, figures[key], _LABELS.get(key))
        for key, name in EXPORTED_OF_LAYER.items():
            if "layers" in figures:
                layers = {layer["layer"]: layer[key] for layer in figures["layers"] if layer[key] is not None}
                yield self._family(name, LAYER_FIELDS[key].doc, layers, "layer")

    def _family(self, name: str, doc: str, value: Any, label: str | None = None) -> Any:
        """One metric with its samples, each labeled with the run; a figure that is None has none."""
        kind = self._core.CounterMetricFamily if name.endswith("_total") else self._core.GaugeMetricFamily
        family = kind(name, doc, labels=("run", label) if label else ("run",))
        if isinstance(value, list):
            value = dict(enumerate(value, start=1))
        samples = value if isinstance(value, dict) else {} if value is None else {None: value}
        for key, number in samples.items():
            family.add_metric((self._run, str(key)) if label else (self._run,), float(number))
        return family
