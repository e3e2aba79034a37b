"""Work, state and places of many layouts as arrays: what `penstock.plan.space_bounds` computes with.

Parts of a stage are its layers by kind, the embedding and the head, in the order of `SpaceBounds.parts`.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from penstock.plan.candidates import LayoutSet
from penstock.plan.composed_run import StageContents


@dataclass(frozen=True)
class Divisions:
    """Work and state of divisions of a family; the first axis of every array has an entry for each.

    Attributes:
        places: index in `dense`, `experts`, `shards`, `rows` of the family.
        forward: seconds of a micro-batch by part, as is `backward`.
        again: forward seconds that recomputation of each of `_CONTAIN` repeats, by part.
        micro_batches: of a step.
        tokens: of a micro-batch on a rank.
        state: bytes of parameters that stay on the device, by part.
        movable: bytes that the optimizer can have on the host, by part.
        whole: bytes of weights that FSDP2 gathers, by part; 0 without it.
        launching: seconds of the host in a step, by part.
        update: seconds of the update, by part.
    """

    family: LayoutSet
    places: np.ndarray
    forward: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    micro_batches: np.ndarray
    tokens: np.ndarray
    state: np.ndarray
    movable: np.ndarray
    whole: np.ndarray
    launching: np.ndarray
    update: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def where(self, keep: np.ndarray) -> "Divisions":
        arrays = {name: value[keep] for name, value in vars(self).items() if name != "family"}
        return replace(self, **arrays)

    def legal(self, shape: int) -> np.ndarray:
        dense, _, shard, rows = self.places.T
        return self.family.legal[dense, shard, rows, shape]


@dataclass(frozen=True)
class Reference:
    """What one row on one layout holds of a token, and the seconds that `TimeBounds` leaves out, by kind of layer.

    Attributes:
        kept: bytes from forward to backward, that wait for weight gradients, and besides the kept ones at the peaks of
            forward and of backward.
        fixed: seconds of a forward and a backward pass that do not depend on the tokens.
        linear: seconds of a token.
        launches: operators that the host launches, a collective counted twice.
        symmetric: bytes of a token in memory that GPUs of a node write into.
        batch: bytes of a row of the step's batch.
    """

    kept: np.ndarray
    fixed: np.ndarray
    linear: np.ndarray
    launches: np.ndarray
    symmetric: float
    batch: float


@dataclass(frozen=True)
class Places:
    """Places of a pipeline that may decide, each a row.

    Attributes:
        held: parts that a place has in memory.
        work: parts that it computes, layers of prediction depths too.
        before: parts of all stages before its first.
        numbers: places with these parts that may be the fullest: the first, and the last if backward is split.
        stages: contents of the stages of such a place.
    """

    held: np.ndarray
    work: np.ndarray
    before: np.ndarray
    numbers: tuple[tuple[int, ...], ...]
    stages: tuple[tuple[StageContents, ...], ...]


class Scaled(NamedTuple):
    """Divisions with the same experts and closer bounds (`SpaceBounds.scaled`).

    Attributes:
        held: bytes of a layer by kind, in the ways of `Reference.kept`.
        beside: bytes of buffers that GPUs of a node write into, and of the step's batch.
    """

    divisions: Divisions
    held: np.ndarray
    beside: np.ndarray
