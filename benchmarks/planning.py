"""What the plan says where AMD has published what theirs says: memory on 768 GPUs, bubbles, dispatch, scaling.

    python -m benchmarks.planning --output benchmarks/results/plan-amd.json

Nothing is measured here and no GPU is needed: memory and bubbles are projected by commands that are written beside the
figures, dispatch and scaling by benchmarks/planning_times.py. Sources: "MoE Training Best Practices on AMD GPUs"
(rocm.blogs.amd.com, December 2025; its figures of memory come from the memory projection of Primus), and "Efficient MoE
Pre-training at Scale with TorchTitan" (pytorch.org/blog). What differs and why: docs/plan-published.md.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any

from benchmarks import planning_times, record
from benchmarks.planning_published import projected
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.kernels.tuning import named_device
from penstock.plan.hardware_file import load_hardware
from penstock.plan.memory import RankMemory, memory_of
from penstock.plan.meta_rank import Saving, Target, conventional

MODELS = ("moe-1t", "moe-2t")
WORLD = 768
LAYERS = 96

SAVED_BYTES = {"moe-1t": 76e9, "moe-2t": 131e9}
"""Activations that CP 2 saves on each GPU at PP 24 EP 8, where it halves them."""

FITS = (
    ("moe-1t", "MI300X", (24, 8, 2), True),
    ("moe-1t", "MI355X", (24, 8, 1), True),
    ("moe-2t", "MI300X", (24, 8, 2), False),
    ("moe-2t", "MI300X", (24, 16, 2), True),
    ("moe-2t", "MI355X", (24, 8, 2), True),
)
"""Published: model, chip, ranks of the pipeline, of the experts and of a row, and whether it fits. Those that fit are
the published choices."""

BUBBLES = {1: 0.544, 3: 0.244, 6: 0.145}
"""Measured with so many stages a rank: PP 16, 16 micro-batches, a model of 500 B that is not published."""

_EVEN_STAGES = {1: "Etttttt|(tttttt|)*14ttttttL", 3: "Ett|(tt|)*46ttL", 6: "Et|(t|)*94tL"}
"""96 layers on 16 ranks, the same on each."""


@dataclass(frozen=True)
class Layout:
    """Sizes that the study of memory changes; each layer is a stage."""

    pipeline: int  # ranks, 24 of 4 stages or 48 of 2
    expert: int  # ranks
    context: int  # ranks

    def __str__(self) -> str:
        return f"PP{self.pipeline} EP{self.expert} CP{self.context}"

    @property
    def stages_per_rank(self) -> int:
        """As many as give each a layer."""
        return LAYERS // self.pipeline


LAYOUTS = tuple(Layout(*sizes) for sizes in product((24, 48), (8, 16), (1, 2)))


@dataclass(frozen=True)
class Variant:
    """A way to train a layout, or to count it."""

    name: str
    overrides: tuple[str, ...]  # of the run
    saving: Saving = "run"  # what is kept for backward
    passes_keys: bool = False  # context-parallel ranks keep their own keys only


ROWS_SENT = Variant("all-to-all", ("dispatch.method=all-to-all",))
CONVENTIONAL = Variant("conventional", ROWS_SENT.overrides, "conventional")
AS_PUBLISHED = Variant(
    "as published", (*ROWS_SENT.overrides, 'recompute.modules=["norm"]'), "conventional", passes_keys=True
)
DE_DUPLICATED = Variant("de-duplicated", ("dispatch.method=auto",))
SHARDED = Variant("all-to-all, FSDP", (*ROWS_SENT.overrides, "parallel.shard=full", "parallel.prefetch=0"))

WAYS_IN = ("", "offload.optimizer=true", "parallel.shard=full parallel.prefetch=0")
"""Overrides of our own run of MoE-2T on MI300X, PP 24 EP 16 CP 2: what brings it in, behind what does not."""


def main() -> None:
    options = record.parser(__doc__).parse_args()
    numbers = {
        "charts": [chart_row(model, context) for model in MODELS for context in (1, 2)],
        "fits": [fits_row(*published) for published in FITS],
        "ways_in": [way_in_row(overrides) for overrides in WAYS_IN],
        "bubbles": [bubble_row(stages) for stages in BUBBLES],
        **planning_times.numbers(),
    }
    record.write(options, numbers)


def as_published(model: str, chip: str, layout: Layout) -> str:
    """The command that counts the memory of a layout as the published figures do."""
    sizes = f"pp={layout.pipeline},vpp={layout.stages_per_rank},ep={layout.expert},cp={layout.context}"
    return (
        f"penstock plan {model} --on {WORLD}x{chip} --layout {sizes},recompute=norm --software primus "
        "--saving conventional model.moe.balance.force_load_balance=true"
    )


def chart_row(model: str, context: int) -> dict[str, Any]:
    """Activations with one or two context-parallel ranks."""
    command = as_published(model, "MI300X", Layout(24, 8, context))
    (found,) = projected(command)["candidates"]
    published = SAVED_BYTES[model] * (3 - context)
    return {
        "model": model,
        "context": context,
        "published": published,
        "activations": found["memory"]["activations"],
        "ratio": found["memory"]["activations"] / published,
        "command": command,
    }


def fits_row(model: str, chip: str, sizes: tuple[int, int, int], fits: bool) -> dict[str, Any]:
    """Whether a layout fits a chip, and what is published of it."""
    command = as_published(model, chip, Layout(*sizes))
    (found,) = projected(command)["candidates"]
    return {
        "model": model,
        "chip": chip,
        "layout": str(Layout(*sizes)),
        "published": fits,
        "fits": found["fits"],
        "memory": found["memory"]["total"],
        "capacity": load_hardware(chip).memory.capacity_bytes,
        "command": command,
    }


def way_in_row(overrides: str) -> dict[str, Any]:
    """Memory and speed of our own run of the layout that is the tightest of those published."""
    command = (
        "penstock plan moe-2t --on 768xMI300X --layout pp=24,vpp=4,ep=16,cp=2,dispatcher=all-to-all --imbalance 1 "
        + overrides
    ).strip()
    (found,) = projected(command)["candidates"]
    speed = found["tokens_per_second_per_device"]
    return {"fits": found["fits"], "memory": found["memory"]["total"], "speed": speed, "command": command}


def bubble_row(stages: int) -> dict[str, Any]:
    """Share of the passes that ranks of a pipeline wait, by their formula, by ours, and with a small vocabulary.

    The projected shares are of MoE-1T: the published model is not known. What the output projection adds to the last
    rank shows in what a small vocabulary leaves.
    """
    schedule = "1f1b" if stages == 1 else "interleaved"
    command = (
        "penstock plan moe-1t --on 512xMI300X --layout own --imbalance 1 training.global_batch=512 "
        f"training.micro_batch=1 parallel.pipeline=16 parallel.expert=8 pipeline.schedule={schedule} "
        f"pipeline.stages_per_rank={stages} 'pipeline.layout={_EVEN_STAGES[stages]}' 'recompute.modules=[\"layer\"]'"
    )
    whole, small = (projected(one)["candidates"][0]["bubble"] for one in (command, f"{command} model.vocab_size=1024"))
    return {
        "stages": stages,
        "published": BUBBLES[stages],
        "formula": 15 / (15 + 16 * stages),
        "projected": whole,
        "small_vocabulary": small,
        "command": command,
    }


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
    device = named_device("MI300X", "bf16")
    passes_keys = variant.passes_keys
    return Target(device=device, imbalance=1.0, saving=variant.saving, passes_keys=passes_keys)


@cache
def memory(model: str, layout: Layout, variant: Variant = ROWS_SENT, *, last: bool = False) -> RankMemory:
    """Of the first rank of the pipeline, whose micro-batches wait longest, or of the last, which has the logits."""
    run = run_of(model, layout, variant)
    rank = WORLD - WORLD // layout.pipeline if last else 0
    return memory_of(run, world=WORLD, rank=rank, target=target_of(variant))


memory_of_the_last = partial(memory, last=True)


def usable_bytes(chip: str) -> int:
    """Of a device, for tensors."""
    return load_hardware(chip).usable_bytes


if __name__ == "__main__":
    main()
