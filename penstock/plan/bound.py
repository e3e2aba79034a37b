"""A rough step time of a layout from its sizes alone: in which order a search looks, and when it may stop.

Products at the stated share of the peak, tokens on their way, what tensor and context ranks exchange, the ramp of the
pipeline, sums of gradients. Kernels that are bound by memory, launches and waits are left out, so a step takes longer
than this; layouts of one question are off by much the same factor, which the search reads off those that it has
projected.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from penstock.plan.hardware import Cluster, Dtype
from penstock.plan.held_state import PartState
from penstock.plan.rates import BYTES
from penstock.plan.rules.sizes import Sizes
from penstock.plan.transfers import Dispatcher, Transfers, Travel

RAMP: Mapping[str, float] = MappingProxyType(
    {
        "none": 0.0,
        "gpipe": 3.0,
        "1f1b": 3.0,
        "interleaved": 3.0,
        "zb-1f1b": 1.0,
        "zb-v": 1.0,
        "dualpipe-v": 1.0,
        "v-half": 2.43,
        "v-min": 3.29,
    }
)
"""Forwards of one stage that ranks wait for, for each rank but one of the pipeline (docs/schedules.md)."""

AGAIN: Mapping[str, float] = MappingProxyType(
    {"norm": 0.01, "expert-activation": 0.01, "latent-up": 0.05, "moe": 0.6, "layer": 1.0}
)
"""Share of a forward pass that is computed twice; a guess."""

EXCHANGES = 4
"""Of a layer's tokens between tensor-parallel, and between context-parallel, ranks; in each direction of a pass."""


@dataclass(frozen=True)
class Load:
    """What a place on the pipeline does.

    Attributes:
        flops: of a token's forward pass.
        moe: layers with experts.
        layers: all.
    """

    flops: float
    moe: int
    layers: int


class Bound:
    """Rough times of one question.

    Args:
        cluster: where.
        hidden: width of a token.
        dtype: what is computed in.
    """

    def __init__(self, cluster: Cluster, hidden: int, dtype: Dtype) -> None:
        self._cluster = cluster
        self._transfers = Transfers(cluster.hardware)
        peak = cluster.hardware.peaks.flops_per_second(dtype) or cluster.hardware.peaks.bf16
        self._rate = peak * cluster.hardware.efficiency.product
        self._token_bytes = hidden * BYTES[dtype]

    def seconds(self, sizes: Sizes, load: Load, state: PartState) -> float:
        """Of a step.

        Args:
            sizes: the layout.
            load: of the place on the pipeline that has most to do.
            state: of the place that has most.
        """
        tokens = sizes.micro_batch * sizes.sequence_length / (sizes.cp * sizes.tp)
        again = max((AGAIN.get(name, 0.0) for name in sizes.recompute), default=0.0)
        compute = (3 + again) * load.flops * tokens / self._rate
        travel = (4 + 2 * (again >= AGAIN["moe"])) * load.moe * self._way(sizes, tokens)
        exchange = 2 * EXCHANGES * load.layers * self._exchange(sizes, tokens)
        micro_batch = compute + travel + exchange
        ramp = RAMP[sizes.schedule] * (sizes.pp - 1) / (3 * sizes.vpp)
        return (sizes.micro_batches + ramp) * micro_batch + self._update(sizes, state)

    def _way(self, sizes: Sizes, tokens: float) -> float:
        """Of tokens to their experts, or back."""
        if sizes.expert_ranks == 1:
            return 0.0
        travel = Travel(
            tokens=max(1, round(tokens)),
            copy_bytes=self._token_bytes,
            experts=sizes.model.experts,
            top_k=sizes.model.top_k * sizes.etp,
        )
        method: Dispatcher = sizes.dispatcher  # type: ignore[assignment]
        return self._transfers.dispatch(method, "dispatch", travel, self._cluster.group(sizes.expert_ranks)).seconds

    def _exchange(self, sizes: Sizes, tokens: float) -> float:
        found = 0.0
        if sizes.tp > 1:
            whole = tokens * sizes.tp * self._token_bytes
            found += self._transfers.collective("all-gather", whole, self._cluster.group(sizes.tp)).seconds
        if sizes.cp > 1:
            group = self._cluster.group(sizes.cp, sizes.tp)
            found += self._transfers.collective("all-to-all", tokens * self._token_bytes, group).seconds
        return found

    def _update(self, sizes: Sizes, state: PartState) -> float:
        """Sums of gradients, and new weights: as if all were shared like the experts, who have most."""
        group = self._cluster.group(max(1, sizes.edp), sizes.expert_ranks)
        if group.ranks == 1:
            return 0.0
        sums = self._transfers.collective("reduce-scatter", state.gradients, group).seconds
        return sums + self._transfers.collective("all-gather", state.weights, group).seconds


class Promises:
    """How long steps took that were promised to take less.

    Attributes:
        least: of their ratios; 1 before the first.
    """

    def __init__(self) -> None:
        self.least = 1.0
        self._is_new = True

    def note(self, promised: float, seconds: float) -> None:
        """One that is known now."""
        ratio = seconds / promised
        self.least = ratio if self._is_new else min(self.least, ratio)
        self._is_new = False
