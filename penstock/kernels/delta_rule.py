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

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.kernels.reference import rms_norm

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
