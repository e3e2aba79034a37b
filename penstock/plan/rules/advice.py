"""What is told of a layout that stays: signs that something else may be faster, with the change that would try it.

A projection has times for most of this, and times decide. Advice says what to look at, in a plan and in a run that
exists; `fix` is a change of the run's config, where one change is right in every case.
"""

from math import ceil

from penstock.plan.rules.order import bubble_of
from penstock.plan.rules.rule import Rule
from penstock.plan.rules.sizes import Sizes

LONG_ROW = 16_384
"""Positions from which a row that one rank holds alone is worth a word."""

SMALL_ACTIVE = 20_000_000_000
"""Active parameters below which matrices are not worth cutting."""

MANY_COPIES = 128
"""Ranks over which sums of bfloat16 gradients in a ring lose too much."""

FEW_PEERS = 4
"""Ranks inside a node to which tokens travel in too little time to hide something in."""

WAITING = 0.2
"""Share of a pipeline's time that ranks may wait without a word."""

UNEVEN = 1.1
"""Layers of the fullest stage over the mean that need no word."""


def _stages_when_pipeline(sizes: Sizes) -> str | None:
    waits = bubble_of(sizes)
    if sizes.pp == 1 or sizes.vpp > 1 or sizes.schedule == "zb-1f1b" or waits <= WAITING / 4:
        return None
    if sizes.model.layers < 2 * sizes.pp:
        return None
    ramp = sizes.pp - 1
    halved = ramp / (ramp + 2 * sizes.micro_batches)
    return f"{sizes.micro_batches} micro-batches on PP {sizes.pp}: one stage a rank waits {waits:.0%}, two {halved:.0%}"


def _micro_batches_fill_the_pipeline(sizes: Sizes) -> str | None:
    waits = bubble_of(sizes)
    if waits <= WAITING:
        return None
    return (
        f"{sizes.micro_batches} micro-batches on PP {sizes.pp} x {sizes.vpp} {sizes.schedule}: ranks wait {waits:.0%}"
    )


def _stages_are_even(sizes: Sizes) -> str | None:
    fullest, mean = ceil(sizes.model.layers / sizes.stages), sizes.model.layers / sizes.stages
    if sizes.pp == 1 or fullest <= UNEVEN * mean:
        return None
    return f"{sizes.model.layers} layers in {sizes.stages} stages: the fullest has {fullest}, the mean is {mean:.3g}"


def _context_for_long_rows(sizes: Sizes) -> str | None:
    if sizes.cp > 1 or sizes.sequence_length < LONG_ROW:
        return None
    return f"one context rank holds rows of {sizes.sequence_length} positions"


def _long_rows_attend_once(sizes: Sizes) -> str | None:
    again = [name for name in ("attention", "layer") if name in sizes.recompute]
    if not again or sizes.sequence_length < LONG_ROW:
        return None
    return f"{again[0]} computes scores of {sizes.sequence_length} x {sizes.sequence_length} positions again"


def _matrices_worth_cutting(sizes: Sizes) -> str | None:
    active = sizes.model.active_parameters
    if sizes.tp == 1 or active >= SMALL_ACTIVE:
        return None
    return f"TP {sizes.tp} for {active / 1e9:.3g}B active parameters"


def _full_shards_with_tensor(sizes: Sizes) -> str | None:
    if sizes.shard != "full" or sizes.tp <= 2:
        return None
    return f"full shards gather beside the sums of TP {sizes.tp}"


def _gathers_once_a_step(sizes: Sizes) -> str | None:
    if sizes.shard != "full" or sizes.pp > 1 or sizes.micro_batches < 2:
        return None
    return f"weights are gathered for each of {sizes.micro_batches} micro-batches, and once a step with shard optimizer"


def _experts_over_nodes_want_overlap(sizes: Sizes) -> str | None:
    if sizes.overlap != "none" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, and nothing is computed meanwhile"


def _overlap_if_exposed(sizes: Sizes) -> str | None:
    near = 1 < sizes.expert_ranks <= FEW_PEERS and sizes.is_inside_node(sizes.expert_ranks)
    if sizes.overlap not in ("halves", "passes") or not near:
        return None
    return f"overlap {sizes.overlap} for tokens that stay among {sizes.expert_ranks} ranks of a node"


def _room_for_the_worst_case(sizes: Sizes) -> str | None:
    model, ranks = sizes.model, sizes.expert_ranks
    if sizes.sync_free < 3 or ranks == 1 or not model.experts:
        return None
    times = ranks * min(model.top_k, max(1, model.experts // sizes.ep)) / (model.top_k * sizes.etp)
    return f"stage 3 has room for {times:.3g} times the even share of rows"


def _sums_over_many_in_fp32(sizes: Sizes) -> str | None:
    ranks = sizes.dp * sizes.cp
    if sizes.reduce != "bf16" or ranks < MANY_COPIES:
        return None
    return f"gradients of {ranks} ranks are summed in bfloat16"


def _natural_routing(sizes: Sizes) -> str | None:
    return "tokens are spread evenly by force: nothing is learned about routing" if sizes.model.forces_balance else None


def _optimizer_on_the_device(sizes: Sizes) -> str | None:
    return "the optimizer's state passes through the host's link in each step" if sizes.offloads_optimizer else None


ADVICE: tuple[Rule, ...] = (
    Rule(
        name="stages-when-pipeline",
        kind="advice",
        doc="A pipeline has several stages on each rank where layers allow: v stages make ramps v times as short. AMD "
        "measured 54.4 % with one stage on 16 ranks and 24.4 % with three; the formula says 48.4 % and 23.8 %.",
        source="L12 (Megatron-Core, MoE guide; AMD's MoE guide)",
        check=_stages_when_pipeline,
        fix=(
            "pipeline.schedule=interleaved",
            "pipeline.stages_per_rank=2",
        ),
    ),
    Rule(
        name="micro-batches-fill-the-pipeline",
        kind="advice",
        doc="Ranks of a pipeline wait a fifth of their time at most. PP 2 with four micro-batches does on H200s.",
        source="L12; docs/layouts.md",
        check=_micro_batches_fill_the_pipeline,
    ),
    Rule(
        name="stages-are-even",
        kind="advice",
        doc="The fullest stage has at most a tenth more layers than the mean: all others wait for it.",
        source="L13, L14 (Megatron-Core, pipeline layout)",
        check=_stages_are_even,
    ),
    Rule(
        name="context-for-long-rows",
        kind="advice",
        doc="Rows of 16,384 positions and more are shared by context-parallel ranks: CP 2 to 32,768, then 4 to 8.",
        source="L7 (Megatron Bridge, long context)",
        check=_context_for_long_rows,
        fix=("parallel.context=2",),
    ),
    Rule(
        name="long-rows-attend-once",
        kind="advice",
        doc="Attention of rows of 16,384 positions and more is not computed again: it grows with the square, what it "
        "would save does not.",
        source="M4, M10 (Megatron Bridge, long context)",
        check=_long_rows_attend_once,
        fix=('recompute.modules=["norm","expert-activation"]',),
    ),
    Rule(
        name="matrices-worth-cutting",
        kind="advice",
        doc="Below 20B active parameters dense matrices stay whole (TP 1).",
        source="L8 (Megatron Bridge, memory tuning)",
        check=_matrices_worth_cutting,
        fix=("parallel.tensor=1",),
    ),
    Rule(
        name="full-shards-with-tensor",
        kind="advice",
        doc="FSDP2 beside TP above 2 has two kinds of traffic in each layer.",
        source="L18 (Megatron Bridge, recommender, H100)",
        check=_full_shards_with_tensor,
        fix=("parallel.shard=optimizer",),
    ),
    Rule(
        name="gathers-once-a-step",
        kind="advice",
        doc="With several micro-batches a step, the optimizer is divided and weights stay whole. With one, both are "
        "equally fast (V2-Lite, EP 4, four H200s), and full shards need 5 GiB less.",
        source="docs/decisions/0013-sharing-the-optimizer.md; layouts-h200x4.json",
        check=_gathers_once_a_step,
        fix=("parallel.shard=optimizer",),
    ),
    Rule(
        name="experts-over-nodes-want-overlap",
        kind="advice",
        doc="Experts on several nodes want work while tokens travel; Megatron gained 17 to 32 % at EP 16.",
        source="L10, O3 (Megatron Bridge, communication overlap)",
        check=_experts_over_nodes_want_overlap,
    ),
    Rule(
        name="overlap-if-exposed",
        kind="advice",
        doc="Among 4 ranks of a node or fewer, tokens are under way too shortly to pay for cutting work in pieces.",
        source="O3, O4 (Megatron Bridge, communication overlap); docs/decisions/0018-graphs-and-overlap.md",
        check=_overlap_if_exposed,
        fix=("dispatch.overlap=none",),
    ),
    Rule(
        name="room-for-the-worst-case",
        kind="advice",
        doc="Sync-free stage 3 has room for every token on one rank; stage 2 has room for twice the even share and "
        "makes a step again that needs more.",
        source="docs/dispatch.md (computed)",
        check=_room_for_the_worst_case,
        fix=("dispatch.sync_free=2",),
    ),
    Rule(
        name="sums-over-many-in-fp32",
        kind="advice",
        doc="Gradients of 128 ranks and more are summed in float32.",
        source="R10 (Megatron Bridge, performance guide)",
        check=_sums_over_many_in_fp32,
        fix=("parallel.reduce=fp32",),
    ),
    Rule(
        name="natural-routing",
        kind="advice",
        doc="Forced balance is for benchmarks: memory and speed of a real run are those of its own routing, where the "
        "fullest expert had ten times its share (V2-Lite, first steps).",
        source="R11 (Megatron-Core, MoE guide); docs/layouts.md",
        check=_natural_routing,
        fix=("model.moe.balance.force_load_balance=false",),
    ),
    Rule(
        name="optimizer-on-the-device",
        kind="advice",
        doc="The optimizer leaves the device only if nothing else makes the run fit: with a quarter of it on the host "
        "a step took 1.9 times as long over PCIe.",
        source="M13 (Megatron Bridge, CPU offloading)",
        check=_optimizer_on_the_device,
        fix=("offload.optimizer=false",),
    ),
)
"""In the order in which they are told."""
