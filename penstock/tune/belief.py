"""What measured trials say about the step times of all candidates: the planner's projection, corrected.

The projection of a candidate is a sum of terms. Each term may be off by a factor that all candidates share, and each
candidate by a factor of its own that it shares in part with its neighbours, the candidates with few other choices:

    log(measured / projected) = scale + sum over terms of share x correction + own + noise

All of these are Gaussian with mean 0, so the step time of a candidate after some trials is a Gaussian too (in
logarithms), and exact: a small system of equations. How far projections are off on this machine is not known before
it is measured; `SPREADS` are tried and the likeliest counts. `expected_gain` is the mean of how much faster than the
best a candidate is, where it is faster.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

TERMS = ("products", "attention", "dispatch", "host", "update")
"""Terms of a projection that have a correction of their own; what is left is only scaled."""

_TERM_OF: Mapping[str, str] = {
    "attention": "attention",
    "dispatch": "dispatch",
    "exchange": "dispatch",
    "host": "host",
    "host link": "host",
    "optimizer": "update",
    "gradients": "update",
    "weights": "update",
    "bubble": "bubble",
}
"""Of the planner's terms; others are products and what is computed beside them."""

SCALE, CORRECTION, OWN = 0.5, 0.25, 0.03
"""Standard deviations of the machine's factor, of a term's, and of a candidate's own, at a spread of 1."""

SPREADS = (0.7, 1.0, 1.4, 2.0, 4.0)  # factors of `CORRECTION` and `OWN` that are tried

SMALL_SPREAD, SMALL_FROM = 0.35, 5
"""A factor of `OWN` alone that is tried too, from so many trials on: fewer that agree by chance are no proof of it."""

NEAR = 3.0  # choices in which a neighbour differs until it shares a third of a candidate's own factor
LEAST_NOISE = 0.004  # standard deviation of a measured step time between two trials of one configuration, at least
CONFIDENT = 1.645  # standard deviations to the bound that a Gaussian is above with 95 %


@dataclass(frozen=True, kw_only=True)
class ShortStep:
    """The step of a candidate's trials, where the whole step is too long: fewer rows, all else as it is."""

    rows: int  # of the step over all ranks
    terms: Mapping[str, float]  # projected seconds by term; they add up to the short step
    memory_bytes: float = 0.0  # projected, of the fullest rank


@dataclass(frozen=True, kw_only=True)
class TrialCandidate:
    """A configuration that may be tried."""

    overrides: tuple[str, ...]  # changes of the reference run, `a.b=c`; none for the reference itself
    terms: Mapping[str, float]  # projected seconds by term; they add up to the step
    memory_bytes: float = 0.0  # projected, of the fullest rank
    source: str = "plan"  # or `reference`, `change`, `free`, `without` a change, or a rule of the doctor
    batches: float = 1.0  # tokens of its step over those of a step of the reference
    short: ShortStep | None = None  # what its trials measure in the place of the step; None: the step itself

    @property
    def key(self) -> str:
        return " ".join(sorted(self.overrides))

    @property
    def projected(self) -> float:
        """Seconds for the tokens of a step of the reference."""
        return sum(self.terms.values()) / self.batches

    @property
    def stretch(self) -> float:
        """The step over the short step, both projected: by this a measured short step becomes a whole one.

        Work of each micro-batch grows with their number, work of each step (update, gradient sums, host) does not,
        and the pipeline's bubble is that of each schedule.
        """
        return 1.0 if self.short is None else sum(self.terms.values()) / sum(self.short.terms.values())

    @property
    def more_bytes(self) -> float:
        """Projected memory that the step needs beyond the short step."""
        return 0.0 if self.short is None else self.memory_bytes - self.short.memory_bytes

    @property
    def choices(self) -> dict[str, str]:
        return dict(override.split("=", 1) for override in self.overrides)


def grouped_terms(terms: Mapping[str, float]) -> dict[str, float]:
    """The planner's terms of a rank, added up to those that are corrected."""
    sums: dict[str, float] = {}
    for name, seconds in terms.items():
        term = _TERM_OF.get(name, "products")
        sums[term] = sums.get(term, 0.0) + seconds
    return sums


@dataclass(frozen=True, kw_only=True)
class StepEstimate:
    """Seconds of a candidate: the median, and the standard deviation of its logarithm."""

    seconds: float
    deviation: float

    @property
    def least(self) -> float:
        """Seconds that it takes at least, with 95 % confidence."""
        return self.seconds * math.exp(-CONFIDENT * self.deviation)

    def expected_gain(self, best: float) -> float:
        """Mean share by which it is faster than `best` seconds, 0 where it is slower."""
        ahead, spread = math.log(best / self.seconds), max(self.deviation, 1e-9)
        z = ahead / spread
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        return ahead * 0.5 * math.erfc(-z / math.sqrt(2)) + spread * density


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A measured candidate: seconds for the tokens of a step of the reference, and their relative standard error."""

    candidate: TrialCandidate
    seconds: float
    error: float = 0.0


@dataclass
class Belief:
    """Estimates of all candidates after the trials so far."""

    candidates: Sequence[TrialCandidate]
    measured: Sequence[Measured] = field(default_factory=list)

    def estimates(self) -> list[StepEstimate]:
        """An estimate of each candidate, in their order."""
        prior = np.log([candidate.projected for candidate in self.candidates])
        if not self.measured:
            sure = math.hypot(SCALE, CORRECTION)
            return [StepEstimate(seconds=math.exp(mean), deviation=sure) for mean in prior]
        seen = [point.candidate for point in self.measured]
        away = np.log([point.seconds / point.candidate.projected for point in self.measured])
        noise = np.array([math.hypot(LEAST_NOISE, point.error) for point in self.measured]) ** 2
        spreads = (SMALL_SPREAD, *SPREADS) if len(seen) >= SMALL_FROM else SPREADS
        spread = max(spreads, key=lambda value: _likelihood(_covariance(seen, seen, value) + np.diag(noise), away))
        inverse = np.linalg.inv(_covariance(seen, seen, spread) + np.diag(noise))
        across = _covariance(self.candidates, seen, spread)
        means = prior + across @ inverse @ away
        diagonal = np.array([_covariance([candidate], [candidate], spread)[0, 0] for candidate in self.candidates])
        variances = np.maximum(diagonal - np.einsum("ij,jk,ik->i", across, inverse, across), 0.0)
        return [
            StepEstimate(seconds=math.exp(mean), deviation=math.sqrt(variance))
            for mean, variance in zip(means, variances, strict=True)
        ]


def _covariance(left: Sequence[TrialCandidate], right: Sequence[TrialCandidate], spread: float) -> Array:
    """Of the logarithms of the factors by which projections are off, between two lists of candidates."""
    terms = (CORRECTION * max(spread, SPREADS[0])) ** 2 * (_shares(left) @ _shares(right).T)
    ours, theirs = [candidate.choices for candidate in left], [candidate.choices for candidate in right]
    apart = np.array([[_apart(a, b) for b in theirs] for a in ours], float)
    return SCALE**2 + terms + (OWN * spread) ** 2 * np.exp(-apart / NEAR)


def _apart(left: Mapping[str, str], right: Mapping[str, str]) -> float:
    """Choices in which two candidates differ; a micro-batch counts twice, because it is of all products and kernels."""
    fields = [name for name in {**left, **right} if left.get(name) != right.get(name)]
    return len(fields) + float("training.micro_batch" in fields)


def _shares(candidates: Sequence[TrialCandidate]) -> Array:
    return np.array(
        [[candidate.terms.get(name, 0.0) / sum(candidate.terms.values()) for name in TERMS] for candidate in candidates]
    )


def _likelihood(covariance: Array, away: Array) -> float:
    """Logarithm of the density of a Gaussian, without constants."""
    _, determinant = np.linalg.slogdet(covariance)
    return float(-0.5 * (away @ np.linalg.solve(covariance, away)) - 0.5 * determinant)
