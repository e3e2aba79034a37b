"""The Prometheus endpoint: what a monitoring system reads over HTTP, by prometheus_client's own parser."""

import socket
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.train.metrics import FIELDS, LAYER_FIELDS
from penstock.train.sinks import ENDPOINT_FIELDS, EXPORTED, EXPORTED_OF_LAYER, PrometheusEndpoint
from tests.train.tiny_run import HELD_OUT, run_start, step_report, tiny_run

parser = pytest.importorskip("prometheus_client.parser")

LOOPBACK = "127.0.0.1"


@pytest.fixture
def endpoint(tmp_path: Path) -> Iterator[PrometheusEndpoint]:
    made = PrometheusEndpoint(LOOPBACK, 0)
    made.started(run_start(tiny_run(tmp_path)))
    yield made
    made.closed()


def text_of(endpoint: PrometheusEndpoint) -> str:
    # A proxy of the environment is not for this machine.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(f"http://{LOOPBACK}:{endpoint.port}/metrics") as answer:
        return str(answer.read().decode())


def samples_of(endpoint: PrometheusEndpoint) -> dict[str, list[tuple[dict[str, str], float]]]:
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in parser.text_string_to_metric_families(text_of(endpoint)):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def one(samples: dict[str, Any], name: str) -> float:
    ((labels, value),) = samples[name]
    assert labels["run"] == "tiny"
    return float(value)


def test_before_the_first_step_it_says_which_run_it_is(endpoint: PrometheusEndpoint) -> None:
    samples = samples_of(endpoint)
    ((labels, value),) = samples["penstock_run_info"]
    assert (labels, value) == ({"run": "tiny", "model": "deepseek-v3", "device": "a laptop", "ranks": "1"}, 1.0)
    assert one(samples, "penstock_wanted_steps") == 4
    assert set(samples) == {"penstock_run_info", "penstock_wanted_steps"}


def test_it_tells_the_last_step(endpoint: PrometheusEndpoint) -> None:
    before = time.time()
    for step in (1, 2):
        endpoint.stepped(step_report(step, phase_seconds={"forward": 0.1, "reduce": 0.02}))
    endpoint.saved(2)
    samples = samples_of(endpoint)
    assert one(samples, "penstock_loss_nats") == 2.5
    assert one(samples, "penstock_steps_total") == 2
    assert one(samples, "penstock_tokens_total") == 96
    assert one(samples, "penstock_step_seconds") == 0.25
    assert one(samples, "penstock_saved_step") == 2
    assert before <= one(samples, "penstock_step_timestamp_seconds") <= time.time()
    phases = {labels["phase"]: value for labels, value in samples["penstock_phase_seconds"]}
    assert phases == {"forward": 0.1, "reduce": 0.02}
    (depth,) = samples["penstock_mtp_loss_nats"]
    assert (depth[0]["depth"], depth[1]) == ("1", 3.0)
    loads = {labels["layer"]: value for labels, value in samples["penstock_layer_expert_load_max_over_mean_ratio"]}
    assert loads == {"1": pytest.approx(1.6), "2": 1.0}


def test_an_evaluation_stays_until_the_next_and_unknown_values_are_absent(endpoint: PrometheusEndpoint) -> None:
    endpoint.stepped(step_report(1, evaluation=HELD_OUT))
    endpoint.stepped(step_report(2))
    samples = samples_of(endpoint)
    assert one(samples, "penstock_evaluation_loss_nats") == 2.0
    assert not {"penstock_model_flops_utilization_ratio", "penstock_phase_seconds"} & {*samples}


def test_only_what_grows_is_a_counter(endpoint: PrometheusEndpoint) -> None:
    endpoint.stepped(step_report(1, evaluation=HELD_OUT, phase_seconds={"forward": 0.1}, model_flops_utilization=0.4))
    kinds = dict(line.split()[2:4] for line in text_of(endpoint).splitlines() if line.startswith("# TYPE"))
    counters = {name for name, kind in kinds.items() if kind == "counter"}
    assert counters == {"penstock_steps_total", "penstock_tokens_total"}
    assert set(kinds.values()) == {"counter", "gauge"}


def test_every_field_has_a_name_that_follows_the_conventions() -> None:
    assert set(EXPORTED) == set(FIELDS) - {"layers"}
    assert set(EXPORTED_OF_LAYER) == set(LAYER_FIELDS) - {"layer", "slots"}
    names = [*EXPORTED.values(), *EXPORTED_OF_LAYER.values(), *ENDPOINT_FIELDS]
    assert len(set(names)) == len(names)
    assert all(name.startswith("penstock_") and name.isascii() and name == name.lower() for name in names)
    suffixes = {"s": "seconds", "bytes": "bytes", "nats/token": "nats"}
    for field, name in EXPORTED.items():
        unit = FIELDS[field].unit
        assert name.endswith(suffixes.get(unit, "")), f"{name} ends in its unit {unit}"


def test_the_port_is_free_after_the_end(tmp_path: Path) -> None:
    first = PrometheusEndpoint(LOOPBACK, 0)
    with pytest.raises(OSError):
        PrometheusEndpoint(LOOPBACK, first.port)
    first.closed()
    second = PrometheusEndpoint(LOOPBACK, first.port)
    second.closed()


def test_the_loopback_is_not_reached_from_elsewhere(endpoint: PrometheusEndpoint) -> None:
    with socket.create_connection((LOOPBACK, endpoint.port)) as link:
        assert link.getpeername()[0] == LOOPBACK
    with pytest.raises(OSError):
        # Another address of the same machine's loopback network stands for another interface.
        socket.create_connection(("127.0.0.2", endpoint.port)).close()
