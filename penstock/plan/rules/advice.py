"""Rules of thumb of the field: what guides say against a layout, with the change that tries the opposite.

The projection has times for all of it, and times decide: a search tells this about its best layout, beside the speed of
the best that it found without it. `fix` is a change of the run's config, if one change is right in every case.
"""

from math import ceil

from penstock.plan.rules.rule import Rule, Sizes, advises

SMALL_MODEL = 20_000_000_000  # parameters below which experts are all that is shared
SHARD = 4096  # positions of a row that context parallelism leaves a rank without objection
LONG_ROW = 16_384  # positions of a row from which context parallelism is advised
MANY_COPIES = 128  # ranks over which sums of bfloat16 gradients in a ring lose too much
FEW_PEERS = 4  # ranks inside a node between which dispatch is too short to overlap
WAITING = 0.2  # bubble of a pipeline above which there is advice
UNEVEN = 1.1  # layers of the fullest stage over the mean above which there is advice


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


@advises("3.0, M5, M9 (Megatron Bridge, activation recompute)", 'recompute.modules=["expert-activation"]')
def selective_before_full(sizes: Sizes) -> str | None:
    """Parts of a layer are recomputed before all of its experts, and those before the whole layer.

    The whole layer costs about 30 % of the computing. Recomputed experts send their tokens twice.
    """
    if "layer" in sizes.recompute:
        return "every forward pass is computed twice"
    return "experts are computed twice, and their tokens are sent twice" if "moe" in sizes.recompute else None


@advises("L8, L11 (Megatron Bridge, memory tuning); AMD's plans for 768 GPUs", "parallel.tensor=1")
def tensor_only_to_fit(sizes: Sizes) -> str | None:
    """TP is the last kind of model parallelism: 1 while anything fits so.

    Doubling it to save memory cost 28 % of the speed of a dense model of 70B; AMD plans 93B active parameters
    without it.
    """
    active = sizes.model.active_parameters / 1e9
    return None if sizes.tp == 1 else f"TP {sizes.tp} cuts matrices of a model of {active:.3g}B active parameters"


@advises("L8 (Megatron Bridge, memory tuning)", "parallel.tensor=1")
def tensor_inside_node(sizes: Sizes) -> str | None:
    """TP stays inside a node: its sums stand in the way of every layer, and nothing hides them."""
    if sizes.is_inside_node(sizes.tp):
        return None
    return f"TP {sizes.tp} crosses nodes of {sizes.node_devices} devices, several times in every layer"


@advises(
    "L9 (Megatron-Core, MoE guide: EP 8 x TP 1 before EP 4 x TP 2 on Mixtral); docs/dispatch.md (copies)",
    "parallel.expert_tensor=1",
)
def expert_before_tensor(sizes: Sizes) -> str | None:
    """Experts are shared whole before they are cut: ETP only where EP of the same ranks does not divide them.

    With ETP P a row goes to P ranks, which all-to-all sends P times.
    """
    experts, ranks = sizes.model.experts, sizes.expert_ranks
    if sizes.etp == 1 or experts == 0 or experts % ranks:
        return None
    return f"EP {ranks} divides {experts} experts, and ETP {sizes.etp} sends every row to {sizes.etp} ranks instead"


@advises("D6 (Megatron-Core, MoE guide); docs/dispatch.md (computed)", "dispatch.method=auto")
def gathers_if_fewer_copies(sizes: Sizes) -> str | None:
    """All-gather is for as many ranks as a token has copies.

    It sends a token to each of W ranks, all-to-all P K (W - 1) / W times for K choices and ETP P: gathering is for W
    up to P K.
    """
    ranks, copies = sizes.expert_ranks, sizes.etp * sizes.model.top_k
    if sizes.dispatcher != "all-gather" or ranks <= copies:
        return None
    sent = copies * (ranks - 1) / ranks
    return (
        f"all-gather sends {ranks - 1} copies of a token over {ranks} ranks, and rows to their experts are {sent:.3g}"
    )


@advises("L10 (Megatron-Core, MoE guide); docs/hardware.md (links over network)")
def expert_product_inside_node(sizes: Sizes) -> str | None:
    """EP x ETP stays inside the fast link, where tokens have 4 to 18 times the bandwidth."""
    if sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP {sizes.ep} x ETP {sizes.etp} = {sizes.expert_ranks} crosses nodes of {sizes.node_devices} devices"


@advises("3.0 (Megatron-Core, MoE guide)")
def context_inside_node(sizes: Sizes) -> str | None:
    """CP x TP stays inside the fast link: ranks that share a row exchange it in every layer."""
    if sizes.cp == 1 or sizes.is_inside_node(sizes.tp * sizes.cp):
        return None
    return f"CP {sizes.cp} x TP {sizes.tp} = {sizes.cp * sizes.tp} crosses nodes of {sizes.node_devices} devices"


@advises("L7 (Megatron Bridge, parallelisms and long context)", "parallel.context=1")
def context_from_8k(sizes: Sizes) -> str | None:
    """CP begins with rows of 8,192 and leaves a rank 4,096 positions.

    Megatron keeps 4,096 to 8,192; half of that is AMD's CP 2 of rows of 4,096, which halves activations where nothing
    else does.
    """
    if sizes.cp == 1 or sizes.sequence_length >= SHARD * sizes.cp:
        return None
    left = sizes.sequence_length // sizes.cp
    return f"CP {sizes.cp} cuts rows of {sizes.sequence_length} positions into {left}, fewer than {SHARD}"


@advises("docs/decisions/0013-sharing-the-optimizer.md", "parallel.shard=optimizer")
def whole_weights_in_pipeline(sizes: Sizes) -> str | None:
    """In a pipeline, ranks divide the optimizer and keep their weights whole.

    FSDP2 gathers weights and sums gradients in each micro-batch.
    """
    if sizes.shard != "full" or sizes.pp == 1:
        return None
    return f"full shards gather weights for each of {sizes.micro_batches} micro-batches of a pipeline"


@advises("L11 (Megatron Bridge, parallelisms); layouts-h200x4.json", "parallel.pipeline=1")
def small_model_without_pipeline(sizes: Sizes) -> str | None:
    """Below 20B parameters experts are all that is shared.

    DeepSeek-V2-Lite on four H200s: PP 2 x EP 2 trains 11 % fewer tokens/s than EP 4, and TP 2 folded with EP 4
    trains 8 % fewer.
    """
    total = sizes.model.total_parameters
    return (
        None if sizes.pp == 1 or total >= SMALL_MODEL else f"PP {sizes.pp} for a model of {total / 1e9:.3g}B parameters"
    )


@advises("docs/schedules.md (by the clock)")
def backward_soon(sizes: Sizes) -> str | None:
    """With more micro-batches than ranks, 1F1B replaces GPipe.

    GPipe has the same bubble (17.95 % on 8 ranks with 32 micro-batches) and holds all 32 micro-batches instead of 8.
    """
    other, held = ("1f1b", sizes.pp) if sizes.vpp == 1 else ("interleaved", 2 * sizes.pp)
    if sizes.schedule != "gpipe" or sizes.micro_batches <= held:
        return None
    return f"gpipe holds all {sizes.micro_batches} micro-batches; {other} has its bubble and holds at most {held}"


@advises(
    "L12 (Megatron-Core, MoE guide; AMD's MoE guide)", "pipeline.schedule=interleaved", "pipeline.stages_per_rank=2"
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


@advises("L12; docs/layouts.md")
def micro_batches_fill_the_pipeline(sizes: Sizes) -> str | None:
    """Ranks of a pipeline wait at most a fifth of their time, as PP 2 with four micro-batches on H200s."""
    waits = bubble_of(sizes)
    if waits <= WAITING:
        return None
    return (
        f"{sizes.micro_batches} micro-batches on PP {sizes.pp} x {sizes.vpp} {sizes.schedule}: ranks wait {waits:.0%}"
    )


@advises("L13, L14 (Megatron-Core, pipeline layout)")
def stages_are_even(sizes: Sizes) -> str | None:
    """The fullest stage has at most a tenth more layers than the mean: all others wait for it."""
    fullest, mean = ceil(sizes.model.layers / sizes.stages), sizes.model.layers / sizes.stages
    if sizes.pp == 1 or fullest <= UNEVEN * mean:
        return None
    return f"{sizes.model.layers} layers in {sizes.stages} stages: the fullest has {fullest}, the mean is {mean:.3g}"


@advises("L7 (Megatron Bridge, long context)", "parallel.context=2")
def context_for_long_rows(sizes: Sizes) -> str | None:
    """Rows of 16,384 positions and more are shared by context-parallel ranks: CP 2 to 32,768, then 4 to 8."""
    if sizes.cp > 1 or sizes.sequence_length < LONG_ROW:
        return None
    return f"one context rank holds rows of {sizes.sequence_length} positions"


@advises("M4, M10 (Megatron Bridge, long context)", 'recompute.modules=["norm","expert-activation"]')
def long_rows_attend_once(sizes: Sizes) -> str | None:
    """Attention of rows of 16,384 positions and more is not recomputed.

    Its time grows with the square of the row, and the memory that it saves does not.
    """
    again = [name for name in ("attention", "layer") if name in sizes.recompute]
    if not again or sizes.sequence_length < LONG_ROW:
        return None
    return f"{again[0]} computes scores of {sizes.sequence_length} x {sizes.sequence_length} positions again"


@advises("L18 (Megatron Bridge, recommender, H100)", "parallel.shard=optimizer")
def full_shards_with_tensor(sizes: Sizes) -> str | None:
    """FSDP2 beside TP above 2 has two kinds of traffic in each layer."""
    if sizes.shard != "full" or sizes.tp <= 2:
        return None
    return f"full shards gather beside the sums of TP {sizes.tp}"


@advises("docs/decisions/0013-sharing-the-optimizer.md; layouts-h200x4.json", "parallel.shard=optimizer")
def gathers_once_a_step(sizes: Sizes) -> str | None:
    """With several micro-batches a step, the optimizer is divided and weights stay whole.

    With one, both are equally fast (V2-Lite, EP 4, four H200s), and full shards need 5 GiB less.
    """
    if sizes.shard != "full" or sizes.pp > 1 or sizes.micro_batches < 2:
        return None
    return f"weights are gathered for each of {sizes.micro_batches} micro-batches, and once a step with shard optimizer"


@advises("L10, O3 (Megatron Bridge, communication overlap)")
def experts_over_nodes_want_overlap(sizes: Sizes) -> str | None:
    """Experts on several nodes want work while tokens travel; Megatron gained 17 to 32 % at EP 16."""
    if sizes.overlap != "none" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, and nothing is computed meanwhile"


@advises(
    "O3, O4 (Megatron Bridge, communication overlap); docs/decisions/0018-graphs-and-overlap.md",
    "dispatch.overlap=none",
)
def overlap_if_exposed(sizes: Sizes) -> str | None:
    """Among 4 ranks of a node or fewer, dispatch is too short to pay for cutting work in pieces."""
    near = 1 < sizes.expert_ranks <= FEW_PEERS and sizes.is_inside_node(sizes.expert_ranks)
    if sizes.overlap != "passes" or not near:
        return None
    return f"overlap passes for tokens that stay among {sizes.expert_ranks} ranks of a node"


@advises("docs/dispatch.md (computed)", "dispatch.sync_free=2")
def room_for_the_worst_case(sizes: Sizes) -> str | None:
    """Sync-free stage 3 needs buffers for every token on one rank.

    Stage 2 has buffers for twice the even share and repeats a step that needs more.
    """
    model, ranks = sizes.model, sizes.expert_ranks
    if sizes.sync_free < 3 or ranks == 1 or not model.experts:
        return None
    times = ranks * min(model.top_k, max(1, model.experts // sizes.ep)) / (model.top_k * sizes.etp)
    return f"stage 3 has room for {times:.3g} times the even share of rows"


@advises("R10 (Megatron Bridge, performance guide)", "parallel.reduce=fp32")
def sums_over_many_in_fp32(sizes: Sizes) -> str | None:
    """Gradients of 128 ranks and more are summed in float32."""
    ranks = sizes.dp * sizes.cp
    if sizes.reduce != "bf16" or ranks < MANY_COPIES:
        return None
    return f"gradients of {ranks} ranks are summed in bfloat16"


@advises("R11 (Megatron-Core, MoE guide); docs/layouts.md", "model.moe.balance.force_load_balance=false")
def natural_routing(sizes: Sizes) -> str | None:
    """Forced balance is for benchmarks.

    Memory and speed of a real run depend on its own routing, where the fullest expert had ten times its share
    (V2-Lite, first steps).
    """
    return "tokens are spread evenly by force: nothing is learned about routing" if sizes.model.forces_balance else None


@advises("M13 (Megatron Bridge, CPU offloading)", "offload.optimizer=false")
def optimizer_on_the_device(sizes: Sizes) -> str | None:
    """The optimizer leaves the device only if nothing else makes the run fit.

    With a quarter of it on the host a step took 1.9 times as long over PCIe.
    """
    return "the optimizer's state passes through the host's link in each step" if sizes.offloads_optimizer else None


ADVICE = tuple(value for value in list(vars().values()) if isinstance(value, Rule))
"""In the order in which they are told."""
