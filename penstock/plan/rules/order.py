"""Layouts that are tried last. Each rule gives a layout a rank; a higher rank counts only if no lower one fits.

The rules go from the costliest way out of a full memory to the cheapest, and ranks are compared from the left: a layout
that recomputes everything comes behind every layout that does not. So the order is that of the
workflow: fit with the least model parallelism, recompute parts before whole layers, keep the largest traffic inside the
fast link, cut rows only if they are long. Rank 0 means that a rule does not apply.
"""

from penstock.plan.rules.rule import Rule, Sizes, rule

SMALL_MODEL = 20_000_000_000
"""Parameters below which experts are all that is shared."""

SHARD = 4096
"""Positions of a row that context parallelism leaves a rank without objection."""

HALF = 0.5


def bubble_of(sizes: Sizes) -> float:
    """Share of a pipeline's time that ranks wait, if F = I = W and links take no time; 0 where no formula is known.

    With m micro-batches on p ranks of v stages: (p - 1) / (p - 1 + m v) for 1F1B, interleaved and GPipe, 3 m for
    zb-1f1b and 6 m for zb-v and dualpipe-v in the place of m v (docs/schedules.md). v-half and v-min have none.
    """
    ramp = sizes.pp - 1
    times = {"gpipe": sizes.vpp, "1f1b": 1, "interleaved": sizes.vpp, "zb-1f1b": 3, "zb-v": 6, "dualpipe-v": 6}
    if ramp == 0 or sizes.schedule not in times:
        return 0.0
    return ramp / (ramp + sizes.micro_batches * times[sizes.schedule])


def _doublings(times: int, unit: int) -> int:
    """How often `unit` must be doubled to hold `times`."""
    return (-(-times // unit) - 1).bit_length()


@rule(
    "order",
    "L12 (Megatron-Core); docs/schedules.md; AMD: 54.4 % at PP 16, VPP 1, 16 micro-batches and 14.5 % at VPP 6",
    rank=lambda sizes: int(bubble_of(sizes) > HALF),
)
def bubble_under_half(sizes: Sizes) -> str | None:
    """A pipeline whose ranks wait more than half of their time comes after everything else.

    The share is (p - 1) / (p - 1 + m v) for m micro-batches on p ranks of v stages.
    """
    share = bubble_of(sizes)
    return f"{sizes.micro_batches} micro-batches on PP {sizes.pp} x {sizes.vpp} {sizes.schedule} wait {share:.0%}"


def _full_rank(sizes: Sizes) -> int:
    return 2 if "layer" in sizes.recompute else int("moe" in sizes.recompute)


@rule(
    "order",
    "3.0, M5, M9 (Megatron Bridge, activation recompute)",
    'recompute.modules=["expert-activation"]',
    rank=_full_rank,
)
def selective_before_full(sizes: Sizes) -> str | None:
    """Parts of a layer are recomputed before all of its experts, and those before the whole layer.

    The whole layer costs about 30 % of the computing. Recomputed experts send their tokens twice.
    """
    return (
        "every forward pass is computed twice"
        if _full_rank(sizes) == 2
        else "experts, and the way to them, are passed twice"
    )


@rule(
    "order",
    "L8, L11 (Megatron Bridge, memory tuning); AMD's plans for 768 GPUs",
    "parallel.tensor=1",
    rank=lambda sizes: _doublings(sizes.tp, 1),
)
def tensor_only_to_fit(sizes: Sizes) -> str | None:
    """TP is the last kind of model parallelism: 1 while anything fits so.

    Doubling it to save memory cost 28 % of the speed of a dense model of 70B; AMD plans 93B active parameters
    without it.
    """
    active = sizes.model.active_parameters / 1e9
    return f"TP {sizes.tp} cuts matrices of a model of {active:.3g}B active parameters"


@rule(
    "order",
    "docs/decisions/0013-sharing-the-optimizer.md",
    "parallel.shard=optimizer",
    rank=lambda sizes: int(sizes.shard == "full" and sizes.pp > 1),
)
def whole_weights_in_pipeline(sizes: Sizes) -> str | None:
    """In a pipeline, ranks divide the optimizer and keep their weights whole.

    FSDP2 gathers weights and sums gradients in each micro-batch.
    """
    return f"full shards gather weights for each of {sizes.micro_batches} micro-batches of a pipeline"


@rule(
    "order",
    "L11 (Megatron Bridge, parallelisms); layouts-h200x4.json",
    "parallel.pipeline=1",
    rank=lambda sizes: _doublings(sizes.pp, 1) if sizes.model.total_parameters < SMALL_MODEL else 0,
)
def small_model_without_pipeline(sizes: Sizes) -> str | None:
    """Below 20B parameters experts are all that is shared.

    DeepSeek-V2-Lite on four H200s: PP 2 x EP 2 trains 11 % fewer tokens/s than EP 4, and TP 2 folded with EP 4
    trains 8 % fewer.
    """
    return f"PP {sizes.pp} for a model of {sizes.model.total_parameters / 1e9:.3g}B parameters"


def _crossing_rank(sizes: Sizes, ranks: int) -> int:
    """Doublings of a node that hold neighbouring ranks; 0 if they lie inside nodes."""
    return 0 if sizes.is_inside_node(ranks) else max(1, _doublings(ranks, sizes.node_devices))


@rule(
    "order",
    "L10 (Megatron-Core, MoE guide); docs/hardware.md (links over network)",
    rank=lambda sizes: _crossing_rank(sizes, sizes.expert_ranks),
)
def expert_product_inside_node(sizes: Sizes) -> str | None:
    """EP x ETP stays inside the fast link, where tokens have 4 to 18 times the bandwidth.

    It crosses nodes if nothing fits otherwise, by as few doublings as possible.
    """
    return f"EP {sizes.ep} x ETP {sizes.etp} = {sizes.expert_ranks} crosses nodes of {sizes.node_devices} devices"


@rule(
    "order",
    "3.0 (Megatron-Core, MoE guide)",
    rank=lambda sizes: 0 if sizes.cp == 1 else _crossing_rank(sizes, sizes.tp * sizes.cp),
)
def context_inside_node(sizes: Sizes) -> str | None:
    """CP x TP stays inside the fast link: ranks that share a row exchange it in every layer."""
    return f"CP {sizes.cp} x TP {sizes.tp} = {sizes.cp * sizes.tp} crosses nodes of {sizes.node_devices} devices"


@rule(
    "order",
    "L7 (Megatron Bridge, parallelisms and long context)",
    "parallel.context=1",
    rank=lambda sizes: 0 if sizes.cp == 1 else _doublings(sizes.cp * SHARD, sizes.sequence_length),
)
def context_from_8k(sizes: Sizes) -> str | None:
    """CP begins with rows of 8,192 and leaves a rank 4,096 positions; shorter rows are cut if nothing else fits."""
    left = sizes.sequence_length // sizes.cp
    return f"CP {sizes.cp} cuts rows of {sizes.sequence_length} positions into {left}, fewer than {SHARD}"


ORDER = tuple(value for value in list(vars().values()) if isinstance(value, Rule))
"""From the costliest to the cheapest."""
