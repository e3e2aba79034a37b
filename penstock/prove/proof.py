"""Whether a composition computes what one process computes, and the smallest one that does not.

1. Rules refuse it with a line: that is an answer. A traceback, a hang or the end of a process is a fault.
2. It trains some steps beside one process. Figures within their bounds: equal.
3. Else routers of some tokens may have chosen other experts. If the scores of these tokens tie, it trains again with
   the choices of one process: within the bounds it was a tie, else it is a fault. Of equal tokens (of equal ids that
   follow nothing) over capacity, rounding decides which are dropped, and nothing tells them apart: a tie too.
4. The slope of a clamped activation changes at its limit, so a value there is a tie too: a fault must be one with
   another limit as well. In 16 bits an indexer may choose other keys: a fault must be one with all keys chosen.
   A bias that moves by quantiles jumps to the next score: a fault must be one with fixed steps.
5. Some models enlarge rounding. It is a tie if one process differs as much whose norms have an epsilon that is larger
   by less than their outputs are rounded. In fewer bits it is one only if the ranks are no farther from float32 than
   one process in the same bits; then it is one, too, if float32 is without fault, or on GPUs, whose kernels need 16
   bits. On CPU ranks it is also one if float32 is without fault and nothing is over twice its bound, on GPUs if ranks
   and one process agree once the norms of both have another epsilon: what is wrong stays wrong then.
6. A composition with captured graphs is judged without them; with them every step must give the same bits.
7. A run that goes on in another layout must begin with the bits that were saved (8-bit moments whose blocks are cut
   elsewhere are rounded once), and one that begins with weights of another run, exported and imported, with the bits of
   that one.
8. A fault is made smaller, setting by setting, as long as it stays one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from penstock.kernels.adamw import FRACTION, ROOT_DECADES, SIGNED_DECADES, numbers
from penstock.prove.choices import Choices, Place, first_flip, least_margin
from penstock.prove.composition import (
    EPSILON,
    FEWER_BITS,
    JOLTED,
    LOW_JOLTED,
    WEIGHTS,
    Composition,
    base_of,
    neighbours,
    refusal,
)
from penstock.prove.draws import draw, draw_graphs
from penstock.prove.play import (
    BOUNDS,
    StepFigures,
    differences,
    first_difference,
    joined,
    put_together,
    whole_tensors,
    worst_factor,
    worst_tensor,
)
from penstock.prove.ranks import Assignment, Played, PlayError, Ranks, encode

REPLAYED_STEPS, REPLAYED_RATE, REPLAYS = 8, 1e-3, 1000
"""Steps of captured graphs beside eager passes, in a draw and with --graphs. The second step captures."""

LOW_BOUNDS = {
    "loss": 1e-2,
    "balance": 5e-2,  # a few of a hundred dropped slots
    "gradient norm": 5e-2,
    "parameters": 0.1,
    "moments": 0.2,
    "held-out loss": 1e-2,
    "one tensor": 0.5,
    "one factor": 0.1,
}
"""Of compositions in which something is rounded to 16 bits or fewer; those with products in 8 bits are low too."""

LOW = frozenset(
    {
        *("training.precision=bf16", "parallel.reduce=bf16"),
        *("optimizer.moment_dtype=bf16", "optimizer.moment_dtype=int8"),
    }
)

GPU_BOUNDS = {
    "loss": 1e-3,
    "balance": 5e-3,
    "gradient norm": 1e-2,
    "parameters": 5e-2,
    "moments": 3e-2,
    "held-out loss": 1e-3,
    "one tensor": 0.15,
    "one factor": 0.03,
}
"""The same on GPUs."""

_OF_PRODUCTS = 2.5
"""Times these bounds where products are in 8 bits: a value that rounds to its other neighbour moves by 6 to 12 %."""

FAR_OVER = 2.0  # times the bounds of fewer bits: figures below may be of rounding that a model amplifies

LIKE_JOLT, LIKE_BITS = 3.0, 1.5
"""Times the difference that another epsilon makes, and the distance of one process in fewer bits from float32."""

NUMBERS = ("loss", "balance", "gradient norm", "held-out loss")
"""Figures that are sums. The one process may be near float32 by luck, so ranks may be twice the bound away from it."""

TIE, LOW_TIE = 1e-4, 3e-2  # scores that are nearer may tie


@dataclass(frozen=True)
class Verdict:
    """How a composition compares with one process."""

    kind: str  # equal, tie, refused, fault
    composition: Composition
    text: str = ""  # the refusal, or what is wrong
    figures: dict[str, float] = field(default_factory=dict)  # relative differences; of a tie those given the choices
    margin: float = float("inf")  # least distance of two scores that decides a choice


class Prover:
    """Compares compositions with one process. `folder` is for files between processes.

    Args:
        gpus: of this machine, on which ranks compute; 0 for CPU ranks.
        replays: draw compositions with graphs only, and compare so many steps with eager ones; 0 for all compositions.
    """

    def __init__(self, ranks: Ranks, folder: Path, gpus: int = 0, replays: int = 0) -> None:
        self.gpus, self.replays = gpus, replays
        self._ranks = ranks
        self._folder = folder
        self._given = folder / "choices"
        self._runs = count()  # numbers of folders with checkpoints
        self._weights: tuple[tuple[str, ...], Path, dict[str, Tensor]] | None = None  # the last ones, and their values
        self._known: tuple[tuple[str, ...], Played] | None = None  # one process: the last one

    def judge(self, composition: Composition) -> Verdict:
        """Play a composition."""
        if composition.capture:
            return self._judge_replays(composition)
        verdict = self._judge(composition)
        if verdict.kind != "fault" or not verdict.figures:
            return verdict
        for override, why in neighbours(composition, is_low=is_low(composition)):
            again = self._judge(composition.plus(override))
            if again.kind in ("equal", "tie"):
                text = f"{verdict.text}; {why}: {override} agrees"
                return replace(again, kind="tie", composition=composition, text=text)
        bounds = bounds_of(composition)
        is_far = any(value > FAR_OVER * bounds[name] for name, value in verdict.figures.items())
        if is_far or not self._agrees_in_float32(composition):
            return verdict
        return replace(verdict, kind="tie", text=f"{verdict.text}; float32 agrees, and nothing is over twice its bound")

    def _agrees_in_float32(self, composition: Composition) -> bool:
        """Whether a composition in fewer bits is no fault in float32; False on GPUs, whose kernels need 16 bits."""
        can_ask = composition.device == "cpu" and is_low(composition)
        return can_ask and self._judge(composition.without(*FEWER_BITS)).kind in ("equal", "tie")

    def _judge(self, composition: Composition) -> Verdict:
        if (line := refusal(composition)) is not None:
            return Verdict("refused", composition, line)
        try:
            alone = self._alone(composition)
            played = self._play(composition)
        except PlayError as error:
            return Verdict("refused" if error.is_line else "fault", composition, str(error))
        outcome = self._compare(composition, played, alone)
        if outcome.kind == "equal":
            return outcome
        flip = first_flip([part.choices for part in played], alone.choices)
        if flip is None:
            return self._rounding_of(outcome, played, alone) or outcome
        step, layer = flip.place
        what = "dropped other slots" if flip.drops_only else "chose other experts"
        text = f"step {step}, layer {layer}: {flip.tokens} tokens {what}, by margins up to {flip.margin:.1e}"
        tie = LOW_TIE * (_OF_PRODUCTS if _is_in_8_bits(composition) else 1.0) if is_low(composition) else TIE
        if flip.margin > tie:
            if not self._agrees_in_float32(composition):
                return replace(outcome, text=f"{outcome.text}; {text}, which is no tie")
            text += "; float32 agrees"
        return self._judge_given(composition, outcome, alone, text, is_equal=flip.of_equal_tokens)

    def _judge_given(
        self, composition: Composition, outcome: Verdict, alone: Played, text: str, *, is_equal: bool
    ) -> Verdict:
        """The verdict where ranks chose other experts: the composition is played again with the choices of one rank."""
        try:
            given = self._play(composition, self.give(alone.choices))
        except PlayError as error:
            return replace(outcome, text=f"{outcome.text}; {text}; given the choices: {error}")
        again = self._compare(composition, given, alone)
        if again.kind == "equal":
            return replace(again, kind="tie", text=text)
        if (rounded := self._rounding_of(again, given, alone)) is not None:
            return replace(rounded, text=f"{text}; {rounded.text}")
        if is_equal:
            return replace(outcome, kind="tie", text=f"{text}; these tokens are equal to others")
        return replace(outcome, text=f"{outcome.text}; {text}; given the choices: {again.text}")

    def _rounding_of(self, fault: Verdict, played: list[Played], alone: Played) -> Verdict | None:
        """A tie by point 5 at the top of the file, else None."""
        if not fault.figures:
            return None
        composition, bounds, expected = fault.composition, bounds_of(fault.composition), _whole([alone])
        jolt = f"{EPSILON}{LOW_JOLTED if is_low(composition) else JOLTED}"
        try:
            jolted = self._given_choices((*composition.alone, jolt), composition, alone)
            moved, _ = _figures(_whole([jolted]), expected, alone)
            text = f"{fault.text}, and one process with {jolt} differs as much"
            if any(value > max(bounds[name], LIKE_JOLT * moved[name]) for name, value in fault.figures.items()):
                if not is_low(composition) or (
                    composition.device == "cpu" and not self._agrees_in_float32(composition)
                ):
                    return None
                text = f"{fault.text}; float32 agrees" if composition.device == "cpu" else fault.text
            if is_low(composition):
                overrides = tuple(override for override in composition.alone if not override.startswith(FEWER_BITS))
                exact = self._given_choices(overrides, composition, alone)
                (mine, _), (theirs, _), (rounded, _) = (
                    _figures(whole, _whole([exact]), exact) for whole in (_whole(played), expected, _whole([jolted]))
                )
                # What these bits cost: of two roundings of one process the one that costs more.
                theirs = {name: max(value, rounded[name]) for name, value in theirs.items()}
                limits = {
                    name: max(bound * (FAR_OVER if name in NUMBERS else 1.0), LIKE_BITS * theirs[name])
                    for name, bound in bounds.items()
                }
                # Norms of gradients differ by at most as much as gradients do.
                limits["gradient norm"] = max(limits["gradient norm"], LIKE_BITS * theirs["moments"])
                if any(value > limits[name] for name, value in mine.items()):
                    return None
                wrong = [name for name, value in fault.figures.items() if value > bounds[name]]
                figures = ", ".join(f"{name} {mine[name]:.1e} and {theirs[name]:.1e}" for name in wrong)
                text += f"; from float32 the two are {figures} away"
        except PlayError:
            return None
        return replace(fault, kind="tie", text=text)

    def _given_choices(self, overrides: tuple[str, ...], composition: Composition, alone: Played) -> Played:
        """One process with other settings, and with the choices of `alone`."""
        given = self.give(alone.choices)
        (played,) = self._ranks.play(1, replace(self._begun(composition, overrides), given=given))
        return played

    def _judge_replays(self, composition: Composition) -> Verdict:
        """Whether graphs give the bits of eager passes, and those what one process computes unless `replays` is set."""
        if (line := refusal(composition)) is not None:
            return Verdict("refused", composition, line)
        eager = composition.eager()
        verdict = Verdict("equal", composition) if self.replays else self.judge(eager)
        if verdict.kind not in ("equal", "tie"):
            return replace(verdict, composition=composition)
        steps = self.replays or REPLAYED_STEPS
        try:
            captured, passes = (
                self._ranks.play(
                    case.ranks, replace(self.part(case), steps=steps, rate=REPLAYED_RATE, has_choices=False)
                )
                for case in (composition, eager)
            )
        except PlayError as error:
            return Verdict("refused" if error.is_line else "fault", composition, str(error))
        for rank, (mine, theirs) in enumerate(zip(captured, passes, strict=True)):
            if difference := first_difference((mine.trace, mine.end), (theirs.trace, theirs.end)):
                return Verdict("fault", composition, f"rank {rank}: graphs and eager passes differ: {difference}")
        return replace(verdict, composition=composition)

    def smallest(self, fault: Verdict) -> Verdict:
        """The same fault with fewer settings."""
        while (smaller := next(self._smaller_faults(fault.composition), None)) is not None:
            fault = smaller
        return fault

    def _smaller_faults(self, composition: Composition) -> Iterator[Verdict]:
        for setting in composition.settings:
            settings = tuple(kept for kept in composition.settings if kept is not setting)
            for ranks in sorted({1, min(2, composition.ranks), composition.ranks}):
                outcome = self.judge(replace(composition, ranks=ranks, settings=settings))
                if outcome.kind == "fault":
                    yield outcome

    def part(self, composition: Composition, given: str = "") -> Assignment:
        """What each rank does; `given` is what `give` returned."""
        two_nodes = "dispatch.method=hierarchical" in composition.overrides
        return replace(self._begun(composition, composition.overrides), two_nodes=two_nodes, given=given)

    def _begun(self, composition: Composition, arguments: tuple[str, ...]) -> Assignment:
        """All steps with these overrides, from the weights that the composition begins with."""
        overrides = base_of(composition.device) + arguments
        if any(setting in composition.overrides for setting in WEIGHTS):
            overrides += (f'training.initial_weights="{self._initial_weights(composition, arguments)}"',)
        return Assignment(overrides, composition.run.training.steps, device=composition.device)

    def _initial_weights(self, composition: Composition, arguments: Sequence[str]) -> Path:
        """A folder of weights of another seed, for the norms of these overrides.

        A PlayError if import does not give what was exported.
        """
        norms = (word for word in arguments if word.startswith(EPSILON))
        overrides = (*base_of(composition.device), *composition.alone, *norms, "seed=1")
        if self._weights is None or self._weights[0] != overrides:
            folder, exports = self._folder / f"weights-{next(self._runs)}", WEIGHTS[0] in overrides
            part = Assignment(overrides, 0, device=composition.device, folder=str(folder), exports=exports)
            (made,) = self._ranks.play(1, part)
            values = {name: x for name, x in whole_tensors([made.end]).items() if name.startswith("model.")}
            self._weights = overrides, folder / "imported" if exports else folder, values
        return self._weights[1]

    def give(self, choices: Mapping[Place, Choices]) -> str:
        """Write choices for ranks to make; returns the name of the file."""
        self._given.write_bytes(encode(choices))
        return str(self._given)

    def _alone(self, composition: Composition) -> Played:
        part = self._begun(composition, composition.alone)
        if self._known is None or self._known[0] != part.overrides:
            (played,) = self._ranks.play(1, part)
            if self._weights is not None and any(setting in part.overrides for setting in WEIGHTS):
                _same("what a run begins with", whole_tensors([played.start]), self._weights[2])
            self._known = part.overrides, played
        return self._known[1]

    def _play(self, composition: Composition, given: str = "") -> list[Played]:
        part, then = self.part(composition, given), composition.then
        if then is None:
            return self._ranks.play(composition.ranks, part)
        half, folder = part.steps // 2, str(self._folder / f"run-{next(self._runs)}")
        first = self._ranks.play(composition.ranks, replace(part, steps=half, folder=folder))
        rest = replace(self.part(then, given), first=half, steps=part.steps - half, folder=folder)
        second = self._ranks.play(then.ranks, rest)
        saved, loaded = (
            whole_tensors(pieces) for pieces in ([played.end for played in first], [played.start for played in second])
        )
        is_equal = [_is_recoded] if composition.run.optimizer.moment_dtype == "int8" else []
        _same("what another layout reads from a checkpoint", loaded, saved, *is_equal)
        trace = joined(first[0].trace, second[0].trace)
        earlier = [Played(trace, [], [], played.choices) for played in first]
        return [*(replace(played, trace=joined(first[0].trace, played.trace)) for played in second), *earlier]

    def _compare(self, composition: Composition, played: list[Played], alone: Played) -> Verdict:
        bounds = bounds_of(composition)
        margin = least_margin(alone.choices)
        try:
            figures, name = _figures(_whole(played), _whole([alone]), alone)
        except AssertionError as error:
            return Verdict("fault", composition, str(error), margin=margin)
        wrong = {figure: value for figure, value in figures.items() if not value <= bounds[figure]}
        if not wrong:
            return Verdict("equal", composition, figures=figures, margin=margin)
        figures_text = ", ".join(f"{figure} {value:.1e}" for figure, value in wrong.items())
        text = f"{figures_text}; most of {name}" if name else figures_text
        return Verdict("fault", composition, text, figures, margin)


def _same(
    what: str,
    got: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    is_equal: Callable[[str, Tensor, Tensor], bool] = lambda _, got, expected: torch.equal(got, expected),
) -> None:
    wrong = [name for name in expected if name not in got or not is_equal(name, got[name], expected[name])]
    if wrong:
        raise PlayError(f"{what} differs: {', '.join(wrong[:3])}")


def _is_recoded(name: str, got: Tensor, expected: Tensor) -> bool:
    """Whether moments in 8 bits are the same up to one rounding, as blocks that are cut elsewhere have new scales."""
    kind = name.partition(".")[0]
    if kind not in ("moment1", "moment2") or torch.equal(got, expected):
        return torch.equal(got, expected)
    decades = SIGNED_DECADES if kind == "moment1" else ROOT_DECADES
    if kind == "moment2":
        got, expected = got.sqrt(), expected.sqrt()
    codes = numbers(decades)
    half = (codes[-1] - codes[-2]) / 2 * (1 + 2 / FRACTION)  # a place between codes is itself rounded
    return bool(((got - expected).abs() <= half * expected.abs().amax(-1, keepdim=True)).all())


def _whole(played: Sequence[Played]) -> StepFigures:
    return put_together([(part.trace, part.end) for part in played])


def _figures(got: StepFigures, expected: StepFigures, alone: Played) -> tuple[dict[str, float], str]:
    figures = differences(got, expected, whole_tensors([alone.start]))
    figures["one tensor"], name = worst_tensor(got, expected)
    figures["one factor"] = worst_factor(got, expected)
    return {figure: value if isfinite(value) else float("inf") for figure, value in figures.items()}, name


def is_low(composition: Composition) -> bool:
    """Whether something is rounded to 16 bits or fewer."""
    return _is_in_8_bits(composition) or any(override in LOW for override in composition.overrides)


def bounds_of(composition: Composition) -> dict[str, float]:
    """Bounds of the figures."""
    if not is_low(composition):
        return BOUNDS
    bounds = LOW_BOUNDS if composition.device == "cpu" else GPU_BOUNDS
    return {name: bound * (_OF_PRODUCTS if _is_in_8_bits(composition) else 1.0) for name, bound in bounds.items()}


def _is_in_8_bits(composition: Composition) -> bool:
    return any(override.startswith("float8.") for override in composition.overrides)


def outcomes(prover: Prover, seed: int, first: int = 0) -> Iterator[tuple[int, Verdict]]:
    """Draws by number, without end."""
    for number in count(first):
        drawn = draw_graphs(seed, number, prover.gpus) if prover.replays else draw(seed, number, prover.gpus)
        yield number, prover.judge(drawn)
