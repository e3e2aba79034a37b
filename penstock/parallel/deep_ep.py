"""The DeepEP library's buffer: asked for by name, loaded only then, made once for all layers of a rank.

Its normal kernels, for training: `get_dispatch_layout`, `dispatch`, `combine` of `deep_ep.Buffer` (1.x), inside a node
and between nodes. They take bfloat16 rows. The library is not part of Penstock and has never been run with it: its use
is tested against a simulation of that class.
"""

from importlib import import_module
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from penstock.base.errors import DeviceError
from penstock.parallel.axes import Axes, Axis

NODE = 8
"""GPUs of a node, as the library counts them where there are several."""


class DeepEpBuffer(Protocol):
    """What we use of `deep_ep.Buffer`. A handle is the library's own and says where rows went."""

    def get_dispatch_layout(
        self, topk_idx: Tensor, num_experts: int
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, Any]:
        """Tokens for each rank, for each rank's node, for each expert; whether a token goes to a rank; an event."""
        ...

    def dispatch(self, x: Tensor, **options: Any) -> tuple[Tensor, Tensor, Tensor, list[int], Any, Any]:
        """Rows, local ids (-1: not here) and weights that came; rows of each expert; a handle; an event."""
        ...

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, Any]:
        """Sums at the tokens of rows and of weights; an event."""
        ...


def make_buffer(axes: Axes, hidden_size: int, device: torch.device) -> DeepEpBuffer:
    """A buffer for the ranks that share experts. All of them call it.

    Args:
        axes: of this rank; `expert` has several.
        hidden_size: D.
        device: where the model is.

    Raises:
        DeviceError: the device or the ranks are none that the library knows, or it is not installed.
    """
    if device.type != "cuda":
        raise DeviceError(
            "dispatch.method=deep-ep runs on GPUs", got=f"device {device.type}", fix="set dispatch.method=auto"
        )
    if axes.expert_across.size > 1 and axes.expert_node.size != NODE:
        raise DeviceError(
            "dispatch.method=deep-ep cannot divide ranks that share experts over these nodes",
            got=f"{axes.expert_node.size} on each",
            allowed=f"{NODE} on each, or all on one",
            fix="set dispatch.method=hierarchical",
        )
    return sized_buffer(_library(), axes.expert, hidden_size * torch.bfloat16.itemsize)


def sized_buffer(library: ModuleType, axis: Axis, row_bytes: int) -> DeepEpBuffer:
    """A buffer as large as the library's own settings for so many ranks want it.

    Raises:
        DeviceError: it has none.
    """
    kind = library.Buffer
    try:
        settings = kind.get_dispatch_config(axis.size), kind.get_combine_config(axis.size)
    except AssertionError as error:
        raise DeviceError(
            "dispatch.method=deep-ep has no settings for so many ranks that share experts",
            got=axis.size,
            fix="set dispatch.method=auto",
        ) from error
    nvlink = max(one.get_nvl_buffer_size_hint(row_bytes, axis.size) for one in settings)
    network = max(one.get_rdma_buffer_size_hint(row_bytes, axis.size) for one in settings)
    buffer: DeepEpBuffer = kind(axis.group, nvlink, network)
    return buffer


def _library() -> ModuleType:
    try:
        return import_module("deep_ep")
    except ImportError as error:
        raise DeviceError(
            "dispatch.method=deep-ep needs the DeepEP library",
            got=str(error),
            allowed="a build of github.com/deepseek-ai/DeepEP for this PyTorch and GPU",
            fix="install it, or set dispatch.method=auto",
        ) from error
