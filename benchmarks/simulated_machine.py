"""A machine that is not there: projections with hidden wrong coefficients and noise, for tests of the search.

Every term of a candidate's projection takes a hidden factor, and so does each candidate by itself and the machine as a
whole. Faults are injected by the key of a candidate.
"""

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product

from penstock.tune.belief import TERMS, TrialCandidate
from penstock.tune.search_loop import Kind, TrialLimits, TrialResult


def random_candidates(rng: random.Random) -> list[TrialCandidate]:
    """Candidates of a made-up run: layouts that trade the terms of the step against each other, and memory."""
    experts, attention, sent, host, update = (rng.uniform(low, 1.0) for low in (0.5, 0.1, 0.05, 0.02, 0.05))
    found = []
    for ep, rows, recompute, stage in product((1, 2, 4, 8), (1, 2, 4), ("none", "layer"), (0, 2)):
        again = 1.0 if recompute == "none" else 1.28
        terms = {
            "products": experts * again * (1 + 0.3 / rows),
            "attention": attention * again,
            "dispatch": sent * (1 - 1 / ep) * again * (1.3 if stage else 1.0),
            "host": host * (1.0 if stage else 1.6) * again / rows,
            "update": update / ep + 0.02,
        }
        kept = rows * (1.0 if recompute == "none" else 0.35)
        overrides = (f"parallel.expert={ep}", f"training.micro_batch={rows}", f"recompute.modules={recompute}")
        memory = 30e9 / ep + 14e9 * kept + (4e9 if stage else 0.0)
        found.append(
            TrialCandidate(overrides=(*overrides, f"dispatch.sync_free={stage}"), terms=terms, memory_bytes=memory)
        )
    first = next(one for one in found if "parallel.expert=1" in one.overrides and "layer" in one.key)
    return [replace(first, overrides=(), source="reference"), *(one for one in found if one is not first)]


@dataclass
class SimulatedMachine:
    """`Trials` of a hidden truth; `faults` are kinds by key, and `asked` the keys that were run."""

    candidates: list[TrialCandidate]
    rng: random.Random
    capacity_bytes: float = math.inf
    noise: float = 0.01
    faults: Mapping[str, Kind] = field(default_factory=dict)
    steps: int = 8
    start_seconds: float = 10.0
    asked: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        scale = math.exp(self.rng.gauss(0, 0.4))
        self._scale, self._factors = scale, {name: scale * math.exp(self.rng.gauss(0, 0.25)) for name in TERMS}
        self._seconds = {one.key: self._sum(one.terms) * math.exp(self.rng.gauss(0, 0.02)) for one in self.candidates}
        self._memory = {one.key: one.memory_bytes * math.exp(self.rng.gauss(0, 0.02)) for one in self.candidates}

    def _sum(self, terms: Mapping[str, float]) -> float:
        """The true seconds of a step with these terms, but for the candidate's own factor."""
        return sum(self._factors.get(name, self._scale) * seconds for name, seconds in terms.items())

    def seconds(self, key: str) -> float:
        """The true step time; infinite if it does not fit or has a fault."""
        fits = self._memory[key] <= self.capacity_bytes
        return self._seconds[key] if fits and key not in self.faults else math.inf

    @property
    def best(self) -> float:
        """The true step time of the best candidate."""
        return min(map(self.seconds, self._seconds))

    def run(self, candidate: TrialCandidate, limits: TrialLimits) -> TrialResult:
        """Measure with noise, or fail."""
        key = candidate.key
        self.asked.append(key)
        kind = self.faults.get(key) or ("ran" if self._memory[key] <= self.capacity_bytes else "out of memory")
        step = self._seconds[key]
        if candidate.short is not None:
            step *= self._sum(candidate.short.terms) / self._sum(candidate.terms)
        count = 3 if step > 1.1 * limits.most_seconds or limits.most_steps < self.steps else self.steps
        losses = tuple(5.0 - 0.1 * place for place in range(count))
        times = tuple(step * math.exp(self.rng.gauss(0, self.noise)) for _ in range(count))
        peak = int(self._memory[key] - candidate.more_bytes)
        ran = TrialResult(
            step_seconds=times, observed_seconds=step, losses=losses, peak_memory_bytes=peak,
            seconds=self.start_seconds + count * step, was_stopped=count < self.steps,
        )  # fmt: skip
        # The loop has to find out about these three by itself.
        if kind == "not finite":
            return replace(ran, losses=(*losses[:-1], math.nan))
        if kind == "another loss":
            return replace(ran, losses=tuple(1.05 * loss for loss in losses))
        if kind == "lying clock":
            return replace(ran, step_seconds=tuple(one / 10 for one in times))
        return ran if kind == "ran" else TrialResult(kind=kind, reason=f"made-up {kind}", seconds=20.0)
