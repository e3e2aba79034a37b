"""Layouts that a search does not project, because another one does the same with less, or is the same layout.

They are legal, and a run that asks for one is planned and trained as it says. Each rule names what takes its place.
"""

from penstock.plan.rules.rule import Rule
from penstock.plan.rules.sizes import Sizes

LEAST_SHARD = 2048
"""Positions of a row that context parallelism leaves a rank at least."""


def _tensor_inside_node(sizes: Sizes) -> str | None:
    if sizes.is_inside_node(sizes.tp):
        return None
    return f"TP {sizes.tp} crosses nodes of {sizes.node_devices} devices, several times in every layer"


def _expert_before_tensor(sizes: Sizes) -> str | None:
    experts, ranks = sizes.model.experts, sizes.expert_ranks
    if sizes.etp == 1 or experts == 0 or experts % ranks:
        return None
    return f"EP {ranks} divides {experts} experts, and ETP {sizes.etp} sends every row to {sizes.etp} ranks instead"


def _context_keeps_2k(sizes: Sizes) -> str | None:
    if sizes.cp == 1 or sizes.sequence_length >= LEAST_SHARD * sizes.cp:
        return None
    left = sizes.sequence_length // sizes.cp
    return f"CP {sizes.cp} leaves {left} of {sizes.sequence_length} positions to a rank, fewer than {LEAST_SHARD}"


def _gathers_if_fewer_copies(sizes: Sizes) -> str | None:
    ranks, copies = sizes.expert_ranks, sizes.etp * sizes.model.top_k
    if sizes.dispatcher != "all-gather" or ranks <= copies:
        return None
    sent = copies * (ranks - 1) / ranks
    return (
        f"all-gather sends {ranks - 1} copies of a token over {ranks} ranks, and rows to their experts are {sent:.3g}"
    )


def _nodes_first_if_several(sizes: Sizes) -> str | None:
    if sizes.dispatcher != "hierarchical" or not sizes.is_inside_node(sizes.expert_ranks):
        return None
    return (
        f"EP x ETP {sizes.expert_ranks} lies inside nodes of {sizes.node_devices}: hierarchical is what it has inside"
    )


def _mapped_memory_inside_node(sizes: Sizes) -> str | None:
    if sizes.dispatcher != "symmetric" or sizes.is_inside_node(sizes.expert_ranks):
        return None
    return f"EP x ETP {sizes.expert_ranks} crosses nodes of {sizes.node_devices}, whose memory is not mapped"


def _dispatcher_where_tokens_travel(sizes: Sizes) -> str | None:
    travels = sizes.expert_ranks > 1
    if sizes.model.pads or travels == (sizes.dispatcher != "local"):
        return None
    if travels:
        return f"local keeps tokens where they are, and {sizes.expert_ranks} ranks share the experts"
    return f"a rank has all experts: {sizes.dispatcher} is local"


def _stage_one_is_stage_zero(sizes: Sizes) -> str | None:
    if sizes.sync_free != 1:
        return None
    return "with our kernels stage 0 has no wait that stage 1 lacks: same time, same memory"


def _stages_need_experts(sizes: Sizes) -> str | None:
    if sizes.sync_free == 0 or sizes.model.experts:
        return None
    return f"sync-free stage {sizes.sync_free} is about experts, and the model has none"


def _overlap_where_tokens_travel(sizes: Sizes) -> str | None:
    if sizes.overlap == "none" or sizes.expert_ranks > 1:
        return None
    return f"overlap {sizes.overlap} hides the way of the tokens, and a rank has all experts"


def _backward_soon(sizes: Sizes) -> str | None:
    other, held = ("1f1b", sizes.pp) if sizes.vpp == 1 else ("interleaved", 2 * sizes.pp)
    if sizes.schedule != "gpipe" or sizes.micro_batches <= held:
        return None
    return f"gpipe holds all {sizes.micro_batches} micro-batches; {other} has its bubble and holds at most {held}"


PRUNE: tuple[Rule, ...] = (
    Rule(
        name="tensor-inside-node",
        kind="prune",
        doc="TP stays inside a node: its sums stand in the way of every layer, and nothing hides them.",
        source="L8 (Megatron Bridge, memory tuning)",
        check=_tensor_inside_node,
        fix=("parallel.tensor=1",),
    ),
    Rule(
        name="expert-before-tensor",
        kind="prune",
        doc="Experts are shared whole before they are cut: ETP only where EP of the same ranks does not divide them. "
        "With ETP P a row goes to P ranks, which all-to-all sends P times.",
        source="L9 (Megatron-Core, MoE guide: EP 8 x TP 1 before EP 4 x TP 2 on Mixtral); docs/dispatch.md (copies)",
        check=_expert_before_tensor,
        fix=("parallel.expert_tensor=1",),
    ),
    Rule(
        name="context-keeps-2k",
        kind="prune",
        doc="CP leaves a rank at least 2,048 positions. Megatron keeps 4,096 to 8,192; half of that is AMD's CP 2 of "
        "rows of 4,096, which halves activations where nothing else does.",
        source="L7 (Megatron Bridge, parallelisms); AMD's plans for 768 GPUs",
        check=_context_keeps_2k,
        fix=("parallel.context=1",),
    ),
    Rule(
        name="gathers-if-fewer-copies",
        kind="prune",
        doc="All-gather sends a token to each of W ranks, all-to-all P K (W - 1) / W times for K choices and ETP P: "
        "gathering is for W up to P K.",
        source="D6 (Megatron-Core, MoE guide); docs/dispatch.md (computed)",
        check=_gathers_if_fewer_copies,
        fix=("dispatch.method=auto",),
    ),
    Rule(
        name="nodes-first-if-several",
        kind="prune",
        doc="Hierarchical dispatch goes to nodes first; inside one node it is the dispatcher that it has inside.",
        source="our dispatchers",
        check=_nodes_first_if_several,
        fix=("dispatch.method=auto",),
    ),
    Rule(
        name="mapped-memory-inside-node",
        kind="prune",
        doc="Symmetric dispatch writes into the memory of GPUs of its node; over several nodes it is what hierarchical "
        "has inside.",
        source="our dispatchers",
        check=_mapped_memory_inside_node,
        fix=("dispatch.method=hierarchical",),
    ),
    Rule(
        name="dispatcher-where-tokens-travel",
        kind="prune",
        doc="Tokens travel if several ranks share the experts, and only then: one layout has one name.",
        source="our dispatchers",
        check=_dispatcher_where_tokens_travel,
        fix=("dispatch.method=auto",),
    ),
    Rule(
        name="stage-one-is-stage-zero",
        kind="prune",
        doc="Sync-free stage 1 forbids waits in router and permutation, where our kernels have none: it is stage 0.",
        source="docs/dispatch.md; host-waits-h200x2.json (the host waits 7 times a step at either stage)",
        check=_stage_one_is_stage_zero,
        fix=("dispatch.sync_free=0",),
    ),
    Rule(
        name="stages-need-experts",
        kind="prune",
        doc="Sync-free stages are about the way to the experts; a dense model has none.",
        source="our dispatchers",
        check=_stages_need_experts,
        fix=("dispatch.sync_free=0",),
    ),
    Rule(
        name="overlap-where-tokens-travel",
        kind="prune",
        doc="Overlap fills the time in which tokens travel; where a rank has all experts there is no such time.",
        source="O1 (Megatron-Core, MoE guide)",
        check=_overlap_where_tokens_travel,
        fix=("dispatch.overlap=none",),
    ),
    Rule(
        name="backward-soon",
        kind="prune",
        doc="With more micro-batches than ranks, GPipe has the bubble of 1F1B (17.95 % on 8 ranks with 32 of them) "
        "and holds them all, 32 instead of 8.",
        source="docs/schedules.md (by the clock)",
        check=_backward_soon,
    ),
)
"""In the order in which they are asked."""
