"""A layout from a command line, such as `pp=24,ep=8,cp=2`, applied to a run.

Names are those of `penstock.plan.projection.Layout`. Parts without a name keep the run's value where it still fits: a
pipeline with other stages takes a schedule that can have them and loses `pipeline.layout`, and another recomputation
starts with all layers. `dp` and `edp` follow from the others; naming them checks them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from itertools import chain
from math import floor

from penstock.base.errors import ConfigError
from penstock.config.fit import grid_of
from penstock.config.run import Run, with_values
from penstock.config.schema import leaves
from penstock.config.tree import build, merge, parse_overrides
from penstock.layout.schedules import SCHEDULES
from penstock.plan.layout_names import FIELDS, FOLLOW
from penstock.plan.projection import Layout, Projection

assert {*FIELDS, *FOLLOW} == {field.name for field in fields(Layout)}, "every word of a layout is known here"

_SIZES = ("pp", "vpp", "ep", "etp", "cp", "tp", "dp", "edp")


def differing_fields(projections: Sequence[Projection]) -> dict[str, list[str]]:
    """Fields of layouts (`pp`), then of runs (`a.b`), that differ: one text for each projection."""
    said = set(FIELDS.values())
    tables = [
        {
            **asdict(projection.layout),
            **{path: value for path, value in leaves(projection.run).items() if path not in said},
        }
        for projection in projections
    ]
    columns = {name: [table.get(name) for table in tables] for name in dict.fromkeys(chain(*tables))}
    return {
        name: ["-" if value is None else f"{value}" for value in values]
        for name, values in columns.items()
        if any(value != values[0] for value in values)
    }


def field_label(name: str) -> str:
    """Name of a field of `differing_fields` in tables: `PP`, `sync-free stage`, `training.sequence_length`."""
    if "." in name:
        return name
    if name in _SIZES:
        return name.upper()
    return {"micro_batch": "micro-batch", "sync_free_stage": "sync-free stage"}.get(name, name)


def with_layout(run: Run, choices: Mapping[str, str], world: int, tokens: float | None = None) -> Run:
    """The run with these parts of a layout, whose rules are not asked.

    Raises a ConfigError if a field does not take its value, or `dp` or `edp` differs.
    """
    changed = with_overrides(run, list(_overrides(run, choices)), world, tokens)
    for name, axis in FOLLOW.items():
        if name in choices:
            (size,) = grid_of(changed, world).shape((axis,))
            if choices[name] != f"{size}":
                raise ConfigError(f"{name} follows from the other sizes", got=choices[name], allowed=size)
    return changed


def check_said_once(run: Run, overrides: Sequence[str], choices: Mapping[str, str]) -> None:
    """Refuse parts of a layout that overrides, which `run` has, say differently, with a ConfigError."""
    said, parts = parse_overrides(Run, overrides), layout_fields(run)
    for name, value in choices.items():
        section, _, field = FIELDS.get(name, "").partition(".")
        if field in said.get(section, {}) and f"{parts[name]}" != value:
            got = f"{name}={value} and {FIELDS[name]}={parts[name]}"
            raise ConfigError("--layout and an override say the same part differently", got=got, fix="leave one out")


def layout_fields(run: Run) -> dict[str, object]:
    """The parts of a layout that a run's configuration says."""
    parts: dict[str, object] = {}
    for name, path in FIELDS.items():
        section, _, field = path.partition(".")
        parts[name] = dict(dict(run)[section])[field]
    offload = "optimizer" if run.offload.optimizer else "none"
    return parts | {"recompute": "+".join(run.recompute.modules) or "none", "offload": offload}


def with_overrides(run: Run, overrides: Sequence[str], world: int, tokens: float | None = None) -> Run:
    """The run with overrides `a.b=c`, of which later ones win, without asking the rules; a ConfigError if one is wrong.

    With `tokens` of a step, the batch becomes the nearest one with whole micro-batches for every data-parallel rank.
    """
    changed = build(Run, merge(Run, run.model_dump(), parse_overrides(Run, overrides)))
    if tokens is None:
        return changed
    parallel, training = changed.parallel, changed.training
    data = max(1, world // (parallel.tensor * parallel.context * parallel.pipeline))
    # Rows of one pass on every data-parallel rank.
    unit = training.micro_batch * data
    rows = unit * max(1, floor(tokens / training.sequence_length / unit + 0.5))
    return with_values(changed, training={"global_batch": rows})


def _overrides(run: Run, choices: Mapping[str, str]) -> Iterator[str]:
    for name, value in choices.items():
        if name == "recompute":
            modules = [] if value == "none" else value.split("+")
            yield f"recompute.modules={modules}"
            yield "recompute.layers=[]"
            yield "recompute.stages=[]"
        elif name == "offload":
            yield f"offload.optimizer={'true' if value == 'optimizer' else 'false'}"
        elif (name, value) == ("dispatcher", "local"):
            yield "dispatch.method=auto"
        elif name in FIELDS and (name, value) != ("schedule", "none"):
            yield f"{FIELDS[name]}={value}"
    if {"pp", "vpp"} & set(choices):
        yield "pipeline.layout="
    yield from _stages(run, choices)


def _stages(run: Run, choices: Mapping[str, str]) -> Iterator[str]:
    """A schedule for the named stages, or stages for the named schedule, if only one of them is named."""
    stages = choices.get("vpp", f"{run.pipeline.stages_per_rank}")
    named = choices.get("schedule", run.pipeline.schedule)
    if named not in SCHEDULES or not stages.isdecimal():
        return
    shape = SCHEDULES[named]
    if shape.fewest <= int(stages) <= (shape.most or int(stages)):
        return
    if "vpp" in choices and "schedule" not in choices:
        yield f"pipeline.schedule={'1f1b' if int(stages) == 1 else 'interleaved'}"
    elif "schedule" in choices and "vpp" not in choices:
        yield f"pipeline.stages_per_rank={shape.fewest}"


def rows_to_share(rows: float, world: int) -> int:
    """A global batch of about `rows` that layouts with any number of data-parallel ranks can share.

    It is a multiple of `world`, or of a half, a quarter, ... of it where rows are fewer.
    """
    unit = world
    while unit > max(1.0, rows):
        unit //= 2
    return unit * max(1, floor(rows / unit + 0.5))
