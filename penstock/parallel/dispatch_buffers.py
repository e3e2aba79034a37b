"""Memory that the GPUs of a node map for each other, where the run's dispatcher needs it and the machine allows it."""

from collections import Counter
from dataclasses import replace

import torch

from penstock.base.errors import DeviceError
from penstock.config.dispatcher import DispatcherChoice, choose_dispatcher, dispatch_facts, plain_row_bytes
from penstock.config.run import Run
from penstock.kernels.device_facts import TRITON, installed
from penstock.kernels.float8.quantized import row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, MXFP8
from penstock.parallel.axes import Axes
from penstock.parallel.collectives import all_gather_json
from penstock.parallel.replicas import ReplicaMemory, replica_sizes
from penstock.parallel.symmetric import BufferSizes, SymmetricBuffers, allocate


def shared_buffers(run: Run, axes: Axes, device: torch.device) -> SymmetricBuffers | None:
    """Buffers for the tokens of one micro-batch, for all layers; None if tokens travel in another way. Collective.

    Raises a DeviceError if the method was asked for by name and cannot be had.
    """
    if run.model.moe is None or axes.expert.size == 1 or device.type == "meta":
        return None
    facts = dispatch_facts(run, axes.expert_node.size)
    choice = choose_dispatcher(facts)
    if not choice.writes_to_peers and not choice.obstacle:
        return None  # The method sends tokens in another way: all ranks know that without asking each other.
    obstacle = peer_obstacle(choice, axes, device)
    choice = choose_dispatcher(replace(facts, obstacle=obstacle))
    refuse(choice)
    if not choice.writes_to_peers:
        return None
    return allocate(buffer_sizes(run, axes), axes.expert_node, device)


def replica_memory(run: Run, axes: Axes, buffers: SymmetricBuffers | None) -> ReplicaMemory | None:
    """The sections of replicas in these buffers; None without replicas, or if they travel by collectives."""
    sizes = replica_sizes(run, axes.grid)
    if buffers is None or sizes is None:
        return None
    dtype = torch.bfloat16 if sizes.itemsize == 2 else torch.float32
    return ReplicaMemory(buffers, sizes, dtype)


def refuse(choice: DispatcherChoice) -> None:
    """Raise a DeviceError if the dispatcher that was asked for by name cannot be had."""
    problem = choice.refusal
    if problem is not None:
        raise DeviceError(f"{problem.field} {problem.what}", got=problem.got, allowed=problem.allowed, fix=problem.fix)


def buffer_sizes(run: Run, axes: Axes) -> BufferSizes:
    assert run.model.moe is not None, "a dense model sends no tokens"
    # Tokens of all nodes may be on their way to the experts of this one.
    tokens = run.training.micro_batch * run.training.sequence_length // axes.sequence.size * axes.expert_across.size
    replicas = replica_sizes(run, axes.grid)
    return BufferSizes(
        tokens=tokens,
        top_k=run.model.moe.top_k * axes.grid.expert_tensor,
        row_bytes=widest_row(run),
        ranks=axes.expert_node.size,
        numbers=0 if replicas is None else run.model.moe.experts,
        replica_bytes=0 if replicas is None else replicas.total_bytes,
    )


def widest_row(run: Run) -> int:
    """Bytes of the widest row: gradients and outputs travel in the compute dtype, and packing widens narrow rows."""
    plain = plain_row_bytes(run)
    if run.float8.dispatch == "none":
        return plain
    return max(plain, *(row_bytes(run.model.hidden_size, recipe) for recipe in (BLOCKWISE, MXFP8)))


def peer_obstacle(choice: DispatcherChoice, axes: Axes, device: torch.device) -> str:
    """Reason why ranks cannot write to each other's memory, the same for all (collective); empty if they can."""
    if device.type != "cuda":
        return f"device {device.type}, which is no GPU"
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    local_obstacle = choice.obstacle  # the first obstacle that this rank sees
    if not local_obstacle and not installed((TRITON,)):
        local_obstacle = "no Triton"
    if not local_obstacle and not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        local_obstacle = "GPUs that cannot reach each other's memory"
    # A rank with an obstacle must not leave before this: the others would wait for it here.
    said = all_gather_json([local_obstacle, axes.expert_node.ranks[0], device.index], axes.world)
    obstacle = next((reason for reason, *_ in said if reason), "")
    # Ranks of a node that see their own GPU only give it the same index: torch maps no memory then.
    (_, index), ranks = Counter((first, index) for _, first, index in said).most_common(1)[0]
    if obstacle or ranks == 1:
        return str(obstacle)
    return (
        f"{ranks} ranks of a node that see their own GPUs only and call them all {index} (show each rank all GPUs of "
        "its node: srun with --gpus-per-node and --gpu-bind=none, without --gpus-per-task)"
    )
