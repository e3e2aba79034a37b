"""What the plan says where AMD has published what theirs says: memory on 768 GPUs, dispatch on 1,024, scaling to 1,024.

    python -m benchmarks.planning --output benchmarks/results/plan-amd.json

Nothing is measured here and no GPU is needed: all figures are projections, by the plan itself, of runs that are said in
full. Routing is even, as in the published figures. Sources: benchmarks/planning_amd.py; what differs and why:
docs/plan-published.md.
"""

import argparse
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from benchmarks import planning_amd as published
from benchmarks import planning_times, record
from benchmarks.planning_amd import WORLD, Layout
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels.device_facts import named_device
from penstock.models.rank_model import embedding_places
from penstock.parallel.axes import make_axes
from penstock.parallel.launch.rendezvous import start_fake_process_group, stop_process_group
from penstock.plan.hardware import cluster_of
from penstock.plan.hardware_file import load_hardware
from penstock.plan.memory import RankMemory, fullest_rank, memory_of, ranks_that_differ
from penstock.plan.meta_rank import Saving, Target, conventional, make_meta_rank
from penstock.plan.meta_run import activations_of

MODELS = ("moe-1t", "moe-2t")
CHIPS = ("MI300X", "MI355X")
LAYOUTS = tuple(Layout(*sizes) for sizes in product((24, 48), (8, 16), (1, 2)))


@dataclass(frozen=True)
class Variant:
    """A way to train a layout, or to count it.

    Attributes:
        overrides: of the run.
        saving: what is kept for backward.
    """

    name: str
    overrides: tuple[str, ...]
    saving: Saving = "run"


ROWS_SENT = Variant("all-to-all", ("dispatch.method=all-to-all",))
CONVENTIONAL = Variant("conventional", ("dispatch.method=all-to-all",), "conventional")
DE_DUPLICATED = Variant("de-duplicated", ("dispatch.method=auto",))
SHARDED = Variant("all-to-all, FSDP", ("dispatch.method=all-to-all", "parallel.shard=full", "parallel.prefetch=0"))
VARIANTS = (ROWS_SENT, CONVENTIONAL, DE_DUPLICATED, SHARDED)

WAYS_IN = (
    (Layout(24, 16, 2), ROWS_SENT),
    (Layout(24, 16, 2), Variant("all-to-all, optimizer on the host", (*ROWS_SENT.overrides, "offload.optimizer=true"))),
    (Layout(24, 16, 2), SHARDED),
    (Layout(24, 8, 2), Variant("de-duplicated, FSDP", ("parallel.shard=full",))),
)
"""What brings MoE-2T into an MI300X without recompute, behind what does not."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    numbers = {
        "memory": [memory_row(*sizes) for sizes in product(MODELS, LAYOUTS, VARIANTS)],
        "published_memory": [published_row(*sizes) for sizes in product(MODELS, LAYOUTS)],
        "saved": [saved_row(*sizes) for sizes in product(MODELS, VARIANTS)],
        "kept": [{"model": model, **kept(model, variant)} for model in MODELS for variant in VARIANTS[:3]],
        "published_kept": {model: published.kept_numbers(load_run(model, [])) for model in MODELS},
        "fits": [fits_row(*sizes) for sizes in product(MODELS, CHIPS, VARIANTS)],
        "speed": [speed_row(*sizes) for sizes in product(MODELS, CHIPS, LAYOUTS, (ROWS_SENT, DE_DUPLICATED))],
        "ways_in": [speed_row("moe-2t", "MI300X", *way) for way in WAYS_IN],
        **planning_times.numbers(),
    }
    record.write(options, numbers)


def run_of(model: str, layout: Layout, variant: Variant) -> Run:
    """The run that a variant of a layout is."""
    sizes = [
        f"parallel.pipeline={layout.pipeline}",
        "pipeline.schedule=interleaved",
        f"pipeline.stages_per_rank={layout.stages_per_rank}",
        f"parallel.expert={layout.expert}",
        f"parallel.context={layout.context}",
    ]
    run = load_run(model, [*sizes, *variant.overrides])
    return run if variant.saving == "run" else conventional(run)


def target_of(variant: Variant) -> Target:
    """One chip stands for all, whose kernels keep the same."""
    return Target(device=named_device("MI300X", "bf16"), imbalance=1.0, saving=variant.saving)


@cache
def memory(model: str, layout: Layout, variant: Variant = ROWS_SENT) -> RankMemory:
    """Of the first rank of the pipeline, whose micro-batches wait longest.

    Args:
        model: preset.
        layout: of its ranks.
        variant: how it is trained and counted.
    """
    return memory_of(run_of(model, layout, variant), world=WORLD, rank=0, target=target_of(variant))


@cache
def memory_of_the_last(model: str, layout: Layout, variant: Variant = ROWS_SENT) -> RankMemory:
    """The same of the last rank, which has the logits."""
    run = run_of(model, layout, variant)
    return memory_of(run, world=WORLD, rank=ranks_that_differ(run, WORLD)[-1], target=target_of(variant))


def usable_bytes(chip: str) -> int:
    """Of a device, for tensors."""
    return load_hardware(chip).usable_bytes


def memory_row(model: str, layout: Layout, variant: Variant) -> dict[str, Any]:
    """Bytes of the rank that needs most."""
    found = fullest_rank((memory(model, layout, variant), memory_of_the_last(model, layout, variant)))
    names = ("parameters", "gradients", "master", "moments", "gathered", "activations", "buffers", "logits", "total")
    sizes = {name: getattr(found, name) for name in names}
    return {"model": model, "layout": str(layout), "variant": variant.name, "rank": found.rank, **sizes}


def published_row(model: str, layout: Layout) -> dict[str, Any]:
    """The same by AMD's arithmetic, as far as it is known."""
    run = load_run(model, [])
    state, kept = published.state_bytes(run, layout), published.activation_bytes(run, layout)
    return {"model": model, "layout": str(layout), "state": state, "activations": kept, "total": state + kept}


def saved_row(model: str, variant: Variant) -> dict[str, Any]:
    """What a second context-parallel rank saves."""
    one, two = (memory(model, Layout(24, 8, context), variant) for context in (1, 2))
    return {
        "model": model,
        "variant": variant.name,
        "activations": [one.activations, two.activations],
        "saved": one.activations - two.activations,
        "published": published.SAVED_BYTES[model],
    }


def fits_row(model: str, chip: str, variant: Variant) -> dict[str, Any]:
    """Layouts that fit on a chip, and by how much the published choice does or does not."""
    usable, choice = usable_bytes(chip), published.CHOICES[model, chip]
    sizes = {str(layout): memory(model, layout, variant).total for layout in LAYOUTS}
    return {
        "model": model,
        "chip": chip,
        "variant": variant.name,
        "usable": usable,
        "fits": [name for name, size in sizes.items() if size <= usable],
        "published_choice": str(choice),
        "room": usable - sizes[str(choice)],
        "room_with_bf16_gradients": usable - sizes[str(choice)] + memory(model, choice, variant).gradients // 2,
    }


def speed_row(model: str, chip: str, layout: Layout, variant: Variant) -> dict[str, Any]:
    """How fast a layout is, whether or not it fits."""
    cluster = cluster_of(WORLD, load_hardware(chip))
    found = planning_times.speed_row(run_of(model, layout, variant), cluster)
    return {"model": model, "chip": chip, "layout": str(layout), "variant": variant.name, **found}


def kept(model: str, variant: Variant) -> dict[str, Any]:
    """Numbers of two bytes that a layer keeps of a token, by part; of a stage in the middle of the model."""
    run = run_of(model, Layout(24, 8, 1), variant)
    start_fake_process_group(WORLD // 2, WORLD)
    try:
        target = target_of(variant)
        axes = make_axes(grid_of(run, WORLD), embedding_places(run), run.parallel.shard_size, target.ranks_per_node)
        stage = activations_of(make_meta_rank(run, axes, target))[0]
    finally:
        stop_process_group()
    return {"variant": variant.name, "numbers": _by_part(stage.kept, 2 * run.training.sequence_length)}


def _by_part(sizes: Mapping[str, int], unit: int) -> dict[str, int]:
    """In parts that other plans have too."""
    parts: Counter[str] = Counter()
    for name, size in sizes.items():
        parts[next((part for start, part in _PARTS if name.startswith(start)), "other")] += size
    return {part: round(size / unit) for part, size in sorted(parts.items())}


_PARTS = (
    ("attention_norm", "norms and residual sums"),
    ("residual", "norms and residual sums"),
    ("message", "norms and residual sums"),
    ("attention", "attention"),
    ("ffn.shared", "shared expert"),
    ("ffn.router", "router"),
    ("ffn.", "experts"),
)
"""Beginnings of modules' names, and what they count as."""


if __name__ == "__main__":
    main()
