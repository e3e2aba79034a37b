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
    """Work and state of divisions of a family; the first axis of every array has an entry for each."""

    family: LayoutSet
    places: np.ndarray  # index in `dense`, `experts`, `shards`, `rows` of the family
    forward: np.ndarray  # seconds of a micro-batch by part, as is `backward`
    backward: np.ndarray
    weight: np.ndarray  # of these, products for weight gradients
    products: np.ndarray  # of these, what `TimeBounds` counts
    again: np.ndarray  # forward seconds that recomputation of each of `_CONTAIN` repeats, by part
    micro_batches: np.ndarray  # of a step
    tokens: np.ndarray  # of a micro-batch on a rank
    state: np.ndarray  # bytes of parameters that stay on the device, by part
    movable: np.ndarray  # bytes that the optimizer can have on the host, by part
    whole: np.ndarray  # bytes of weights that FSDP2 gathers, by part; 0 without it
    launching: np.ndarray  # seconds of the host in a step, by part
    update: np.ndarray  # seconds of the update, by part

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

    `kept` are bytes from forward to backward, that wait for weight gradients, and besides the kept ones at the peaks of
    forward and of backward.
    """

    kept: np.ndarray
    fixed: np.ndarray  # seconds of a forward and a backward pass that do not depend on the tokens
    linear: np.ndarray  # seconds of a token
    launches: np.ndarray  # operators that the host launches, a collective counted twice
    symmetric: float  # bytes of a token in memory that GPUs of a node write into
    batch: float  # bytes of a row of the step's batch


@dataclass(frozen=True)
class Places:
    """Places of a pipeline that may decide, each a row."""

    held: np.ndarray  # parts that a place has in memory
    work: np.ndarray  # parts that it computes, layers of prediction depths too
    before: np.ndarray  # parts of all stages before its first
    numbers: tuple[tuple[int, ...], ...]  # places that may be the fullest: the first, and the last if backward is split
    stages: tuple[tuple[StageContents, ...], ...]  # contents of the stages of such a place


class Scaled(NamedTuple):
    """Divisions with the same experts and closer bounds (`SpaceBounds.scaled`)."""

    divisions: Divisions
    held: np.ndarray  # bytes of a layer by kind, in the ways of `Reference.kept`
    beside: np.ndarray  # bytes of buffers that GPUs of a node write into, and of the step's batch
