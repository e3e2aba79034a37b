"""A run that changes its layout on the way loses nothing: weights, moments, loss, and its place in the data.

Each pair trains two steps on one layout, saves, and trains two more on another. What was saved must be what the other
layout holds, bit for bit; what follows must be what one process without a stop saw, as far as float32 sums in another
order allow.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
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

BF16 = ("training.precision=bf16",)


@dataclass(frozen=True)
class Layout:
    ranks: int
    overrides: tuple[str, ...] = ()


ALONE = Layout(1)
EP4 = Layout(4, layout("expert=4", "shard=optimizer"))
FSDP4 = Layout(4, layout("shard=full"))
TP2 = Layout(2, layout("tensor=2"))
PP2_EP2 = Layout(4, pipeline("interleaved", 2, "expert=2"))

PAIRS = {
    "EP 4, ZeRO-1 to PP 2 x EP 2, ZB-V": (EP4, Layout(4, pipeline("zb-v", 2, "expert=2"))),
    "FSDP 4 to TP 2 folded with EP 2": (FSDP4, Layout(2, layout("tensor=2", "expert=2"))),
    "TP 2 to EP 2 x EDP 2, FSDP": (TP2, Layout(4, layout("expert=2", "shard=full"))),
    "PP 2, interleaved, x EP 2 to one process": (PP2_EP2, ALONE),
    "one process to CP 2 x ETP 2": (ALONE, Layout(2, layout("context=2", "expert_tensor=2"))),
    "PP 2, interleaved, x EP 2 to PP 4, explicit layout": (
        PP2_EP2,
        Layout(4, pipeline("1f1b", 4, 'pipeline.layout="E|t*2|t|t,mL"')),
    ),
}

IN_BF16 = {"loss": 1e-3, "balance": 1e-3, "gradient norm": 2e-2, "parameters": 5e-2, "moments": 0.1} | {
    "held-out loss": 1e-3
}
"""The same for runs in bfloat16, where losses of different layouts were seen up to 6e-4 apart, of balance 7e-5."""


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


@cache
def _uninterrupted(ranks: Pool, folder: Path, model: tuple[str, ...] = ()) -> tuple[Leg, StepFigures]:
    """One process that trains all steps; and what of it lies behind the stop of the others."""
    whole = ride(ranks, ALONE, folder, 0, STEPS, model)
    seen = whole.seen
    figures = (figures[len(figures) // STEPS * HALF :] for figures in (seen.losses, seen.norms, seen.balance))
    return whole, StepFigures(*figures, seen.held_out, seen.left_out[HALF:], seen.tensors)


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("uninterrupted")


def _check_legs(
    ranks: Pool,
    kept: Path,
    folder: Path,
    legs: tuple[Layout, Layout],
    model: tuple[str, ...],
    allowed: dict[str, float],
) -> None:
    whole, expected = _uninterrupted(ranks, kept, model)
    first, second = (ride(ranks, on, folder, n * HALF, (n + 1) * HALF, model) for n, on in enumerate(legs))
    assert_equal(second.begun.tensors, first.seen.tensors)
    assert second.places == (first.places[1], whole.places[1])
    assert second.places[1]["tokens"] == STEPS * 8 * 32  # rows of a batch, positions of a row
    assert_within(differences(second.seen, expected, whole.begun.tensors), allowed)


@pytest.mark.often("EP 4, ZeRO-1 to PP 2 x EP 2, ZB-V")
@pytest.mark.parametrize("name", PAIRS)
def test_a_run_goes_on_in_another_layout_as_if_nothing_had_happened(
    name: str, ranks: Pool, kept: Path, tmp_path: Path
) -> None:
    _check_legs(ranks, kept, tmp_path, PAIRS[name], (), TOLERANCES)  # float32: sums in another order only


def test_a_run_with_muon_goes_on_in_another_layout(ranks: Pool, kept: Path, tmp_path: Path) -> None:
    _check_legs(ranks, kept / "muon", tmp_path, PAIRS["FSDP 4 to TP 2 folded with EP 2"], MUON, TOLERANCES)


@pytest.mark.slow
@pytest.mark.parametrize(
    "legs",
    [
        pytest.param((EP4, Layout(2, pipeline("zb-1f1b", 2))), id="EP 4, ZeRO-1 to PP 2, zb-1f1b"),
        pytest.param((Layout(2, layout("shard=full")), EP4), id="FSDP 2 to EP 4, ZeRO-1"),
    ],
)
def test_in_bf16_a_run_goes_on_from_the_very_float32_weights(
    legs: tuple[Layout, Layout], ranks: Pool, kept: Path, tmp_path: Path
) -> None:
    _check_legs(ranks, kept / "bf16", tmp_path, legs, BF16, IN_BF16)


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
