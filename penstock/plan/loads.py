"""Recorded loads of experts, in the place of one assumed imbalance (`penstock plan --routing metrics.jsonl`).

Some lines of metrics.jsonl list how many slots chose each expert of each layer. From these follow the rows of each rank
for any number of ranks that share the experts, and with replicas of experts (`dispatch.balance`) by the plan that the
ranks themselves make (penstock/kernels/replica_plan.py). A layer's time is that of its fullest rank, so the imbalance
in time is the mean over layers, and over steps, of the fullest rank's rows over the even share.

The slots are those of a whole step. A micro-batch alone is less even, so recorded loads say at least how uneven it is.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import msgspec

from penstock.base.errors import RunFolderError
from penstock.config.run import Run
from penstock.kernels.replica_plan import ReplicaRule, group_loads, place_replicas
from penstock.parallel.replicas import replica_rule

METRICS = "metrics.jsonl"
USUAL = 0.5  # share of the lines, the last part, that count: routing settles in the first steps


@dataclass(frozen=True, kw_only=True)
class RankLoads:
    """Loads of the ranks that share experts, as means over layers and recorded steps."""

    fullest: float  # rows of each layer's fullest rank over the even share
    most: float  # rows of one rank over its even share, of the rank whose mean over layers is highest
    replicas: float = 0.0  # of a layer, on all ranks
    busiest: float = 0.0  # replicas that one rank sends or receives, the most of a layer


@dataclass(frozen=True, eq=False)
class RecordedLoads:
    """Slots of each expert, by recorded step and layer."""

    path: str
    steps_LE: tuple[tuple[tuple[int, ...], ...], ...]
    _known: dict[tuple[int, ReplicaRule | None, int], RankLoads] = field(default_factory=dict, repr=False)

    @property
    def layers(self) -> int:
        return len(self.steps_LE[0])

    @property
    def experts(self) -> int:
        return len(self.steps_LE[0][0])

    def of(self, run: Run) -> RankLoads:
        """Loads of the ranks of a run, with its replicas. Raises a RunFolderError if it has other experts."""
        moe, parallel = run.model.moe, run.parallel
        if moe is None or moe.balance.force_load_balance or parallel.expert == 1:
            return RankLoads(fullest=1.0, most=1.0)
        if moe.experts != self.experts:
            raise RunFolderError(
                f"{self.path} has loads of other experts than the model", got=self.experts, allowed=moe.experts
            )
        tokens = run.training.micro_batch * run.training.sequence_length // (parallel.context * parallel.tensor)
        rows = tokens * moe.top_k * parallel.expert * parallel.expert_tensor  # of a pass, on all ranks of a layer
        key = (parallel.expert, replica_rule(moe.experts, parallel.expert, run.dispatch), rows)
        if key not in self._known:
            self._known[key] = self._ranks(*key)
        return self._known[key]

    def _ranks(self, ranks: int, rule: ReplicaRule | None, rows: int) -> RankLoads:
        counts = [[_scaled(slots_E, rows) for slots_E in layers_E] for layers_E in self.steps_LE]
        plain = ReplicaRule(experts=self.experts, groups=ranks, slots=0)
        loads = [[group_loads(layer, plain) for layer in layers] for layers in counts]
        replicas, busiest = [0], [0]
        if rule is not None:
            placed = [[place_replicas(layer, rule)[0] for layer in layers] for layers in counts]
            each = [layer for layers in placed for layer in layers]
            replicas = [sum(map(len, placement.replicas)) for placement in each]
            busiest = [max(placement.most_slots, _most_sent(placement.replicas, rule)) for placement in each]
            loads = [[layer.loads for layer in layers] for layers in placed]
        mean = rows / ranks
        return RankLoads(
            fullest=fmean(max(layer) for layers in loads for layer in layers) / mean,
            most=fmean(max(map(fmean, zip(*layers, strict=True))) for layers in loads) / mean,
            replicas=fmean(replicas),
            busiest=fmean(busiest),
        )


Imbalance = float | RecordedLoads  # rows of each layer's fullest rank over the even share: assumed, or recorded


def read_loads(path: Path) -> RecordedLoads:
    """The loads of a run, from its folder or its metrics.jsonl; the last half of the lines that list them.

    Raises a RunFolderError if the file cannot be read or lists no loads.
    """
    file = path / METRICS if path.is_dir() else path
    try:
        rows = [row for row in file.read_bytes().splitlines() if b'"slots": [' in row]
    except OSError as error:
        raise RunFolderError(f"cannot read {file}", got=error.strerror or error) from error
    rows = rows[int(len(rows) * USUAL) :]
    try:
        lines = [msgspec.json.decode(row) for row in rows]
        steps = tuple(tuple(map(_slots, line["layers"])) for line in lines)
    except (ValueError, KeyError, TypeError) as error:
        raise RunFolderError(f"{file} has a line that is no line of metrics", got=error) from error
    shapes = {(len(step), len(slots)) for step in steps for slots in step}
    if len(shapes) != 1 or not all(steps):
        raise RunFolderError(
            f"{file} lists no loads of experts", fix="record them: penstock train writes them in steps 1, 2, 4, 8, ..."
        )
    return RecordedLoads(f"{file}", steps)


def _slots(layer: dict[str, Any]) -> tuple[int, ...]:
    slots = tuple(map(int, layer["slots"]))
    if not slots or min(slots) < 0 or not sum(slots):
        raise ValueError(f"layer {layer['layer']} has no slots")
    return slots


def _scaled(slots_E: Sequence[int], rows: int) -> list[int]:
    """Slots in proportion, `rows` together: the first experts get what rounding leaves."""
    total = sum(slots_E)
    scaled = [slots * rows // total for slots in slots_E]
    for expert in range(rows - sum(scaled)):
        scaled[expert] += 1
    return scaled


def _most_sent(replicas: Sequence[Sequence[tuple[int, int]]], rule: ReplicaRule) -> int:
    homes = [expert // rule.per_group for held in replicas for expert, _ in held]
    return max(map(partial(list.count, homes), range(rule.groups)), default=0)
