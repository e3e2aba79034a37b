"""One rank of a run without memory: its groups, model, shards, optimizer and schedule on the meta device.

The code of a real run builds it, with a process group that moves nothing, so problems of a layout show on a laptop.
Only forward and backward are left out.
"""

from dataclasses import dataclass

import torch

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.run import Run
from penstock.layout.stages import Stage
from penstock.models.parameters import param_shards
from penstock.models.rank_model import RankModel, build_rank, embedding_places, stages_of
from penstock.moe.experts import GroupedExperts
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.train.optimizer import MasterAdamW


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """State of one rank from its first step to its last.

    Attributes:
        model: its stages, with groups and schedule.
        stages: content of each stage, by number.
        dense: parameters outside of routed experts on this rank, before sharding over data ranks.
        expert: parameters of its experts.
        weight_bytes: between steps.
        gradient_bytes: float32 sums.
        optimizer_bytes: separate masters and moments, or the buffers that they pass through.
        host_bytes: masters and moments in host memory.
    """

    model: RankModel
    stages: dict[int, Stage]
    dense: int
    expert: int
    weight_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    host_bytes: int


def rehearse(run: Run, *, world: int, rank: int) -> Rehearsal:
    """Build one rank of a run. Starts and ends a process group, so there must be none.

    Raises:
        ConfigError: the layout does not fit the ranks or the model, or there is no such rank.
    """
    grid = grid_of(run, world)
    if rank >= world:
        raise ConfigError("--rank is not a rank of --fake-world", got=rank, allowed=f"0 to {world - 1}")
    start_fake_process_group(rank, world)
    try:
        axes = make_axes(grid, embedding_places(run), run.parallel.shard_size)
        model = build_rank(run, axes, torch.device("meta"))
        held = param_shards(model.modules, axes)
        optimizer = MasterAdamW(held, run.optimizer, parallel=run.parallel, world=axes.world, offload=run.offload)
        memory = optimizer.memory()
    finally:
        stop_process_group()
    stages = stages_of(run)
    parameters = {name: parameter.numel() for name, parameter in model.named_parameters()}
    experts = sum(
        parameter.numel()
        for decoder in model.modules
        for module in decoder.modules()
        if isinstance(module, GroupedExperts)
        for parameter in module.parameters()
    )
    return Rehearsal(
        model=model,
        stages={number: stages[number] for number in model.decoders},
        dense=sum(parameters.values()) - experts,
        expert=experts,
        weight_bytes=memory.weights,
        gradient_bytes=memory.gradients,
        optimizer_bytes=memory.optimizer,
        host_bytes=memory.host,
    )
