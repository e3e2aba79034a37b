"""Layouts that a search does not project, because another layout does the same with less or is the same.

They are legal: a run that asks for one is planned and trained. Each rule names the layout that takes its place.
"""

from penstock.plan.rules.rule import Rule, Sizes, rule

LEAST_SHARD = 2048
"""Positions of a row that context parallelism leaves a rank at least."""


@rule("prune", "L8 (Megatron Bridge, memory tuning)", "parallel.tensor=1")
def tensor_inside_node(sizes: Sizes) -> str | None:
    """TP stays inside a node: its sums stand in the way of every layer, and nothing hides them."""
    if sizes.is_inside_node(sizes.tp):
        return None
    return f"TP {sizes.tp} crosses nodes of {sizes.node_devices} devices, several times in every layer"


@rule(
    "prune",
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


@rule("prune", "L7 (Megatron Bridge, parallelisms); AMD's plans for 768 GPUs", "parallel.context=1")
def context_keeps_2k(sizes: Sizes) -> str | None:
    """CP leaves a rank at least 2,048 positions.

    Megatron keeps 4,096 to 8,192; half of that is AMD's CP 2 of rows of 4,096, which halves activations where
    nothing else does.
    """
    if sizes.cp == 1 or sizes.sequence_length >= LEAST_SHARD * sizes.cp:
        return None
    left = sizes.sequence_length // sizes.cp
    return f"CP {sizes.cp} leaves {left} of {sizes.sequence_length} positions to a rank, fewer than {LEAST_SHARD}"


@rule("prune", "D6 (Megatron-Core, MoE guide); docs/dispatch.md (computed)", "dispatch.method=auto")
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


@rule("prune", "our dispatchers", "dispatch.method=auto")
def nodes_first_if_several(sizes: Sizes) -> str | None:
    """Hierarchical dispatch goes to nodes first; inside one node it is the dispatcher that it has inside."""
    if sizes.dispatcher != "hierarchical" or not sizes.is_inside_node(sizes.expert_ranks):
        return None
    return (
        f"EP x ETP {sizes.expert_ranks} lies inside nodes of {sizes.node_devices}: hierarchical is what it has inside"
    )


@rule("prune", "our dispatchers", "dispatch.method=hierarchical")
def mapped_memory_inside_node(sizes: Sizes) -> str | None:
    """Symmetric dispatch writes into the memory of GPUs of its own node.

    Over several nodes hierarchical dispatch uses it inside each.
    """
    if sizes.dispatcher != "symmetric" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, whose memory is not mapped"


@rule("prune", "our dispatchers", "dispatch.method=auto")
def dispatcher_where_tokens_travel(sizes: Sizes) -> str | None:
    """Tokens travel if several ranks share the experts, and only then: one layout has one name."""
    travels = sizes.expert_ranks > 1
    if sizes.model.pads or travels == (sizes.dispatcher != "local"):
        return None
    if travels:
        return f"local keeps tokens where they are, and {sizes.expert_ranks} ranks share the experts"
    return f"a rank has all experts: {sizes.dispatcher} is local"


@rule(
    "prune",
    "docs/dispatch.md; host-waits-h200x2.json (the host waits 7 times a step at either stage)",
    "dispatch.sync_free=0",
)
def stage_one_is_stage_zero(sizes: Sizes) -> str | None:
    """Sync-free stage 1 forbids waits in router and permutation, where our kernels have none: it is stage 0."""
    if sizes.sync_free != 1:
        return None
    return "with our kernels stage 0 has no wait that stage 1 lacks: same time, same memory"


@rule("prune", "our dispatchers", "dispatch.sync_free=0")
def stages_need_experts(sizes: Sizes) -> str | None:
    """Sync-free stages are about the way to the experts; a dense model has none."""
    if sizes.sync_free == 0 or sizes.model.experts:
        return None
    return f"sync-free stage {sizes.sync_free} is about experts, and the model has none"


@rule("prune", "O1 (Megatron-Core, MoE guide)", "dispatch.overlap=none")
def overlap_where_tokens_travel(sizes: Sizes) -> str | None:
    """Overlap fills the time in which tokens travel; where a rank has all experts there is no such time."""
    if sizes.overlap == "none" or sizes.expert_ranks > 1:
        return None
    return f"overlap {sizes.overlap} hides the way of the tokens, and a rank has all experts"


@rule("prune", "docs/schedules.md (by the clock)")
def backward_soon(sizes: Sizes) -> str | None:
    """With more micro-batches than ranks, 1F1B replaces GPipe.

    GPipe has the same bubble (17.95 % on 8 ranks with 32 micro-batches) and holds all 32 micro-batches instead of 8.
    """
    other, held = ("1f1b", sizes.pp) if sizes.vpp == 1 else ("interleaved", 2 * sizes.pp)
    if sizes.schedule != "gpipe" or sizes.micro_batches <= held:
        return None
    return f"gpipe holds all {sizes.micro_batches} micro-batches; {other} has its bubble and holds at most {held}"


PRUNE = tuple(value for value in list(vars().values()) if isinstance(value, Rule))
"""In the order in which they are asked."""
