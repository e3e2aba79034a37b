"""Remedies of the communication wall: fewer bytes, bytes under way beside computing, nobody late."""

from math import comb

from penstock.config.fit import grid_of, micro_batches
from penstock.plan.rules.advice import FEW_PEERS, MANY_COPIES
from penstock.tune.doctor_evidence import Evidence, Late
from penstock.tune.doctor_remedy import DOUBLED, PLAN_SOURCES, Remedy, first_accepted, named
from penstock.tune.doctor_walls import Bottlenecks

LEAST_SPARED = 0.24
"""Copies of tokens that are spared if each goes to a rank once, if nobody knows the model: of DeepSeek-V2-Lite on 8
ranks, 3.97 of 5.25 (docs/dispatch.md, computed); every other model and number of ranks there spares more."""

OVERLAP_GAINS = 1 - 1 / 1.17
"""Share of the step that overlap takes away: Megatron trained 17 to 32 % faster at EP 16; the least of it."""

EXPERTS_WEIGHT = 0.001
"""Weight of an auxiliary loss where there is none: of the order of those that are published; more costs quality."""


def symmetric(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Each token goes once to each rank that needs it, written straight into that rank's memory."""
    run = evidence.facts.run
    change = first_accepted(evidence, 'dispatch.method="symmetric"', words="each token once to each rank that needs it")
    if change is None or not evidence.has_experts or (run is not None and run.parallel.expert == 1):
        return None
    spared = spared_copies(evidence)
    return Remedy(
        change=change,
        what=f"send each token once to each rank that needs it, inside a node: {spared:.0%} fewer copies",
        gain_us=spared * _transfers(evidence, walls, "all-to-all"),
        rule="tokens-travel-once",
        source="docs/dispatch.md, What each sends (computed)",
    )


def spared_copies(evidence: Evidence) -> float:
    """Share of an all-to-all's copies that go away if each token goes to a rank once (docs/dispatch.md)."""
    run = evidence.facts.run
    if run is None or run.model.moe is None:
        return LEAST_SPARED
    experts, chosen, ranks = run.model.moe.experts, run.model.moe.top_k, run.parallel.expert
    if ranks == 1 or experts % ranks:
        return LEAST_SPARED
    needed = (ranks - 1) * (1 - comb(experts - experts // ranks, chosen) / comb(experts, chosen))
    return 1 - needed / (chosen * (ranks - 1) / ranks)


def overlap(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Something else is computed while tokens travel."""
    run = evidence.facts.run
    ranks = evidence.facts.world if run is None else run.parallel.expert * run.parallel.expert_tensor
    overlaps = run is not None and run.dispatch.overlap != "none"
    if overlaps or not evidence.has_experts or (ranks is not None and ranks <= FEW_PEERS):
        return None
    changes = ('dispatch.overlap="passes"', 'dispatch.overlap="halves"', 'dispatch.overlap="shared"')
    change = first_accepted(evidence, *changes, words="transfers of tokens beside computing")
    if change is None:
        return None
    tokens = ("all-to-all",) if run is not None and run.parallel.pipeline > 1 else ("all-to-all", "send-recv")
    return Remedy(
        change=change,
        what="compute while tokens travel: the other half of the rows, or another micro-batch",
        gain_us=min(_transfers(evidence, walls, *tokens), OVERLAP_GAINS * walls.total_us, walls.compute_us),
        rule="overlap-if-exposed",
        source=PLAN_SOURCES["overlap-if-exposed"],
    )


def even_experts(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Experts get as many rows as others."""
    hot = [one for one in evidence.late if one.cause == "experts"]
    run = evidence.facts.run
    weight = f'model.moe.balance.aux_loss="global-batch" model.moe.balance.aux_loss_coef={EXPERTS_WEIGHT:g}'
    changes = [weight]
    if run is not None and run.model.moe is not None:
        changes.insert(0, "model.moe.router.expert_bias=true")
        if run.model.moe.balance.aux_loss_coef > 0:
            changes[1] = f"model.moe.balance.aux_loss_coef={2 * run.model.moe.balance.aux_loss_coef:g}"
    change = first_accepted(evidence, *changes, words="a bias of the router by load, or an auxiliary loss")
    if not hot or change is None:
        return None
    return Remedy(
        change=change,
        what=f"even out the experts of {named(hot)}: {hot[0].detail}",
        gain_us=_waits_for(hot, evidence, walls),
        rule="even-experts",
        source="waiting that these ranks caused; arXiv 2408.15664 (bias), arXiv 2101.03961 (auxiliary loss)",
    )


def late_rank(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """A rank computes more slowly than others do the same."""
    slow = [one for one in evidence.late if one.cause in ("compute", "unknown")]
    if not slow:
        return None
    return Remedy(
        change=f"mend or leave out {named(slow)}",
        what=f"find out why {named(slow)} comes last ({slow[0].detail}): clocks, heat, power, more rows",
        gain_us=_waits_for(slow, evidence, walls),
        rule="no-rank-is-late",
        source="waiting that these ranks caused",
    )


def gathers(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Weights stay whole, and only the optimizer is divided."""
    run = evidence.facts.run
    if run is None or evidence.facts.world is None or run.parallel.shard != "full":
        return None
    change = first_accepted(evidence, 'parallel.shard="optimizer"')
    passes = micro_batches(run, grid_of(run, evidence.facts.world))
    if change is None:
        return None
    return Remedy(
        change=change,
        what=f"gather weights once a step, not in each of {passes} micro-batches; they stay whole",
        gain_us=(1 - 1 / passes) * _transfers(evidence, walls, "all-gather", "reduce-scatter"),
        rule="gathers-once-a-step",
        source=PLAN_SOURCES["gathers-once-a-step"],
    )


def fewer_sums(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Gradients are summed once for more rows."""
    run = evidence.facts.run
    if not evidence.trains or (run is not None and run.parallel.tensor * run.parallel.context > 1):
        return None
    changes = () if run is None else (f"training.global_batch={2 * run.training.global_batch}",)
    change = first_accepted(evidence, *changes, words="twice the rows for each sum of gradients")
    if change is None:
        return None
    return Remedy(
        change=change,
        what="sum gradients once for twice the rows: half as many sums for the same tokens; it trains differently",
        gain_us=DOUBLED * _transfers(evidence, walls, "all-reduce"),
        rule="sums-once-for-more-rows",
        source="bytes of a sum do not depend on rows",
    )


def sums_in_two_bytes(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Gradients are summed in bfloat16 where few ranks sum."""
    run, world = evidence.facts.run, evidence.facts.world
    if run is None or world is None or run.parallel.reduce != "fp32":
        return None
    change = first_accepted(evidence, 'parallel.reduce="bf16"')
    if change is None:
        return None
    grid = grid_of(run, world)
    if grid.data * grid.context >= MANY_COPIES:
        return None
    return Remedy(
        change=change,
        what=f"sum gradients in bfloat16: half the bytes; below {MANY_COPIES} ranks",
        gain_us=DOUBLED * _transfers(evidence, walls, "all-reduce", "reduce-scatter"),
        rule="sums-over-many-in-fp32",
        source=PLAN_SOURCES["sums-over-many-in-fp32"],
    )


def more_stages(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """A pipeline rank has two stages: ramps are half as long."""
    run = evidence.facts.run
    if run is None or run.parallel.pipeline == 1 or run.pipeline.stages_per_rank > 1:
        return None
    change = first_accepted(evidence, 'pipeline.schedule="interleaved" pipeline.stages_per_rank=2')
    if change is None:
        return None
    return Remedy(
        change=change,
        what="two stages on each pipeline rank: ranks wait half as long at both ends of a step",
        gain_us=DOUBLED * evidence.communication("send-recv"),
        rule="stages-when-pipeline",
        source=PLAN_SOURCES["stages-when-pipeline"],
    )


def _transfers(evidence: Evidence, walls: Bottlenecks, *kinds: str) -> float:
    """Exposed communication of some kinds that is not known to be waiting."""
    exposed = evidence.mean("exposed_communication_us")
    moving = walls.transfer_us / exposed if exposed else 0.0
    return moving * sum(evidence.communication(kind) for kind in kinds)


def _waits_for(ranks: list[Late], evidence: Evidence, walls: Bottlenecks) -> float:
    """What the mean rank waits for these."""
    caused = evidence.caused_wait_us - sum(one.caused_wait_us for one in evidence.late if one.cause == "host")
    return walls.waiting_us * sum(one.share * one.caused_wait_us for one in ranks) / caused if caused else 0.0
