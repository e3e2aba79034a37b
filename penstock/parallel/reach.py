"""Memory that the GPUs of a node write into, made where it is asked for and can be had."""

from importlib import import_module
from typing import TYPE_CHECKING

import torch

from penstock.base.errors import DeviceError
from penstock.config.run import Run
from penstock.kernels.device_facts import TRITON, installed
from penstock.parallel.axes import Axes

if TYPE_CHECKING:  # it imports Triton, which may be absent
    from penstock.parallel.symmetric import SymmetricBuffers


def shared_buffers(run: Run, axes: Axes, device: torch.device) -> "SymmetricBuffers | None":
    """Buffers for the tokens of one micro-batch; all layers use the same. All ranks call it together.

    Args:
        run: says by `dispatch.method` whether they are wanted; with auto they are, if they can be had.
        axes: of this rank.
        device: where the model will be.

    Returns:
        The buffers, or None if tokens travel in another way or not at all.

    Raises:
        DeviceError: they are asked for by name and cannot be had.
    """
    moe, wanted = run.model.moe, run.dispatch.method
    if moe is None or moe.balance.pad_to_capacity or axes.expert.size == 1 or wanted not in ("auto", "symmetric"):
        return None
    obstacle = why_not(axes, device)
    if obstacle and wanted == "symmetric":
        raise DeviceError(
            "dispatch.method=symmetric cannot be had", got=obstacle, fix="set dispatch.method=auto, or all-to-all"
        )
    if obstacle:
        return None
    symmetric = import_module("penstock.parallel.symmetric")
    width = run.model.hidden_size * (2 if run.training.precision == "bf16" else 4)
    sizes = symmetric.BufferSizes(
        tokens=run.training.micro_batch * run.training.sequence_length // axes.sequence.size,
        top_k=moe.top_k * axes.grid.expert_tensor,
        row_bytes=width,
        ranks=axes.expert.size,
    )
    buffers: SymmetricBuffers = symmetric.allocate(sizes, axes.expert, device)
    return buffers


def why_not(axes: Axes, device: torch.device) -> str:
    """What keeps the ranks that share experts from writing into each other's memory; empty if nothing does."""
    if device.type != "cuda":
        return f"device {device.type}, which is no GPU"
    if axes.expert_node.size < axes.expert.size:
        return f"ranks {', '.join(map(str, axes.expert.ranks))} on several nodes"
    if not installed((TRITON,)):
        return "no Triton"
    here = torch.cuda.device_count()
    others = [other for other in range(here) if other != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "GPUs that cannot reach each other's memory"
    return ""
