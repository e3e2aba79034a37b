"""The place where a NaN or infinity is put is the place that is named."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor, nn

from penstock.config.parallel import Offload
from penstock.config.run import Optimizer
from penstock.data.loader import Batch
from penstock.models.decoder import Decoder
from penstock.models.parameters import param_shards
from penstock.models.rank_model import RankModel
from penstock.moe.layer import moe_loads
from penstock.train.diagnose import NO_ORIGIN, NonFiniteFinding, NonFiniteOrigin, find_origin
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import LossRule
from penstock.train.step import StepRule
from tests.closeness import assert_equal
from tests.train.tiny_run import cut_rule, one_rank, random_batch, tiny_run

OFF = Offload()
RULE = StepRule(
    cut=cut_rule(2),
    clip_norm=1.0,
    loss=LossRule(depths=1, mtp_weight=0.3, z_weight=0.0, chunk_tokens=None),
    moe_layers=(1, 2),
    experts=4,
)


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    return one_rank(tiny_run(tmp_path)).whole


@pytest.fixture
def batch() -> Batch:
    return random_batch(4, 12)


def search(model: Decoder, batch: Batch, *, spoiled: str = "", offload: Offload = OFF) -> NonFiniteOrigin | None:
    """The origin, if gradients of the failed step whose names begin with `spoiled` are infinite."""
    rank_model = RankModel(decoders={0: model})
    optimizer = MasterAdamW(
        param_shards(rank_model.modules, rank_model.axes), Optimizer(learning_rate=1e-3), offload=offload
    )
    there = optimizer.gradient_offload
    gradients = dict(optimizer.gradients()) | ({} if there is None else there.host)
    for name, gradient in gradients.items():
        gradient.fill_(math.inf if spoiled and name.startswith(spoiled) else 7)
    before = {name: gradient.clone() for name, gradient in gradients.items()}
    origin = find_origin(rank_model, optimizer, batch, RULE)
    assert_equal(gradients, before)
    return origin


def origin_in(model: Decoder, batch: Batch, **case: Any) -> NonFiniteOrigin:
    origin = search(model, batch, **case)
    assert origin is not None
    return origin


def spoil_output(module: nn.Module) -> None:
    def hook(module: nn.Module, inputs: object, output: Tensor) -> Tensor:
        return output * math.nan

    module.register_forward_hook(hook)


def test_a_parameter_that_is_not_finite_comes_first(model: Decoder, batch: Batch) -> None:
    with torch.no_grad():
        model.get_parameter("blocks.1.ffn.experts.down_eDF")[0, 0, 0] = math.inf
    origin = origin_in(model, batch)
    assert (origin.place, origin.layer) == ("parameter", 1)
    assert origin.name == "blocks.1.ffn.experts.down_eDF"
    assert origin.parameters == (origin.name,)


def test_the_innermost_module_is_named(model: Decoder, batch: Batch) -> None:
    spoil_output(model.get_submodule("blocks.1.ffn.experts"))
    origin = origin_in(model, batch)
    assert (origin.place, origin.name, origin.layer) == ("output", "blocks.1.ffn.experts", 1)
    assert str(origin) == "it began in the output of blocks.1.ffn.experts (layer 1)"
    spoil_output(model.get_submodule("norm"))
    spoil_output(model.get_submodule("blocks.0.ffn"))
    assert origin_in(model, batch).name == "blocks.0.ffn", "the first of several"


def test_a_loss_can_overflow_with_finite_hidden_states(model: Decoder, batch: Batch) -> None:
    with torch.no_grad():
        model.head_VD.fill_(3e38)
    origin = origin_in(model, batch)
    assert (origin.place, origin.name) == ("loss", "the output projection")


@pytest.mark.parametrize("offload", [OFF, Offload(gradients=True)])
def test_a_gradient_is_traced_to_the_deepest_layer(model: Decoder, batch: Batch, offload: Offload) -> None:
    origin = origin_in(model, batch, spoiled="blocks.0.ffn", offload=offload)
    assert (origin.place, origin.layer) == ("gradient", 0)
    assert origin.name.startswith("blocks.0.ffn") and origin.name == origin.parameters[-1]


def test_a_search_changes_nothing_and_a_fault_that_does_not_happen_again_is_said_to_be_one(
    model: Decoder, batch: Batch
) -> None:
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    origin = origin_in(model, batch)
    assert (origin.place, origin.name) == ("sum of gradients", "")
    assert "everything is finite when it is run again" in str(origin)
    assert_equal(model.state_dict(), before)
    assert all(bool((parameter.grad == 7).all()) for parameter in model.parameters())
    assert all(int(load.slots_E.sum()) == 0 for load in moe_loads([model]))
    assert not any(module._forward_hooks for module in model.modules())


def test_a_gpu_without_memory_for_the_search_is_no_fault(
    model: Decoder, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "forward", Mock(side_effect=torch.OutOfMemoryError))
    assert search(model, batch) is None


def test_a_finding_is_a_report_and_one_line(tmp_path: Path) -> None:
    origin = NonFiniteOrigin(place="output", name="blocks.1.ffn", layer=1)
    path = tmp_path / "nonfinite.json"
    checkpoint = "runs/a/checkpoints/step-000006"
    finding = NonFiniteFinding(figure="loss", value="nan", step=7, origin=origin, checkpoint=checkpoint)
    assert finding.write(path) is None
    assert str(finding.error(path)) == (
        "the loss of step 7 is nan: it began in the output of blocks.1.ffn (layer 1); "
        f"fix: read {path}; newest checkpoint: {checkpoint}"
    )
    assert json.loads(path.read_text())["origin"] == asdict(origin) | {"parameters": []}
    nothing = NonFiniteFinding(figure="loss", value="inf", step=1).error(path)
    assert f"is inf: {NO_ORIGIN}; fix: read {path}; newest checkpoint: none" in str(nothing)


def test_a_finding_that_cannot_be_written_is_an_error_that_says_both(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "nonfinite.json"
    unsaved = "cannot write step-000006; got No space left"
    finding = NonFiniteFinding(figure="loss", value="nan", step=7, unsaved=unsaved)
    unwritten = finding.write(path)
    assert unwritten == f"cannot write {path}: No such file or directory"
    assert str(finding.error(path, unwritten)) == (
        f"the loss of step 7 is nan: {NO_ORIGIN}; nothing was saved: {unsaved}; {unwritten}; "
        "fix: newest checkpoint: none"
    )
