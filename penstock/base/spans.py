"""Names of the timed regions, said once: planned and measured tables join on them."""

from enum import StrEnum


class Span(StrEnum):
    """A region of a training step, in the order in which a step meets them."""

    STEP = "step"
    DATA = "data"
    FORWARD = "forward"
    EMBED = "embed"
    NORM = "norm"
    ATTENTION = "attention"
    DENSE = "dense"
    ROUTE = "route"
    DISPATCH = "dispatch"
    EXPERTS = "experts"
    COMBINE = "combine"
    SHARED = "shared"
    MTP = "mtp"
    LOSS = "loss"
    BACKWARD = "backward"
    CLIP = "clip"
    OPTIMIZER = "optimizer"
    BALANCE = "balance"
    EVALUATE = "evaluate"
    SAVE = "save"
