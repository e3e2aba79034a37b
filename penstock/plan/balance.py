"""Step time of a run by recorded loads, without and with replicas of experts, and with forced balance as the limit.

Beside the rows of the fullest rank, replicas cost what the projection of the run leaves out: the way of their weights
(twice a pass, forward and backward) and of their float32 gradients (once), on the rank that sends or receives most.
Weights share the links with rows, so they are waited for. With collectives gradients are too. Where GPUs write to each
other's memory they go beside the backward pass of attention, which is slower for that: on two H200 about half of their
time was saved (benchmarks/results/balanced-h200x2.json).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.config.dispatcher import choose_dispatcher, dispatch_facts
from penstock.config.fit import grid_of, micro_batches
from penstock.config.rules import problems
from penstock.config.run import Run, with_values
from penstock.parallel.replicas import replica_sizes
from penstock.plan.assumptions import Assumptions
from penstock.plan.hardware import Cluster, RankGroup
from penstock.plan.loads import RankLoads
from penstock.plan.project import project
from penstock.plan.rates import TransferTimes

_HIDDEN = 0.5  # most of the gradients' time
_OF_ATTENTION = 5 / 7  # of its products, which backward has; forward has two


@dataclass(frozen=True, kw_only=True)
class BalanceCase:
    """One way to even out the rows."""

    name: str
    loads: RankLoads
    step_seconds: float  # with `exposed_seconds`
    exposed_seconds: float = 0.0  # of a step, in which ranks wait for replicas and their gradients


def balance_cases(run: Run, cluster: Cluster, assumptions: Assumptions) -> tuple[BalanceCase, ...]:
    """The run with `dispatch.balance` none, bounded and exact where rules allow them, and forced. Raises as `project`.

    `assumptions` have recorded loads. Nothing for a run whose ranks share no experts.
    """
    if run.model.moe is None or run.parallel.expert == 1:
        return ()
    return tuple(_case(name, changed, cluster, assumptions) for name, changed in _ways(run))


def balance_json(cases: tuple[BalanceCase, ...]) -> dict[str, Any]:
    """The key `balance` of `penstock plan --json --routing metrics.jsonl`; nothing without cases."""
    rows = [
        {
            "dispatch.balance": case.name,
            "fullest": case.loads.fullest,
            "replicas": case.loads.replicas,
            "exposed_seconds": case.exposed_seconds,
            "step_seconds": case.step_seconds,
        }
        for case in cases
    ]
    return {"balance": rows} if rows else {}


def _ways(run: Run) -> Iterator[tuple[str, Run]]:
    moe = run.model.moe
    assert moe is not None, "the run has experts"
    for name in ("none", "bounded", "exact"):
        changed = with_values(run, dispatch={"balance": name})
        if not problems(changed):
            yield name, changed
    forced = moe.model_copy(update={"balance": moe.balance.model_copy(update={"force_load_balance": True})})
    yield "forced", with_values(run, dispatch={"balance": "none"}, model={"moe": forced})


def _case(name: str, run: Run, cluster: Cluster, assumptions: Assumptions) -> BalanceCase:
    assert assumptions.loads is not None, "loads are recorded"
    plan, loads = project(run, cluster, assumptions), assumptions.loads.of(run)
    slowest = max(plan.time.ranks, key=lambda rank: rank.terms.get("experts", 0.0))
    exposed = _exposed(run, cluster, loads, slowest.terms) if loads.busiest else 0.0
    return BalanceCase(name=name, loads=loads, step_seconds=plan.time.step_seconds + exposed, exposed_seconds=exposed)


def _exposed(run: Run, cluster: Cluster, loads: RankLoads, terms: Mapping[str, float]) -> float:
    """Seconds of a step in which the ranks of a stage wait for replicas."""
    grid = grid_of(run, cluster.devices)
    sizes = replica_sizes(run, grid)
    assert sizes is not None, "replicas have slots"
    moe_layers = run.model.moe_layers + run.model.mtp_layers
    passes = micro_batches(run, grid) * max(1.0, moe_layers / grid.pipeline)  # of layers of a rank, in a step
    each = sizes.gradients[0] / sizes.rule.slots  # bytes of a replica's weights
    experts = cluster.group(grid.expert * grid.expert_tensor)
    pair = RankGroup(2, 2 if experts.nodes == 1 else 1, 0 if experts.pods == 1 else 1)
    transfers = TransferTimes(cluster.hardware)

    def sent(size: float) -> float:
        return transfers.collective("point-to-point", size * loads.busiest, pair).seconds

    weights, gradients = sent(each), sent(4 / sizes.itemsize * each)
    is_mapped = choose_dispatcher(dispatch_facts(run, experts.node_ranks)).writes_to_peers
    rest = _OF_ATTENTION * terms.get("attention", 0.0) / passes if is_mapped else 0.0
    return passes * (2 * weights + gradients - min(rest, _HIDDEN * gradients))
