"""Whether a run can fit into the memory of its machine, by arithmetic, before anything is made.

Counted is what the layout of a run needs at least on each rank: weights, gradients and optimizer, the input of every
layer that backward reads, and the ids of a step. A run that is refused cannot fit. One that is not may still be too
large, since kernels, messages and the allocator need more: `penstock plan` projects that.
"""

from dataclasses import dataclass

import torch

from penstock.base.errors import DeviceError
from penstock.config.fit import shard
from penstock.config.run import Run
from penstock.config.size import routed_parameters, size_of
from penstock.layout.grid import Grid
from penstock.parallel.launch.host import host_bytes

_ID_BYTES = 8
"""Of an id; the rows of a step are held with the numbers of their documents beside the ids."""


@dataclass(frozen=True)
class Need:
    """What one rank needs at least, in bytes.

    Attributes:
        state: weights, gradients and optimizer.
        activations: inputs of layers.
        rows: ids of all rows of a step, in host memory.
    """

    state: int
    activations: int
    rows: int


def least_need(run: Run, grid: Grid) -> Need:
    """What a rank of a run needs at least, on average over the stages of a pipeline."""
    training, model = run.training, run.model
    size = size_of(model, training.sequence_length)
    routed = routed_parameters(model)
    dense = size.parameters + size.mtp_parameters - routed
    state = _state(run, dense / (grid.tensor * grid.pipeline), grid.data * grid.context)
    state += _state(run, routed / (grid.expert * grid.expert_tensor * grid.pipeline), grid.expert_data)
    width = model.hidden_size * (2 if training.precision == "bf16" else 4)
    positions = training.micro_batch * training.sequence_length / (grid.tensor * grid.context)
    kept = 0 if run.offload.activations else model.layers / grid.pipeline * positions * width
    return Need(int(state), int(kept), 2 * training.global_batch * (training.sequence_length + 1) * _ID_BYTES)


def find_shortage(run: Run, grid: Grid, device: torch.device, local_ranks: int) -> DeviceError | None:
    """What is wrong if a run cannot fit into the memory of its ranks here; None if it can, or nobody asks.

    Args:
        run: the run.
        grid: its ranks.
        device: of this rank.
        local_ranks: ranks of this machine, which share its memory.
    """
    if not run.host.check_memory:
        return None
    need = least_need(run, grid)
    wanted = need.state + need.activations
    if device.type == "cuda":
        where = "GPU"
        there: int | None = torch.cuda.get_device_properties(device).total_memory
    else:
        where, there = "machine", host_bytes()
        wanted = (wanted + need.rows) * local_ranks
    if there is None or wanted <= there:
        return None
    of_ranks = f" of {local_ranks} ranks" if where == "machine" and local_ranks > 1 else ""
    larger = max(("state", "activations", "rows"), key=lambda name: vars(need)[name])
    cause = {
        "state": "weights, gradients and optimizer",
        "activations": f"activations of training.sequence_length {run.training.sequence_length:,}",
        "rows": f"{run.training.global_batch:,} rows of training.sequence_length {run.training.sequence_length:,}",
    }[larger]
    smaller = "a smaller model, such as its first layers (NAME-4l)" if larger == "state" else "shorter or fewer rows"
    return DeviceError(
        f"run {run.name} does not fit into the memory of this {where}: {cause}{of_ranks} are most of what it needs",
        got=f"a need of {wanted / 1e9:,.1f} GB or more, and {there / 1e9:,.1f} GB",
        fix=f"{smaller}, or more ranks: `penstock plan {run.name} --on 8xH200` says where it fits; "
        "host.check_memory=false tries it all the same",
    )


def _state(run: Run, parameters: float, copies: int) -> float:
    """Bytes of a rank's weights, gradients and optimizer of so many parameters that so many ranks have."""
    divides, shards = shard(run), min(run.parallel.shard_size or copies, copies)
    # Weight, gradient, and what the optimizer holds: two moments, and masters of weights in bfloat16.
    weight, gradient, optimizer = (2, 4, 12) if run.training.precision == "bf16" and divides != "full" else (4, 4, 8)
    if run.offload.optimizer:
        optimizer = 0
    if divides == "full":
        return parameters * (weight + gradient + optimizer) / shards
    return parameters * (weight + gradient + optimizer / (shards if divides == "optimizer" else 1))
