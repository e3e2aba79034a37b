"""The runs by which the plan is held against measurements (benchmarks/projection.py).

They differ in what a projection must get right: model, micro-batch, sequence, what is computed twice, kernels, graphs,
and how ranks share the work. The first half was there while the model was made. None of the second half was run before
the model stood, and nothing was changed for it: its errors are what a user has to expect.

Routing is natural, of a router that has not learned yet, on random tokens.
"""

from dataclasses import dataclass
from typing import Literal

from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.tune.trial import first_steps

Chosen = Literal["while the model was made", "after it was frozen"]

MADE: Chosen = "while the model was made"
FROZEN: Chosen = "after it was frozen"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run that is measured and projected.

    Attributes:
        name: of the case and its run.
        target: preset.
        overrides: laid over it.
        processes: ranks, one GPU each, of one machine.
        chosen: when.
    """

    name: str
    target: str
    overrides: tuple[str, ...]
    processes: int
    chosen: Chosen

    def every_override(self, steps: int) -> tuple[str, ...]:
        """What turns the target into the run that is measured."""
        own = ("data.source=synthetic-random", *self.overrides)
        return (*own, *first_steps(load_run(self.target, own), steps))

    def run(self, steps: int) -> Run:
        """The run that is measured, and projected."""
        return load_run(self.target, self.every_override(steps))


def _case(name: str, target: str, batch: str, *overrides: str, processes: int = 1, chosen: Chosen = MADE) -> Case:
    """`batch` is global x micro-batch x positions, such as 8 x 4 x 4096."""
    rows, micro_batch, positions = (int(size) for size in batch.split(" x "))
    sizes = (
        f"training.global_batch={rows}",
        f"training.micro_batch={micro_batch}",
        f"training.sequence_length={positions}",
    )
    return Case(name=name, target=target, overrides=(*sizes, *overrides), processes=processes, chosen=chosen)


QWEN3 = (
    # Qwen3-30B-A3B (its published config.json), but for the norms of its queries and keys.
    "model.hidden_size=2048",
    "model.vocab_size=151936",
    "model.attention.heads=32",
    "model.attention.kv_heads=4",
    "model.attention.rope.theta=1000000.0",
    "model.moe.experts=128",
    "model.moe.moe_intermediate_size=768",
    "model.moe.shared_expert_intermediate_size=0",
    "model.moe.router.norm_topk_prob=true",
)
"""Turns `moe-515b` into a model as wide."""

V3 = (
    # A share of the experts and of the vocabulary, as one rank of many has it.
    "model.dense_layers=1",
    "model.moe.experts=32",
    "model.vocab_size=32768",
)

EP2 = "parallel.expert=2"
PP2 = "parallel.pipeline=2"

CASES = (
    _case("lite-8-layers", "deepseek-v2-lite-8l", "8 x 4 x 4096"),
    _case("lite-4-layers-micro-batch-1", "deepseek-v2-lite-4l", "8 x 1 x 4096"),
    _case(
        "lite-4-layers-micro-batch-8-recomputed", "deepseek-v2-lite-4l", "16 x 8 x 4096", 'recompute.modules=["layer"]'
    ),
    _case("lite-4-layers-torch-kernels", "deepseek-v2-lite-4l", "8 x 2 x 8192", "kernels.all=torch"),
    _case(
        "qwen3-4-layers-selective",
        "moe-515b",
        "8 x 2 x 4096",
        "model.layers=4",
        *QWEN3,
        'recompute.modules=["norm", "expert-activation"]',
    ),
    _case(
        "v3-3-layers-graphs",
        "deepseek-v3",
        "4 x 1 x 4096",
        "model.layers=3",
        "model.mtp_layers=0",
        *V3,
        "graphs.capture=full",
    ),
    _case(
        "lite-14-layers-ep2-all-to-all",
        "deepseek-v2-lite-14l",
        "8 x 2 x 4096",
        EP2,
        "dispatch.method=all-to-all",
        "dispatch.sync_free=1",
        processes=2,
    ),
    _case(
        "lite-14-layers-ep2-symmetric",
        "deepseek-v2-lite-14l",
        "16 x 4 x 4096",
        EP2,
        "dispatch.method=symmetric",
        "dispatch.sync_free=2",
        processes=2,
    ),
    _case("lite-14-layers-pp2-1f1b", "deepseek-v2-lite-14l", "16 x 2 x 4096", PP2, processes=2),
    _case(
        "lite-14-layers-pp2-interleaved",
        "deepseek-v2-lite-14l",
        "8 x 1 x 4096",
        PP2,
        "pipeline.schedule=interleaved",
        "pipeline.stages_per_rank=2",
        processes=2,
    ),
    _case("lite-10-layers-fsdp", "deepseek-v2-lite-10l", "8 x 4 x 4096", "parallel.shard=full", processes=2),
    _case("lite-8-layers-cp2", "deepseek-v2-lite-8l", "4 x 1 x 16384", "parallel.context=2", processes=2),
    # From here on chosen and run after the model was frozen. What three of them had shown went into the model (two were
    # beyond 10 %, gpt-oss was 8 % too fast): so they count as made with it now.
    _case("lite-7-layers-micro-batch-8-of-2048", "deepseek-v2-lite-7l", "16 x 8 x 2048", chosen=FROZEN),
    _case(
        "lite-6-layers-experts-recomputed",
        "deepseek-v2-lite-6l",
        "8 x 4 x 4096",
        'recompute.modules=["moe"]',
        chosen=FROZEN,
    ),
    _case(
        "lite-6-layers-attention-recomputed-16k",
        "deepseek-v2-lite-6l",
        "3 x 1 x 16384",
        'recompute.modules=["attention", "latent-up"]',
        chosen=FROZEN,
    ),
    _case(
        "lite-5-layers-parts-captured", "deepseek-v2-lite-5l", "12 x 2 x 2048", "graphs.capture=partial", chosen=FROZEN
    ),
    _case("qwen3-5-layers-8k", "moe-515b", "6 x 2 x 8192", "model.layers=5", *QWEN3, chosen=FROZEN),
    _case(
        "v3-2-layers-mtp-recomputed",
        "deepseek-v3",
        "6 x 2 x 4096",
        "model.layers=2",
        "model.mtp_layers=1",
        *V3,
        'recompute.modules=["norm", "latent-up", "expert-activation", "shared-expert"]',
        chosen=FROZEN,
    ),
    _case(
        "lite-13-layers-ep2-shared-graphs",
        "deepseek-v2-lite-13l",
        "12 x 2 x 4096",
        EP2,
        "dispatch.method=symmetric",
        "dispatch.sync_free=2",
        "dispatch.overlap=shared",
        "graphs.capture=full",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "lite-15-layers-ep2-all-gather-stage-2",
        "deepseek-v2-lite-15l",
        "8 x 2 x 4096",
        EP2,
        "dispatch.method=all-gather",
        "dispatch.sync_free=2",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "v3-4-layers-ep2-all-to-all",
        "deepseek-v3",
        "8 x 1 x 4096",
        "model.layers=4",
        "model.mtp_layers=0",
        *V3,
        EP2,
        "dispatch.method=all-to-all",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "qwen3-8-layers-ep2-fsdp",
        "moe-515b",
        "8 x 4 x 4096",
        "model.layers=8",
        *QWEN3,
        EP2,
        "parallel.shard=full",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "lite-12-layers-pp2-zb-v",
        "deepseek-v2-lite-12l",
        "12 x 1 x 4096",
        PP2,
        "pipeline.schedule=zb-v",
        "pipeline.stages_per_rank=2",
        processes=2,
        chosen=MADE,
    ),
    _case(
        "lite-16-layers-pp2-1f1b-recomputed",
        "deepseek-v2-lite-16l",
        "16 x 4 x 4096",
        PP2,
        'recompute.modules=["layer"]',
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "lite-10-layers-tp2-ep2",
        "deepseek-v2-lite-10l",
        "8 x 4 x 4096",
        EP2,
        "parallel.tensor=2",
        processes=2,
        chosen=MADE,
    ),
    _case("lite-9-layers-tp2", "deepseek-v2-lite-9l", "8 x 2 x 4096", "parallel.tensor=2", processes=2, chosen=FROZEN),
    _case(
        "lite-12-layers-pp2-zb-1f1b",
        "deepseek-v2-lite-12l",
        "16 x 2 x 4096",
        PP2,
        "pipeline.schedule=zb-1f1b",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "lite-11-layers-cp2-ep2",
        "deepseek-v2-lite-11l",
        "6 x 2 x 8192",
        "parallel.context=2",
        EP2,
        "dispatch.method=all-to-all",
        processes=2,
        chosen=FROZEN,
    ),
    _case(
        "v3-4-layers-ep2-symmetric-recomputed",
        "deepseek-v3",
        "8 x 2 x 4096",
        "model.layers=4",
        "model.mtp_layers=0",
        *V3,
        EP2,
        "dispatch.method=symmetric",
        "dispatch.sync_free=2",
        'recompute.modules=["norm", "latent-up", "expert-activation"]',
        processes=2,
        chosen=FROZEN,
    ),
    *(
        _case(name, target, batch, chosen=chosen)
        for name, target, batch, chosen in (
            ("gpt-oss-4-layers", "gpt-oss-20b-4l", "16 x 4 x 4096", MADE),
            ("mixtral-2-layers", "mixtral-8x7b-2l", "16 x 4 x 4096", FROZEN),
            ("qwen3-8-layers", "qwen3-30b-a3b-8l", "16 x 4 x 4096", FROZEN),
            ("olmoe-8-layers", "olmoe-1b-7b-8l", "16 x 4 x 4096", FROZEN),
            ("llama4-2-layers", "llama4-scout-2l", "8 x 2 x 4096", FROZEN),
        )
    ),
    _case(
        "lite-whole-ep4-symmetric", "deepseek-v2-lite", "16 x 2 x 4096", "parallel.expert=4", processes=4, chosen=FROZEN
    ),
    _case(
        "lite-whole-pp2-ep2-1f1b",
        "deepseek-v2-lite",
        "16 x 2 x 4096",
        PP2,
        EP2,
        "dispatch.method=all-to-all",
        processes=4,
        chosen=FROZEN,
    ),
    _case(
        "lite-whole-ep4-fsdp",
        "deepseek-v2-lite",
        "16 x 4 x 4096",
        "parallel.expert=4",
        "parallel.shard=full",
        processes=4,
        chosen=FROZEN,
    ),
    *(
        _case(
            name,
            target,
            "8 x 2 x 4096",
            "model.mtp_layers=0",
            *overrides,
            # Its gradients of keys went into the model.
            chosen=MADE if name == "glm-5-5-layers" else FROZEN,
        )
        for name, target, *overrides in (
            ("moonlight-6-layers", "moonlight-16b-a3b-6l"),
            ("kimi-k2-3-layers", "kimi-k2-3l", "model.moe.experts=40"),
            ("kimi-linear-8-layers", "kimi-linear-48b-a3b-8l", "model.moe.experts=64"),
            ("glm-4.5-air-5-layers", "glm-4.5-air-5l", "model.moe.experts=64"),
            ("glm-5-5-layers", "glm-5-5l", "model.moe.experts=24"),
            ("deepseek-v3.2-4-layers", "deepseek-v3.2-4l", "model.moe.experts=32"),
            ("ernie-21b-8-layers", "ernie-4.5-21b-a3b-8l"),
            ("minimax-m2-4-layers", "minimax-m2-4l", "model.moe.experts=64"),
            ("qwen3-next-8-layers", "qwen3-next-80b-a3b-8l", "model.moe.experts=128"),
            ("qwen3.5-8-layers", "qwen3.5-35b-a3b-8l", "model.moe.experts=128"),
        )
    ),
)
"""In the order in which they were chosen."""


def named(names: list[str], chosen: str) -> tuple[Case, ...]:
    """Some of the cases.

    Args:
        names: of those that are wanted; empty takes all.
        chosen: only those that were chosen then; empty takes both halves.
    """
    unknown = set(names) - {case.name for case in CASES}
    assert not unknown, f"no such cases: {unknown}"
    return tuple(case for case in CASES if (not names or case.name in names) and chosen in ("", case.chosen))
