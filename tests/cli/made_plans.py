"""Projections with made-up figures, as small as printing needs them."""

from collections.abc import Mapping
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.plan.hardware import Cluster
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.memory import RankMemory
from penstock.plan.projection import Plan, Projection, RankTime, Refusal, StepTime, layout_of

CLUSTER = parse_cluster("16xMI300X")
GB = 10**9


def run_of(*overrides: str) -> Run:
    return load_run("debug", ["parallel.pipeline=2", "parallel.expert=4", "training.global_batch=64", *overrides])


def memory(rank: int, activations: int, **changed: Any) -> RankMemory:
    sizes = dict.fromkeys(
        ("gathered", "buffers", "logits", "communication", "graph_pool", "libraries", "reserve", "host"), 0
    )
    state = {"parameters": 10 * GB, "gradients": 20 * GB, "master": 5 * GB, "moments": 10 * GB}  # 45 GB
    terms = {"held": activations - 3 * GB, "layers.1.moe": 2 * GB, "layers.1.attention": GB}  # which add up
    values = {**sizes, **state, "activations": activations, "moment": "forward of stage 0", "terms": terms}
    return RankMemory(rank=rank, **(values | changed))


def rank_time(rank: int, step: float, waiting: float) -> RankTime:
    terms = {"attention": 0.25 * step, "experts": step - 0.25 * step - waiting, "waiting": waiting}
    return RankTime(
        rank=rank,
        passes=step - waiting - 0.5,
        waiting=waiting,
        update=0.5,
        compute=step - waiting,
        communication=2.0,
        exposed_communication=0.034,
        host=0.0,
        terms=terms,
    )


def projection(
    run: Run | None = None, cluster: Cluster = CLUSTER, step: float = 11.2, activations: int = 50 * GB
) -> Projection:
    """Tokens per second follow from the step; the second place needs 1 GB less and waits 1 s more."""
    run = run or run_of()
    grid = grid_of(run, cluster.devices)
    return Projection(
        run=run,
        cluster=cluster,
        layout=layout_of(run, grid, "all-to-all" if grid.expert > 1 else "local", "optimizer"),
        memories=(memory(0, activations), memory(cluster.devices // 2, activations - GB)),
        time=StepTime(
            step_seconds=step,
            tokens_per_second_per_device=run.tokens_per_step / step / cluster.devices,
            model_flops_utilization=0.321,
            bubble=0.067,
            exposed_communication_seconds=0.034,
            ranks=(rank_time(0, step, 0.0), rank_time(cluster.devices // 2, step, 1.0)),
        ),
    )


def refusal(rule: str, reason: str, count: int = 1, **layout: object) -> Refusal:
    return Refusal(layout=layout, rule=rule, reason=reason, count=count)


def plan(*candidates: Projection, refused: tuple[Refusal, ...] = ()) -> Plan:
    considered = len(candidates) + sum(one.count for one in refused)
    return Plan(model="debug", cluster=CLUSTER, candidates=candidates, refused=refused, considered=considered)


class MadeUp:
    """A planner that computes nothing: a step takes a second for each row of a rank, and experts 10 ms each.

    Attributes:
        asked: every run that it was asked for, with its cluster.
    """

    def __init__(self, refuses: Mapping[str, str] | None = None) -> None:
        self.asked: list[tuple[Run, Cluster]] = []
        self._refuses = refuses or {}

    def __call__(self, run: Run, cluster: Cluster, **_: object) -> Projection:
        self.asked.append((run, cluster))
        if (reason := self._refuses.get(run.dispatch.method)) is not None:
            raise ConfigError(reason)
        rows = run.training.global_batch / grid_of(run, cluster.devices).data  # of a data-parallel rank
        return projection(run, cluster, step=rows + 1)
