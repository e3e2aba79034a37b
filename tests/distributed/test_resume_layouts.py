"""A run that changes its layout on the way loses nothing: weights, moments, loss, and its place in the data.

It trains a step on one layout, saves, and trains another on the next. What was saved must be what that one holds, bit
for bit; what follows must be what one process without a stop saw, as far as float32 sums in another order allow. Random
compositions (tests/prove) change between layouts of every kind, and compare what follows.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.models.build import build_model
from penstock.models.huggingface.weights import load_huggingface
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import RunFolder
from penstock.train.state import restore_state, save_state
from tests.closeness import assert_close, assert_equal, assert_within
from tests.distributed.case import MUON
from tests.distributed.one_loss import (
    BASE,
    TOLERANCES,
    Saved,
    StepFigures,
    differences,
    follow,
    layout,
    pipeline,
    put_together,
    saved_by,
    start_session,
)
from tests.distributed.pool import Pool

HALF, STEPS, RATE = 1, 2, 1e-2  # steps before the change of layout, and in all
SHORT = ("model.layers=4",)
"""A layer for each of a pipeline's stages."""


@dataclass(frozen=True)
class Layout:
    ranks: int
    overrides: tuple[str, ...] = ()


ALONE = Layout(1)
FSDP4 = Layout(4, layout("shard=full"))
TP2_EP2 = Layout(2, layout("tensor=2", "expert=2"))
PP2_EP2 = Layout(4, pipeline("interleaved", 2, "expert=2"))


@dataclass(frozen=True)
class Leg:
    """A part of a run on one layout."""

    begun: StepFigures  # tensors of the ranks before the first step
    seen: StepFigures  # what its steps gave, and tensors after them
    places: tuple[Mapping[str, Any], Mapping[str, Any]]  # of every rank in the data, before and after


def _ride(
    overrides: tuple[str, ...], folder: str, begin: int, end: int
) -> tuple[Saved, StepFigures, Saved, list[dict[str, Any]]]:
    """Train from one step to another on this rank, with a checkpoint before and after."""
    session = start_session(overrides)
    state = session.state
    store = CheckpointStore(Path(folder), keep=0, asynchronous=True, world=session.axes.world)  # 0 keeps all
    if begin:
        restore_state(store, begin, state)
    places, begun = [state.batches.state()], saved_by(session)
    seen = follow(session, end - begin, RATE)
    places.append(state.batches.state())
    save_state(store, end, state, {})
    store.close()
    state.batches.close()
    return begun, seen, saved_by(session), places


def ride(ranks: Pool, on: Layout, folder: Path, begin: int, end: int, model: tuple[str, ...] = ()) -> Leg:
    results = ranks.run(on.ranks, _ride, SHORT + model + on.overrides, str(folder), begin, end)
    places = results[0][3]
    assert all(other == places for *_, other in results), "ranks stand at different places"
    begun, seen = (put_together([(result[1], result[held]) for result in results]) for held in (0, 2))
    return Leg(begun, seen, (places[0], places[1]))


def behind_the_stop(seen: StepFigures) -> StepFigures:
    """What one process saw behind the step at which the others stopped."""
    figures = (figures[len(figures) // STEPS * HALF :] for figures in (seen.losses, seen.norms, seen.balance))
    return StepFigures(*figures, seen.held_out, seen.left_out[HALF:], seen.tensors)


def test_a_run_with_muon_goes_on_in_another_layout(ranks: Pool, tmp_path: Path) -> None:
    whole = ride(ranks, ALONE, tmp_path / "whole", 0, STEPS, MUON)
    first, second = (ride(ranks, on, tmp_path, n * HALF, (n + 1) * HALF, MUON) for n, on in enumerate((FSDP4, TP2_EP2)))
    assert_equal(second.begun.tensors, first.seen.tensors)
    assert second.places == (first.places[1], whole.places[1])
    assert second.places[1]["tokens"] == STEPS * 8 * 32  # rows of a batch, positions of a row
    assert_within(differences(second.seen, behind_the_stop(whole.seen), whole.begun.tensors), TOLERANCES)


def test_what_a_pipeline_saved_is_exported_as_one_process_would(
    ranks: Pool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ride(ranks, PP2_EP2, tmp_path / "pipeline" / "checkpoints", 0, HALF)
    shutil.copytree(tmp_path / "pipeline", tmp_path / "alone")
    ride(ranks, ALONE, tmp_path / "alone" / "checkpoints", HALF, HALF)  # reads, and writes in its own way

    for name, overrides in (("pipeline", PP2_EP2.overrides), ("alone", ())):
        run = load_run("debug", BASE + SHORT + overrides)
        RunFolder(tmp_path / name).write_config(run)
        assert main(["export", str(tmp_path / name), str(tmp_path / f"{name}-out")]) == 0
        assert f"the weights of step {HALF} of" in capsys.readouterr().out
    saved = [sorted(file.name for file in (tmp_path / name).rglob("*.safetensors")) for name in ("pipeline", "alone")]
    assert [len(files) for files in saved] == [PP2_EP2.ranks, 1]
    for file in ("config.json", "model.safetensors"):
        one, other = (tmp_path / f"{name}-out" / file for name in ("pipeline", "alone"))
        assert one.read_bytes() == other.read_bytes(), file

    ours = build_model(run, torch.device("cpu"))
    load_huggingface(ours, tmp_path / "pipeline-out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "pipeline-out", dtype=torch.float32).eval()
    tokens_BS = torch.randint(run.model.vocab_size, (2, 24))
    with torch.no_grad():
        logits_BSV = ours.logits(tokens_BS, torch.arange(24).expand(2, -1))
        assert_close(logits_BSV, theirs(tokens_BS, use_cache=False).logits, tolerance=2e-5)
