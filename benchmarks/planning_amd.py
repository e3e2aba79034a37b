"""What AMD has published of plans and runs of large models, and the arithmetic behind it as far as it is known.

Memory: "MoE Training Best Practices on AMD GPUs" (rocm.blogs.amd.com, December 2025), section on models of 1 T and
more. Its figures come from the memory projection of Primus. What a parameter costs there is in its source code; the
activations below are a fit of ours, which meets both published figures, to what the code counts for a layer of experts.

Dispatch: the same article. Scaling: "Efficient MoE Pre-training at Scale with TorchTitan" (pytorch.org/blog).
"""

from dataclasses import dataclass

from penstock.config.model import GroupedQueryAttention
from penstock.config.run import Run

WORLD = 768
LAYERS = 96


@dataclass(frozen=True)
class Layout:
    """Sizes that the study of memory changes; each layer is a stage.

    Attributes:
        pipeline: ranks, 24 of 4 stages or 48 of 2.
        expert: ranks.
        context: ranks.
    """

    pipeline: int
    expert: int
    context: int

    def __str__(self) -> str:
        return f"PP{self.pipeline} EP{self.expert} CP{self.context}"

    @property
    def stages_per_rank(self) -> int:
        """As many as give each a layer."""
        return LAYERS // self.pipeline


SAVED_BYTES = {"moe-1t": 76e9, "moe-2t": 131e9}
"""Activations that CP 2 saves on each GPU, at PP 24."""

CHOICES = {
    ("moe-1t", "MI300X"): Layout(24, 8, 2),
    ("moe-1t", "MI355X"): Layout(24, 8, 1),
    ("moe-2t", "MI300X"): Layout(24, 16, 2),
    ("moe-2t", "MI355X"): Layout(24, 8, 2),
}
"""The best layout of each model on each chip."""

DISPATCH_GAIN = (1.05, 7.66)
"""DeepEP over all-to-all, end to end: the least and the most at EP 8 to 64, MoE-2T on 1,024 MI300X."""

SCALING = (0.96, 0.97)
"""Efficiency of DeepSeek-V3 from 128 to 1,024 MI325X, PP 8, EP 8, VPP 4."""


def state_bytes(run: Run, layout: Layout) -> float:
    """Their bytes of a parameter, times those of the first rank of the pipeline.

    bfloat16 weight and gradient; float32 moments and 2 bytes more for the master, over the ranks that hold the same
    experts. Ours sum gradients in float32, and a master is 4 bytes.
    """
    copies = WORLD / (layout.pipeline * layout.expert)
    return _parameters(run, layout) * (4 + 10 / copies)


def activation_bytes(run: Run, layout: Layout) -> float:
    """Of the first rank of the pipeline: layers in flight, times what they keep, times tokens, in bfloat16.

    In flight are PP x VPP layers, and PP more, and the embedding's output of as many micro-batches as that makes.
    """
    in_flight = layout.pipeline * (layout.stages_per_rank + 1)
    tokens = run.training.sequence_length // layout.context
    embedding = in_flight / layout.stages_per_rank * run.model.hidden_size
    return 2.0 * tokens * (in_flight * sum(kept_numbers(run).values()) + embedding)


def kept_numbers(run: Run) -> dict[str, int]:
    """Numbers that a layer keeps of a token.

    Queries, keys, values, the result of attention and, for its softmax, as much as the queries; for each choice and for
    the shared expert D + 3 F. Their code counts norms, residual sums and the router's input too; with those the figures
    come out 30 % (1 T) and 17 % (2 T) larger than published.
    """
    model, moe, attention = run.model, run.model.moe, run.model.attention
    assert moe is not None and isinstance(attention, GroupedQueryAttention), "one of the proxies"
    row = model.hidden_size + 3 * moe.moe_intermediate_size
    heads = 2 * (attention.heads + attention.kv_heads) * attention.head_dim
    return {"attention": heads + model.hidden_size, "experts": moe.top_k * row, "shared expert": row}


def _parameters(run: Run, layout: Layout) -> int:
    """Layers of a rank and the embedding; norms are too few to matter."""
    model, moe, attention = run.model, run.model.moe, run.model.attention
    assert moe is not None and isinstance(attention, GroupedQueryAttention), "one of the proxies"
    expert = 3 * model.hidden_size * moe.moe_intermediate_size
    heads = 2 * model.hidden_size * attention.head_dim * (attention.heads + attention.kv_heads)
    layer = heads + model.hidden_size * moe.experts + expert * (moe.experts // layout.expert + 1)
    return layout.stages_per_rank * layer + model.vocab_size * model.hidden_size
