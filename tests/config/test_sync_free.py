"""`dispatch.sync_free` auto bounds buffers where that has been measured to be faster, and they are small."""

from typing import Any

import pytest

from penstock.config.load import load_run
from penstock.config.sync_free import SyncFreeFacts, bounded_buffer_bytes, settled_sync_free
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.project import project

EP2 = ("parallel.expert=2", "training.micro_batch=1", "training.sequence_length=4096")
H200 = SyncFreeFacts(dispatcher="symmetric", vendor="nvidia", limit=3, device_bytes=150_000_000_000)


def settled(*overrides: str, preset: str = "qwen3-30b-a3b-12l", facts: SyncFreeFacts = H200) -> tuple[Any, str]:
    run, reason = settled_sync_free(load_run(preset, [*EP2, *overrides]), facts)
    return run.dispatch.sync_free_stage, reason


def test_auto_leaves_counts_on_the_device_where_gpus_write_to_each_other() -> None:
    stage, reason = settled()
    assert stage == 2
    assert reason.startswith("2: no waits for row counts")
    assert "dispatch.sync_free=0" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dispatcher": "all-to-all"}, "0: all-to-all dispatch sends what the host has counted"),
        ({"dispatcher": "hierarchical"}, "0: hierarchical dispatch sends what the host has counted"),
        ({"vendor": "amd"}, "0: by default counts stay on the device on NVIDIA GPUs only"),
        ({"limit": 1}, "0: kernels of this run read row counts on the host"),
        ({"device_bytes": 24_000_000_000}, "0: bounded buffers take up to 1.2 GB more (dispatch.sync_free=2 tries)"),
        ({"dispatcher": "local"}, ""),
    ],
)
def test_auto_reads_counts_elsewhere_and_says_why(changes: dict[str, Any], reason: str) -> None:
    facts = {name: getattr(H200, name) for name in H200.__slots__} | changes
    stage, given = settled(facts=SyncFreeFacts(**facts))
    assert stage == 0
    assert given.startswith(reason) and bool(given) == bool(reason)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_number_stays(stage: int) -> None:
    assert settled(f"dispatch.sync_free={stage}") == (stage, "")


def test_buffers_are_what_all_layers_keep_beyond_their_even_share_or_what_evaluation_needs() -> None:
    run = load_run("qwen3-30b-a3b-12l", [*EP2, "evaluation.rows=0"])
    # 4,096 tokens of 8 choices in 12 layers of 2 x 768 features, 2 bytes each, once more.
    assert bounded_buffer_bytes(run) == 4096 * 8 * 12 * 2 * 768 * 2
    balanced = load_run("qwen3-30b-a3b-12l", [*EP2, "evaluation.rows=0", "dispatch.balance=bounded"])
    assert bounded_buffer_bytes(balanced) == pytest.approx(0.05 * bounded_buffer_bytes(run))
    evaluated = load_run("qwen3-30b-a3b-1l", [*EP2, "evaluation.rows=8"])
    # All 8,192 tokens of both ranks on one, 8 choices, with gate, up, their product and the output.
    assert bounded_buffer_bytes(evaluated) == 8192 * 8 * (3 * 768 + 2048) * 2


@pytest.mark.parametrize(
    ("cluster", "options", "stage"),
    [
        ("2xH200", (), 2),
        ("2xH200", ("training.micro_batch=8", "training.global_batch=16"), 0),
        ("2xMI300X", (), 0),
        ("2xH200", ("dispatch.method=all-to-all",), 0),
    ],
)
def test_a_plan_settles_auto_as_the_run_does(cluster: str, options: tuple[str, ...], stage: int) -> None:
    run = load_run("qwen3-30b-a3b-2l", [*EP2, "training.global_batch=8", *options])
    projection = project(run, parse_cluster(cluster))
    assert projection.layout.sync_free_stage == stage
