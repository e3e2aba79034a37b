"""Remedies: one function for each change that can help, with the time that it saves at most.

A rule reads the evidence and the bottlenecks and offers a remedy or None. Its gain is the lost time times the share
that the same change was measured, or computed, to save, so never more than the lost time; each rule says how it is
computed. Gains do not add up: two changes may save the same time.

A change is a list of overrides of the run, as `penstock train` takes them. If the configuration of the run is known, a
change that it would reject, or that has no effect, is not offered, and neither is one that the plan refuses
(`penstock.tune.doctor.planned`). If the times are the plan's, the plan's saving limits the gain. For another program's
trace the change is in words; `what` always has the words. Rules that the plan has too keep their names and sources
(`penstock.plan.rules`).
"""

import re
from math import comb

from penstock.base.numbers import bytes_text
from penstock.config.fit import grid_of, micro_batches
from penstock.plan.rules import FEW_PEERS, MANY_COPIES
from penstock.trace.events import GARBAGE
from penstock.trace.launches import ALLOCATIONS, COPIES
from penstock.tune.doctor.evidence import STANDS, Bottlenecks, Evidence
from penstock.tune.doctor.remedy import (
    LAUNCHES_OF_PARTS,
    LAUNCHES_OF_PASSES,
    NO_OFFER,
    REFERENCE_COSTS,
    TORCH_COSTS,
    Offer,
    Remedy,
    RemedyRule,
    behind_counts_us,
    between_steps_us,
    cpu_rule,
    first_accepted,
    imbalance_us,
    late_launches_us,
    least_even,
    most_waiting_us,
    named,
    rule,
    transfers_us,
    waits_us,
)

WORTH_SAYING = 0.005  # share of the step below which a gain is noise
DOUBLED = 0.5  # share of the cost of a pass, or of a step, that disappears if it has twice the rows

LEAST_SPARED = 0.24
"""Saved share of token copies if each token goes to a rank once, for an unknown model: DeepSeek-V2-Lite on 8 ranks,
3.97 of 5.25 (docs/dispatch.md, computed). Every other model and number of ranks there saves more."""

OVERLAP_GAINS = 1 - 1 / 1.17
"""Share of the step that overlap saves at most: Megatron trained 17 to 32 % faster at EP 16; this is the lower end."""

EXPERTS_WEIGHT = 0.001
"""Weight of an auxiliary loss for a run without one: the order of published weights; a larger one costs quality."""

MUCH_POINTWISE = 0.1  # share of the step in elementwise kernels from which fusing them is offered

TOKENS = (
    *("all-to-all", "send-recv", "symmetric", "hierarchical", "deep-ep", "hybrid-ep", "mori", "pplx"),
    *("expert-parallel", "gathered tokens", "nvshmem", "ucx"),
)
"""Kinds of communication that carry tokens: collectives, dispatchers, and libraries."""

SELECTIVE = 'recompute.modules=["norm","expert-activation"]'
"""Recomputation that is cheap for the activations that it frees."""

FLOAT8 = "float8.dense=auto float8.experts=auto"
FLOAT8_DISPATCH = f"{FLOAT8} float8.dispatch=auto"

_PASSES = (
    'graphs.capture="full"',
    'graphs.capture="full" dispatch.sync_free=2',
    'graphs.capture="full" dispatch.sync_free=2 dispatch.method="auto"',
)
LARGEST_LAUNCH_US = 100.0  # that a slow host spends on an eager operator of one kernel, autograd and Python included

_PARTS = 'graphs.capture="partial"'


def remedies(evidence: Evidence, bottlenecks: Bottlenecks) -> tuple[Remedy, ...]:
    """All offered remedies, the largest gain first; a run that does not fit gets changes that free memory first."""
    facts = evidence.facts
    offered: list[Remedy] = []
    for entry in RULES:
        if evidence.is_cpu and not entry.on_cpu:
            continue
        change, what, gain_us = entry.offer(evidence, bottlenecks) or NO_OFFER
        if change is None or change in facts.lacking_bytes:
            continue
        if evidence.source == "plan" and change in facts.saved_seconds:  # the plan's saving limits the gain
            gain_us = min(gain_us, facts.saved_seconds[change] * 1e6)
        if bottlenecks.share(gain_us) >= WORTH_SAYING:
            offered.append(
                Remedy(
                    change=change,
                    what=what,
                    gain_us=gain_us,
                    rule=entry.name,
                    source=entry.source,
                    how=entry.how,
                    fits=bottlenecks.fits,
                )
            )
    fitting = [] if bottlenecks.fits else make_it_fit(evidence)
    return (*fitting, *sorted(offered, key=lambda remedy: -remedy.gain_us))


# Communication: fewer bytes, transfers during computing, no late rank.


@rule(
    "tokens-travel-once",
    "docs/dispatch.md, Bytes sent by each method (computed)",
    how="exposed all-to-all without waiting, times the copies of a token that disappear",
)
def symmetric(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if not evidence.has_experts or (run is not None and run.parallel.expert == 1):
        return None
    spared = spared_copies(evidence)
    return (
        first_accepted(evidence, 'dispatch.method="symmetric"', text="each token once to each rank that needs it"),
        f"send each token once to each rank that needs it, inside a node: {spared:.0%} fewer copies",
        spared * transfers_us(evidence, bottlenecks, "all-to-all"),
    )


def spared_copies(evidence: Evidence) -> float:
    """Share of an all-to-all's token copies that disappears if each token goes to a rank once (docs/dispatch.md)."""
    run = evidence.facts.run
    if run is None or run.model.moe is None:
        return LEAST_SPARED
    experts, chosen, ranks = run.model.moe.experts, run.model.moe.top_k, run.parallel.expert
    if ranks == 1 or experts % ranks:
        return LEAST_SPARED
    # Expected number of other ranks that a token needs, over its copies that leave the rank.
    needed = (ranks - 1) * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))
    return 1 - needed / (chosen * (ranks - 1) / ranks)


@rule(
    "overlap-if-exposed",
    how="exposed dispatch and combine without waiting, at most the computing beside it and "
    f"{OVERLAP_GAINS:.1%} of the step",
)
def overlap(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    """Computing continues while tokens travel, whichever dispatcher sends them.

    Among few ranks dispatch is usually too short to pay for cutting work in pieces, unless it is measured to be long.
    """
    run = evidence.facts.run
    ranks = evidence.facts.world if run is None else run.parallel.expert * run.parallel.expert_tensor
    if (run is not None and run.dispatch.overlap != "none") or not evidence.has_experts:
        return None
    changes = ('dispatch.overlap="passes"', 'dispatch.overlap="shared"')
    # NCCL sends an all-to-all as send and receive kernels; those of a pipeline are messages between stages.
    is_pipeline = run is not None and run.parallel.pipeline > 1
    tokens = [kind for kind in TOKENS if not is_pipeline or kind != "send-recv"]
    transfers = transfers_us(evidence, bottlenecks, *tokens)
    if ranks is not None and ranks <= FEW_PEERS and bottlenecks.share(transfers) < STANDS:
        return None
    carried = max(tokens, key=evidence.communication)
    return (
        first_accepted(evidence, *changes, text=f"transfers of tokens ({carried}) beside computing"),
        f"compute while tokens travel ({carried}): the shared expert, or another micro-batch",
        min(transfers, OVERLAP_GAINS * bottlenecks.total_us, bottlenecks.compute_us),
    )


@cpu_rule(
    "even-experts",
    "arXiv 2408.15664 (bias), arXiv 2101.03961 (auxiliary loss)",
    how="waiting that these ranks caused by their experts; without such ranks, by the rows of the metrics",
)
def even_experts(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    hot = [rank for rank in evidence.late if rank.cause == "experts"]
    lost = min(between_steps_us(evidence), most_waiting_us(evidence, bottlenecks))
    if not hot and not lost:
        return None
    run = evidence.facts.run
    weight = f'model.moe.balance.aux_loss="global-batch" model.moe.balance.aux_loss_coef={EXPERTS_WEIGHT:g}'
    changes = [weight]
    if run is not None and run.model.moe is not None:
        changes.insert(0, "model.moe.router.expert_bias=true")
        if run.model.moe.balance.aux_loss_coef > 0:
            changes[1] = f"model.moe.balance.aux_loss_coef={2 * run.model.moe.balance.aux_loss_coef:g}"
    change = first_accepted(evidence, *changes, text="a bias of the router by load, or an auxiliary loss")
    if hot:
        return (
            change,
            f"even out the experts of {named(hot)}: {hot[0].detail}",
            waits_us(hot, evidence, bottlenecks),
        )
    return (change, f"even out the routing: {least_even(evidence)}", lost)


@rule(
    "rows-within-a-bound",
    "docs/dispatch.md, Balanced dispatch",
    how="rows over the bound on each layer's fullest rank, times the mean rank's time in the experts, without copies",
)
def bounded_rows(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is None or run.dispatch.balance != "none" or run.parallel.expert == 1:
        return None
    return (
        first_accepted(evidence, 'dispatch.balance="bounded"'),
        f"a few experts are copied to ranks with room: {least_even(evidence)}",
        min(
            imbalance_us(evidence, 1 + run.dispatch.balance_tolerance),
            most_waiting_us(evidence, bottlenecks),
        ),
    )


@cpu_rule("no-rank-is-late", "the trace, waiting in collectives", how="waiting that these ranks caused")
def late_rank(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    slow = [rank for rank in evidence.late if rank.cause in ("compute", "unknown")]
    if not slow:
        return None
    return (
        f"mend or leave out {named(slow)}",
        f"find out why {named(slow)} comes last ({slow[0].detail}): clocks, heat, power, more rows",
        waits_us(slow, evidence, bottlenecks),
    )


@cpu_rule("gathers-once-a-step", how="exposed gathers and scatters without waiting, times (1 - 1 / micro-batches)")
def gathers(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is None or evidence.facts.world is None or run.parallel.shard != "full":
        return None
    change = first_accepted(evidence, 'parallel.shard="optimizer"')
    if change is None:
        return None
    passes = micro_batches(run, grid_of(run, evidence.facts.world))  # legal: the changed run has the same grid
    return (
        change,
        f"gather weights once a step, not in each of {passes} micro-batches; they stay whole",
        (1 - 1 / passes) * transfers_us(evidence, bottlenecks, "all-gather", "reduce-scatter"),
    )


@cpu_rule(
    "sums-once-for-more-rows",
    "bytes of a sum do not depend on rows",
    how="half of the exposed all-reduces without waiting",
)
def fewer_sums(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if not evidence.trains or (run is not None and run.parallel.tensor * run.parallel.context > 1):
        return None
    changes = () if run is None else (f"training.global_batch={2 * run.training.global_batch}",)
    return (
        first_accepted(evidence, *changes, text="twice the rows for each sum of gradients"),
        "sum gradients once for twice the rows: half as many sums for the same tokens; it trains differently",
        DOUBLED * transfers_us(evidence, bottlenecks, "all-reduce"),
    )


@rule("sums-over-many-in-fp32", how="half of the exposed gradient sums without waiting")
def sums_in_two_bytes(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run, world = evidence.facts.run, evidence.facts.world
    if run is None or world is None or run.parallel.reduce != "fp32":
        return None
    change = first_accepted(evidence, 'parallel.reduce="bf16"')
    if change is None:
        return None
    grid = grid_of(run, world)
    if grid.data * grid.context >= MANY_COPIES:
        return None
    return (
        change,
        f"sum gradients in bfloat16: half the bytes; below {MANY_COPIES} ranks",
        DOUBLED * transfers_us(evidence, bottlenecks, "all-reduce", "reduce-scatter"),
    )


@cpu_rule("stages-when-pipeline", how="half of the exposed messages between stages")
def more_stages(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is None or run.parallel.pipeline == 1 or run.pipeline.stages_per_rank > 1:
        return None
    return (
        first_accepted(evidence, 'pipeline.schedule="interleaved" pipeline.stages_per_rank=2'),
        "two stages on each pipeline rank: ranks wait half as long at both ends of a step",
        DOUBLED * evidence.communication("send-recv"),
    )


# Host: fewer launches, no waits, no late host.


@rule(
    "launches-in-one-call",
    "G1 (Megatron Bridge, CUDA graphs); docs/graphs.md",
    how=f"idle time before late launches, times the launches that go ({LAUNCHES_OF_PASSES:.0%} for passes, "
    f"{LAUNCHES_OF_PARTS:.0%} for parts) and at most {LARGEST_LAUNCH_US:.0f} us each, and for passes idle time behind "
    "waits for row counts",
)
def graphs(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run, launches = evidence.facts.run, evidence.launches
    if launches is not None and launches.from_graphs > DOUBLED * launches.kernels:
        return None
    change = first_accepted(evidence, *_PASSES, _PARTS, text="graphs of whole passes")
    if change is None or (run is not None and run.graphs.capture not in ("none", "auto")):
        return None
    late = late_launches_us(evidence, bottlenecks)
    if launches is not None:  # the host does other things as well, of which a graph saves none
        late = min(late, LARGEST_LAUNCH_US * launches.kernels / (max(1, evidence.steps) * len(evidence.ranks)))
    gain = LAUNCHES_OF_PARTS * late
    if change != _PARTS:  # a whole pass in one launch contains no wait
        gain = LAUNCHES_OF_PASSES * late + behind_counts_us(evidence, bottlenecks)
    return (
        change,
        "launch the kernels of a pass in one call (CUDA or HIP graphs), if memory allows; a compiler that fuses "
        "them spares a part",
        gain,
    )


@cpu_rule("larger-passes", "launches of a pass do not depend on rows", how="half of the idle time before late launches")
def larger_passes(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    facts = evidence.facts
    if facts.peak_bytes is not None and facts.capacity_bytes and facts.peak_bytes > DOUBLED * facts.capacity_bytes:
        return None
    if facts.run is None and not evidence.trains:  # a server does not choose its number of requests
        return None
    changes = () if facts.run is None else (f"training.micro_batch={2 * facts.run.training.micro_batch}",)
    return (
        first_accepted(evidence, *changes, text="twice the rows in a pass"),
        "twice the rows in a pass: half as many launches for the same tokens, if memory allows",
        DOUBLED * late_launches_us(evidence, bottlenecks),
    )


@rule(
    "host-never-waits",
    "docs/dispatch.md, Sync-free stages; host-waits-h200x2.json",
    how="idle time behind waits for row counts, and the waiting of others for ranks that these make late",
)
def sync_free(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if not evidence.has_experts or (run is not None and run.dispatch.sync_free_stage >= 2):
        return None
    changes = ("dispatch.sync_free=2", 'dispatch.sync_free=2 dispatch.method="auto"')
    return (
        first_accepted(evidence, *changes, text="buffers of the experts with a bound"),
        "bound the buffers of the experts, so that the host need not read how many rows come",
        behind_counts_us(evidence, bottlenecks),
    )


@cpu_rule("no-host-is-late", "the trace, waiting in collectives", how="waiting that these ranks caused by idle devices")
def late_host(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    late = [rank for rank in evidence.late if rank.cause == "host"]
    if not late:
        return None
    change = None
    if evidence.facts.run is not None:
        near = () if evidence.is_cpu else ("host.numa=true",)
        change = first_accepted(evidence, *near, "training.collect_garbage_every=50")
    return (
        change or f"mend the host of {named(late)}",
        f"find out what the host of {named(late)} does meanwhile ({late[0].detail}): other processes, data, "
        "garbage, cores far from the device",
        bottlenecks.usual_host * bottlenecks.late_host_us,
    )


@cpu_rule("rows-ahead", "the trace, spans of data", how="idle time while the host fetches rows, and computing for it")
def rows_ahead(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    ours = evidence.facts.run is not None
    return (
        "pack the rows once (penstock data pack)" if ours else "more workers of the data loader, rows prepared ahead",
        "read the rows of a step while the step before computes: tokenize ahead, from a disk that keeps up",
        bottlenecks.data_us,
    )


# Memory and computing: less recomputation, fewer copies, faster kernels.


@cpu_rule("selective-before-full", how="all recomputation")
def recompute_less(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is not None and not {"layer", "moe"} & set(run.recompute.modules):
        return None
    return (
        first_accepted(evidence, SELECTIVE, text="compute less of forward again in backward"),
        "compute again only what is cheap for its bytes (norms, activations), if memory allows",
        min(evidence.mean("recompute_us"), bottlenecks.memory_us),
    )


@rule("optimizer-on-the-device", how="copies with nothing beside them")
def optimizer_on_device(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is None or not (run.offload.optimizer or run.offload.activations):
        return None
    return (
        "offload.optimizer=false" if run.offload.optimizer else "offload.activations=[]",
        "keep on the device what is copied to the host and back, if memory allows",
        min(evidence.mean("exposed_copies_us"), bottlenecks.memory_us),
    )


@rule(
    "kernels-by-measurement",
    "docs/results.md; one-gpu.json",
    how="computing, times the share that the same change was measured to save",
)
def kernels(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run = evidence.facts.run
    if run is None or run.kernels.all not in ("reference", "torch"):
        return None
    share = REFERENCE_COSTS if run.kernels.all == "reference" else TORCH_COSTS
    return (
        'kernels.all="auto"',
        f"compute with our kernels instead of {run.kernels.all} forms",
        share * bottlenecks.compute_us,
    )


@rule(
    "eight-bits-where-they-pay",
    "penstock plan of the same run in 8 bits; rules P3, P6",
    how="the share of the step that the plan saves in 8 bits, at most the computing",
)
def float8(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    """Products in 8 bits, where computing takes the time and the plan projects a saving.

    On Hopper many published models are slower in 8 bits than tuned ones in 16, so no fixed share is assumed.
    """
    planned, facts = evidence.facts.planned_step_seconds, evidence.facts
    # Faster products leave a late host and late ranks as they are.
    computes = bottlenecks.share(bottlenecks.host_us) < STANDS and bottlenecks.share(bottlenecks.waiting_us) < STANDS
    in_8_bits = {change: saved for change, saved in facts.saved_seconds.items() if change.startswith("float8.")}
    if not in_8_bits or not planned or not computes:
        return None
    change, saved = max(in_8_bits.items(), key=lambda item: item[1])
    return (
        change,
        "compute products in 8 bits; look at the loss beside one in 16 (docs/float8.md)",
        min(saved / planned * bottlenecks.total_us, bottlenecks.compute_us),
    )


@rule(
    "elementwise-in-one-kernel",
    "the trace, runs of elementwise kernels on a stream",
    how="time of each run of elementwise kernels beyond its longest kernel: a fused one reads and writes once",
)
def fuse(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    run, kernels = evidence.facts.run, evidence.mean("pointwise_kernels")
    if bottlenecks.share(evidence.mean("pointwise_us")) < MUCH_POINTWISE:
        return None
    if run is not None and run.kernels.all in ("reference", "torch"):  # `kernels` is the remedy
        return None
    share = bottlenecks.share(evidence.mean("pointwise_us"))
    return (
        "fuse elementwise kernels (torch.compile, or kernels of their own)",
        f"compute what {kernels:,.0f} elementwise kernels ({share:.0%} of the step) do one after the other in fewer",
        min(evidence.mean("fusable_us"), bottlenecks.compute_us),
    )


@rule(
    "copies-ahead",
    "the trace, the host in copies",
    how="time in which the device computes and sends nothing while the host is in these copies",
)
def host_copies(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    return _host_calls(evidence, bottlenecks, COPIES, "copy ahead, from pinned memory (pin_memory, non_blocking=True)")


@rule(
    "memory-is-kept",
    "the trace, the host in calls that reserve memory",
    how="time in which the device computes and sends nothing while the host is in these calls",
)
def reserves(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    change = "PYTORCH_ALLOC_CONF=expandable_segments:True, no empty_cache() in a step, or less memory in use"
    return _host_calls(evidence, bottlenecks, ALLOCATIONS, change)


@rule(
    "garbage-between-steps",
    "the trace, Python's collections of garbage",
    how="time in which the device computes and sends nothing while the host collects garbage",
)
def collections_of_garbage(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    change = first_accepted(evidence, "training.collect_garbage_every=50")
    by_hand = "gc.freeze() and gc.disable() before the loop, gc.collect() between steps"
    return _host_calls(evidence, bottlenecks, re.compile(re.escape(GARBAGE)), change or by_hand)


def _host_calls(evidence: Evidence, bottlenecks: Bottlenecks, named: re.Pattern[str], change: str) -> Offer | None:
    """A change that spares the most expensive calls of the host, if they have such a name."""
    call = evidence.host_call
    if call is None or not named.match(call.call):
        return None
    size = "" if call.bytes is None else f", {bytes_text(call.bytes)}"
    where = f" from {call.where}" if call.where else ""
    times = "once," if call.count == 1 else f"{call.count} times, the longest"
    times += f" {call.longest_us / 1e3:,.1f} ms{size}, on rank {evidence.host_call_rank}"
    return (
        change,
        f"the host stays in {call.call}{where} ({times}) while the device has nothing to do",
        min(evidence.mean("host_call_us"), bottlenecks.host_us + bottlenecks.memory_us),
    )


@rule(
    "power-holds-the-clock",
    "the run's metrics, power and clock",
    how="computing, times (1 - clock / highest clock): products follow the clock, memory-bound kernels less",
)
def power(evidence: Evidence, bottlenecks: Bottlenecks) -> Offer | None:
    facts = evidence.facts.power
    if facts is None or not bottlenecks.power_us:
        return None
    return (
        "raise the power limit of the board (nvidia-smi -pl, amd-smi set), or cool it better",
        f"it draws {facts.watts:,.0f} of {facts.limit_watts:,.0f} W, which holds the clock at {facts.clock_mhz:,.0f} "
        f"of {facts.limit_mhz:,.0f} MHz; fewer bytes and fewer bits per product draw less",
        bottlenecks.power_us,
    )


def make_it_fit(evidence: Evidence) -> list[Remedy]:
    """Changes that free memory: those sufficient alone first, by step time; then the others, by bytes."""
    facts = evidence.facts
    lacks = (facts.planned_bytes or 0) - (facts.capacity_bytes or 0)
    freed = sorted(facts.freed_bytes.items(), key=lambda item: -item[1])
    others = [item for item in freed if 0 < item[1] < lacks]
    enough = [item for item in freed if item[1] >= lacks]
    enough.sort(key=lambda item: -facts.saved_seconds.get(item[0], 0.0))  # stable: of equal times the most bytes first
    return [
        Remedy(
            change=change,
            what=f"{verdict}: needs {size / 1e9:.1f} GB less on the fullest rank, by the plan",
            gain_us=0.0,
            gain_bytes=size,
            rule="selective-before-full" if change == SELECTIVE else "fits-by-plan" if fits else "frees-memory",
            source="penstock plan, memory of the fullest rank",
            fits=fits,
        )
        for verdict, fits, changes in (("fits then", True, enough), ("not enough alone", False, others))
        for change, size in changes
    ]


RULES = tuple(value for value in globals().values() if isinstance(value, RemedyRule))
"""Every rule above, in the order of this file, in which remedies with equal gains are listed."""
