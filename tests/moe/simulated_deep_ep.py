"""Stands in for the module `deep_ep` where a test needs it: its `Buffer`, moving rows over a gloo group.

It keeps to what the library's normal kernels promise (deep_ep/buffer.py, 1.x): shapes, types, ids of -1, weights of 0
where an expert is elsewhere, rows in the order of source ranks and tokens, sums in `combine`. Unlike the library it
takes float32 rows too, so that results can be compared closely.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Config:
    """How large buffers must be."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks * 256

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0 if num_ranks <= 8 else hidden_bytes * num_ranks


class Buffer:
    """See the top of the file."""

    def __init__(self, group: dist.ProcessGroup, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        assert num_nvl_bytes > 0
        self.group, self.num_nvl_bytes, self.num_rdma_bytes = group, num_nvl_bytes, num_rdma_bytes
        self.rank, self.group_size = group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in (2, 4, 8, 16), f"Unsupported number of EP ranks: {num_ranks}"
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(self, topk_idx: Tensor, num_experts: int) -> tuple[Tensor, None, Tensor, Tensor, None]:
        assert topk_idx.dtype == torch.int64
        experts = torch.arange(num_experts)
        is_chosen = (topk_idx[:, :, None] == experts).any(1)
        is_sent = is_chosen.view(-1, self.group_size, num_experts // self.group_size).any(2)
        return is_sent.sum(0).int(), None, (topk_idx[:, :, None] == experts).sum((0, 1)).int(), is_sent, None

    def dispatch(
        self,
        x: Tensor,
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, list[int] | None, Any, None]:
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None
            assert topk_weights is None
            sent, send, receive, _ = handle
            return self._exchange(x[sent], receive, send), None, None, None, None, None
        assert num_tokens_per_rank is not None
        assert is_token_in_rank is not None
        assert num_tokens_per_expert is not None
        assert topk_idx is not None
        assert topk_weights is not None
        assert topk_weights.dtype == torch.float32
        assert topk_weights.is_contiguous()
        sent = is_token_in_rank.T.nonzero()[:, 1]
        send = num_tokens_per_rank.tolist()
        receive = self._exchange(num_tokens_per_rank, [1] * self.group_size, [1] * self.group_size).tolist()
        own = num_tokens_per_expert.numel() // self.group_size
        ids = self._exchange(topk_idx[sent], receive, send) - self.rank * own
        is_own = (ids >= 0) & (ids < own)
        ids = ids.masked_fill(~is_own, -1)
        weights = self._exchange(topk_weights[sent], receive, send).masked_fill(~is_own, 0)
        counts = [int((ids == expert).sum()) for expert in range(own)]
        return self._exchange(x[sent], receive, send), ids, weights, counts, (sent, send, receive, x.shape[0]), None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, None]:
        sent, send, receive, tokens = handle
        sums: list[Tensor | None] = []
        for values in (x, topk_weights):
            if values is None:
                sums.append(None)
                continue
            assert values.shape[0] == sum(receive)
            assert values.is_contiguous()
            back = self._exchange(values, send, receive).float()
            total = torch.zeros(tokens, values.shape[1]).index_add(0, sent, back)
            sums.append(total.to(values.dtype))
        assert sums[0] is not None
        return sums[0], sums[1], None

    def _exchange(self, values: Tensor, receive: list[int], send: list[int]) -> Tensor:
        received = values.new_empty(sum(receive), *values.shape[1:])
        dist.all_to_all_single(received, values.contiguous(), receive, send, group=self.group)
        return received
