"""The layouts that a search considers, as `Sizes`.

    grid      tensor, context, pipeline, expert, expert_tensor ranks
    pipeline  on a grid: schedule with its stages per rank, rows of a micro-batch
    dispatch  on a grid: dispatcher with its sync-free stage
    ladder    recomputation, from nothing to everything; each step holds less and takes longer

Illegal values that a user may ask for, such as expert ranks that do not divide the experts, are listed too: rules
refuse them by name (`penstock.plan.rules`). A part in `fixed` has one value; `fixed_by` reads `fixed` from a command
line. `run_of` makes a run of a layout.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from typing import Any, get_args

from penstock.base.errors import ConfigError
from penstock.config.dispatcher import DispatchFacts, choose_dispatcher, ranks_on_a_node
from penstock.config.fit import NO_PIPELINE
from penstock.config.model import LatentAttention, Model
from penstock.config.parallel import Graphs, Offload, Overlap, Pipeline, Recompute
from penstock.config.run import Run
from penstock.config.tree import parse_overrides
from penstock.layout.schedules import SCHEDULES
from penstock.models.decoder import OVERLAPS_IN_STEPS
from penstock.plan.asked_layout import FIELDS, check_name, layout_fields
from penstock.plan.rules.rule import Sizes
from penstock.plan.transfers import DispatchMethod

GRID = ("tp", "cp", "pp", "ep", "etp")
"""Sizes of a grid, by their names in a layout."""

MOST_MICRO_BATCH = 8
MOST_CONTEXT = 64
MOST_STAGES = 8
"""Stages of a rank."""

SEARCHED_SCHEDULES = ("1f1b", "interleaved", "zb-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v")
"""GPipe is left out: it holds more than 1F1B and is no faster."""

_TEXTS: Mapping[str, tuple[str, ...]] = {
    "schedule": (NO_PIPELINE, *SCHEDULES),
    "dispatcher": ("local", *get_args(DispatchMethod)),
    "shard": ("auto", "none", "optimizer", "full"),
}
"""Parts of a layout that are no numbers."""

_NEVER_SEARCHED = (
    "pipeline.layout",
    "recompute.layers",
    "recompute.stages",
    "offload.activations",
    "offload.optimizer",
    "dispatch.overlap",
)
"""Fields that `run_of` sets: a search considers one value of them."""

ROOM_FOR_ALL = 3
"""The sync-free stage with buffers for the worst case."""


def check_fixed(fixed: Mapping[str, str]) -> None:
    """Refuse a name that is no part of a layout, or a text that is no value of its part, with a ConfigError."""
    for name, text in fixed.items():
        check_name(name)
        allowed = _TEXTS.get(name)
        if allowed is not None and text not in allowed:
            raise ConfigError(f"{name} is unknown", got=text, allowed=", ".join(allowed))
        if name not in (*_TEXTS, "recompute") and (not text.isdecimal() or int(text) < (name != "sync_free_stage")):
            raise ConfigError(f"{name} is no number of the kind", got=text, allowed="a whole number >= 1")


def fixed_by(run: Run, overrides: Sequence[str], only: Mapping[str, str]) -> dict[str, str]:
    """The parts of a layout that a command line fixes by its overrides and `--only`, as texts by name.

    `run` has the overrides. The search chooses the parts that its preset or file sets, and those that are `auto`.

    Raises:
        ConfigError: both fix a part differently; or an override asks for a value that no layout of a search has.
    """
    said = parse_overrides(Run, overrides)
    _check_searched(run, said)
    own = {
        name: f"{value}"
        for name, value in layout_fields(run).items()
        if _has_field(said, FIELDS[name]) and value != "auto"
    }
    for name, value in own.items():
        if only.get(name, value) != value:
            got = f"{name}={only[name]} and {FIELDS[name]}={value}"
            raise ConfigError("--only and an override fix the same part differently", got=got, fix="leave one out")
    return {**own, **only}


def _check_searched(run: Run, said: Mapping[str, Any]) -> None:
    """Refuse an override that a search would drop."""
    for path in _NEVER_SEARCHED:
        section, _, name = path.partition(".")
        value = dict(dict(run)[section])[name]
        is_kept = searched_overlap(run) == value if path == "dispatch.overlap" else not value
        if _has_field(said, path) and not is_kept:
            raise ConfigError(
                f"a search looks at no layout with {path}", got=value, fix="leave it out, or add --layout own"
            )


def _has_field(tree: Mapping[str, Any], path: str) -> bool:
    section, _, name = path.partition(".")
    return name in tree.get(section, {})


class SearchSpace:
    """The layouts that are considered.

    Args:
        neutral: sizes of the request, with one rank for everything.
        run: the run to lay out.
        fixed: texts by the names of a layout.

    Attributes:
        ladder: recomputed modules, from nothing to whole layers.
    """

    def __init__(self, neutral: Sizes, run: Run, fixed: Mapping[str, str]) -> None:
        self._neutral = neutral
        self._run = run
        self._fixed = dict(fixed)
        recompute = fixed.get("recompute", "none")
        modules = () if recompute == "none" else tuple(recompute.split("+"))
        self.ladder = ladder_of(run.model) if "recompute" not in fixed else (modules,)

    def grids(self) -> Iterator[Sizes]:
        """Every grid, least model parallelism first, with a schedule and a dispatch that it may have."""
        world = self._neutral.world
        axes = [self._values(name) for name in GRID]
        wanted = {name: int(self._fixed[name]) for name in ("dp", "edp") if name in self._fixed}
        for tp, cp, pp, ep, etp in product(*axes):
            if max(tp * cp, ep * etp) * pp > world or world % (tp * cp * pp) or world % (ep * etp * pp):
                continue
            schedule, capture = ("1f1b", "none") if pp > 1 else (NO_PIPELINE, self._run.graphs.capture)
            grid = replace(self._neutral, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, schedule=schedule, capture=capture)
            if all((grid.dp, grid.edp)[name == "edp"] == size for name, size in wanted.items()):
                dispatcher, sync_free = self.dispatches(grid)[0]
                yield replace(grid, dispatcher=dispatcher, sync_free=sync_free)

    def size_of_grid(self, grid: Sizes) -> int:
        """Layouts of a grid."""
        return prod(map(len, (self.schedules(grid), self.rows(), self.dispatches(grid), self.ladder)))

    def pipelines(self, grid: Sizes) -> Iterator[Sizes]:
        """A grid with each schedule, stages per rank, and rows of a micro-batch."""
        for (schedule, vpp), rows in product(self.schedules(grid), self.rows()):
            yield replace(grid, schedule=schedule, vpp=vpp, micro_batch=rows)

    def with_dispatches(self, grid: Sizes) -> Iterator[Sizes]:
        """A grid with each dispatcher and sync-free stage."""
        for dispatcher, sync_free in self.dispatches(grid):
            yield replace(grid, dispatcher=dispatcher, sync_free=sync_free)

    def schedules(self, grid: Sizes) -> Sequence[tuple[str, int]]:
        """Schedules, each with stages per rank."""
        if grid.pp == 1:
            return ((NO_PIPELINE, 1),)
        names = (self._fixed["schedule"],) if "schedule" in self._fixed else SEARCHED_SCHEDULES
        most = max(1, (self._neutral.model.layers + 2) // grid.pp)
        found = []
        for name in names:
            shape = SCHEDULES[name]
            stages = range(shape.fewest, (shape.most or min(MOST_STAGES, max(most, shape.fewest))) + 1)
            found += [(name, count) for count in stages if self._fixed.get("vpp", f"{count}") == f"{count}"]
        return found or [(names[0], int(self._fixed["vpp"]))]

    def rows(self) -> Sequence[int]:
        """Rows of a micro-batch."""
        if "micro_batch" in self._fixed:
            return (int(self._fixed["micro_batch"]),)
        return [1 << power for power in range(MOST_MICRO_BATCH.bit_length())]

    def dispatches(self, grid: Sizes) -> Sequence[tuple[str, int]]:
        """Dispatchers, each with a sync-free stage."""
        found = [
            (name, stage)
            for name, stage in _dispatches(grid)
            if self._fixed.get("dispatcher", name) == name
            and self._fixed.get("sync_free_stage", f"{stage}") == f"{stage}"
        ]
        if found:
            return found
        default = _dispatches(grid)[0]
        return [(self._fixed.get("dispatcher", default[0]), int(self._fixed.get("sync_free_stage", f"{default[1]}")))]

    def _values(self, name: str) -> Sequence[int]:
        if name in self._fixed:
            return (int(self._fixed[name]),)
        model, world, node = self._neutral.model, self._neutral.world, self._neutral.node_devices
        sizes = [size for size in range(1, world + 1) if world % size == 0]
        match name:
            case "tp":
                return [size for size in sizes if size <= 2 * node and min(model.head_counts) % size == 0]
            case "cp":
                return [size for size in sizes if size <= MOST_CONTEXT and size & (size - 1) == 0]
            case "pp":
                return [size for size in sizes if size <= model.layers + 2]
            case "ep":
                return [size for size in sizes if model.experts % size == 0] if model.experts else (1,)
        return [size for size in sizes if size <= node and model.expert_width % size == 0] or (1,)


def ladder_of(model: Model) -> tuple[tuple[str, ...], ...]:
    """Modules to recompute, cheapest first, whole layers last."""
    parts = ("norm", "latent-up") if isinstance(model.attention, LatentAttention) else ("norm",)
    if model.moe is None:
        return (), parts, ("layer",)
    return (), ("expert-activation",), ("expert-activation", *parts), ("moe", *parts), ("layer",)


def run_of(run: Run, sizes: Sizes) -> Run:
    """A run with a layout; without offload, and without settings of single layers or stages."""
    is_local = sizes.dispatcher == "local" or sizes.model.pads
    changes = {
        "parallel": {
            "tensor": sizes.tp,
            "context": sizes.cp,
            "pipeline": sizes.pp,
            "expert": sizes.ep,
            "expert_tensor": sizes.etp,
        },
        "dispatch": {
            "method": "auto" if is_local else sizes.dispatcher,
            "sync_free": sizes.sync_free,
            "overlap": sizes.overlap,
        },
        "training": {"micro_batch": sizes.micro_batch, "global_batch": sizes.global_batch},
    }
    update = {name: dict(run)[name].model_copy(update=values) for name, values in changes.items()}
    schedule = {"schedule": sizes.schedule, "stages_per_rank": sizes.vpp} if sizes.pp > 1 else {}
    return run.model_copy(
        update={
            **update,
            "pipeline": Pipeline().model_copy(update=schedule),
            "recompute": Recompute(modules=sizes.recompute),
            "offload": Offload(),
            "graphs": Graphs().model_copy(update={"capture": sizes.capture}),
        }
    )


def with_recompute(sizes: Sizes, modules: tuple[str, ...]) -> Sizes:
    """A layout with recomputation; tokens that are sent twice are not overlapped."""
    is_whole = "moe" in modules or "layer" in modules
    return replace(sizes, recompute=modules, overlap="none" if is_whole else sizes.overlap)


def worse_dispatch(dispatch: Sizes, dispatches: Sequence[tuple[str, int]]) -> tuple[str, str] | None:
    """Rule and reason against a dispatch that is worse than another one of the grid, or None."""
    if len(dispatches) > 1 and dispatch.sync_free == ROOM_FOR_ALL:
        return "room-for-the-worst-case", "costs the same time as stage 2 and needs buffers for the worst case"
    if dispatch.dispatcher == "all-to-all" and any(name == "symmetric" for name, _ in dispatches):
        copies = dispatch.model.top_k * dispatch.etp
        reason = f"inside a node a token goes to each rank once by symmetric, and up to {copies} times by all-to-all"
        return "symmetric-inside-node", reason
    return None


def searched_overlap(run: Run) -> Overlap:
    """The overlap of a search: the run's, unless it interleaves passes."""
    return "none" if run.dispatch.overlap in OVERLAPS_IN_STEPS else run.dispatch.overlap


def _dispatches(grid: Sizes) -> Sequence[tuple[str, int]]:
    """Dispatchers of a grid with their sync-free stages, the usual one first."""
    if grid.expert_ranks == 1 or grid.model.experts == 0:
        return (("local", 0),)
    sent = ("all-to-all", 0)
    if grid.vendor == "cpu":
        return (sent,)
    node_ranks = ranks_on_a_node(grid.expert_ranks, grid.node_devices)
    facts = DispatchFacts(
        method="auto", pads=grid.model.pads, ranks=grid.expert_ranks, node_ranks=node_ranks, expert_tensor=grid.etp
    )
    name = choose_dispatcher(facts).name
    if name == "symmetric":
        return ((name, 2), (name, 0), (name, ROOM_FOR_ALL), sent)
    return ((name, 0), (name, 2), (name, ROOM_FOR_ALL), sent) if name == "hierarchical" else (sent,)
