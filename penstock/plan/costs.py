"""Seconds of a recorded operator on a device, and the term that it counts as.

    products          mm, addmm, bmm, the experts' kernels, attention: penstock/plan/rates.py, by shapes
    communication     collectives, and kernels that write into other GPUs' memory: penstock/plan/rates.py
    host link         copies between the device and its host's memory, at the link's rate
    all others        the bytes of their tensors at the memory's rate

Kernels of experts compute the rows that arrive, not the capacity of their buffers: where a run bounds rows instead of
counting them, a tensor with a row for each slot counts by the expected rows. `_BYTES` lists kernels that do not move
each tensor exactly once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from types import MappingProxyType
from typing import NamedTuple, Self

from penstock.config.run import Run
from penstock.config.sync_free import bound_factor
from penstock.kernels import gram
from penstock.kernels.attention_window import AttentionWindow
from penstock.kernels.bounded_attention import most_of
from penstock.kernels.delta_rule import CHUNK
from penstock.moe.balance import even_stride
from penstock.plan.hardware import Dtype, Hardware, RankGroup
from penstock.plan.loads import Imbalance, RecordedLoads
from penstock.plan.op_recorder import COPIES, RecordedOp, RecordedOps
from penstock.plan.rates import (
    ACCUMULATED_BYTES,
    COLLECTIVES,
    GroupedProduct,
    Pass,
    Rates,
    TokenTraffic,
    TransferTimes,
    pairs,
)
from penstock.plan.software import OWN, Software

HOST_LINK = "host link"  # term of time that waits for copies between the device and its host's memory


class OpCost(NamedTuple):
    """Seconds of the device, the term, whether the operator only communicates, and how often the host launches."""

    seconds: float
    term: str
    is_communication: bool = False
    launches: int = 1


@dataclass(frozen=True, kw_only=True)
class RoutedRows:
    """Rows that go to the experts of one rank in one pass."""

    traffic: TokenTraffic  # tokens of a rank before dispatch. A token has no bytes yet.
    ranks: int  # that share the experts of a layer
    rows: int  # that the fullest rank's experts get
    imbalance: float  # `rows` over the even share
    is_clamped: bool = False  # experts have a clamped activation


def routed_traffic(run: Run, *, in_turn: bool = False) -> TokenTraffic:
    """Choices of a rank's tokens in one pass, of a run with experts; `in_turn` as of `copies`."""
    moe, parallel = run.model.moe, run.parallel
    assert moe is not None, "the run has experts"
    forced = even_stride(moe.experts) if moe.balance.force_load_balance else 0
    tokens = run.training.micro_batch * run.training.sequence_length // (parallel.context * parallel.tensor)
    return TokenTraffic(
        tokens=tokens,
        copy_bytes=0,
        experts=moe.experts,
        top_k=moe.top_k,
        expert_tensor=parallel.expert_tensor,
        n_group=moe.router.n_group,
        topk_group=moe.router.topk_group,
        stride=1 if in_turn else forced,
    )


def assumed_imbalance(run: Run, imbalance: Imbalance) -> float:
    """The assumption, or 1 where the run itself forces balance, or the bound to which replicas of experts keep it.

    Recorded loads have the rows of the run's own ranks, with its replicas.
    """
    moe = run.model.moe
    if isinstance(imbalance, RecordedLoads):
        return imbalance.of(run).fullest
    if moe is not None and moe.balance.force_load_balance:
        return 1.0
    return imbalance if run.dispatch.balance == "none" else min(imbalance, bound_factor(run.dispatch))


def routed_rows(run: Run, imbalance: Imbalance, *, in_turn: bool = False) -> RoutedRows | None:
    """Rows of a run with experts, or None.

    `imbalance` is rows of the fullest rank over the even share. It is cut to the most that can be: every token chooses
    as many of the rank's experts as it can.
    """
    moe, parallel = run.model.moe, run.parallel
    if moe is None:
        return None
    limit = parallel.expert * min(moe.top_k, moe.experts // parallel.expert) / moe.top_k
    uneven = min(assumed_imbalance(run, imbalance), limit)
    traffic = routed_traffic(run, in_turn=in_turn)
    return RoutedRows(
        traffic=traffic,
        ranks=parallel.expert * parallel.expert_tensor,
        rows=round(traffic.tokens * moe.top_k * parallel.expert_tensor * uneven),
        imbalance=uneven,
        is_clamped=moe.clamped is not None,
    )


def buffer_rows(works: tuple[RecordedOps, ...]) -> frozenset[int]:
    """Rows of the experts' buffers, by their kernels; buffers that are kept for backward may be smaller."""
    return frozenset(operator.shapes[2][0] for work in works for operator in work if operator.name in _OF_ROWS)


class HardwareTimes(NamedTuple):
    """Answers about one kind of hardware; each is computed once."""

    rates: Rates
    transfers: TransferTimes

    @classmethod
    def of(cls, hardware: Hardware) -> Self:
        """Without answers yet."""
        return cls(Rates(hardware), TransferTimes(hardware))


class OpCosts:
    """Costs of the operators of a run on one kind of hardware, as a trainer runs them; each is computed once.

    `experts` are the routed rows of the run, None without experts; `buffers` are rows of buffers (`buffer_rows`).
    `rounds` is how often a recorded attention runs, where ranks pass their keys around. `times` are answers about the
    hardware that several runs share.
    """

    def __init__(
        self,
        hardware: Hardware,
        experts: RoutedRows | None,
        buffers: frozenset[int],
        software: Software = OWN,
        rounds: int = 1,
        times: HardwareTimes | None = None,
    ) -> None:
        self._software, self._rounds = software, rounds
        self._is_clamped = experts is not None and experts.is_clamped
        self._rates, self._transfers = times or HardwareTimes.of(hardware)
        self._bandwidth = self._rates.hardware.bandwidth
        self._experts = experts
        self._buffers = buffers
        self._room = max(buffers, default=0)
        self._timed: dict[str, tuple[Callable[[RecordedOp], float], str]] = {
            "_grouped_mm": (self._torch_grouped, "experts"),
            "rows_kernel": (self._rows_product, "experts"),
            "weights_kernel": (self._weights_product, "experts"),
            "float8_rows_kernel": (self._float8_rows, "experts"),
            **dict.fromkeys(_PRODUCTS, (self._product, "products")),
            "gram_kernel": (self._gram, "products"),
            **dict.fromkeys(_BOUNDED, (self._bounded, "attention")),
            **dict.fromkeys((*_BY_CHUNKS, *_BY_FEATURE), (self._by_chunks, "attention")),
            **dict.fromkeys(_OF_CHOSEN, (self._of_chosen, "attention")),
            "largest_logits_kernel": (self._logits, "attention"),
        }
        self.of = cache(self._of)  # an operator's cost

    def _of(self, operator: RecordedOp) -> OpCost:
        cost = self._ours(operator)
        software = self._software
        if cost.is_communication or cost.term == HOST_LINK:
            hidden = software.tensor_hidden if cost.term == "exchange" else 0.0
            return cost._replace(seconds=cost.seconds * (1 - hidden))
        if operator.name in _CASTS:
            return cost._replace(seconds=cost.seconds * software.casts)
        if operator.name in _CLAMPED and self._is_clamped:
            return cost._replace(seconds=cost.seconds * max(software.clamped, _CLAMPED[operator.name]))
        factors = {"products": software.products, "experts": software.experts, "attention": software.attention}
        return cost._replace(seconds=cost.seconds * factors.get(cost.term, software.moved))

    def _ours(self, operator: RecordedOp) -> OpCost:
        """The cost of our own operator, save how tokens are sent."""
        name = operator.name
        if operator.group is not None:
            return self._collective(operator)
        if name in COPIES:
            return OpCost(operator.moved_bytes / self._rates.hardware.host_link.bytes_per_second, HOST_LINK)
        if name == "float8_matrices_kernel":
            return self._float8_matrices(operator)
        if name in self._timed:
            seconds, term = self._timed[name]
            alone = self._one_by_one(operator) if term == "experts" else None
            return OpCost(seconds(operator), term) if alone is None else alone
        if name.startswith("_scaled_dot_product") and name != "_scaled_dot_product_attention_math":
            return OpCost(self._attention(operator), "attention")
        if name in _SENDERS:
            return OpCost(self._send(operator), "dispatch", is_communication=True)
        if name in _NOTHING:
            return OpCost(0.0, _TERMS.get(name, "elementwise"))
        term = _TERMS.get(name, "elementwise")
        moved = self._bytes(operator)
        if name == "adamw_kernel" and self._rates.hardware.vendor != "cpu":
            moved /= _UPDATE_SHARES["CODES" in operator.switches]
        return OpCost(self._rates.memory_bound(moved, is_update=term == "optimizer").seconds, term)

    def _product(self, operator: RecordedOp) -> float:
        given = _PRODUCTS[operator.name]
        left, right = operator.shapes[given - 2 : given]
        (m, k), n = left[-2:], right[-1]
        dtype = _DTYPES[operator.sizes[given - 2] // max(1, prod(left))]
        by_rows = dtype == "fp8" and _is_by_rows(operator, scales=3, rows=n)
        # A batch fills the chip as one product of as many rows does, but each of its matrices is read.
        batch = prod(left[:-2])
        seconds = self._rates.product(batch * m, n, k, dtype, by_rows=by_rows).seconds
        if batch > 1:
            seconds = max(seconds, sum(operator.sizes) / self._bandwidth)
        # A weight gradient that is added to its float32 sum: the sum moves while the product is computed.
        if given == 3 and operator.itemsize == 4:
            seconds = max(seconds, ACCUMULATED_BYTES * m * n / self._bandwidth)
        return seconds

    def _one_by_one(self, operator: RecordedOp) -> OpCost | None:
        """Products of 16-bit experts that are launched one after the other; None where a kernel does all."""
        if not self._software.one_by_one or operator.name == "_grouped_mm" or operator.itemsize != 2:
            return None
        if operator.name == "rows_kernel":
            (_, k), (groups, *_), (room, n) = operator.shapes[:3]
            sizes = max(1, self._rows(room) // groups), n, k
        else:
            (room, *_), _, (groups, n, k) = operator.shapes[:3]
            sizes = n, k, max(1, self._rows(room) // groups)
        seconds = self._rates.product(*sizes).seconds
        if "ACCUMULATE" in operator.switches:  # a kernel of its own adds a 16-bit gradient to the sum
            seconds += self._rates.memory_bound((ACCUMULATED_BYTES + 4.0) * n * k).seconds
        return OpCost(groups * seconds, "experts", launches=groups)

    def _rows_product(self, operator: RecordedOp) -> float:
        (_, depth), (groups, *_), (room, width) = operator.shapes[:3]
        rows, dtype = max(1, self._rows(room) // groups), _DTYPES[operator.itemsize]
        if "DEPTH_FIRST" in operator.switches:
            return self._rates.grouped("input_gradient", groups, rows, depth, width, dtype).seconds
        product: GroupedProduct = "forward_gathered" if "GATHER" in operator.switches else "forward"
        return self._rates.grouped(product, groups, rows, width, depth, dtype).seconds

    def _weights_product(self, operator: RecordedOp) -> float:
        (room, *_), _, (groups, n, k) = operator.shapes[:3]
        rows = max(1, self._rows(room) // groups)

        def seconds(product: GroupedProduct) -> float:
            return self._rates.grouped(product, groups, rows, n, k, _DTYPES[operator.itemsize]).seconds

        # Points are measured for each variant alone; a kernel that gathers and accumulates pays both differences.
        plain = seconds("weight_gradient")
        more = seconds("weight_gradient_gathered") - plain if "GATHER" in operator.switches else 0.0
        summed = seconds("weight_gradient_accumulated") - plain if "ACCUMULATE" in operator.switches else 0.0
        return plain + more + summed

    def _float8_rows(self, operator: RecordedOp) -> float:
        """Each expert's rows times its matrix, in 8 bits: forward, or the gradient of the rows."""
        (_, depth), (groups, columns, _), (room, _) = operator.shapes[:3]
        product: GroupedProduct = "forward_gathered" if "GATHER" in operator.switches else "forward"
        rows = max(1, self._rows(room) // groups)
        return self._rates.grouped(product, groups, rows, columns, depth, "fp8").seconds

    def _float8_matrices(self, operator: RecordedOp) -> OpCost:
        """A dense product in 8 bits, or the gradients of the experts' matrices, which are contracted over rows."""
        (n, depth), _, (groups, _, k) = operator.shapes[:3]
        is_sum, by_rows = "ACCUMULATE" in operator.switches, _is_by_rows(operator, scales=4, rows=k)
        if groups == 1:
            seconds = self._rates.product(n, k, depth, "fp8", by_rows=by_rows).seconds
            return OpCost(max(seconds, ACCUMULATED_BYTES * n * k / self._bandwidth) if is_sum else seconds, "products")
        # Beside the experts' rows there is room between them, which is not computed.
        rows = max(1, min(depth, self._rows(self._room)) // groups) if self._room else max(1, depth // groups)
        product: GroupedProduct = "weight_gradient_accumulated" if is_sum else "weight_gradient"
        return OpCost(self._rates.grouped(product, groups, rows, n, k, "fp8", by_rows=by_rows).seconds, "experts")

    def _torch_grouped(self, operator: RecordedOp) -> float:
        """`torch.nn.functional.grouped_mm`: rows times a matrix for each expert, or a contraction over rows."""
        first, second = operator.shapes[:2]
        if len(second) == 3:
            groups, k, n = second
            rows = max(1, self._rows(first[0]) // groups)
            return self._rates.grouped("forward", groups, rows, n, k, _DTYPES[operator.itemsize]).seconds
        groups, n, k = operator.shapes[-1]
        rows = max(1, self._rows(first[1]) // groups)
        return self._rates.grouped("weight_gradient", groups, rows, n, k, _DTYPES[operator.itemsize]).seconds

    def _attention(self, operator: RecordedOp) -> float:
        is_backward = "backward" in operator.name
        query, key, value = operator.shapes[is_backward : is_backward + 3]
        (rows, heads, queries, width), keys = query, key[-2]
        has_mask = any(shape[-2:] == (queries, keys) for shape in operator.shapes[3 + 3 * is_backward :])
        of_masks = next((times for name, times in _MASKED.items() if has_mask and name in operator.name), (1.0, 1.0))
        estimate = self._rates.attention(
            "backward" if is_backward else "forward",
            rows * heads,
            queries,
            keys,
            (width, value[-1]),
            causal=not has_mask,
            dtype=_DTYPES[operator.itemsize],
        )
        return estimate.seconds * of_masks[is_backward] * self._rounds

    def _bounded(self, operator: RecordedOp) -> float:
        """A kernel of attention between bounds. A row of documents counts as one document: lengths are not known."""
        direction, factor = _BOUNDED[operator.name]
        (rows, queries, heads, width), (_, keys, _, _), (*_, value_width) = operator.shapes[:3]
        window = AttentionWindow(kind="window", size=most_of(operator.switches))
        seen = window.pairs(keys) - window.pairs(keys - queries) + queries * _BORDER
        sizes = rows * heads, queries, keys, (width, value_width)
        whole = self._rates.attention(direction, *sizes, dtype=_DTYPES[operator.itemsize]).seconds
        return whole * factor * seen / pairs(queries, keys, causal=True)

    def _gram(self, operator: RecordedOp) -> float:
        """Each matrix times its transpose: on a GPU tiles on and above the diagonal."""
        count, rows, depth = operator.shapes[0]
        seconds = self._rates.product(count * rows, rows, depth, _DTYPES[operator.itemsize]).seconds
        if self._rates.hardware.vendor == "cpu":
            return seconds
        tiles = -(-rows // gram.LAUNCH.block_rows)
        return max(seconds * (tiles + 1) / (2 * tiles) / _GRAM_SHARE, operator.moved_bytes / self._bandwidth)

    def _logits(self, operator: RecordedOp) -> float:
        """The first of the two products of attention."""
        rows, positions, heads, width = operator.shapes[0]
        dtype = _DTYPES[operator.itemsize]
        sizes = rows * heads, positions, positions, (width, width)
        return self._rates.attention("forward", *sizes, causal=True, dtype=dtype).seconds / 2

    def _by_chunks(self, operator: RecordedOp) -> float:
        """A kernel of linear attention: products of J x J and of J x N x M for each chunk of each head."""
        if operator.name in _BY_FEATURE:
            return self._rates.memory_bound(self._bytes(operator)).seconds * _BY_FEATURE[operator.name]
        pairs_of, states = _BY_CHUNKS[operator.name]
        rows, positions, _, width = operator.shapes[0]  # of keys, or queries
        with_states = next((shape for shape in operator.shapes if len(shape) == 5), None)
        if with_states is None:
            heads, value_width = operator.shapes[-1 if operator.name == "delta_local_backward_kernel" else 1][2:]
        else:
            heads, value_width = with_states[2], with_states[4]
        of_chunk = CHUNK * CHUNK * pairs_of(width, value_width) + states * CHUNK * width * value_width
        flops = 2.0 * rows * heads * -(-positions // CHUNK) * of_chunk
        direction: Pass = "backward" if "backward" in operator.name else "forward"
        dtype = _DTYPES[operator.itemsize]
        return self._rates.by_chunks(direction, flops, self._bytes(operator), dtype).seconds / _LINEAR_SPEED

    def _of_chosen(self, operator: RecordedOp) -> float:
        """A kernel of sparse attention, whose queries choose as many keys as there are, or have all before them."""
        of_pairs, keys, speed = _OF_CHOSEN[operator.name]
        share = 1.0
        if keys is not None:
            _, positions, top_k = operator.shapes[keys]
            share = 1 - top_k / (2 * positions) if top_k < positions else positions / (2 * top_k)
        direction: Pass = "backward" if "backward" in operator.name else "forward"
        flops, dtype = 2.0 * share * of_pairs(operator.shapes), _DTYPES[operator.itemsize]
        seconds = self._rates.by_chunks(direction, flops, 0.0, dtype).seconds / speed
        if operator.name != "sparse_key_backward_kernel":
            return seconds
        # However many heads there are, a query adds a float32 row to the gradients of each of its keys.
        (queries, _, chosen), (*_, columns) = operator.shapes[-2:]
        return max(seconds, 4.0 * share * queries * chosen * columns / (_ADDED_SHARE * self._bandwidth))

    def _send(self, operator: RecordedOp) -> float:
        """A kernel that writes rows into other ranks' memory, or the wait for its counterpart."""
        rows, ranks = operator.shapes[0][0], operator.shapes[-1][0]
        traffic, whole = self._traffic(operator.sizes[0] // rows), self._ranks
        if ranks == whole:
            seconds = self._transfers.dispatch("symmetric", "dispatch", traffic, RankGroup(ranks, ranks)).seconds
        else:  # inside one of several nodes
            seconds = self._transfers.spread(traffic, RankGroup(whole, ranks)).seconds
        if operator.name == "push_rows_kernel":
            return seconds
        return max(seconds, self._filled(operator, 0) / self._bandwidth)

    def _traffic(self, row_bytes: int) -> TokenTraffic:
        """Tokens of the fullest rank, whose rows have so many bytes."""
        experts = self._experts
        assert experts is not None, "rows travel to experts"
        return replace(experts.traffic, tokens=round(experts.traffic.tokens * experts.imbalance), copy_bytes=row_bytes)

    @property
    def _ranks(self) -> int:
        return 1 if self._experts is None else self._experts.ranks

    def _collective(self, operator: RecordedOp) -> OpCost:
        assert operator.group is not None, operator
        kind = COLLECTIVES.get(operator.name, "all-reduce")
        term = "dispatch" if kind == "all-to-all" else "exchange"
        rows = max(operator.shapes, key=len, default=())
        if kind == "all-to-all" and self._software.dispatch == "deep-ep" and len(rows) == 2:
            traffic = self._traffic(max(operator.sizes) // max(shape[0] for shape in operator.shapes if shape))
            seconds = self._transfers.dispatch("deep-ep", "dispatch", traffic, operator.group).seconds
        else:
            seconds = self._transfers.collective(kind, max(operator.sizes, default=0), operator.group).seconds
        return OpCost(seconds, term, is_communication=True)

    def _bytes(self, operator: RecordedOp) -> float:
        """Bytes that the memory moves."""
        moved = sum(self._filled(operator, index) for index in range(len(operator.sizes)))
        times = _BYTES.get(operator.name)
        if times is not None:
            return times(operator, moved)
        if operator.name.endswith("_") and operator.sizes:
            return moved + self._filled(operator, 0)
        return moved

    def _filled(self, operator: RecordedOp, index: int) -> float:
        """Bytes of a tensor that hold rows."""
        shape, size = operator.shapes[index], operator.sizes[index]
        if shape and shape[0] in self._buffers:
            # A buffer by capacity: only the expected rows are read or written.
            return size * self._rows(shape[0]) / shape[0]
        return size

    def _rows(self, room: int) -> int:
        """Expected rows of a buffer with `room` slots."""
        return room if self._experts is None or room not in self._buffers else min(room, self._experts.rows)


_BYTES: Mapping[str, Callable[[RecordedOp, float], float]] = MappingProxyType(
    {
        # Counted again and again, from registers and caches: 1,024 rows of 32k scores took 0.54 ms on an H200.
        "choose_keys_kernel": lambda operator, moved: 16.0 * operator.sizes[0],
        # The selected rows are read and written.
        **dict.fromkeys(
            ("embedding", "index_select", "index", "gather"), lambda operator, moved: 2.0 * operator.sizes[-1]
        ),
        # Of what rows are copied from, as much is read as is written.
        **dict.fromkeys(
            ("gather_rows_kernel", "gather_columns_kernel"), lambda operator, moved: 2.0 * (moved - operator.sizes[0])
        ),
        "index_put_": lambda operator, moved: 3.0 * operator.sizes[-1],
        # Rows in 16 bits are read; as many rows in float32, if no token comes twice, are read and written.
        "sum_runs_kernel": lambda operator, moved: 5.0 * operator.sizes[0],
        "join_runs_kernel": lambda operator, moved: 0.0,
        # Of replicas, one of each rank: how many there are depends on the loads.
        **dict.fromkeys(
            ("push_replicas_kernel", "clear_slots_kernel"),
            lambda operator, moved: operator.sizes[0] / operator.shapes[0][0],
        ),
        "pull_gradients_kernel": lambda operator, moved: 3.0 * operator.sizes[0] / operator.shapes[0][0],
        # Each tensor is read or written, none both.
        **dict.fromkeys(("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_"), lambda operator, moved: moved),
        # The first half of the tensors is read and written, the other one read; factors are on the host.
        **dict.fromkeys(("_foreach_lerp_", "_foreach_add_"), lambda operator, moved: 1.5 * moved),
        "_foreach_mul_": lambda operator, moved: 2.0 * moved,
        # Logits are read for the sum, read again and written as gradients. A profiler saw a little more than 3 times.
        "linear_cross_entropy_kernel": lambda operator, moved: (
            moved * ("STATISTICS" in operator.switches) + 2.4 * operator.sizes[0] * ("GRADIENT" in operator.switches)
        ),
    }
)
"""Bytes that the memory moves, from an operator and the sum of its tensors, where that is not the sum."""

_UPDATE_SHARES = {False: 1.08, True: 0.56}
"""Bytes in a second of our update over those of PyTorch's operators over many tensors, by whether moments are codes of
8 bits. On an H200: 1.06 to 1.11, and 0.55 to 0.57 (benchmarks/results/optimizer-step-h200.json)."""

_GRAM_SHARE = 0.75
"""Operations in a second of products of matrices with their transposes over those of other products: 0.56 to 1.05 on
an H200 (benchmarks/results/muon-h200.json)."""

_WAITS = frozenset({"wait_kernel", "signal_kernel", "push_numbers_kernel", "take_numbers_kernel"})
"""Kernels that move nothing."""

_CASTS = frozenset({"quantize_kernel", "measure_kernel"})
"""Kernels that round to 8 bits, or find the largest number first."""

_CLAMPED: Mapping[str, float] = MappingProxyType(
    {"swiglu_kernel": 1.34, "swiglu_backward_kernel": 1.24, "bias_parts_kernel": 2.2}
)
"""Kernels between the products of experts, with limits and biases: seconds over those of their bytes, in a step of
gpt-oss on an H200."""

_NOTHING = _WAITS | {"set_"}  # operators without device time; `set_` gives a tensor another storage on the host


def _is_by_rows(operator: RecordedOp, *, scales: int, rows: int) -> bool:
    """Whether each row of a product's second operand has its own scale; `scales` is the place of the scales' tensor."""
    return len(operator.shapes) > scales and operator.shapes[scales][0] == rows


_BY_CHUNKS: Mapping[str, tuple[Callable[[int, int], int], int]] = MappingProxyType(
    {
        "delta_system_kernel": (lambda width, values: 2 * width + values, 0),
        "delta_state_kernel": (lambda width, values: 0, 2),
        "delta_output_kernel": (lambda width, values: width + values, 1),
        "delta_local_backward_kernel": (lambda width, values: width + values, 0),
        "delta_state_backward_kernel": (lambda width, values: 0, 3),
        "delta_read_backward_kernel": (lambda width, values: 2 * width + values, 3),
        "delta_write_backward_kernel": (lambda width, values: 4 * width + 2 * values + 2 * CHUNK, 0),
    }
)
"""Kernels of linear attention: the sum of depths and widths of products with J x J pairs, by the widths of keys and
values, and the number of products with a state."""

_BY_FEATURE: Mapping[str, float] = MappingProxyType(
    {
        "channel_pairs_kernel": 2.0,
        "channel_system_kernel": 3.3,
        "channel_output_kernel": 1.05,
        "channel_local_backward_kernel": 1.05,
        "channel_write_backward_kernel": 1.7,
        "channel_query_backward_kernel": 2.35,
        "channel_key_backward_kernel": 2.5,
    }
)
"""Kernels of linear attention with decays of single features: seconds over those of their bytes, on an H200
(benchmarks/results/channel-delta-rule-h200.json)."""

_MASKED: Mapping[str, tuple[float, float]] = MappingProxyType({"cudnn": (1.6, 1.7), "efficient": (4.6, 6.5)})
"""Torch's backends with a mask: seconds of forward and backward over those of all pairs at the rate without a mask.

On an H200 over documents, 1.5 to 1.8 and 1.5 to 2.6 with cuDNN, 4.3 to 5.2 and 3.6 to 12.8 with the other one
(benchmarks/results/attention-masked-h200.json)."""

_BORDER = 96
"""Keys that a query computes beside those that it sees, because a tile has several queries and whole blocks of keys."""

_BOUNDED: Mapping[str, tuple[Pass, float]] = MappingProxyType(
    {
        "attention_kernel": ("forward", 1.5),
        "attention_query_gradient_kernel": ("backward", 0.6),
        "attention_key_gradient_kernel": ("backward", 1.15),
    }
)
"""Kernels of attention between bounds: the pass, and seconds over those of a plain causal pass with as many pairs.

On an H200, over documents and a window, 1.2 to 1.8 times cuDNN's forward and 1.5 to 2.1 times its backward
(benchmarks/results/attention-masked-h200.json and attention-h200.json)."""

_OF_CHOSEN: Mapping[str, tuple[Callable[[Sequence[Sequence[int]]], int], int | None, float]] = MappingProxyType(
    {
        "sparse_forward_kernel": (
            lambda shapes: prod(shapes[4]) * shapes[0][0] * (2 * shapes[0][3] + shapes[1][3]),
            *(4, 0.76),
        ),
        "sparse_score_backward_kernel": (
            lambda shapes: prod(shapes[9]) * (2 * shapes[0][3] + shapes[1][3]),
            *(4, 0.65),
        ),
        "sparse_query_backward_kernel": (lambda shapes: prod(shapes[0]) * shapes[1][2], 2, 1.4),
        # With values two products, else one.
        "sparse_key_backward_kernel": (lambda shapes: prod(shapes[-2]) * shapes[-1][2] * (len(shapes) - 5), -5, 0.55),
        "index_scores_kernel": (lambda shapes: prod(shapes[4]) * prod(shapes[0][2:]), None, 0.9),
        "index_backward_kernel": (lambda shapes: 4 * shapes[5][0] * shapes[5][2] * prod(shapes[0][2:]), 3, 0.39),
    }
)
"""Kernels of sparse attention: multiplications of all pairs of a query and a chosen key, by the shapes of the tensors;
the place of the keys' numbers among these; the speed over that of dense attention in the same pass, on an H200 with the
widths of DeepSeek-V3.2 (docs/decisions/0168-chosen-keys.md)."""

_ADDED_SHARE = 0.45
"""Bytes of float32 rows that atomic additions take in a second, over those that a kernel moves that computes little: on
an H200 1.85 TB/s, whatever the launch (docs/decisions/0168-chosen-keys.md)."""

_LINEAR_SPEED = 0.58  # of these kernels over attention's, on an H200 (delta-rule-h200.json, launches that run)

_OF_ROWS = frozenset({"rows_kernel", "float8_rows_kernel"})
"""Kernels that multiply the rows of experts by their matrices."""

_PRODUCTS: Mapping[str, int] = MappingProxyType({"mm": 2, "bmm": 2, "addmm": 3, "baddbmm": 3, "_scaled_mm_v2": 2})
"""Matrix products, and their number of tensor arguments; the last two are multiplied."""

_SENDERS = frozenset({"push_rows_kernel", "return_rows_kernel"})  # kernels that write into other GPUs' memory

_TERMS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("route_kernel", "route_backward_kernel", "sum_parts_kernel", "balance_loss_kernel"), "route"),
        **dict.fromkeys(("count_kernel", "scan_kernel", "place_kernel", "tile_table_kernel"), "route"),
        **dict.fromkeys(("count_arrivals_kernel", "place_arrivals_kernel", "spread_kernel"), "route"),
        **dict.fromkeys(("take_rows_kernel", "sum_ranks_kernel", *sorted(_WAITS)), "dispatch"),
        **dict.fromkeys(("adamw_kernel", "_foreach_norm", "_foreach_zero_", "_foreach_copy_"), "optimizer"),
        **dict.fromkeys(("_foreach_lerp_", "_foreach_add_", "_foreach_mul_"), "optimizer"),
        **dict.fromkeys(("linear_cross_entropy_kernel", "logits_gradient_kernel"), "loss"),
        "mxfp4_kernel": "quantize",
    }
)
"""Terms of operators that compute little; others are elementwise."""

_DTYPES: Mapping[int, Dtype] = MappingProxyType({1: "fp8", 2: "bf16", 4: "fp32", 8: "fp32"})
"""By the bytes of an element."""
