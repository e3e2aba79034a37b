"""How far tokens go on their way to experts, and the memory they go through, made where it can be had.

On the meta device there is none, and nothing is refused: a model there has shapes only.
"""

from collections import Counter
from collections.abc import Iterable
from importlib import import_module
from typing import TYPE_CHECKING

import torch

from penstock.base.errors import DeviceError
from penstock.config.run import Run
from penstock.kernels.device_facts import TRITON, installed
from penstock.kernels.float8.packed_rows import row_bytes
from penstock.kernels.float8.recipes import BLOCKWISE, MXFP8
from penstock.kernels.symmetric_transfer import MOST_RANKS, ROW_MULTIPLE
from penstock.layout.experts import ExpertPlacement
from penstock.parallel.axes import Axes
from penstock.parallel.deep_ep import DeepEpBuffer, make_buffer
from penstock.parallel.messages import exchange_json

if TYPE_CHECKING:  # it imports Triton, which may be absent
    from penstock.parallel.symmetric import SymmetricBuffers


def crosses_nodes(method: str, placement: ExpertPlacement, axes: Axes) -> bool:
    """Whether tokens go to other nodes first and there to ranks.

    Args:
        method: `dispatch.method`; auto crosses first where several ranks of each node share the experts.
        placement: of a layer's experts.
        axes: of this rank.

    Raises:
        DeviceError: they are asked to by name, and the nodes hold unequal parts of the experts.
    """
    node, across = axes.expert_node.size, axes.expert_across.size
    if across == 1 or method not in ("auto", "hierarchical"):
        return False
    if method == "auto":
        return node > 1 and placement.divides_into(node)
    if not placement.divides_into(node):
        raise DeviceError(
            "dispatch.method=hierarchical wants nodes that hold whole experts, or equal parts of the same",
            got=f"{node} ranks on a node and parallel.expert_tensor {placement.expert_tensor}",
            fix="set dispatch.method=auto",
        )
    return True


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
    if moe is None or moe.balance.pad_to_capacity or axes.expert.size == 1 or device.type == "meta":
        return None
    if wanted not in ("auto", "symmetric", "hierarchical"):
        return None
    grid = axes.grid
    placement = ExpertPlacement(experts=moe.experts, expert=grid.expert, expert_tensor=grid.expert_tensor)
    is_crossing = crosses_nodes(wanted, placement, axes)
    obstacle = why_not(run, axes, device, is_crossing)
    if obstacle and wanted == "symmetric":
        raise DeviceError(
            "dispatch.method=symmetric cannot be had", got=obstacle, fix="set dispatch.method=auto, or all-to-all"
        )
    if obstacle:
        return None
    # Tokens of all nodes may be on their way to the experts of ours.
    tokens = run.training.micro_batch * run.training.sequence_length // axes.sequence.size * axes.expert_across.size
    symmetric = import_module("penstock.parallel.symmetric")
    sizes = symmetric.BufferSizes(
        tokens=tokens,
        top_k=moe.top_k * grid.expert_tensor,
        row_bytes=widest_row(run),
        ranks=axes.expert_node.size,
    )
    buffers: SymmetricBuffers = symmetric.allocate(sizes, axes.expert_node, device)
    return buffers


def widest_row(run: Run) -> int:
    """Bytes of the widest row that travels: gradients and outputs never do in 8 bits, and tiny rows grow by packing."""
    plain = _plain_row(run)
    if run.float8.dispatch == "none":
        return plain
    return max(plain, *(row_bytes(run.model.hidden_size, recipe) for recipe in (BLOCKWISE, MXFP8)))


def _plain_row(run: Run) -> int:
    """Bytes of a token in the compute dtype."""
    return run.model.hidden_size * (2 if run.training.precision == "bf16" else 4)


def library_buffer(run: Run, axes: Axes, device: torch.device) -> DeepEpBuffer | None:
    """The DeepEP library's buffer. All ranks call it together.

    Args:
        run: says by `dispatch.method` whether it is wanted.
        axes: of this rank.
        device: where the model will be.

    Raises:
        DeviceError: it cannot be had.
    """
    if run.dispatch.method != "deep-ep" or run.model.moe is None or axes.expert.size == 1 or device.type == "meta":
        return None
    return make_buffer(axes, run.model.hidden_size, device)


def why_not(run: Run, axes: Axes, device: torch.device, is_crossing: bool) -> str:
    """What keeps ranks from writing into each other's memory; empty if nothing does.

    All ranks ask together. What keeps one of them keeps them all: ranks that share experts must go the same way.

    Args:
        run: says how wide rows are.
        axes: of this rank.
        device: its GPU.
        is_crossing: those of our node are enough; else all that share experts.
    """
    if device.type != "cuda":
        return f"device {device.type}, which is no GPU"
    own = _own_obstacle(run, axes, device, is_crossing)
    said = exchange_json([own, axes.expert_node.ranks[0], device.index], axes.world)
    obstacle = next((one for one, *_ in said if one), "")
    return obstacle or _named_twice((first, number) for _, first, number in said)


def unfit_rows(run: Run) -> str:
    """Why the kernels cannot write a run's rows into another GPU's memory; empty if they can."""
    size = _plain_row(run)  # rows in 8 bits always fit: they are filled up
    if size % ROW_MULTIPLE == 0:
        return ""
    return f"rows of {size} bytes, no multiple of {ROW_MULTIPLE} (model.hidden_size {run.model.hidden_size})"


def _own_obstacle(run: Run, axes: Axes, device: torch.device, is_crossing: bool) -> str:
    """What this rank knows of by itself."""
    node = axes.expert_node.size
    if node == 1:
        return "one rank on each node"
    if axes.expert_across.size > 1 and not is_crossing:
        return f"ranks {', '.join(map(str, axes.expert.ranks))} on several nodes"
    if node > MOST_RANKS:
        return f"{node} ranks on a node, and {MOST_RANKS} are the most"
    if obstacle := unfit_rows(run):
        return obstacle
    if not installed((TRITON,)):
        return "no Triton"
    others = [other for other in range(torch.cuda.device_count()) if other != device.index]
    if not all(torch.cuda.can_device_access_peer(device, other) for other in others):
        return "GPUs that cannot reach each other's memory"
    return ""


def _named_twice(gpus: Iterable[tuple[int, int]]) -> str:
    """An obstacle if ranks of a node have GPUs of one number: each sees its own only, and torch maps no others then.

    Args:
        gpus: of each rank the first on its node that it shares experts with, and the number of its GPU.
    """
    counts = Counter(gpus)
    if all(count == 1 for count in counts.values()):
        return ""
    (_, number), ranks = counts.most_common(1)[0]
    return (
        f"{ranks} ranks of a node that see their own GPUs only and call them all {number} (show each rank all GPUs of "
        "its node: srun with --gpus-per-node and --gpu-bind=none, without --gpus-per-task)"
    )
