"""Linear attention by a gated delta rule: the definition step by step, and the same function by chunks in PyTorch.

A head has a state of key features x value features. Each position lets it decay, replaces what it returns for the key
by the value, as far as beta says, and reads it by the query:

    S <- exp(g) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q

g is one number for a head (Gated DeltaNet, arXiv 2412.06464) or one for each key feature (KDA, arXiv 2510.26692). A
document starts with a state of zeros. Queries and keys come normalized (`unit_length`), queries also scaled. Several
value heads may share a query and key head, as in grouped-query attention.

By chunks: inside a chunk all updates together are one triangular system, whose solution u - w S depends on the state S
at the start of the chunk (the WY form, arXiv 2406.06484 section 3). c is the sum of g from the start of the chunk:

    A[i, j] = beta_i k_i k_j exp(c_i - c_j) below the diagonal      u = (1 + A)^-1 beta v, w = (1 + A)^-1 beta exp(c) k
    d = u - w S                                                     the values that are really written
    o = exp(c) q S + (q k^T exp(c_i - c_j), lower triangle) d       S <- exp(c_last) S + (exp(c_last - c) k)^T d

A short causal convolution mixes neighbouring positions before. Only products of positions of one document count: decays
across documents are masked, and never computed as exp of a positive number.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from penstock.base.errors import KernelError
from penstock.kernels.channel_delta_rule_kernels import (
    channel_key_backward_kernel,
    channel_local_backward_kernel,
    channel_output_kernel,
    channel_pairs_kernel,
    channel_query_backward_kernel,
    channel_system_kernel,
    channel_write_backward_kernel,
)
from penstock.kernels.delta_rule_kernels import (
    delta_local_backward_kernel,
    delta_output_kernel,
    delta_read_backward_kernel,
    delta_state_backward_kernel,
    delta_state_kernel,
    delta_system_kernel,
    delta_write_backward_kernel,
)
from penstock.kernels.language import ceil_div, on_gpu, power_of_two, start_kernel
from penstock.kernels.reference import rms_norm
from penstock.kernels.tuning import section, section_or_any, target_of

CHUNK = 64  # positions; products of 64 x 64 fill matrix units, and the triangular system stays small
CHANNEL_CHUNK = 16  # with a decay for each key feature, which takes J x J x N numbers for each chunk

LENGTH_EPSILON = 1e-6


def unit_length(x_BSHN: Tensor, scale: float = 1.0) -> Tensor:
    """Each head divided by its length, in float32 at least, times `scale`; in the dtype of x."""
    wide = x_BSHN.to(torch.promote_types(x_BSHN.dtype, torch.float32))
    return (wide * (scale * torch.rsqrt(wide.square().sum(-1, keepdim=True) + LENGTH_EPSILON))).to(x_BSHN.dtype)


def gated_norm(o_BSHM: Tensor, gate_BSHM: Tensor, weight_M: Tensor, epsilon: float, *, is_silu: bool) -> Tensor:
    """RMSNorm of each head times SiLU of its gate, or times the gate's sigmoid; in the dtype of o."""
    activate = F.silu if is_silu else torch.sigmoid
    return (rms_norm(o_BSHM, weight_M, epsilon) * activate(gate_BSHM.float())).to(o_BSHM.dtype)


def short_convolution(x_BSD: Tensor, weight_DJ: Tensor, documents_BS: Tensor | None = None) -> Tensor:
    """SiLU of a causal convolution of each feature over the last J positions of its document, the newest last.

    With weights [1, 10] and one document, x = [1, 2, 3] gives SiLU of [10, 21, 32]. In the dtype of x.
    """
    width, wide = weight_DJ.shape[1], x_BSD.float()
    y_BSD = wide * weight_DJ[:, -1].float()
    for back in range(1, min(width, x_BSD.shape[1])):
        earlier = F.pad(wide, (0, 0, back, 0))[:, :-back]
        if documents_BS is not None:
            before_BS = F.pad(documents_BS, (back, 0), value=-1)[:, :-back]
            earlier = torch.where((before_BS == documents_BS)[..., None], earlier, 0)
        y_BSD = y_BSD + earlier * weight_DJ[:, width - 1 - back].float()
    return F.silu(y_BSD).to(x_BSD.dtype)


def recurrent_delta_rule(
    q_BSGN: Tensor, k_BSGN: Tensor, v_BSHM: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """The definition, position by position, in float32 at least: o_BSHM in the dtype of v.

    `g` is the logarithm of the decay, B x S x H or B x S x H x N, at most 0; value heads of one key head are
    neighbours. `documents_BS` are int64 documents of each position, or None for one in each row.
    """
    q, k, v, g, beta = _wide(q_BSGN, k_BSGN, v_BSHM, g_BSH, beta_BSH)
    state_BHNM = v.new_zeros(v.shape[0], v.shape[2], q.shape[-1], v.shape[-1])
    outputs = []
    for position in range(v.shape[1]):
        if documents_BS is not None and position > 0:
            stays_B = documents_BS[:, position] == documents_BS[:, position - 1]
            state_BHNM = torch.where(stays_B[:, None, None, None], state_BHNM, 0)
        state_BHNM = state_BHNM * g[:, position].exp()[..., None]
        k_BHN1 = k[:, position, ..., None]
        written_BHM = beta[:, position, :, None] * (v[:, position] - (state_BHNM * k_BHN1).sum(-2))
        state_BHNM = state_BHNM + k_BHN1 * written_BHM[:, :, None]
        outputs.append((state_BHNM * q[:, position, ..., None]).sum(-2))
    return torch.stack(outputs, dim=1).to(v_BSHM.dtype)


def chunked_delta_rule(
    q_BSGN: Tensor, k_BSGN: Tensor, v_BSHM: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """`recurrent_delta_rule` by chunks: matrix products inside chunks, and a loop over them."""
    by_channel, positions = g_BSH.ndim == 4, v_BSHM.shape[1]
    chunk = CHANNEL_CHUNK if by_channel else CHUNK
    padding = -positions % chunk
    q, k, v, g, beta = (_in_chunks(tensor, chunk, padding) for tensor in _wide(q_BSGN, k_BSGN, v_BSHM, g_BSH, beta_BSH))
    same_BIJJ, carries_BIJ = _of_one_document(documents_BS, v_BSHM, chunk, padding)
    c_BHIJN = g.cumsum(-2)  # N is 1 for a decay of the whole head
    # Decay from position j to i, for pairs of one document with j at most i.
    pairs = (c_BHIJN[..., :, None, :] - c_BHIJN[..., None, :, :]).masked_fill(
        ~same_BIJJ[:, None, ..., None], -torch.inf
    )
    decay = pairs.exp()
    read, written = (_scores(left, k, decay, by_channel=by_channel) for left in (q, k))
    carried = torch.where(carries_BIJ[:, None, ..., None], c_BHIJN.exp(), 0)  # of the state before the chunk
    system = (written * beta).tril(-1)
    u, w = (
        torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        for right in (beta * v, beta * carried * k)
    )
    # To the last position of the chunk, from those of its document.
    left_k, kept = decay[..., -1, :, :] * k, carried[..., -1, :]
    state = v.new_zeros(*v.shape[:2], q.shape[-1], v.shape[-1])
    outputs = []
    for number in range(v.shape[2]):
        values = u[:, :, number] - w[:, :, number] @ state
        outputs.append((carried * q)[:, :, number] @ state + read[:, :, number] @ values)
        state = kept[:, :, number, :, None] * state + left_k[:, :, number].mT @ values
    o_BHSM = torch.stack(outputs, dim=2).flatten(2, 3)[:, :, :positions]
    return o_BHSM.transpose(1, 2).to(v_BSHM.dtype)


def _wide(
    q_BSGN: Tensor, k_BSGN: Tensor, v_BSHM: Tensor, g_BSH: Tensor, beta_BSH: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """In float32 at least, with a query and a key for each value head; a decay of heads gets a last dim of 1."""
    dtype = torch.promote_types(v_BSHM.dtype, torch.float32)
    shared = v_BSHM.shape[2] // q_BSGN.shape[2]
    q, k = (tensor.to(dtype).repeat_interleave(shared, dim=2) for tensor in (q_BSGN, k_BSGN))
    g = (g_BSH if g_BSH.ndim == 4 else g_BSH[..., None]).to(dtype)
    return q, k, v_BSHM.to(dtype), g, beta_BSH.to(dtype)


def _in_chunks(x_BSH: Tensor, chunk: int, padding: int) -> Tensor:
    """B x S x H [x N] to B x H x I x J x N; rows are filled up with zeros, which change no state."""
    x = x_BSH[..., None] if x_BSH.ndim == 3 else x_BSH
    return F.pad(x, (0, 0, 0, 0, 0, padding)).unflatten(1, (-1, chunk)).permute(0, 3, 1, 2, 4)


def _of_one_document(documents_BS: Tensor | None, v_BSHM: Tensor, chunk: int, padding: int) -> tuple[Tensor, Tensor]:
    """Masks B x I x J x J (the second position is of the same document, and not later) and B x I x J.

    The second mask is true where the document began before the chunk.
    """
    if documents_BS is None:
        documents_BS = torch.zeros(1, v_BSHM.shape[1], dtype=torch.int64, device=v_BSHM.device)
    # The last document goes on in the padding.
    padded_BS = torch.cat((documents_BS, documents_BS[:, -1:].expand(-1, padding)), dim=1)
    documents_BIJ = padded_BS.unflatten(1, (-1, chunk))
    same_BIJJ = documents_BIJ[..., :, None] == documents_BIJ[..., None, :]
    before_BI = torch.cat((documents_BIJ[:, :1, 0], documents_BIJ[:, :-1, -1]), dim=1)
    return same_BIJJ.tril(), documents_BIJ == before_BI[..., None]


def _scores(left: Tensor, k: Tensor, decay: Tensor, *, by_channel: bool) -> Tensor:
    """Products of each position of `left` with each key of its chunk, with the decay between them: [..., J, J]."""
    if by_channel:
        return torch.einsum("...in,...jn,...ijn->...ij", left, k, decay)
    return left @ k.mT * decay[..., 0]


INVERTED = 8  # side of the blocks of a triangular matrix that are inverted row by row
FEW_HEADS = 64  # of all rows; below, a kernel over the chunks of a row has too few programs
LEAST = 16  # sides of a product on matrix units


class _Launch(NamedTuple):
    block: int  # value features that a program holds at a time
    warps: int
    stages: int = 2
    key_block: int = 256  # key features; kernels that hold a state hold all of them


@cache
def _launches_of(target: str) -> Mapping[str, _Launch]:
    rows = {**section("any", "delta_rule"), **section_or_any(target, "delta_rule")}
    return {part: _Launch(**fields) for part, fields in rows.items()}


class _Sizes(NamedTuple):
    """Sizes of one call."""

    rows: int
    positions: int
    key_heads: int
    heads: int
    key_width: int
    value_width: int
    chunk: int
    target: str

    @classmethod
    def of(cls, q_BSGN: Tensor, v_BSHM: Tensor) -> "_Sizes":
        (rows, positions, heads, value_width), (*_, key_heads, key_width) = v_BSHM.shape, q_BSGN.shape
        return cls(rows, positions, key_heads, heads, key_width, value_width, CHUNK, target_of(v_BSHM.device))

    @property
    def chunks(self) -> int:
        return ceil_div(self.positions, self.chunk)

    @property
    def levels(self) -> int:
        """Of pairs of positions of a chunk, whose decays meet in the middle."""
        return self.chunk.bit_length() - 1

    @property
    def of_states(self) -> tuple[int, ...]:
        """Shape of the states before all chunks."""
        return self.rows, self.chunks, self.heads, self.key_width, self.value_width

    def launch(self, part: str) -> dict[str, int]:
        """Constants, warps and stages of a kernel."""
        launches = _launches_of(self.target)
        launch = launches[part]
        if self.rows * self.heads < FEW_HEADS:  # narrower programs fill the chip
            launch = launches.get(f"{part} of few heads", launch)
        return {
            "G": self.key_heads,
            "H": self.heads,
            "N": self.key_width,
            "M": self.value_width,
            "J": self.chunk,
            "BLOCK_N": max(LEAST, min(launch.key_block, power_of_two(self.key_width))),
            "BLOCK_M": max(LEAST, min(launch.block, power_of_two(self.value_width))),
            "num_warps": launch.warps,
            "num_stages": launch.stages,
        }

    def start(
        self, kernel: Any, part: str, *arguments: Tensor | int | None, over_chunks: bool = False, **constants: int
    ) -> None:
        """Launch a program for each chunk of a head, or for some value features of a head in all chunks of a row."""
        constants = self.launch(part) | constants
        programs = ceil_div(self.value_width, constants["BLOCK_M"]) if over_chunks else self.chunks
        start_kernel(kernel, (programs, self.heads, self.rows), *arguments, **constants)


def delta_rule(
    q_BSGN: Tensor, k_BSGN: Tensor, v_BSHM: Tensor, g_BSH: Tensor, beta_BSH: Tensor, documents_BS: Tensor | None = None
) -> Tensor:
    """`penstock.kernels.delta_rule.recurrent_delta_rule`, by kernels unless it is in float32 on a GPU.

    With decays of single key features (KDA) there are four forward and five backward, of which those over the chunks of
    a row are the same. Saved for backward are the inputs, the inverses of the triangular systems, the state before each
    chunk, and what the system kernel gives; for KDA also products of queries and keys. Float32 on a GPU runs by chunks
    in PyTorch: its products use no matrix units of NVIDIA, and its states take more shared memory than a chip has.

    Products have the dtype of v, states are float32. Raises KernelError where shapes do not fit.
    """
    if on_gpu(v_BSHM) and v_BSHM.dtype.itemsize >= torch.float32.itemsize:
        return chunked_delta_rule(q_BSGN, k_BSGN, v_BSHM, g_BSH, beta_BSH, documents_BS)
    fits = q_BSGN.shape == k_BSGN.shape and v_BSHM.shape[2] % q_BSGN.shape[2] == 0
    fits = fits and beta_BSH.shape == v_BSHM.shape[:3]
    if not fits or g_BSH.shape not in (beta_BSH.shape, (*beta_BSH.shape, q_BSGN.shape[-1])):
        got = ", ".join(f"{tuple(tensor.shape)}" for tensor in (q_BSGN, k_BSGN, v_BSHM, g_BSH, beta_BSH))
        raise KernelError("delta_rule: heads and positions do not fit", got=got)
    tensors = (tensor.to(v_BSHM.dtype).contiguous() for tensor in (q_BSGN, k_BSGN, v_BSHM))
    decays = (tensor.float().contiguous() for tensor in (g_BSH, beta_BSH))
    documents_BS = None if documents_BS is None else documents_BS.contiguous()
    rule = _ChannelDeltaRule if g_BSH.ndim == 4 else _DeltaRule
    return rule.apply(*tensors, *decays, documents_BS)


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_BSGN: Tensor,
        k_BSGN: Tensor,
        v_BSHM: Tensor,
        g_BSH: Tensor,
        beta_BSH: Tensor,
        documents_BS: Tensor | None,
    ) -> Tensor:
        sizes = _Sizes.of(q_BSGN, v_BSHM)
        rows, positions, heads, _ = v_BSHM.shape
        c_BSH, carried_BSH, kept_BSH = (torch.empty_like(g_BSH) for _ in range(3))
        u_BSHM = torch.empty_like(v_BSHM)
        t_BSHJ, w_BSHN = (v_BSHM.new_empty(rows, positions, heads, width) for width in (sizes.chunk, sizes.key_width))
        sizes.start(
            delta_system_kernel, "system",
            k_BSGN, v_BSHM, g_BSH, beta_BSH, documents_BS, c_BSH, carried_BSH, kept_BSH, t_BSHJ, u_BSHM, w_BSHN,
            positions, SIDE=INVERTED,
        )  # fmt: skip
        states = v_BSHM.new_empty(sizes.of_states)
        d_BSHM = u_BSHM  # written values replace u, which no other program reads
        sizes.start(
            delta_state_kernel, "state",
            k_BSGN, carried_BSH, kept_BSH, u_BSHM, w_BSHN, states, d_BSHM, positions, sizes.chunks, over_chunks=True,
        )  # fmt: skip
        o_BSHM = torch.empty_like(v_BSHM)
        sizes.start(
            delta_output_kernel, "output",
            q_BSGN, k_BSGN, c_BSH, carried_BSH, d_BSHM, documents_BS, states, o_BSHM, positions, sizes.chunks,
        )  # fmt: skip
        ctx.save_for_backward(
            q_BSGN, k_BSGN, v_BSHM, beta_BSH, documents_BS, c_BSH, carried_BSH, kept_BSH, t_BSHJ, w_BSHN, states, d_BSHM
        )
        ctx.sizes = sizes
        return o_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        q_BSGN, k_BSGN, v_BSHM, beta_BSH, documents_BS, *of_chunks, t_BSHJ, w_BSHN, states, d_BSHM = ctx.saved_tensors
        c_BSH, carried_BSH, kept_BSH = of_chunks
        sizes: _Sizes = ctx.sizes
        positions, chunks, do_BSHM = sizes.positions, sizes.chunks, do_BSHM.contiguous()
        dstates, dd_BSHM = torch.empty_like(states), torch.empty_like(v_BSHM)
        sizes.start(
            delta_local_backward_kernel, "local backward",
            q_BSGN, k_BSGN, c_BSH, documents_BS, do_BSHM, dd_BSHM, positions,
        )  # fmt: skip
        sizes.start(
            delta_state_backward_kernel, "state backward",
            q_BSGN, k_BSGN, carried_BSH, kept_BSH, w_BSHN, do_BSHM, dstates, dd_BSHM, positions, chunks,
            over_chunks=True,
        )  # fmt: skip
        # Of each value head; those that share a key head are summed below.
        dq_BSHN, dk_BSHN = torch.empty_like(w_BSHN), torch.empty_like(w_BSHN)
        dv_BSHM, dg_BSH, dbeta_BSH = torch.empty_like(v_BSHM), torch.empty_like(c_BSH), torch.empty_like(c_BSH)
        dw_BSHN, dc_BSH = torch.empty_like(w_BSHN), torch.empty_like(c_BSH)
        sizes.start(
            delta_read_backward_kernel, "read backward",
            q_BSGN, k_BSGN, c_BSH, carried_BSH, kept_BSH, documents_BS, states, d_BSHM, do_BSHM, dstates, dd_BSHM,
            dq_BSHN, dk_BSHN, dw_BSHN, dc_BSH, positions, chunks,
        )  # fmt: skip
        sizes.start(
            delta_write_backward_kernel, "write backward",
            k_BSGN, v_BSHM, beta_BSH, c_BSH, carried_BSH, t_BSHJ, documents_BS, dd_BSHM, dw_BSHN, dk_BSHN, dc_BSH,
            dv_BSHM, dg_BSH, dbeta_BSH, positions,
        )  # fmt: skip
        dq_BSGN, dk_BSGN = (_of_key_heads(gradient, sizes, k_BSGN.dtype) for gradient in (dq_BSHN, dk_BSHN))
        return dq_BSGN, dk_BSGN, dv_BSHM, dg_BSH, dbeta_BSH, None


class _ChannelDeltaRule(torch.autograd.Function):
    """With a decay for each key feature."""

    @staticmethod
    def forward(
        ctx: Any,
        q_BSGN: Tensor,
        k_BSGN: Tensor,
        v_BSHM: Tensor,
        g_BSHN: Tensor,
        beta_BSH: Tensor,
        documents_BS: Tensor | None,
    ) -> Tensor:
        sizes = _Sizes.of(q_BSGN, v_BSHM)
        rows, positions, heads, _ = v_BSHM.shape
        p_BSHJ, t_BSHJ = (v_BSHM.new_empty(rows, positions, heads, sizes.chunk) for _ in range(2))
        a_BSHJ = g_BSHN.new_empty(p_BSHJ.shape)
        rounded_BSHN = torch.empty_like(g_BSHN, dtype=_dtype_of_decays(v_BSHM.dtype))
        w_BSHN, carried_q_BSHN, kept_k_BSHN = (v_BSHM.new_empty(g_BSHN.shape) for _ in range(3))
        carried_BIHN = g_BSHN.new_empty(sizes.of_states[:-1])
        marks, pairs = _tables_for(v_BSHM, sizes.chunk)
        sizes.start(
            channel_pairs_kernel, "channel pairs",
            q_BSGN, k_BSGN, g_BSHN, documents_BS, rounded_BSHN, p_BSHJ, a_BSHJ, carried_q_BSHN, w_BSHN, kept_k_BSHN,
            carried_BIHN, marks, positions, sizes.chunks, LEVELS=sizes.levels,
        )  # fmt: skip
        u_BSHM = torch.empty_like(v_BSHM)
        sizes.start(
            channel_system_kernel, "channel system",
            w_BSHN, v_BSHM, a_BSHJ, beta_BSH, t_BSHJ, u_BSHM, positions, SIDE=INVERTED,
        )  # fmt: skip
        states = v_BSHM.new_empty(sizes.of_states)
        d_BSHM = u_BSHM  # written values replace u, which no other program reads
        sizes.start(
            delta_state_kernel, "state",
            kept_k_BSHN, carried_BIHN, None, u_BSHM, w_BSHN, states, d_BSHM, positions, sizes.chunks, G=heads,
            over_chunks=True,
        )  # fmt: skip
        o_BSHM = torch.empty_like(v_BSHM)
        sizes.start(
            channel_output_kernel, "channel output",
            carried_q_BSHN, p_BSHJ, d_BSHM, states, o_BSHM, positions, sizes.chunks,
        )  # fmt: skip
        ctx.save_for_backward(
            q_BSGN, k_BSGN, v_BSHM, rounded_BSHN, beta_BSH, documents_BS, p_BSHJ, t_BSHJ, w_BSHN, carried_q_BSHN,
            kept_k_BSHN, carried_BIHN, states, d_BSHM,
        )  # fmt: skip
        ctx.sizes, ctx.tables = sizes, (marks, pairs)
        return o_BSHM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do_BSHM: Tensor) -> tuple[Tensor | None, ...]:
        q_BSGN, k_BSGN, v_BSHM, rounded_BSHN, beta_BSH, documents_BS, p_BSHJ, t_BSHJ, *of_states, d_BSHM = (
            ctx.saved_tensors
        )
        w_BSHN, carried_q_BSHN, kept_k_BSHN, carried_BIHN, states = of_states
        sizes: _Sizes = ctx.sizes
        positions, chunks, do_BSHM = sizes.positions, sizes.chunks, do_BSHM.contiguous()
        dstates, dd_BSHM, dp_BSHJ = torch.empty_like(states), torch.empty_like(v_BSHM), torch.empty_like(p_BSHJ)
        sizes.start(
            channel_local_backward_kernel, "channel local backward",
            p_BSHJ, d_BSHM, documents_BS, do_BSHM, dp_BSHJ, dd_BSHM, positions,
        )  # fmt: skip
        sizes.start(
            delta_state_backward_kernel, "channel state backward",
            carried_q_BSHN, kept_k_BSHN, carried_BIHN, None, w_BSHN, do_BSHM, dstates, dd_BSHM, positions, chunks,
            G=sizes.heads, over_chunks=True,
        )  # fmt: skip
        dwritten_BSHN, dv_BSHM = torch.empty_like(w_BSHN), torch.empty_like(v_BSHM)
        da_BSHJ, dbeta_BSH = torch.empty_like(t_BSHJ), torch.empty_like(beta_BSH)
        marks, pairs = ctx.tables
        sizes.start(
            channel_write_backward_kernel, "channel write backward",
            k_BSGN, v_BSHM, rounded_BSHN, beta_BSH, t_BSHJ, documents_BS, states, dd_BSHM, dwritten_BSHN, da_BSHJ,
            dv_BSHM, dbeta_BSH, marks, positions, chunks, LEVELS=sizes.levels,
        )  # fmt: skip
        dq_BSHN, dk_BSHN = torch.empty_like(w_BSHN), torch.empty_like(w_BSHN)
        dg_BSHN = torch.empty_like(rounded_BSHN, dtype=torch.float32)
        sizes.start(
            channel_query_backward_kernel, "channel query backward",
            q_BSGN, k_BSGN, rounded_BSHN, beta_BSH, documents_BS, states, do_BSHM, dp_BSHJ, da_BSHJ, dwritten_BSHN,
            dq_BSHN, dg_BSHN, dbeta_BSH, marks, pairs, positions, chunks, LEVELS=sizes.levels,
        )  # fmt: skip
        sizes.start(
            channel_key_backward_kernel, "channel key backward",
            q_BSGN, k_BSGN, rounded_BSHN, beta_BSH, documents_BS, states, d_BSHM, dstates, dp_BSHJ, da_BSHJ,
            dwritten_BSHN, carried_BIHN, dk_BSHN, dg_BSHN, marks, pairs, positions, chunks, LEVELS=sizes.levels,
        )  # fmt: skip
        dq_BSGN, dk_BSGN = (_of_key_heads(gradient, sizes, k_BSGN.dtype) for gradient in (dq_BSHN, dk_BSHN))
        return dq_BSGN, dk_BSGN, dv_BSHM, dg_BSHN, dbeta_BSH, None


def _dtype_of_decays(dtype: torch.dtype) -> torch.dtype:
    """Products of 16 bits take the decays in float16, which has 8 times the precision of bfloat16."""
    return torch.float16 if dtype.itemsize == 2 else torch.float32


def _tables_for(v_BSHM: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """`_tables` beside a tensor; in a dry run tensors of their shapes."""
    if not v_BSHM.is_meta:
        return _tables(chunk, v_BSHM.dtype, v_BSHM.device)
    levels = chunk.bit_length() - 1
    marks = v_BSHM.new_empty(levels + 2, chunk, chunk, dtype=_dtype_of_decays(v_BSHM.dtype))
    return marks, v_BSHM.new_empty(2 * levels + 1, chunk, chunk)


@cache
def _tables(chunk: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Zeros and ones that the kernels of decays by feature multiply by; computed there they would take registers.

    The first tables multiply g. Those of levels mark the positions over which each position decays to, or from, the
    middle of its block: of positions 0 to 3 at level 1, whose middle is 2, {1, 2}, {2}, {} and {3}. The last two mark
    the positions until each, and those after it. The second tables multiply gradients of pairs: for each level those in
    different halves of one block, then for each level those in one block; the last marks the positions from each on.
    """
    place_J = torch.arange(chunk, device=device)
    marks, across, inside = [], [], []
    for level in range(chunk.bit_length() - 1):
        half_J = place_J >> level
        middle_J = (half_J | 1) << level
        first_J, last_J = torch.minimum(place_J, middle_J), torch.maximum(place_J, middle_J)
        marks.append((place_J > first_J[:, None]) & (place_J <= last_J[:, None]))
        across.append((half_J ^ 1)[:, None] == half_J)
        inside.append((half_J[:, None] // 2 == half_J // 2) & (place_J[:, None] != place_J))
    marks += [place_J[:, None] >= place_J, place_J[:, None] < place_J]
    pairs = [*across, *inside, place_J[:, None] <= place_J]
    return torch.stack(marks).to(_dtype_of_decays(dtype)), torch.stack(pairs).to(dtype)


def _of_key_heads(x_BSHN: Tensor, sizes: _Sizes, dtype: torch.dtype) -> Tensor:
    """Sums over the value heads of each key head."""
    shared = x_BSHN.unflatten(2, (sizes.key_heads, -1)).unbind(3)
    if len(shared) == 2:  # as in Qwen3-Next; several times as fast as torch's sum
        return shared[0] + shared[1]
    return torch.stack(shared).sum(0, dtype=torch.float32).to(dtype) if len(shared) > 1 else shared[0]
