"""An HTTP endpoint for Prometheus: `curl http://127.0.0.1:PORT/metrics` shows the last step of the run.

A report is stored by one assignment, and a thread of the endpoint writes the answer, so requests cost the run nothing.
Names follow Prometheus' conventions: the program first, base units last, `_total` for counters. The counters of a
resumed run start with its earlier steps, which Prometheus takes for a restart.
"""

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
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
_KEPT = ("evaluation_loss", "evaluation_bits_per_byte")


@dataclass(frozen=True, kw_only=True)
class _Told:
    """State of the run; times are in seconds since 1970."""

    start: RunStart
    line: Mapping[str, Any]  # of the last step, with the last evaluation; empty before the first step
    step_time: float = 0.0
    saved_step: int = 0  # 0 before the first checkpoint
    saved_time: float = 0.0


class PrometheusEndpoint(Observer):
    """Observer that answers HTTP requests; port 0 takes a free one.

    Raises OSError if the port is taken, or the address is none of this machine.
    """

    def __init__(self, address: str, port: int) -> None:
        client: Any = import_module("prometheus_client")
        self._core: Any = import_module("prometheus_client.core")
        self._told: _Told | None = None
        registry = client.CollectorRegistry(auto_describe=False)
        registry.register(self)
        self._server, self._thread = client.start_http_server(port, addr=address, registry=registry)
        self.port = int(self._server.server_port)

    def started(self, start: RunStart) -> None:
        self._told = _Told(start=start, line={})

    def stepped(self, report: StepReport) -> None:
        """Store the figures of a step; those of an evaluation stay until the next one."""
        assert self._told is not None, "a run starts before it steps"
        kept = {name: self._told.line[name] for name in _KEPT if name in self._told.line}
        self._told = replace(self._told, line=kept | record(report), step_time=time.time())

    def saved(self, step: int) -> None:
        """Store the step of the newest checkpoint."""
        assert self._told is not None, "a run starts before it saves"
        self._told = replace(self._told, saved_step=step, saved_time=time.time())

    def closed(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def collect(self) -> Iterator[Any]:
        """Metric families of prometheus_client; its thread calls this for each request."""
        data = self._told  # once: the training thread may replace it meanwhile
        if data is None:
            return
        run = data.start.run
        info = {"model": run.model.family, "device": data.start.device_name, "ranks": f"{data.start.ranks}"}
        yield self._family(data, RUN_INFO, {tuple(info.values()): 1.0}, labels=tuple(info))
        yield self._family(data, WANTED_STEPS, {(): float(run.training.steps)})
        if data.saved_step:
            yield self._family(data, SAVED_STEP, {(): float(data.saved_step)})
            yield self._family(data, SAVED_TIME, {(): data.saved_time})
        if not data.line:
            return
        yield self._family(data, STEP_TIME, {(): data.step_time})
        for field, name in EXPORTED.items():
            label = _LABELS.get(field)
            yield self._family(data, name, _samples(data.line.get(field)), FIELDS[field].doc, (label,) if label else ())
        for field, name in EXPORTED_OF_LAYER.items():
            layers: dict[tuple[str, ...], float] = {
                (f"{layer['layer']}",): float(layer[field]) for layer in data.line["layers"] if layer[field] is not None
            }
            yield self._family(data, name, layers, LAYER_FIELDS[field].doc, ("layer",))

    def _family(
        self,
        data: _Told,
        name: str,
        samples: Mapping[tuple[str, ...], float],
        doc: str = "",
        labels: tuple[str, ...] = (),
    ) -> Any:
        """One metric with its samples, each labeled with the run."""
        kind = self._core.CounterMetricFamily if name.endswith("_total") else self._core.GaugeMetricFamily
        family = kind(name, doc or ENDPOINT_FIELDS[name].doc, labels=("run", *labels))
        for values, number in samples.items():
            family.add_metric((data.start.run.name, *values), number)
        return family


def _samples(value: Any) -> dict[tuple[str, ...], float]:
    """Samples of a field by the values of its label; empty for a field that is null or absent."""
    if value is None:
        return {}
    if isinstance(value, Mapping):
        return {(str(key),): float(number) for key, number in value.items()}
    if isinstance(value, list):
        return {(f"{depth}",): float(number) for depth, number in enumerate(value, start=1)}
    return {(): float(value)}
