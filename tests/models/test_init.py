"""Every rank of every layout starts from its part of one and the same model."""

import pytest
import torch
from torch import Tensor

from penstock.config.fit import grid_of
from penstock.models.build import build_model
from penstock.models.init import initialize
from penstock.models.parameters import param_shards
from penstock.models.rank_model import build_rank
from penstock.parallel.axes import make_axes
from penstock.parallel.shard import own_rows
from tests.distributed.pool import Pool
from tests.models.attentions import ATTENTIONS
from tests.models.families import tiny_decoder, tiny_model
from tests.models.layouts import CPU, LAYOUTS, MODELS, V3, every_rank_model, laid_out, part_of


@pytest.mark.often("*-everything", "v3-*", "grouped queries-tensor")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_shards_have_the_values_of_the_whole_model(model: str, layout: str) -> None:
    # bfloat16 where ranks round their own parts.
    run, world = laid_out(MODELS[model], layout, "bf16" if layout.startswith("experts") else "fp32")
    whole = dict(build_model(run, CPU).named_parameters())
    for rank_model in every_rank_model(run, world, CPU):
        for holding in param_shards(rank_model.modules, rank_model.axes):
            expected = part_of(whole[holding.name].detach(), holding)
            assert holding.parameter.dtype == expected.dtype
            assert torch.equal(holding.parameter, expected), f"{holding.name} on rank {rank_model.axes.rank}"


def test_norms_start_with_one_biases_and_buffers_with_zero_and_all_else_is_drawn() -> None:
    decoder = build_model(laid_out(V3, "one rank")[0], CPU)
    for buffer in decoder.buffers():
        buffer.fill_(7)
    initialize(decoder, seed=1, std=0.05)
    assert all(not buffer.any() for buffer in decoder.buffers())
    embed = decoder.get_parameter("embed.weight")
    assert embed.std().item() == pytest.approx(0.05, rel=0.1)
    assert embed.mean().item() == pytest.approx(0.0, abs=0.005)
    one, other = (decoder.get_parameter(f"blocks.{layer}.attention.out.weight") for layer in (1, 2))
    assert not torch.equal(one, other)
    for family in ("gpt-oss", "qwen3", "olmoe"):
        decoder = tiny_decoder(tiny_model(family="plain", attention=ATTENTIONS[family]))
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                assert (parameter == 1).all(), name
            elif ".attention." in name:
                assert parameter.any() != name.endswith(".bias"), name
        assert family != "gpt-oss" or all(block.attention.sinks_H.all() for block in decoder.blocks.values())


def _sharded(layout: str) -> list[tuple[str, tuple[int, int], Tensor]]:
    """Name, rows and values of what a rank holds under FSDP."""
    run, world = laid_out(V3, layout, "bf16")
    run = run.model_copy(update={"parallel": run.parallel.model_copy(update={"shard": "full"})})
    model = build_rank(run, make_axes(grid_of(run, world)), CPU)
    return [(one.name, *own_rows(one.parameter)[::-1]) for one in param_shards(model.modules, model.axes)]


def test_rows_that_data_parallel_ranks_divide_have_the_values_of_the_whole_in_float32(ranks: Pool) -> None:
    run, world = laid_out(V3, "data")
    whole = dict(build_model(run, CPU).named_parameters())
    for held in ranks.run(world, _sharded, "data"):
        assert {name for name, _, _ in held} == whole.keys()
        for name, rows, values in held:
            assert values.dtype == torch.float32
            assert torch.equal(values, whole[name][slice(*rows)]), name


def test_experts_are_drawn_one_by_one_whatever_their_number() -> None:
    few, many = (tiny_model(moe=_experts(count)) for count in (4, 8))
    assert torch.equal(_gate_up(few), _gate_up(many)[:4])
    assert not torch.equal(_gate_up(many)[0], _gate_up(many)[1])


def _experts(count: int) -> object:
    moe = tiny_model("deepseek-v2").moe
    assert moe is not None
    return moe.model_copy(update={"experts": count})


def _gate_up(model: object) -> Tensor:
    return tiny_decoder(model).get_parameter("blocks.1.ffn.experts.gate_up_eFD").detach()  # type: ignore[arg-type]
