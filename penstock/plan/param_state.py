"""Model state of a rank, and its update, computed from lists of its parameters.

The numbers are those of the optimizer (`MasterAdamW.memory`) and its buckets without making either, because a search
asks for tens of thousands of ranks with the same parameters in other counts and shards. Facts about a parameter come
from the modules (`facts_of`); only the rows of the first rank are computed again here, and tests compare them with the
optimizer. `update_of` is the update as operators: one operator stands for all of a kind that move device memory, and
messages are full buckets. The norm's sum over ranks and gradients that tensor-parallel ranks share are left out.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import ceil, prod
from typing import Any

import torch

from penstock.config.run import Optimizer, Run
from penstock.layout.grid import Grid
from penstock.layout.sharding import Matrices, newton_schulz_flops, row_width, rows_of_shard
from penstock.models.parameters import copy_bytes, param_shards, refresh_float8
from penstock.parallel.buckets import BUCKET_VALUES, IN_FLIGHT, ROW_VALUES
from penstock.parallel.matrix_exchange import ROUND_VALUES
from penstock.parallel.offload import CHUNK_BYTES
from penstock.parallel.shard import ParamShard
from penstock.plan.hardware import RankGroup
from penstock.plan.liveness import layer_kind
from penstock.plan.meta_rank import MetaRank
from penstock.plan.meta_run import UpdateOps
from penstock.plan.op_recorder import OpRecorder, RecordedOp, RecordedOps
from penstock.train.adamw import StateShape, state_shapes

SUM_BYTES = 4  # of one value of a float32 sum

OTHERS = ("embed", "mtp", "head")
"""Parts that are no decoder layers; a layer is called by its kind (`penstock.plan.liveness`)."""


@dataclass(frozen=True)
class ParamFacts:
    """A parameter, as a rank holds it: `rows` of `width` values."""

    rows: int
    width: int
    itemsize: int  # bytes of a value between steps
    is_expert: bool  # held by the ranks of `expert_data`, not of `dense_data`
    is_sharded: bool  # by FSDP2
    is_partial: bool  # tensor-parallel ranks sum its gradient
    copy_bytes: int = 0  # of its copies in 8 bits
    quantize_ops: RecordedOps = ()  # operators that make these copies after each update
    matrices: Matrices | None = None  # that Muon updates, of all ranks that divide them; None if AdamW updates it
    cuts: int = 1  # tensor-parallel ranks that divide each matrix

    @property
    def values(self) -> int:
        return self.rows * self.width

    def own(self, ranks: int) -> int:
        """Values that the first of so many ranks updates."""
        begin, end = rows_of_shard(self.rows, 0, ranks)
        return (end - begin) * self.width


ParamsByKind = Mapping[str, tuple[ParamFacts, ...]]  # parameters of embed, each kind of layer, mtp and head

ParamCounts = Sequence[tuple[tuple[ParamFacts, ...], int]]
"""Parameters of each part of a rank, and how many such parts it has."""


@dataclass(frozen=True, kw_only=True)
class ShardCounts:
    """Ranks that shard a parameter."""

    dense: int  # ranks that shard a dense matrix
    expert: int
    shards_optimizer: bool  # parameters that FSDP2 leaves alone are sharded when they are updated
    reduce_bytes: int  # of a value of a gradient in a message
    offloads: bool  # moments and masters of 16-bit weights are in host memory
    optimizer: Optimizer  # formats of moments and masters
    dense_owners: int = 1  # ranks that may orthogonalize a dense matrix, those of the stage
    expert_owners: int = 1  # ranks that may orthogonalize an expert's matrix, those that hold parts of it

    def of(self, fact: ParamFacts) -> int:
        if not (self.shards_optimizer or fact.is_sharded):
            return 1
        return self.expert if fact.is_expert else self.dense


def shards_of(run: Run, grid: Grid) -> ShardCounts:
    parallel, size = run.parallel, run.parallel.shard_size

    def within(ranks: int) -> int:
        return size if 0 < size < ranks else ranks

    return ShardCounts(
        dense=within(grid.data * grid.context),
        expert=within(grid.expert_data),
        shards_optimizer=parallel.shard in ("auto", "optimizer"),
        reduce_bytes=SUM_BYTES if parallel.reduce == "fp32" else 2,
        offloads=run.offload.optimizer,
        optimizer=run.optimizer,
        dense_owners=grid.world // grid.pipeline,
        expert_owners=grid.expert_data * grid.expert_tensor,
    )


@dataclass(frozen=True)
class PartState:
    """Bytes of the parameters of some parts of a rank."""

    weights: int = 0
    gradients: int = 0  # float32 sums
    master: int = 0  # float32 weights, or their missing bits, where the weights are not float32
    moments: int = 0
    whole: int = 0  # weights that FSDP2 shards, when they are whole
    host: int = 0  # in host memory

    @property
    def total(self) -> int:
        """Bytes between steps."""
        return self.weights + self.gradients + self.master + self.moments


def part_state(facts: Iterable[ParamFacts], shards: ShardCounts) -> PartState:
    weights = gradients = master = moments = whole = 0
    for fact in facts:
        local_values = fact.own(shards.of(fact))
        if fact.is_sharded:
            # The weight is its own float32 master; gradients are reduced as soon as they are there.
            weights, gradients = weights + SUM_BYTES * local_values, gradients + SUM_BYTES * local_values
            whole += fact.values * fact.itemsize
        else:
            weights += fact.values * fact.itemsize + fact.copy_bytes
            gradients += fact.values * SUM_BYTES
        for name, state in _state_of(fact, shards).items():
            if name == "master":
                master += state.nbytes
            else:
                moments += state.nbytes
    if shards.offloads:
        return PartState(weights, gradients, whole=whole, host=master + moments)
    return PartState(weights, gradients, master, moments, whole)


def _state_of(fact: ParamFacts, shards: ShardCounts) -> dict[str, StateShape]:
    """Moments and master of the values that the first rank updates."""
    rows = fact.own(shards.of(fact)) // fact.width
    # FSDP2's shards are float32, and so their own masters.
    dtype = torch.float32 if fact.is_sharded or fact.itemsize >= SUM_BYTES else torch.bfloat16
    shape, is_muon = (rows, fact.width) if fact.width > 1 else (rows,), fact.matrices is not None
    return state_shapes(shape, dtype, shards.optimizer, is_muon=is_muon)


def together(parts: Iterable[tuple[PartState, int]]) -> PartState:
    """The sum of several parts of a rank, each with its count."""
    states = list(parts)
    whole = PartState(*(sum(count * vars(state)[part.name] for state, count in states) for part in fields(PartState)))
    # The host's state passes through two buffers (penstock/parallel/offload.py).
    return replace(whole, moments=2 * min(CHUNK_BYTES, whole.host)) if whole.host else whole


def facts_of(rank: MetaRank) -> ParamsByKind:
    """Parameters of a rank that holds every part; one layer of each kind."""
    facts_by_kind: dict[str, dict[str, ParamFacts]] = {}
    kind_of = _kinds(rank)
    # FSDP2 keeps no copies in 8 bits from step to step.
    copies: dict[str, tuple[int, RecordedOps]] = {}
    recorder = OpRecorder()
    for decoder in () if rank.sharded else rank.decoders.values():
        for path, module in decoder.named_modules():
            if sizes := copy_bytes(module):
                with recorder:
                    refresh_float8([module])
                ops = recorder.cut()
                # The operators of all copies of a module count as those of its first parameter.
                copies.update(
                    {f"{path}.{name}": (size, () if k else ops) for k, (name, size) in enumerate(sizes.items())}
                )
    for param_shard in param_shards(rank.decoders.values(), rank.axes):
        kind, path = kind_of(param_shard.name)
        facts = facts_by_kind.setdefault(kind, {})
        if kind not in OTHERS and any(not name.startswith(path) for name in facts):
            continue
        width = row_width(tuple(param_shard.parameter.shape))
        copied, quantize_ops = copies.get(param_shard.name, (0, ()))
        facts[param_shard.name] = ParamFacts(
            rows=param_shard.parameter.numel() // width,
            width=width,
            itemsize=param_shard.parameter.dtype.itemsize,
            is_expert=param_shard.data is rank.axes.expert_data,
            is_sharded=param_shard.name in rank.sharded,
            is_partial=any(axis.name == "tensor" for axis in param_shard.partial),
            copy_bytes=copied,
            quantize_ops=quantize_ops,
            **(_of_muon(param_shard) if rank.run.optimizer.method == "muon" else {}),
        )
    return {kind: tuple(facts.values()) for kind, facts in facts_by_kind.items()}


def _of_muon(param_shard: ParamShard) -> dict[str, Any]:
    """The matrices of a parameter that ranks with the same experts have."""
    if param_shard.matrices is None:
        return {}
    groups = prod(cut.count for cut in param_shard.cuts if cut.axis == "expert")
    first, *others = param_shard.matrices.shape
    matrices = replace(param_shard.matrices, shape=(first // groups, *others))
    return {"matrices": matrices, "cuts": prod(cut.count for cut in param_shard.cuts) // groups}


def _kinds(rank: MetaRank) -> Callable[[str], tuple[str, str]]:
    """A function from a parameter's name to the kind of its part and the prefix of that part's names."""
    blocks = {
        f"blocks.{layer}.": layer_kind(rank.run, int(layer))
        for decoder in rank.decoders.values()
        for layer in decoder.blocks
    }

    def kind_of(name: str) -> tuple[str, str]:
        first, rest = name.split(".")[:2]
        if first == "blocks":
            path = f"{first}.{rest}."
            return blocks[path], path
        return (first if first in ("embed", "mtp") else "head"), first

    return kind_of


def update_bytes(parts: ParamCounts, shards: ShardCounts) -> int:
    """Peak of the update: the buckets of sums over ranks, or of new weights."""
    columns: Counter[tuple[str, bool, int]] = Counter()
    for facts, times in parts:
        for fact in facts:
            ranks, holders = shards.of(fact), shards.expert if fact.is_expert else shards.dense
            if fact.is_sharded or holders == 1:
                continue
            # A row of a bucket: the shard of one rank, padded to equal sizes.
            width = -(-fact.rows // ranks) * fact.width
            columns["sum", fact.is_expert, ranks] += times * width
            if ranks > 1:
                columns[f"new {fact.itemsize}", fact.is_expert, ranks] += times * width
            if fact.is_partial:
                columns["part", False, 1] += times * fact.own(ranks)
    peak = 0
    for (what, _, ranks), width in columns.items():
        in_flight = min(width, IN_FLIGHT * max(BUCKET_VALUES // ranks, ROW_VALUES))
        # A sum also has the rank's own row.
        row = ranks * int(what.split()[1]) if what.startswith("new") else (ranks + (ranks > 1)) * shards.reduce_bytes
        peak = max(peak, in_flight * row)
    return max(peak, _MuonLoad(parts, shards).peak_bytes)


class _MuonLoad:
    """What Muon does on a rank, if the ranks of its stage do the same."""

    def __init__(self, parts: ParamCounts, shards: ShardCounts) -> None:
        self.own, self.sent = 0, 0.0  # values that it updates, and about so many that it sends to owners
        self._muon = shards.optimizer.muon
        self._itemsize = 2 if self._muon.precision == "bf16" else SUM_BYTES
        shares: dict[tuple[int, int], float] = defaultdict(float)
        for facts, times in parts:
            for fact in facts:
                if (matrices := fact.matrices) is not None:
                    ranks, owners = shards.of(fact), shards.expert_owners if fact.is_expert else shards.dense_owners
                    self.own += times * fact.own(ranks)
                    shares[matrices.rows, matrices.columns] += times * matrices.count / owners
                    # A matrix is in so many parts, one of which is its owner's.
                    cut_into = max(1.0, fact.cuts * ranks / matrices.count)
                    self.sent += times * prod(matrices.shape) / owners * (1 - 1 / cut_into)
        # Matrices that it orthogonalizes, by their shape.
        self.stacks = Counter({shape: int(share) for shape, share in shares.items() if share >= 1})
        # Ranks with fewer matrices of one shape have more of another: what is left counts as matrices of the smallest.
        left = sum(share % 1 * newton_schulz_flops(*shape, 1) for shape, share in shares.items())
        if left:
            smallest = min((shape for shape, share in shares.items() if share % 1), key=prod)
            self.stacks[smallest] += ceil(left / newton_schulz_flops(*smallest, 1))

    @property
    def peak_bytes(self) -> int:
        """Matrices of a round with the temporaries of products, and its messages and those of the next round."""
        largest = 0
        for (rows, columns), count in self.stacks.items():
            short, whole = min(rows, columns), rows * columns
            matrices = min(count, max(1, ROUND_VALUES // whole))
            largest = max(largest, matrices * (3 * whole + 2 * short * short))
        messages = 3 * min(int(self.sent), ROUND_VALUES)
        return (largest + messages) * self._itemsize

    def ops(self, stage: RankGroup) -> RecordedOps:
        """The update, without AdamW's."""
        if not self.own:
            return ()
        item, iterations = self._itemsize, self._muon.iterations
        operators = [
            *(_moving("_foreach_lerp_", self.own, (SUM_BYTES, SUM_BYTES)) for _ in range(2)),
            *(_moving("_foreach_copy_", self.own, (item, SUM_BYTES)) for _ in range(2)),
            _moving("_foreach_mul_", self.own, (SUM_BYTES,)),
            _moving("_foreach_add_", self.own, (SUM_BYTES, SUM_BYTES)),
            _moving("_foreach_zero_", self.own, (SUM_BYTES,)),
        ]
        if sent := int(self.sent):
            operators += [_message("alltoall_base_", (sent, sent), (sent * item,) * 2, stage)] * 2
        for (rows, columns), count in self.stacks.items():
            short, long = sorted((rows, columns))
            square, matrix = (count, short, short), (count, short, long)
            products = (("bmm", (matrix, (count, long, short))), ("bmm", (square, square)))
            if self._muon.precision == "bf16":
                products = (("gram_kernel", (matrix, square)), ("gram_kernel", (square, square)))
            for name, shapes in (*products, ("bmm", (square, matrix))):
                sizes = tuple(prod(shape) * item for shape in shapes)
                operators += [RecordedOp(name, shapes=shapes, sizes=sizes, itemsize=item)] * iterations
        return tuple(operators)


@dataclass(frozen=True)
class Partners:
    """Ranks that hold the same matrices: `shard` divides one copy, `replicate` holds the same shard of other copies."""

    shard: RankGroup
    replicate: RankGroup


def update_of(
    parts: ParamCounts,
    shards: ShardCounts,
    dense: Partners,
    expert: Partners,
    embedding: tuple[RankGroup, int] | None,
    stage: RankGroup,
) -> UpdateOps:
    """The update of a rank with `parts`.

    `dense` and `expert` are the ranks that hold the same dense matrices and the same experts. `embedding` are the
    stages that hold the embedding too, and values of it that this rank updates; None if no other does. `stage` are all
    ranks of the pipeline stage.
    """
    loads = {False: _Load(), True: _Load()}
    for facts, times in parts:
        for fact in facts:
            loads[fact.is_expert].add(fact, times, shards)
    reduce: list[RecordedOp] = []
    step: list[RecordedOp] = []
    for is_expert, load in loads.items():
        partners = expert if is_expert else dense
        reduce += load.sums(partners, shards)
        step += load.new_weights(partners)
    if embedding is not None:
        group, values = embedding
        reduce.append(_moving("copy_", 2 * values, (SUM_BYTES, shards.reduce_bytes)))
        for columns, times in _buckets(values, 1):
            reduce += [_message("allreduce_", (columns,), (columns * shards.reduce_bytes,), group)] * times
    local_values, copied = (sum(vars(load)[name] for load in loads.values()) for name in ("own", "copied"))
    # The kernel sets the gradients that it reads to zero; the others are left.
    left = sum(load.values for load in loads.values()) - local_values
    moved = loads[False].moved + loads[True].moved
    updates = [
        RecordedOp(
            "adamw_kernel",
            shapes=((read,), (moved[name, True],)),
            sizes=(read, moved[name, True]),
            itemsize=1,
            switches=("CODES",) if name.startswith(str(torch.uint8)) else (),
        )
        for (name, is_written), read in moved.items()
        if not is_written and read
    ]
    updates += [_moving("_foreach_copy_", copied, (2, SUM_BYTES))] if copied else []
    step += [op for load in loads.values() for op in load.quantized]
    step += _MuonLoad(parts, shards).ops(stage)
    host = sum(times * part_state(facts, shards).host for facts, times in parts) if shards.offloads else 0
    return UpdateOps(
        peak_bytes=update_bytes(parts, shards),
        zero=(_moving("_foreach_zero_", left, (SUM_BYTES,)),) if left else (),
        reduce=tuple(reduce),
        norm=(_moving("_foreach_norm", local_values, (SUM_BYTES,)),),
        step=(*updates, *step),
        host_bytes=host,
    )


class _Load:
    """Sums over the dense parameters of a rank, or over its experts."""

    def __init__(self) -> None:
        self.values = self.own = 0  # with a float32 sum on this rank; that it updates
        self.copied = 0  # of `own`, that Muon updates in masters, which are rounded afterwards
        self.width = self.own_sent = 0  # of a row of buckets; of `own`, that pass through buckets: none of FSDP2
        self.quantized: list[RecordedOp] = []  # operators that make copies in 8 bits
        self.moved = Counter[tuple[str, bool]]()  # bytes of our update, by format and whether they are written
        self.itemsize = SUM_BYTES  # of a weight

    def add(self, fact: ParamFacts, times: int, shards: ShardCounts) -> None:
        """Add a parameter that the rank has `times` times."""
        ranks, state = shards.of(fact), _state_of(fact, shards)
        local_values = fact.own(ranks)
        self.own += times * local_values
        master = state["master"].dtype if "master" in state else None
        if fact.matrices is not None:
            self.copied += times * local_values if master == torch.float32 else 0
        else:
            self._add_adamw(fact, local_values, times, state)
        if fact.is_sharded:
            self.values += times * local_values
            return
        self.values += times * fact.values
        self.quantized += [op.times(times) for op in fact.quantize_ops]
        self.width += times * -(-fact.rows // ranks) * fact.width
        self.own_sent += times * local_values
        if fact.itemsize < SUM_BYTES:
            self.itemsize = fact.itemsize

    def _add_adamw(self, fact: ParamFacts, local_values: int, times: int, state: Mapping[str, StateShape]) -> None:
        changed = SUM_BYTES * local_values + sum(entry.nbytes for entry in state.values())
        weights = (SUM_BYTES if fact.is_sharded else fact.itemsize) * local_values
        is_apart = "master" in state and state["master"].dtype == torch.float32
        name = f"{state['moment1'].dtype} {is_apart} {len(state)}"
        self.moved[name, False] += times * (changed if is_apart else changed + weights)
        self.moved[name, True] += times * (changed + weights)

    def sums(self, partners: Partners, shards: ShardCounts) -> RecordedOps:
        """Sums of gradients over ranks."""
        ranks = partners.shard.ranks if shards.shards_optimizer else 1
        group = partners.shard if shards.shards_optimizer else None
        if not self.width or partners.shard.ranks * partners.replicate.ranks == 1:
            return ()
        operators = [_moving("copy_", self.width * ranks, (SUM_BYTES, shards.reduce_bytes))]
        for columns, times in _buckets(self.width, ranks):
            sizes = columns * shards.reduce_bytes, columns * ranks * shards.reduce_bytes
            if group is not None and ranks > 1:
                operators += [_message("_reduce_scatter_base_", (columns, columns * ranks), sizes, group)] * times
            others = partners.replicate if group is not None else partners.shard
            # Hybrid sharding sums over the other copies; without sharding all holders sum the whole bucket.
            if others.ranks > 1:
                operators += [_message("allreduce_", (columns,), sizes[:1], others)] * times
        operators.append(_moving("copy_", self.own_sent, (SUM_BYTES, shards.reduce_bytes)))
        return tuple(operators)

    def new_weights(self, partners: Partners) -> RecordedOps:
        """New weights for the other ranks."""
        ranks = partners.shard.ranks
        if not self.width or ranks == 1 or self.own_sent == self.values:
            return ()
        operators = [_moving("copy_", self.own_sent, (self.itemsize,) * 2)]
        for columns, times in _buckets(self.width, ranks):
            sizes = columns * ranks * self.itemsize, columns * self.itemsize
            operators += [_message("_allgather_base_", (columns * ranks, columns), sizes, partners.shard)] * times
        operators.append(_moving("copy_", self.width * ranks, (self.itemsize,) * 2))
        return tuple(operators)


def _buckets(width: int, ranks: int) -> list[tuple[int, int]]:
    """Columns of buckets, and how many buckets have so many."""
    size = max(BUCKET_VALUES // ranks, ROW_VALUES)
    return [(columns, times) for columns, times in ((size, width // size), (width % size, 1)) if columns and times]


def _moving(name: str, values: int, itemsizes: tuple[int, ...]) -> RecordedOp:
    return RecordedOp(
        name,
        shapes=((values,),) * len(itemsizes),
        sizes=tuple(values * size for size in itemsizes),
        itemsize=itemsizes[0],
    )


def _message(name: str, values: tuple[int, ...], sizes: tuple[int, ...], group: RankGroup) -> RecordedOp:
    return RecordedOp(
        name, shapes=tuple((value,) for value in values), sizes=sizes, itemsize=sizes[0] // values[0], group=group
    )
