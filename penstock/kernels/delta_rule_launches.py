"""Linear attention by a gated delta rule in Triton: three kernels forward, four backward.

With decays of single key features (KDA) there are four forward and five backward, of which those over the chunks of a
row are the same. Saved for backward are the inputs, the inverses of the triangular systems, the state before each
chunk, and what the system kernel gives; for KDA also products of queries and keys. Float32 on a GPU runs by chunks in
PyTorch: its products use no matrix units of NVIDIA, and its states take more shared memory than a chip has.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
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
from penstock.kernels.delta_rule import CHUNK, chunked_delta_rule
from penstock.kernels.delta_rule_kernels import (
    delta_local_backward_kernel,
    delta_output_kernel,
    delta_read_backward_kernel,
    delta_state_backward_kernel,
    delta_state_kernel,
    delta_system_kernel,
    delta_write_backward_kernel,
)
from penstock.kernels.language import ceil_div, power_of_two
from penstock.kernels.launching import on_gpu, start_kernel
from penstock.kernels.tuning import section, section_or_any, target_of

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
