"""Layers whose static parts are replayed, by graphs of a CPU: the same numbers; what is captured, told, given up."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.config.model import Balance
from penstock.config.parallel import Offload, Recompute
from penstock.config.run import Run
from penstock.models.parameters import fuse_wgrad_accumulation, param_shards
from penstock.train.capture import CapturedParts
from penstock.train.optimizer import MasterAdamW
from penstock.train.step import Passes, StepResult, evaluate, step_rule, train_step
from tests.models.attentions import ATTENTIONS
from tests.parallel.recorded_graph import Graphs
from tests.parallel.same_addresses import SameAddresses
from tests.train.tiny_run import CPU, held_out_rows, one_rank, random_batch, tiny_model, tiny_run

LAYERS = 3
"""Of the tiny model: a dense one, one of experts, and one that predicts further."""

CAPTURES = [f"{what} {number}" for number in range(2 * LAYERS) for what in ("capture", "replay")]
REPLAYS = [f"replay {number}" for number in range(2 * LAYERS)]


def moe_of(**balance: Any) -> dict[str, Any]:
    moe = tiny_model().moe
    assert moe is not None
    return {"model": tiny_model(moe=moe.model_copy(update={"balance": Balance(**balance)}))}


def steps(
    run: Run, passes: Passes | None, count: int = 4, *, documents: bool = False
) -> tuple[list[StepResult], list[float], dict[str, Tensor]]:
    """Some steps over other data each, with an evaluation after each; products add to the sums of gradients."""
    torch.manual_seed(0)
    model = one_rank(run)
    optimizer = MasterAdamW(param_shards(model.modules, model.axes), run.optimizer)
    fuse_wgrad_accumulation(model.modules, optimizer.gradient_of)
    rule = step_rule(run, model, CPU) if passes is None else step_rule(run, model, CPU, passes)
    results, held_out = [], []
    for seed in range(count):
        batch = random_batch(4, 12, seed=seed, documents=documents)
        results.append(replace(train_step(model, optimizer, batch, rule, 1e-2), peak_memory_bytes=0))
        held_out.append(evaluate(model, held_out_rows(), rule.cut, rule.loss).loss)
    tensors = {**model.whole.state_dict(), **{name: part.tensor for name, part in optimizer.parts().items()}}
    return results, held_out, {name: tensor.clone() for name, tensor in tensors.items()}


def captured(graphs: SameAddresses, *, is_asked_for: bool = True) -> CapturedParts:
    return CapturedParts(is_asked_for=is_asked_for, begin_pool=graphs.begin)


@pytest.mark.often(
    "sequence loss-True",
    "drops-False",
    "recomputed-True",
    "offloaded-False",
    "dense-True",
    "windows-False",
    "chunks-True",
    "loss over the micro-batch-False",
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        moe_of(aux_loss="micro-batch", aux_loss_coef=0.1, z_loss_coef=0.1),
        moe_of(capacity_factor=0.5),
        {"recompute": Recompute(modules=("expert-activation", "shared-expert", "dense"))},
        {"offload": Offload(activations=("dense",))},
        {"model": tiny_model(moe=None, dense_layers=2, mtp_layers=0)},
        {"model": tiny_model(attention=ATTENTIONS["gpt-oss"])},
        {"model": tiny_model(attention=ATTENTIONS["llama4"])},
    ],
    ids=[
        "sequence loss",
        "loss over the micro-batch",
        "drops",
        "recomputed",
        "offloaded",
        "dense",
        "windows",
        "chunks",
    ],
)
def test_replayed_parts_train_as_eager_layers_do(changes: dict[str, Any], documents: bool, tmp_path: Path) -> None:
    run, graphs = tiny_run(tmp_path, **changes), SameAddresses()
    results, held_out, state = steps(run, None, documents=documents)
    replayed = steps(run, captured(graphs), documents=documents)
    assert replayed[0] == results
    assert replayed[1] == held_out
    for name, tensor in state.items():
        assert torch.equal(replayed[2][name], tensor), name
    layers = 2 if run.model.moe is None else LAYERS
    recorded = steps(run, CapturedParts(is_asked_for=True, begin_pool=Graphs(layers).begin), documents=documents)
    assert recorded[:2] == (results, held_out)
    for name, tensor in state.items():
        assert torch.equal(recorded[2][name], tensor), name
    assert graphs.log[: 1 + 4 * layers] == ["pool", *CAPTURES[: 4 * layers]]
    assert graphs.log[1 + 4 * layers :] == (3 * 2 - 1) * REPLAYS[: 2 * layers]


def test_the_first_step_is_eager_and_says_nothing(tmp_path: Path) -> None:
    graphs = SameAddresses()
    parts = captured(graphs)
    steps(tiny_run(tmp_path), parts, 1)
    assert (graphs.log, parts.pool_bytes, parts.take_notices()) == ([], 0, ())


def test_the_memory_of_parts_is_told_once(tmp_path: Path) -> None:
    parts = captured(SameAddresses(), is_asked_for=False)
    steps(tiny_run(tmp_path), parts, 3)
    assert 600_000_000 < parts.pool_bytes < 600_100_000
    assert parts.take_notices() == ("graphs: 6 parts captured in 1.5 s; they keep 0.60 GB",)
    assert parts.take_notices() == ()


def test_parts_that_were_given_up_are_captured_again_into_another_pool(tmp_path: Path) -> None:
    graphs, run = SameAddresses(), tiny_run(tmp_path)
    parts = captured(graphs)
    steps(run, parts, 2)
    graphs.log.clear()
    parts.release()
    parts.release()
    assert graphs.log == [f"release {number}" for number in range(2 * LAYERS)]
    assert parts.pool_bytes == 0
    steps(run, parts, 1)
    assert graphs.log[2 * LAYERS :][:2] == ["pool", "capture 6"]


@pytest.mark.parametrize("fails_at", [0, 1, 3, 5])
def test_without_memory_layers_stay_eager_and_the_user_hears_it_once(fails_at: int, tmp_path: Path) -> None:
    run, graphs = tiny_run(tmp_path), SameAddresses(fails_at=fails_at)
    results, held_out, state = steps(run, None)
    parts = captured(graphs, is_asked_for=False)
    stayed = steps(run, parts)
    assert stayed[:2] == (results, held_out)
    assert all(torch.equal(stayed[2][name], tensor) for name, tensor in state.items())
    assert graphs.captures <= 2 * LAYERS
    assert [entry for entry in graphs.log if entry.startswith("release")] == [
        f"release {number}" for number in range(graphs.captures) if number != fails_at and number < graphs.captures
    ]
    assert parts.take_notices() == (
        "graphs: layers stay eager, there is no memory for a part (tried to allocate 2 GiB)",
    )


def test_parts_that_were_asked_for_and_find_no_memory_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="finds no memory for a part; got tried to allocate 2 GiB; fix: a smaller"):
        steps(tiny_run(tmp_path), captured(SameAddresses(fails_at=2)), 2)
