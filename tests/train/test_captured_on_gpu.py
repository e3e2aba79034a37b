"""Passes, and parts of layers, that a GPU replays give the very numbers of eager ones, over steps with other data."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.config.load import load_run
from penstock.train.setup import Session, prepare
from penstock.train.step import StepResult, evaluate, train_step
from tests.train.tiny_run import ENVIRONMENT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

SMALL = (
    "device=cuda",
    "training.precision=bf16",
    "training.deterministic=true",
    "training.global_batch=8",
    "data.source=synthetic-learnable",
    "checkpoint.enabled=false",
    "model.mtp_layers=1",
)


def _start(folder: Path, *overrides: str) -> Session:
    return prepare(load_run("debug", [*SMALL, f"record.folder={folder}", *overrides]), ENVIRONMENT)


def _step(session: Session) -> StepResult:
    batch = session.state.batches.next_batch()
    result = train_step(session.model, session.state.optimizer, batch, session.rule, 1e-3)
    return replace(result, peak_memory_bytes=0)


def _train(session: Session, steps: int = 5) -> tuple[list[StepResult], list[float], dict[str, Tensor]]:
    """Steps, an evaluation after each other one, and the state at the end."""
    results, held_out = [], []
    for step in range(steps):
        results.append(_step(session))
        if step % 2 and session.held_out is not None:
            held_out.append(evaluate(session.model, session.held_out, session.rule.cut, session.rule.loss).loss)
    state = {name: part.tensor.clone() for name, part in session.state.optimizer.parts().items()}
    session.state.batches.close()
    return results, held_out, state


@pytest.mark.parametrize(
    "overrides",
    [(), ("data.document_mask=true", 'recompute.modules=["layer"]')],
    ids=["plain", "documents, everything recomputed"],
)
def test_replayed_passes_give_the_bits_of_eager_ones(overrides: tuple[str, ...], tmp_path: Path) -> None:
    eager, eager_held_out, eager_state = _train(_start(tmp_path, *overrides))
    session = _start(tmp_path, *overrides, "graphs.capture=full")
    replayed, held_out, state = _train(session)
    assert session.graphs is not None
    assert session.graphs.pool_bytes > 0
    assert (replayed, held_out) == (eager, eager_held_out)
    for name, tensor in eager_state.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("data.document_mask=true", 'recompute.modules=["expert-activation", "shared-expert"]'),
        ("kernels.experts=reference", "model.moe.balance.capacity_factor=1.0", "dispatch.overlap=shared"),
    ],
    ids=["plain", "documents, experts recomputed", "a host that waits between parts"],
)
def test_replayed_parts_give_the_bits_of_eager_layers(overrides: tuple[str, ...], tmp_path: Path) -> None:
    eager, eager_held_out, eager_state = _train(_start(tmp_path, *overrides))
    session = _start(tmp_path, *overrides, "graphs.capture=partial")
    replayed, held_out, state = _train(session)
    assert session.graphs is not None
    assert session.graphs.pool_bytes > 0
    assert (replayed, held_out) == (eager, eager_held_out)
    for name, tensor in eager_state.items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("capture", ["auto", "partial"])
def test_a_graph_that_was_given_up_is_captured_again(capture: str, tmp_path: Path) -> None:
    eager, _, _ = _train(_start(tmp_path), 4)
    session = _start(tmp_path, f"graphs.capture={capture}")
    graphs = session.graphs
    assert graphs is not None
    results = [_step(session) for _ in range(3)]
    held = torch.cuda.memory_reserved()
    graphs.release()
    assert torch.cuda.memory_reserved() < held
    assert graphs.pool_bytes == 0
    results.append(_step(session))
    assert graphs.pool_bytes > 0
    assert results == eager
    session.state.batches.close()
