"""The work of our functions that multiply in 8 bits; `penstock.trace.work` has all others.

Operands are quantized before a product or inside its function, and results are written in 16 bits. Quantization moves
bytes that are no part of this: what it costs shows as a share of the roof that is not reached.
"""

from collections.abc import Mapping

from penstock.trace.operators import Call
from penstock.trace.work_arguments import Found, Model, Tensor, UnknownShapeError, need, optional


def _linear(call: Call, tensors: list[Tensor | None], used_rows: float) -> Found:
    """A dense product: x_D, w_FD."""
    x, w = need(tensors, 0, 2), need(tensors, 1, 2)
    rows = x.numel // max(x.shape[-1], 1)
    _refuse_others(call, most=4)
    return 2 * rows * w.numel, x.numel + w.numel + rows * w.shape[0] * x.width


def _networks(call: Call, tensors: list[Tensor | None], used_rows: float) -> Found:
    """Both products of experts, whose arguments are those of 16 bits, or of a dense network: x_TD, gate_up, down."""
    x, gate_up, down = (need(tensors, one, 2) for one in range(3))
    is_dense = call.name == "_Float8Network"
    if is_dense:
        _refuse_others(call, most=5)
    index = None if is_dense else optional(tensors, 5) or optional(tensors, 4)
    rows = (1 if is_dense else used_rows) * (index.shape[0] if index is not None and index.shape else x.shape[0])
    wide, hidden, narrow = gate_up.shape[-2], gate_up.shape[-1], down.shape[-1]
    moved = gate_up.numel + down.numel + rows * (hidden + narrow + (wide + hidden) * x.width)
    return 2 * rows * hidden * (wide + narrow), moved


def _latent_heads_backward(call: Call, tensors: list[Tensor | None], used_rows: float) -> Found:
    """Gradients of queries, keys and values, read in 16 bits and written in 8, twice; a rotation has few FLOPs."""
    given = [need(tensors, place, 4) for place in range(3)]
    return sum(one.numel for one in given), 2 * sum(one.bytes for one in given)


def _refuse_others(call: Call, *, most: int) -> None:
    """Functions of the same name in other libraries have more arguments; of ours, objects are not recorded."""
    if len(call.shapes) > most:
        raise UnknownShapeError


FORWARD: Mapping[str, Model] = {
    "_Float8ExpertFfn": _networks,
    "_Float8Linear": _linear,
    "_Float8Network": _networks,
}
"""By the name of the autograd function; the backward of each has twice its work."""

LATENT_HEADS_BACKWARD: Model = _latent_heads_backward
"""Of heads that hand their gradients over in 8 bits; forward they are those of 16 bits."""
