"""Compressed attention (DeepSeek-V4): a window of positions, and entries that compress all positions before.

    queries through a latent; one key of all heads, which is the value too; both normed, their last features rotated
    entries:   a gated mean over each window of positions, by feature, normed and rotated to the window's first position
    attention: over the positions of the sliding window, the entries of closed windows, and a sink
    output:    rotated back to the query's position, projected by groups of heads, then to the hidden size

Windows count from the first position of a document and end with it, so a document attends as if it were alone. Windows
of `csa` layers overlap: an entry also reads the positions of the window before, by features of their own.

The indexer of `csa` layers has entries of its own. It learns as that of latent attention does (`penstock.models.mla`):
its softmax over the chosen entries follows the attention of all heads to them, and its inputs are detached.

Queries attend in blocks, which run again in backward: no more scores exist than one block's. Tensor- and
context-parallel ranks are refused (`indexer_has_rows_and_heads_of_its_own`); products are in high precision.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from penstock.config.model import CompressedAttention, Rope
from penstock.kernels.float8.operators import NO_FLOAT8
from penstock.kernels.float8.quantized import RowColQuantized
from penstock.kernels.sparse_attention import attach_loss, best_keys, index_loss, index_scores
from penstock.models.attention import SoftmaxAttention
from penstock.models.linear import Linear
from penstock.models.mla import LatentQuery
from penstock.models.model_inputs import ForwardContext, angles
from penstock.models.norm import RMSNorm
from penstock.parallel.async_transfer import deferrable
from penstock.parallel.layer_context import LayerContext
from penstock.parallel.recompute import recomputed

SCORES = 1 << 27  # of attention and indexer, that a block of queries has at most
QUERIES = 512  # of a block at most: a wider one reads more positions that most of its queries do not see


class Windows(NamedTuple):
    """The windows of a row whose entries a kind of layers reads, as many as the row could have."""

    rows_BIJ: (
        Tensor  # int64 positions of the tokens of each entry; of overlapping windows those of the one before first
    )
    is_read_BIJ: Tensor  # bool, False where a document has no window before
    last_BI: Tensor  # int64 position of the last token; beyond the row where there is no window
    cos_BIP: Tensor  # of the first token
    sin_BIP: Tensor


def windows_of(first_BS: Tensor, rate: int, rope: Rope, rotary_dim: int, *, overlap: bool) -> Windows:
    """The windows of `rate` positions; `first_BS` is the first position of each position's document."""
    rows, positions = first_BS.shape
    position_S = torch.arange(positions, device=first_BS.device)
    is_last_BS = (position_S - first_BS + 1) % rate == 0
    count = positions // rate
    place_BS = torch.where(is_last_BS, is_last_BS.cumsum(1) - 1, count)  # the place behind the last takes all others
    last_BI = torch.full((rows, count + 1), positions, device=first_BS.device)
    last_BI = last_BI.scatter(1, place_BS, position_S.expand(rows, -1).contiguous())[:, :count]
    start_BI = (last_BI - rate + 1).clamp(max=positions - 1)
    inside_BI = start_BI - first_BS.gather(1, start_BI)  # in the document
    reach_J = torch.arange(-rate if overlap else 0, rate, device=first_BS.device)
    is_read_BIJ = (reach_J >= 0) | (inside_BI >= rate)[..., None]
    rows_BIJ = (start_BI[..., None] + reach_J).clamp(0, positions - 1)
    return Windows(rows_BIJ, is_read_BIJ, last_BI, *angles(rope, rotary_dim, inside_BI))


def rotated(x_BSHN: Tensor, cos_BSP: Tensor, sin_BSP: Tensor, layer_context: LayerContext) -> Tensor:
    """The same with the last features of each head rotated."""
    rest, last = x_BSHN.split([x_BSHN.shape[-1] - 2 * cos_BSP.shape[-1], 2 * cos_BSP.shape[-1]], dim=-1)
    return torch.cat((rest, layer_context.operators.rotate(last, cos_BSP, sin_BSP)), dim=-1)


class Compressor(nn.Module):
    """Entries of windows: a mean of the positions' keys, weighted by feature."""

    def __init__(
        self, hidden_size: int, width: int, rate: int, layer_context: LayerContext, *, overlap: bool, epsilon: float
    ) -> None:
        super().__init__()
        self.layer_context, self.width, self.rate = layer_context, width, rate
        wide = 2 * width if overlap else width
        self.kv = Linear(hidden_size, wide, layer_context)
        self.gate = Linear(hidden_size, wide, layer_context)
        self.position_bias_JN = nn.Parameter(torch.empty(rate, wide))
        self.norm = RMSNorm(width, epsilon, layer_context.operators)

    def forward(self, x_BSD: Tensor, windows: Windows) -> Tensor:
        """Entries, B x I x N, of hidden states of whole rows."""
        kv_BSN, gate_BSN = self.kv(x_BSD), self.gate(x_BSD)
        return self.layer_context.run("norm", self._entries, kv_BSN, gate_BSN, windows)

    def _entries(self, kv_BSN: Tensor, gate_BSN: Tensor, windows: Windows) -> Tensor:
        gates_BIJN = self._of_windows(gate_BSN.float(), windows) + torch.cat(
            self.position_bias_JN.float().split(self.width, -1)
        )
        weights_BIJN = gates_BIJN.masked_fill(~windows.is_read_BIJ[..., None], float("-inf")).softmax(2)
        kv_BIJN = self._of_windows(kv_BSN, windows)
        entries_BIN = self.norm((kv_BIJN * weights_BIJN.to(kv_BIJN.dtype)).sum(2))
        return rotated(entries_BIN[:, :, None], windows.cos_BIP, windows.sin_BIP, self.layer_context)[:, :, 0]

    def _of_windows(self, x_BSN: Tensor, windows: Windows) -> Tensor:
        """Rows of each window; the first half of the features belongs to overlapping windows' first half of rows."""
        halves = zip(x_BSN.split(self.width, -1), windows.rows_BIJ.split(self.rate, -1), strict=True)
        parts = [
            half.gather(1, rows.flatten(1)[..., None].expand(-1, -1, self.width)).unflatten(1, rows.shape[1:])
            for half, rows in halves
        ]
        return torch.cat(parts, dim=2)


class EntryIndexer(nn.Module):
    """Chooses the entries of each query."""

    def __init__(
        self, config: CompressedAttention, hidden_size: int, layer_context: LayerContext, epsilon: float
    ) -> None:
        super().__init__()
        self.config, self.layer_context = config.indexer, layer_context
        heads, width = config.indexer.index_n_heads, config.indexer.index_head_dim
        self.query = Linear(config.q_lora_rank, heads * width, layer_context)
        self.weights = Linear(hidden_size, heads, layer_context)
        self.compressor = Compressor(hidden_size, width, config.csa_rate, layer_context, overlap=True, epsilon=epsilon)

    def forward(
        self, x_BSD: Tensor, latent_BSC: Tensor, windows: Windows, context: ForwardContext
    ) -> tuple[Tensor, ...]:
        """Queries of heads, entries and float32 weights of heads, whose product with scales are the scores."""
        x_BSD, latent_BSC = x_BSD.detach(), latent_BSC.detach()
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        q_BSGN = self.query(latent_BSC).unflatten(-1, (heads, width))
        q_BSGN = rotated(q_BSGN, context.cos_BSP, context.sin_BSP, self.layer_context)
        return q_BSGN, self.compressor(x_BSD, windows), self.weights(x_BSD).float() * (heads * width) ** -0.5


class CompressedLayer(SoftmaxAttention):
    """Compressed attention of one layer."""

    def __init__(
        self, config: CompressedAttention, hidden_size: int, layer_context: LayerContext, *, layer: int, epsilon: float
    ) -> None:
        layer_context = replace(layer_context, float8=NO_FLOAT8)
        super().__init__(layer_context, config.heads, config.head_dim**-0.5, sinks=True)
        self.config, self.epsilon, self.kind = config, epsilon, config.kind_of(layer)
        queries, outputs = config.heads * config.head_dim, config.o_groups * config.o_lora_rank
        self.query = LatentQuery(config, hidden_size, layer_context, epsilon)
        self.kv = Linear(hidden_size, config.head_dim, layer_context)
        self.kv_norm = RMSNorm(config.head_dim, epsilon, layer_context.operators)
        make = partial(Compressor, hidden_size, config.head_dim, layer_context=layer_context, epsilon=epsilon)
        self.compressor = None
        if self.kind != "window":
            is_csa = self.kind == "csa"
            self.compressor = make(rate=config.csa_rate if is_csa else config.hca_rate, overlap=is_csa)
        self.indexer = EntryIndexer(config, hidden_size, layer_context, epsilon) if self.kind == "csa" else None
        self.out_down = Linear(queries // config.o_groups, outputs, layer_context, blocks=config.o_groups)
        self.out = Linear(outputs, hidden_size, layer_context)

    @property
    def reads_float8(self) -> bool:
        """Whether products read a float8 input: none does."""
        return False

    @property
    def reads_high_precision(self) -> bool:
        return True

    def forward(self, x_BSD: Tensor, context: ForwardContext, x_float8: RowColQuantized | None = None) -> Tensor:
        """Attend. Returns B x S x D."""
        run = self.layer_context.run
        latent_BSC = self.query(x_BSD)
        kv_BSN = run("norm", self.kv_norm, self.kv(x_BSD))
        q_BSHN, kv_BSN = run("latent-up", self._heads, latent_BSC, kv_BSN, context)
        windows = context.csa_windows if self.kind == "csa" else context.hca_windows
        entries: tuple[Tensor, ...] = ()
        if self.compressor is not None and (of_row := Windows(*windows)).last_BI.shape[1]:  # else too short a row
            entries = (of_row.last_BI, self.compressor(x_BSD, of_row))
            if self.indexer is not None:
                entries += self.indexer(x_BSD, latent_BSC, of_row, context)
        o_BSHN = run("attention", self._attended, q_BSHN, kv_BSN, context, *entries)
        y_BSC = deferrable(self._by_groups, (o_BSHN,), (self.out_down.weight,), self.layer_context.weight_grads)
        y_BSD: Tensor = self.out(y_BSC)
        return y_BSD

    def _by_groups(self, o_BSHN: Tensor, weight: Tensor) -> Tensor:
        """Each group of heads times its block of the matrix: B x S x C, side by side."""
        groups = self.config.o_groups
        of_groups = o_BSHN.flatten(-2).unflatten(-1, (groups, -1))
        return torch.einsum("bsgn,gcn->bsgc", of_groups, weight.unflatten(0, (groups, -1))).flatten(-2)

    def _angles(self, context: ForwardContext) -> tuple[Tensor, Tensor]:
        if self.kind != "window":
            return context.cos_BSP, context.sin_BSP
        cos_BSP, sin_BSP = context.local_angles
        return cos_BSP, sin_BSP

    def _heads(self, latent_BSC: Tensor, kv_BSN: Tensor, context: ForwardContext) -> tuple[Tensor, Tensor]:
        """Queries of all heads after the norm without weights, and the key, both rotated."""
        q_BSHN = self.query.expand(latent_BSC).unflatten(-1, (self.heads, -1))
        norm = self.layer_context.operators.rms_norm
        q_BSHN = norm(q_BSHN, q_BSHN.new_ones(q_BSHN.shape[-1]), self.epsilon)
        angles_BSP = self._angles(context)
        kv_BSHN = rotated(kv_BSN[:, :, None], *angles_BSP, self.layer_context)
        return rotated(q_BSHN, *angles_BSP, self.layer_context), kv_BSHN[:, :, 0]

    def _attended(self, q_BSHN: Tensor, kv_BSN: Tensor, context: ForwardContext, *entries: Tensor) -> Tensor:
        """The output of attention, rotated back; `entries` are their last positions, themselves, and the indexer's."""
        assert context.first_BS is not None, "a model with compressed attention has it"
        rows, positions, heads, _ = q_BSHN.shape
        last_BI, entries_BIN, *index = entries or (None, None)
        wide = max(heads, self.config.indexer.index_n_heads if index else 0)
        count = 0 if entries_BIN is None else entries_BIN.shape[1]
        block = SCORES // (rows * wide * (self.config.sliding_window + QUERIES + count))
        block = max(1, min(block, QUERIES))
        # Divided at once: backward joins the gradients of blocks, where those of slices would be whole tensors to add.
        blocks = zip(*(x.split(block, dim=1) for x in (q_BSHN, context.first_BS, *index[::2])), strict=True)
        outputs = []
        for begin, (q_BQHN, first_BQ, *of_index) in zip(range(0, positions, block), blocks, strict=True):
            low = max(0, begin - self.config.sliding_window + 1)
            inputs = (q_BQHN, kv_BSN[:, low : begin + block], first_BQ, last_BI, entries_BIN)
            of_index[1:1] = index[1:2]
            compute = partial(self._block, begin, low, context.scope.share / (rows * positions))
            outputs.append(recomputed(compute, *inputs, *of_index))
        cos_BSP, sin_BSP = self._angles(context)
        # Keys are values, so outputs are rotated too: back to angles relative to the query.
        return rotated(torch.cat(outputs, dim=1), cos_BSP, -sin_BSP, self.layer_context)

    def _block(
        self,
        begin: int,
        low: int,
        share: float,  # of a position in the global batch
        q_BQHN: Tensor,
        near_BKN: Tensor,
        first_BQ: Tensor,
        last_BI: Tensor | None,
        entries_BIN: Tensor | None,
        *index: Tensor,
    ) -> Tensor:
        """Outputs of the queries from position `begin` on, over keys from position `low` on and entries."""
        query_Q1 = torch.arange(begin, begin + q_BQHN.shape[1], device=q_BQHN.device)[:, None]
        key_K = torch.arange(low, low + near_BKN.shape[1], device=q_BQHN.device)
        near_QK = (key_K <= query_Q1) & (key_K > query_Q1 - self.config.sliding_window)
        seen_BQK = near_QK & (key_K >= first_BQ[..., None])
        if entries_BIN is None or last_BI is None:
            return self._softmax(q_BQHN, near_BKN, seen_BQK)[0]
        closed_BQI = (last_BI[:, None] <= query_Q1) & (last_BI[:, None] >= first_BQ[..., None])
        keys_BKN = torch.cat((near_BKN, entries_BIN), 1)
        if not index:
            return self._softmax(q_BQHN, keys_BKN, torch.cat((seen_BQK, closed_BQI), -1))[0]
        scores_BQI = index_scores(index[0], index[1], index[2])
        chosen_BQI = best_keys(scores_BQI, closed_BQI, self.config.indexer.index_topk)
        o_BQHN, weights_BQHK = self._softmax(q_BQHN, keys_BKN, torch.cat((seen_BQK, chosen_BQI), -1))
        factor = self.config.indexer.loss_coef * share
        if not (self.training and scores_BQI.requires_grad and factor):
            return o_BQHN
        # A query without entries has the first one alone here: its loss is 0.
        is_first_I = torch.arange(chosen_BQI.shape[-1], device=chosen_BQI.device) == 0
        chosen_BQI = chosen_BQI | (is_first_I & ~chosen_BQI.any(-1, keepdim=True))
        of_entries = weights_BQHK.detach()[..., near_BKN.shape[1] :]
        tiny = torch.finfo(of_entries.dtype).tiny  # where no entry has a weight, none is followed
        mass_BQI = (of_entries / of_entries.sum(-1, keepdim=True).clamp(min=tiny)).mean(2)
        return attach_loss(o_BQHN, index_loss(scores_BQI, mass_BQI, chosen_BQI) * factor)

    def _softmax(self, q_BQHN: Tensor, keys_BKN: Tensor, seen_BQK: Tensor) -> tuple[Tensor, Tensor]:
        """Attention of all heads to the same keys, which are the values, and its weights; a sink is beside them."""
        assert self.sinks_H is not None, "each head has a sink"
        shape, dtype = q_BQHN.shape[1:3], torch.promote_types(q_BQHN.dtype, torch.float32)
        scores_BQHK = (q_BQHN.flatten(1, 2) @ keys_BKN.mT).unflatten(1, shape).to(dtype) * self.scale
        scores_BQHK = scores_BQHK.masked_fill(~seen_BQK[:, :, None], float("-inf"))
        sinks_BQH1 = self.sinks_H.to(dtype)[:, None].expand(*scores_BQHK.shape[:-1], 1)
        weights_BQHK = torch.cat((scores_BQHK, sinks_BQH1), dim=-1).softmax(-1)[..., :-1]
        return (weights_BQHK.to(keys_BKN.dtype).flatten(1, 2) @ keys_BKN).unflatten(1, shape), weights_BQHK
