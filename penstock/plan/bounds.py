"""Lower bounds of step time and memory from the sizes of a layout alone, without running anything.

A search may leave a layout out only if it is proven to be no better: these numbers never exceed those of the projection
(tests draw layouts and compare). They count the large operators of a layer, with the costs that the projection gives
them: matrix products, attention, products of experts, transfers of tokens, exchanges of tensor- and context-parallel
ranks, and the bytes of norms and activations. Small kernels, launches, waits and the update are left out.

    time      most of (micro-batches x the work of a place + its wait for the first micro-batch and after the last)
    memory    state, and what a layer keeps at the least, times the micro-batches in flight
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple, cast

import numpy as np

from penstock.config.model import CompressedAttention, GroupedQueryAttention, LatentAttention, Model, Moe
from penstock.config.run import Run
from penstock.layout.actions import Kind, Schedule, even_costs, play
from penstock.layout.schedules import schedule
from penstock.plan.candidates import Experts
from penstock.plan.costs import HardwareTimes, assumed_imbalance, routed_traffic
from penstock.plan.hardware import Cluster, Dtype
from penstock.plan.rates import ACCUMULATED_BYTES, BYTES, CollectiveName, DispatchMethod, GroupedProduct
from penstock.plan.streams import OVERLAP_GAIN

# Longest paths through schedules whose order costs more than the work of the busiest place.
#
# In V-Half and V-Min a place waits for others in every round if a forward pass, an input gradient and weight gradients
# take different times. Any path through the actions of a schedule bounds a step by the sum of their times, whatever
# these are. The longest path for about the same times gives a close bound, and many layouts share it.


PASSES: dict[Kind, tuple[int, int, int]] = {
    Kind.FORWARD: (1, 0, 0),
    Kind.BACKWARD: (0, 1, 1),
    Kind.INPUT: (0, 1, 0),
    Kind.WEIGHT: (0, 0, 1),
}
"""Forward passes, input gradients and weight gradients of an action."""


WAITING_SCHEDULES = ("v-half", "v-min")

ROUNDS = 3
"""Micro-batches for each rank of the longest schedule that is played: a longer one repeats its last round."""


def path_counts(
    name: str, ranks: int, stages_per_rank: int, micro_batches: int, times: tuple[float, float, float]
) -> np.ndarray:
    """[stages, 3]: forward passes, input gradients and weight gradients on the longest path of equal stages.

    `times` are those of the three.
    """
    shape, played = (name, ranks, stages_per_rank), min(micro_batches, ROUNDS * ranks)
    path = _longest(shape, played, times)
    if played < micro_batches:
        path = path + (micro_batches - played) / ranks * (path - _longest(shape, played - ranks, times))
    return path


@cache
def _longest(shape: tuple[str, int, int], micro_batches: int, times: tuple[float, float, float]) -> np.ndarray:
    plan = _schedule(*shape, micro_batches)
    ends, steps = play(plan, even_costs(plan.stages, times)).ends, plan.execution_order.done
    last: dict[int, int] = {}  # the step before on each rank
    before = []
    for number, step in enumerate(steps):
        before.append([source for source in (last.get(step.rank), *step.after) if source is not None])
        last[step.rank] = number
    counts = np.zeros((plan.stages, 3))
    path = [max(range(len(ends)), key=ends.__getitem__)]
    while path:
        for action in steps[path[-1]].unit:
            counts[action.stage] += PASSES[action.kind]
        path = sorted(before[path[-1]], key=ends.__getitem__)[-1:]
    return counts


@cache
def _schedule(name: str, ranks: int, stages_per_rank: int, micro_batches: int) -> Schedule:
    return schedule(name, ranks=ranks, stages_per_rank=stages_per_rank, micro_batches=micro_batches)


LOSS_CHUNKS = (2048, 4096)
"""Tokens whose logits exist at once, where a run does not say it (penstock/kernels/linear_cross_entropy.py)."""

SHARE_OF_PRODUCTS = 0.98  # of their seconds, in the head: rates of sizes between measured ones may be off by a little


class WorkSeconds(NamedTuple):
    """Seconds of one micro-batch in a part of a stage, at the least.

    `again` is the part of `forward` that is repeated where the whole is recomputed: up to the last saved tensor, so
    without the second product of a network and the way back of its rows. `activation` is the same where the experts'
    activation is recomputed. `weight` is the part of `backward` that is products for weight gradients.
    """

    forward: float
    backward: float
    again: float = 0.0
    activation: float = 0.0
    weight: float = 0.0


class TimeBounds:
    """Lower bounds of the time of parts of a layer, for one run on one cluster; each is computed once.

    `tokens` are those of a rank between the matrices, where tensor-parallel ranks divide the positions. `accumulates`:
    kernels add weight gradients to float32 sums, as without FSDP2. `imbalance` is rows of the fullest rank's experts
    over the even share.
    """

    def __init__(self, run: Run, cluster: Cluster, imbalance: float, times: HardwareTimes) -> None:
        self._run = run
        self._model: Model = run.model
        self._hidden, self._parts = run.model.hidden_size, run.model.projections
        self._cluster = cluster
        self._imbalance = assumed_imbalance(run, imbalance)
        self._traffic = None if run.model.moe is None else routed_traffic(run)
        self._rates, self._transfers = times
        self._dtype: Dtype = run.training.precision
        self._width = BYTES[self._dtype]
        self._bandwidth = cluster.hardware.bandwidth
        self.attention = cache(self._attention)
        """Attention, both norms and the residual sums: is_local, tp, cp, rows of a micro-batch, accumulates."""
        self.head = cache(self._head)
        """Output projection and loss of all heads, prediction depths too; of their layers the projection alone."""
        self._dense = cache(self._dense_network)
        self._routed = cache(self._routed_experts)
        self._grouped = cache(self._grouped_products)

    def _head(self, tp: int, cp: int, rows: int) -> WorkSeconds:
        depths, hidden = self._model.mtp_layers, self._hidden
        tokens, columns = rows * self._run.training.sequence_length // cp, self._model.vocab_size // tp
        every = (1 + depths) * tokens
        # The loss takes all tokens at once, or chunks: the fastest for a token is the bound.
        chunks = {min(every, size) for size in (every, tokens, *LOSS_CHUNKS, self._run.kernels.loss_chunk or every)}
        products = [
            (self._products(size, [(hidden, columns)], False), SHARE_OF_PRODUCTS * every / size) for size in chunks
        ]
        forward = min(product.forward * times for product, times in products)
        backward = min(product.backward * times for product, times in products)
        if depths:
            ways = (tokens // tp, hidden), (tokens, hidden // tp)
            joined = [self._products(size, [(2 * hidden, width)], False) for size, width in ways]
            forward += SHARE_OF_PRODUCTS * depths * min(product.forward for product in joined)
            backward += SHARE_OF_PRODUCTS * depths * min(product.backward for product in joined)
        return WorkSeconds(forward + self._moved(every * columns), backward)

    def _products(self, m: int, shapes: Sequence[tuple[int, int]], accumulates: bool) -> WorkSeconds:
        """M rows times each K x N matrix, with both gradients in backward."""

        def seconds(m: int, n: int, k: int) -> float:
            float8 = self._run.float8
            in_8_bits = (float8.dense, float8.head) != ("none", "none")
            kinds: tuple[Dtype, ...] = (self._dtype, "fp8") if in_8_bits else (self._dtype,)
            return min(self._rates.product(m, n, k, dtype).seconds for dtype in kinds)

        def weight(k: int, n: int) -> float:
            return max(seconds(n, k, m), ACCUMULATED_BYTES * n * k / self._bandwidth if accumulates else 0.0)

        forward = [seconds(m, n, k) for k, n in shapes]
        backward = sum(seconds(m, k, n) + weight(k, n) for k, n in shapes)
        return WorkSeconds(sum(forward), backward, forward[0], weight=sum(weight(k, n) for k, n in shapes))

    def _exchange(self, kind: CollectiveName, numbers: float, ranks: int, stride: int = 1) -> float:
        if ranks == 1:
            return 0.0
        return self._transfers.collective(kind, numbers * self._width, self._cluster.group(ranks, stride)).seconds

    def _moved(self, numbers: float) -> float:
        return numbers * self._width / self._bandwidth

    def _attention(self, is_local: bool, tp: int, cp: int, rows: int, accumulates: bool) -> WorkSeconds:
        model, attention, ranks = self._model, self._model.attention, (tp, cp)
        hidden, heads = model.hidden_size, attention.heads // tp
        positions = self._run.training.sequence_length
        whole = rows * positions // cp  # tokens inside the tensor-parallel part
        rank_tokens = whole // tp
        if isinstance(attention, LatentAttention):
            width, value_width, kv_heads = attention.head_dim, attention.v_head_dim, heads
            latent = attention.kv_lora_rank + attention.qk_rope_head_dim
            query = [(attention.q_lora_rank, heads * width)] if attention.q_lora_rank else [(hidden, heads * width)]
            down = [(hidden, attention.q_lora_rank)] if attention.q_lora_rank else []
            up = (attention.kv_lora_rank, heads * (attention.qk_nope_head_dim + value_width))
            products = [self._products(rank_tokens, [*down, (hidden, latent)], accumulates)]
            products += [self._products(whole, [*query, up, (heads * value_width, hidden)], accumulates)]
            gathered = [attention.q_lora_rank or hidden, latent]
        elif isinstance(attention, CompressedAttention):  # which no tensor-parallel ranks divide
            width = value_width = attention.head_dim
            kv_heads, outputs = 1, attention.o_groups * attention.o_lora_rank
            shapes = [(hidden, attention.q_lora_rank), (attention.q_lora_rank, heads * width), (hidden, width)]
            shapes += [(heads * width // attention.o_groups, outputs), (outputs, hidden)]
            products, gathered = [self._products(whole, shapes, accumulates)], []
        else:
            width = value_width = attention.head_dim
            kv_heads = attention.kv_heads // tp
            shapes = [(hidden, heads * width), *[(hidden, kv_heads * width)] * 2, (heads * width, hidden)]
            products = [self._products(whole, shapes, accumulates)]
            gathered = [hidden]
        exchange = sum(self._exchange("all-gather", whole * columns, tp) for columns in gathered)
        exchange += self._exchange("reduce-scatter", whole * hidden, tp)
        exchange += self._context(whole, (heads, kv_heads), (width, value_width), ranks)
        core = WorkSeconds(0.0, 0.0) if is_local else self._core(rows, (heads, kv_heads), (width, value_width), ranks)
        # Each norm reads and writes the residual stream at least once; a sum reads two tensors and writes one.
        moved = self._moved(rank_tokens * hidden * 7)
        if model.hyper_connections is not None:  # both networks read all streams four times, and write them
            moved += self._moved(rank_tokens * model.residual_size * 10)
        return WorkSeconds(
            sum(product.forward for product in products) + core.forward + exchange + moved,
            sum(product.backward for product in products) + core.backward + exchange + moved,
            weight=sum(product.weight for product in products),
        )

    def _by_heads(self, heads: tuple[int, int], cp: int) -> bool:
        """Context-parallel ranks exchange positions for heads."""
        method = self._run.parallel.context_method
        return method == "ulysses" or (method == "auto" and not any(head % cp for head in heads))

    def _context(self, tokens: int, heads: tuple[int, int], widths: tuple[int, int], ranks: tuple[int, int]) -> float:
        """Exchanges of context-parallel ranks in one pass, where they exchange heads; gathers are left out."""
        (tp, cp), (query, kv) = ranks, heads
        if cp == 1 or not self._by_heads(heads, cp):
            return 0.0
        parts = (query * widths[0], kv * widths[0], kv * widths[1], query * widths[1])
        return sum(self._exchange("all-to-all", tokens * part, cp, tp) for part in parts)

    def _core(self, rows: int, heads: tuple[int, int], widths: tuple[int, int], ranks: tuple[int, int]) -> WorkSeconds:
        """Scores and weighted values of a layer that attends to the whole row."""
        cp, positions = ranks[1], self._run.training.sequence_length
        attention = self._model.attention
        is_sparse = not isinstance(attention, GroupedQueryAttention) and attention.indexer is not None
        if not self._by_heads(heads, cp) or self._run.data.document_mask or is_sparse:
            # The shapes depend on chunks, documents or chosen keys.
            return WorkSeconds(0.0, 0.0)
        count, keys = rows * heads[0] // cp, positions
        passes = (self._rates.attention(way, count, keys, keys, widths, dtype=self._dtype) for way in _PASSES)
        forward, backward = (estimate.seconds for estimate in passes)
        return WorkSeconds(forward, backward)

    def ffn(self, experts: Sequence[Experts], is_moe: bool, tokens: int, tp: int, accumulates: bool) -> np.ndarray:
        """The rest of a layer: a row with the fields of `WorkSeconds` for each division of the experts."""
        moe = self._model.moe
        if not is_moe or moe is None:
            dense = self._dense(tokens * tp, self._model.intermediate_size // tp, tp, accumulates)
            return np.tile(dense, (len(experts), 1))
        shared = moe.shared_expert_intermediate_size // tp
        beside = self._dense(tokens * tp, shared, tp, accumulates) if shared else WorkSeconds(0.0, 0.0)
        routed = np.array([self._routed(tokens, division, accumulates) for division in experts])
        forward, backward, again, weight, out, back = routed.T
        # The activation reads a pre-activation and writes half as much; backward reads that too and writes both.
        activated = tokens * moe.top_k * moe.moe_intermediate_size
        every = WorkSeconds(
            beside.forward + forward + out + back + self._moved((self._parts + 1) * activated),
            beside.backward + backward + out + back + self._moved((2 * self._parts + 1) * activated),
            beside.again + again + out,
            again,
            beside.weight + weight,
        )
        return np.stack(every, 1)

    def _dense_network(self, tokens: int, width: int, tp: int, accumulates: bool) -> WorkSeconds:
        """A dense network, or the shared expert; `tokens` are those inside the tensor-parallel part."""
        products = self._products(tokens, [(self._hidden, self._parts * width), (width, self._hidden)], accumulates)
        exchange = self._exchange("all-gather", tokens * self._hidden, tp)
        exchange += self._exchange("reduce-scatter", tokens * self._hidden, tp)
        return WorkSeconds(
            products.forward + exchange + self._moved((self._parts + 1) * tokens * width),
            products.backward + exchange + self._moved((2 * self._parts + 1) * tokens * width),
            products.again,
            weight=products.weight,
        )

    def _routed_experts(self, tokens: int, experts: Experts, accumulates: bool) -> tuple[float, ...]:
        """Forward, backward, again and weight of the experts' products, and the way of tokens to them and back."""
        products = self._grouped(tokens, experts.ep, experts.etp, accumulates)
        return products.forward, products.backward, products.again, products.weight, *self._sent(tokens, experts)

    def _grouped_products(self, tokens: int, ep: int, etp: int, accumulates: bool) -> WorkSeconds:
        moe = self._model.moe
        assert moe is not None, "a layer with experts has them in its model"
        groups, width = moe.experts // ep, moe.moe_intermediate_size // etp
        rows = max(1, int(tokens * moe.top_k * etp * self._uneven(moe, ep)) // groups)
        kinds: tuple[Dtype, ...] = (self._dtype, "fp8") if self._run.float8.experts != "none" else (self._dtype,)

        def least(n: int, k: int, *names: GroupedProduct) -> float:
            return min(
                self._rates.grouped(name, groups, rows, n, k, dtype).seconds for name in names for dtype in kinds
            )

        shapes = ((self._parts * width, self._hidden), (self._hidden, width))
        forward = [least(n, k, "forward", "forward_gathered") for n, k in shapes]
        weights: GroupedProduct = "weight_gradient_accumulated" if accumulates else "weight_gradient"
        backward = sum(least(n, k, "input_gradient") + least(n, k, weights) for n, k in shapes)
        return WorkSeconds(sum(forward), backward, forward[0], weight=sum(least(n, k, weights) for n, k in shapes))

    def _uneven(self, moe: Moe, ep: int) -> float:
        """Rows of the fullest rank over the even share, at most those of tokens that all choose its experts."""
        return min(self._imbalance, ep * min(moe.top_k, moe.experts // ep) / moe.top_k)

    def _sent(self, tokens: int, experts: Experts) -> tuple[float, float]:
        """Tokens to their experts, and back, in one pass."""
        ranks, name, moe = experts.ep * experts.etp, experts.dispatcher, self._model.moe
        if ranks == 1 or name == "local" or moe is None or self._traffic is None:
            return 0.0, 0.0
        # Over nodes tokens are sent by expected counts, which say less than the imbalance of one rank.
        crosses = name == "hierarchical"
        traffic = replace(
            self._traffic,
            tokens=max(1, int(tokens * (1.0 if crosses else self._uneven(moe, experts.ep)))),
            copy_bytes=self._hidden * (1 if self._run.float8.dispatch != "none" else self._width),
            expert_tensor=1 if crosses else experts.etp,
        )
        group, method = self._cluster.group(ranks), cast(DispatchMethod, name)
        # Beside other work at least the part that overlap does not gain is paid.
        paid = 1.0 if self._run.dispatch.overlap == "none" else 1 - OVERLAP_GAIN
        out, back = (
            paid * self._transfers.dispatch(method, way, traffic, group).seconds for way in ("dispatch", "combine")
        )
        return out, back


_PASSES: tuple[Literal["forward", "backward"], ...] = ("forward", "backward")


def kept_numbers(model: Model, recompute: Sequence[str]) -> Mapping[bool, float]:
    """Numbers that a layer keeps for each token of a rank at the least, without and with experts (`has_experts`)."""
    hidden, moe, attention = model.hidden_size, model.moe, model.attention
    if "layer" in recompute:
        return dict.fromkeys((False, True), model.residual_size)
    if isinstance(attention, GroupedQueryAttention):
        heads = 2 * attention.heads * attention.head_dim + 2 * attention.kv_heads * attention.head_dim
    elif isinstance(attention, CompressedAttention):
        heads = attention.heads * attention.head_dim
    elif "latent-up" in recompute:
        heads = attention.heads * attention.v_head_dim
    else:
        heads = 2 * attention.heads * (attention.head_dim + attention.v_head_dim)
    always = model.residual_size + (0 if "attention" in recompute else heads)
    experts = 0.0
    if moe is not None and "moe" not in recompute:
        experts = hidden
        if "expert-activation" not in recompute:
            experts += model.projections * moe.top_k * moe.moe_intermediate_size
    return {False: always, True: always + experts}
