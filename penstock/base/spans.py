"""Names of the timed regions, on which planned and measured tables join.

A trace shows them nested, `layer 3` around `attention`, in the order below; penstock/parallel/spans.py opens them.
"""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class Span(StrEnum):
    """A region of a training step, in the order in which a step meets them."""

    STEP = "step"
    DATA = "data"
    ZERO = "zero"
    FORWARD = "forward"
    REPLAY = "replay"
    EMBED = "embed"
    NORM = "norm"
    ATTENTION = "attention"
    RESIDUAL = "residual"
    DENSE = "dense"
    ROUTE = "route"
    SORT = "sort"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"
    SHARED = "shared"
    MTP = "mtp"
    LOSS = "loss"
    BACKWARD = "backward"
    RECOMPUTE = "recompute"
    REDUCE = "reduce"
    CLIP = "clip"
    READ = "read"
    OPTIMIZER = "optimizer"
    BALANCE = "balance"
    EVALUATE = "evaluate"
    SAVE = "save"


NUMBERED_STEP = "step {}"
MICRO_BATCH = "micro-batch {}"  # a forward and a backward pass without a pipeline
LAYER = "layer {}"  # multi-token prediction layers count on after the last decoder layer

ACTIONS: Mapping[str, str] = MappingProxyType(
    {
        "F": "forward of stage {}, micro-batch {}",
        "B": "backward of stage {}, micro-batch {}",
        "I": "input gradient of stage {}, micro-batch {}",
        "W": "weight gradient of stage {}, micro-batch {}",
    }
)
"""What a rank of a pipeline does, by the letter of its kind (penstock/layout/actions.py)."""
