"""Advice about a layout that stays: signs that another choice may be faster, with the change that tries it.

The projection has times for most of it, and times decide. `fix` is a change of the run's config, if one change is right
in every case.
"""

from math import ceil

from penstock.plan.rules.order import bubble_of
from penstock.plan.rules.rule import Rule, Sizes, rule

LONG_ROW = 16_384
"""Positions of a row from which context parallelism is advised."""

SMALL_ACTIVE = 20_000_000_000
"""Active parameters below which tensor parallelism is not worth its sums."""

MANY_COPIES = 128
"""Ranks over which sums of bfloat16 gradients in a ring lose too much."""

FEW_PEERS = 4
"""Ranks inside a node between which dispatch is too short to overlap."""

WAITING = 0.2
"""Bubble of a pipeline above which there is advice."""

UNEVEN = 1.1
"""Layers of the fullest stage over the mean above which there is advice."""


@rule(
    "advice",
    "L12 (Megatron-Core, MoE guide; AMD's MoE guide)",
    "pipeline.schedule=interleaved",
    "pipeline.stages_per_rank=2",
)
def stages_when_pipeline(sizes: Sizes) -> str | None:
    """A pipeline has several stages on each rank where layers allow: v stages make ramps v times as short.

    AMD measured 54.4 % with one stage on 16 ranks and 24.4 % with three; the formula says 48.4 % and 23.8 %.
    """
    waits = bubble_of(sizes)
    if sizes.pp == 1 or sizes.vpp > 1 or sizes.schedule == "zb-1f1b" or waits <= WAITING / 4:
        return None
    if sizes.model.layers < 2 * sizes.pp:
        return None
    ramp = sizes.pp - 1
    halved = ramp / (ramp + 2 * sizes.micro_batches)
    return f"{sizes.micro_batches} micro-batches on PP {sizes.pp}: one stage a rank waits {waits:.0%}, two {halved:.0%}"


@rule("advice", "L12; docs/layouts.md")
def micro_batches_fill_the_pipeline(sizes: Sizes) -> str | None:
    """Ranks of a pipeline wait at most a fifth of their time, as PP 2 with four micro-batches on H200s."""
    waits = bubble_of(sizes)
    if waits <= WAITING:
        return None
    return (
        f"{sizes.micro_batches} micro-batches on PP {sizes.pp} x {sizes.vpp} {sizes.schedule}: ranks wait {waits:.0%}"
    )


@rule("advice", "L13, L14 (Megatron-Core, pipeline layout)")
def stages_are_even(sizes: Sizes) -> str | None:
    """The fullest stage has at most a tenth more layers than the mean: all others wait for it."""
    fullest, mean = ceil(sizes.model.layers / sizes.stages), sizes.model.layers / sizes.stages
    if sizes.pp == 1 or fullest <= UNEVEN * mean:
        return None
    return f"{sizes.model.layers} layers in {sizes.stages} stages: the fullest has {fullest}, the mean is {mean:.3g}"


@rule("advice", "L7 (Megatron Bridge, long context)", "parallel.context=2")
def context_for_long_rows(sizes: Sizes) -> str | None:
    """Rows of 16,384 positions and more are shared by context-parallel ranks: CP 2 to 32,768, then 4 to 8."""
    if sizes.cp > 1 or sizes.sequence_length < LONG_ROW:
        return None
    return f"one context rank holds rows of {sizes.sequence_length} positions"


@rule("advice", "M4, M10 (Megatron Bridge, long context)", 'recompute.modules=["norm","expert-activation"]')
def long_rows_attend_once(sizes: Sizes) -> str | None:
    """Attention of rows of 16,384 positions and more is not recomputed.

    Its time grows with the square of the row, and the memory that it saves does not.
    """
    again = [name for name in ("attention", "layer") if name in sizes.recompute]
    if not again or sizes.sequence_length < LONG_ROW:
        return None
    return f"{again[0]} computes scores of {sizes.sequence_length} x {sizes.sequence_length} positions again"


@rule("advice", "L8 (Megatron Bridge, memory tuning)", "parallel.tensor=1")
def matrices_worth_cutting(sizes: Sizes) -> str | None:
    """Below 20B active parameters dense matrices stay whole (TP 1)."""
    active = sizes.model.active_parameters
    if sizes.tp == 1 or active >= SMALL_ACTIVE:
        return None
    return f"TP {sizes.tp} for {active / 1e9:.3g}B active parameters"


@rule("advice", "L18 (Megatron Bridge, recommender, H100)", "parallel.shard=optimizer")
def full_shards_with_tensor(sizes: Sizes) -> str | None:
    """FSDP2 beside TP above 2 has two kinds of traffic in each layer."""
    if sizes.shard != "full" or sizes.tp <= 2:
        return None
    return f"full shards gather beside the sums of TP {sizes.tp}"


@rule("advice", "docs/decisions/0013-sharing-the-optimizer.md; layouts-h200x4.json", "parallel.shard=optimizer")
def gathers_once_a_step(sizes: Sizes) -> str | None:
    """With several micro-batches a step, the optimizer is divided and weights stay whole.

    With one, both are equally fast (V2-Lite, EP 4, four H200s), and full shards need 5 GiB less.
    """
    if sizes.shard != "full" or sizes.pp > 1 or sizes.micro_batches < 2:
        return None
    return f"weights are gathered for each of {sizes.micro_batches} micro-batches, and once a step with shard optimizer"


@rule("advice", "L10, O3 (Megatron Bridge, communication overlap)")
def experts_over_nodes_want_overlap(sizes: Sizes) -> str | None:
    """Experts on several nodes want work while tokens travel; Megatron gained 17 to 32 % at EP 16."""
    if sizes.overlap != "none" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, and nothing is computed meanwhile"


@rule(
    "advice",
    "O3, O4 (Megatron Bridge, communication overlap); docs/decisions/0018-graphs-and-overlap.md",
    "dispatch.overlap=none",
)
def overlap_if_exposed(sizes: Sizes) -> str | None:
    """Among 4 ranks of a node or fewer, dispatch is too short to pay for cutting work in pieces."""
    near = 1 < sizes.expert_ranks <= FEW_PEERS and sizes.is_inside_node(sizes.expert_ranks)
    if sizes.overlap not in ("halves", "passes") or not near:
        return None
    return f"overlap {sizes.overlap} for tokens that stay among {sizes.expert_ranks} ranks of a node"


@rule("advice", "docs/dispatch.md (computed)", "dispatch.sync_free=2")
def room_for_the_worst_case(sizes: Sizes) -> str | None:
    """Sync-free stage 3 needs buffers for every token on one rank.

    Stage 2 has buffers for twice the even share and repeats a step that needs more.
    """
    model, ranks = sizes.model, sizes.expert_ranks
    if sizes.sync_free < 3 or ranks == 1 or not model.experts:
        return None
    times = ranks * min(model.top_k, max(1, model.experts // sizes.ep)) / (model.top_k * sizes.etp)
    return f"stage 3 has room for {times:.3g} times the even share of rows"


@rule("advice", "R10 (Megatron Bridge, performance guide)", "parallel.reduce=fp32")
def sums_over_many_in_fp32(sizes: Sizes) -> str | None:
    """Gradients of 128 ranks and more are summed in float32."""
    ranks = sizes.dp * sizes.cp
    if sizes.reduce != "bf16" or ranks < MANY_COPIES:
        return None
    return f"gradients of {ranks} ranks are summed in bfloat16"


@rule("advice", "R11 (Megatron-Core, MoE guide); docs/layouts.md", "model.moe.balance.force_load_balance=false")
def natural_routing(sizes: Sizes) -> str | None:
    """Forced balance is for benchmarks.

    Memory and speed of a real run depend on its own routing, where the fullest expert had ten times its share
    (V2-Lite, first steps).
    """
    return "tokens are spread evenly by force: nothing is learned about routing" if sizes.model.forces_balance else None


@rule("advice", "M13 (Megatron Bridge, CPU offloading)", "offload.optimizer=false")
def optimizer_on_the_device(sizes: Sizes) -> str | None:
    """The optimizer leaves the device only if nothing else makes the run fit.

    With a quarter of it on the host a step took 1.9 times as long over PCIe.
    """
    return "the optimizer's state passes through the host's link in each step" if sizes.offloads_optimizer else None


ADVICE = tuple(value for value in list(vars().values()) if isinstance(value, Rule))
"""In the order in which they are told."""
