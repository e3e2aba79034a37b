"""Plans made by hand: real memory of a small run, times by the clock with even costs."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.kernels.tuning import named_device
from penstock.layout.actions import Schedule, even_costs, play
from penstock.layout.schedules import schedule
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.memory import RankMemory, memory_of
from penstock.plan.meta_rank import Target
from penstock.plan.projection import Plan, Projection, RankTime, Refusal, StepTime, layout_of

PRESET, WORLD = "deepseek-v2-lite-4l", 2
BASE = ["training.global_batch=16", "training.micro_batch=2", "parallel.pipeline=2"]
SECOND = 0.01  # of a forward pass; an input gradient and weight gradients take as long each

REFUSALS = (
    Refusal(layout={"pp": 4, "ep": 2}, rule="layers-divide", reason="4 layers do not fill <6> stages", count=1200),
    Refusal(layout={"pp": 1, "ep": None}, rule="memory", reason="activations overflow by 12.3 GB", count=31),
)


@cache
def memories(*overrides: str) -> tuple[RankMemory, ...]:
    run = load_run(PRESET, [*BASE, *overrides])
    target = Target(device=named_device("H200", "bf16"), imbalance=1.0)
    return tuple(memory_of(run, world=WORLD, rank=rank, target=target) for rank in range(WORLD))


def step_time(plan: Schedule) -> StepTime:
    """A step whose stages are all alike, with an update behind it."""
    playback = play(plan, even_costs(plan.stages, (SECOND, SECOND, SECOND), send=SECOND / 5))
    update, step = 4 * SECOND, playback.span + 4 * SECOND
    ranks = []
    for rank, busy in enumerate(playback.busy):
        shares = {"attention": 0.3, "experts": 0.4, "dispatch": 0.1, "products": 0.1, "loss": 0.07, "strange": 0.03}
        terms = {name: busy * share for name, share in shares.items()}
        ranks.append(
            RankTime(
                rank=rank,
                passes=busy,
                waiting=playback.span - busy,
                update=update,
                compute=busy * 0.82,
                communication=busy * 0.18,
                exposed_communication=busy * 0.12,
                host=0.0,
                terms=terms | {"bubble": playback.span - busy, "update": update},
            )
        )
    return StepTime(
        step_seconds=step,
        tokens_per_second_per_device=16 * 4096 / step / WORLD,
        model_flops_utilization=0.41,
        bubble=playback.bubble,
        exposed_communication_seconds=max(rank.exposed_communication for rank in ranks),
        ranks=tuple(ranks),
        schedule=plan,
        playback=playback,
        kept_bytes=(10**9,) * plan.stages,
    )


def projection(*overrides: str) -> Projection:
    run = load_run(PRESET, [*BASE, *overrides])
    grid = grid_of(run, WORLD)
    plan = schedule(
        run.pipeline.schedule,
        ranks=2,
        stages_per_rank=run.pipeline.stages_per_rank,
        micro_batches=16 // run.training.micro_batch,
    )
    return Projection(
        run=run,
        cluster=parse_cluster(f"{WORLD}xH200"),
        layout=layout_of(run, grid, "local", "none"),
        memories=memories(*overrides),
        time=step_time(plan),
    )


SCHEDULES: Sequence[tuple[str, ...]] = (
    ("pipeline.schedule=1f1b",),
    ("pipeline.schedule=interleaved", "pipeline.stages_per_rank=2"),
    ('recompute.modules=["layer"]',),
    ("training.micro_batch=1",),
)


def small_plan() -> Plan:
    candidates = tuple(projection(*overrides) for overrides in SCHEDULES)
    ordered = tuple(sorted(candidates, key=lambda one: one.time.step_seconds))
    return Plan(model=PRESET, cluster=ordered[0].cluster, candidates=ordered, refused=REFUSALS, considered=1235)


def too_large(one: Projection) -> Projection:
    """The projection with activations that fit no device."""
    return replace(one, memories=tuple(replace(memory, activations=300 * 10**9) for memory in one.memories))


def with_schedule(plan: Plan, large: Schedule) -> Plan:
    first, *others = plan.candidates
    return replace(plan, candidates=(replace(first, time=step_time(large)), *others))
