"""A few training steps on this rank, and what they gave; and the figures of all ranks beside those of one process.

A layout must not change what a run computes. Losses, gradient norms, held-out loss, weights and moments of a layout
equal those of one process, up to rounding: float32 numbers are summed in another order.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from penstock.data.loader import Batch
from penstock.kernels.reference import IGNORED_LABEL
from penstock.train.optimizer import learning_rate
from penstock.train.setup import Session
from penstock.train.step import evaluate, train_step

BOUNDS = {
    "loss": 2e-5,
    "balance": 2e-5,
    "gradient norm": 1e-4,
    "parameters": 1e-4,
    "moments": 1e-4,
    "held-out loss": 2e-5,
    "one tensor": 1e-3,
    "one factor": 1e-3,
}
"""Largest relative difference that passes; of tensors the norm of the difference over the norm of the change."""

_FLOOR = 1e-3  # a tensor with less than this part of the largest one's gradient is compared relative to this part
_MANY = 1000  # numbers of a tensor, over which rounding cancels


@dataclass(frozen=True)
class StepFigures:
    """What some steps gave."""

    losses: list[float]  # of each step, each followed by those of multi-token prediction
    norms: list[float]
    balance: list[float]  # of each step, sums of auxiliary losses and of dropped slots over the layers
    held_out: float  # loss on held-out rows after the last step; 0 without any
    left_out: list[int]  # of each step, rows that found no room at first
    tensors: dict[str, Tensor] = field(repr=False)  # of the checkpoint: weights, buffers, moments


Saved = list[tuple[str, tuple[int, ...], list[tuple[tuple[int, ...], Tensor]]]]
"""Name and whole shape of tensors, and (offset, values) of every rectangle that a rank writes."""


def follow(
    session: Session,
    steps: int = 3,
    rate: float | None = 1e-2,
    begin: Callable[[int], object] = lambda step: None,
    *,
    first: int = 0,
    has_bare_rows: bool = False,
) -> StepFigures:
    """Train a session for some steps from number `first` on, and evaluate it if it has held-out rows.

    `rate` is a constant learning rate, None for that of the run's schedule. `begin` gets the number of each step, and
    that of the evaluation, which comes after them. With `has_bare_rows` some rows have no labels.
    """
    losses, norms, balance, left_out = [], [], [], []
    run = session.run
    for step in range(first, first + steps):
        begin(step)
        batch = session.state.batches.next_batch()
        batch = some_labels(batch) if has_bare_rows else batch
        planned = learning_rate(step, run.training.steps, run.optimizer.learning_rate, run.schedule)
        wanted = planned if rate is None else rate
        result = train_step(session.model, session.state.optimizer, batch, session.rule, wanted)
        losses += [result.loss, *result.mtp_losses]
        norms.append(result.gradient_norm)
        left_out.append(result.left_out)
        balance += [sum(layer.auxiliary_loss for layer in result.layers), sum(layer.dropped for layer in result.layers)]
    begin(first + steps)
    held_out = 0.0
    if session.held_out is not None:
        held_out = evaluate(session.model, session.held_out, session.rule.cut, session.rule.loss).loss
    return StepFigures(losses, norms, balance, held_out, left_out, {})


def some_labels(batch: Batch) -> Batch:
    """The batch without the labels of about half of its rows; which ones, their tokens say, on every rank."""
    is_bare_B = batch.tokens_BS.sum(1) % 2 == 0
    return replace(batch, labels_BS=batch.labels_BS.masked_fill(is_bare_B[:, None], IGNORED_LABEL))


def joined(first: StepFigures, other: StepFigures) -> StepFigures:
    """Figures of the first steps and of those after them, without tensors."""
    losses, norms, balance = (vars(first)[name] + vars(other)[name] for name in ("losses", "norms", "balance"))
    return StepFigures(losses, norms, balance, other.held_out, first.left_out + other.left_out, {})


def saved_by(session: Session) -> Saved:
    """Parts that this rank writes; of equal parts one rank writes each."""
    return [
        (name, part.shape, [(piece.whole, values.clone().cpu()) for piece, values in part.decoded().views()])
        for name, part in session.state.parts().items()
        if part.writes
    ]


def put_together(results: Sequence[tuple[StepFigures, Saved]]) -> StepFigures:
    """The figures of all ranks, which must agree on what is not theirs alone, or an AssertionError."""
    first = results[0][0]
    for seen, _ in results:
        assert (seen.losses, seen.norms, seen.held_out) == (first.losses, first.norms, first.held_out), "ranks disagree"
    tensors = whole_tensors(saved for _, saved in results)
    return StepFigures(first.losses, first.norms, first.balance, first.held_out, first.left_out, tensors)


def whole_tensors(parts: Iterable[Saved]) -> dict[str, Tensor]:
    """Tensors from the rectangles of all ranks. An AssertionError says what is missing or there twice."""
    tensors: dict[str, Tensor] = {}
    for saved in parts:
        for name, shape, rectangles in saved:
            whole = tensors.setdefault(name, torch.full(shape, float("nan")))  # nan: not saved by any rank
            for offsets, values in rectangles:
                region = tuple(slice(start, start + size) for start, size in zip(offsets, values.shape, strict=True))
                assert whole[region].isnan().all(), f"{name} is saved twice"
                whole[region] = values
    for name, tensor in tensors.items():
        assert tensor.isfinite().all(), f"{name} has values that were not saved"
    return tensors


def differences(got: StepFigures, expected: StepFigures, start: dict[str, Tensor]) -> dict[str, float]:
    """Largest relative difference of each figure; `start` are the tensors before the first step."""

    def relative(left: list[float], right: list[float]) -> float:
        return max(
            (abs(value - other) / max(abs(other), 1e-6) for value, other in zip(left, right, strict=True)), default=0
        )

    assert got.tensors.keys() == expected.tensors.keys(), "checkpoints hold other tensors"
    assert expected.tensors.keys() == start.keys(), "the start is of another model"

    def strayed(kind: str) -> float:
        names = [name for name in start if name.startswith(kind)]
        wrong = torch.stack([(got.tensors[name] - expected.tensors[name]).norm() for name in names]).norm()
        moved = torch.stack([(expected.tensors[name] - start[name]).norm() for name in names]).norm()
        return float(wrong / moved)

    return {
        "loss": relative(got.losses, expected.losses),
        "balance": relative(got.balance, expected.balance),
        "gradient norm": relative(got.norms, expected.norms),
        "parameters": strayed("model."),
        "moments": max(strayed("moment1."), strayed("moment2.")),
        "held-out loss": relative([got.held_out], [expected.held_out]),
    }


def first_difference(first: tuple[StepFigures, Saved], other: tuple[StepFigures, Saved]) -> str:
    """Where the bits of a rank differ from those of another run of it, in words; empty if nowhere."""
    for name in ("losses", "norms", "balance"):
        for index, (mine, theirs) in enumerate(zip(vars(first[0])[name], vars(other[0])[name], strict=True)):
            if float(mine).hex() != float(theirs).hex():  # nan equals nan here
                step = index * len(first[0].norms) // len(vars(first[0])[name])
                return f"{name} of step {step}: {mine:.9g} and {theirs:.9g}"
    if first[0].held_out.hex() != other[0].held_out.hex():
        return f"held-out loss: {first[0].held_out:.9g} and {other[0].held_out:.9g}"
    for (name, _, pieces), (_, _, wanted) in zip(first[1], other[1], strict=True):
        for (_, mine_), (_, theirs_) in zip(pieces, wanted, strict=True):
            if not torch.equal(_bytes_of(mine_), _bytes_of(theirs_)):
                return f"{name}, by up to {float((mine_ - theirs_).abs().max()):.1e}"
    return ""


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)  # torch has no bytes of a tensor without dims


def worst_tensor(got: StepFigures, expected: StepFigures) -> tuple[float, str]:
    """The largest relative difference of a tensor's first moments, which are sums of its gradients, and its name."""
    names = [name for name in expected.tensors if name.startswith("moment1.")]
    floor = _FLOOR * max((float(expected.tensors[name].norm()) for name in names), default=0.0)
    differences = [
        (float((got.tensors[name] - expected.tensors[name]).norm() / max(expected.tensors[name].norm(), floor)), name)
        for name in names
    ]
    return max(differences, default=(0.0, ""))


def worst_factor(got: StepFigures, expected: StepFigures) -> float:
    """How far the factor between first moments is from 1, of the tensor where it is farthest.

    Rounding points in any direction, a wrong factor or a lost row in that of the gradient. So this equals the
    difference of `worst_tensor` where a factor is wrong, and is far smaller where only rounding differs.
    """
    moments = [(name, wanted) for name, wanted in expected.tensors.items() if name.startswith("moment1.")]
    floor = _FLOOR * max((float(wanted.norm()) for _, wanted in moments), default=0.0)
    return max(
        (
            abs(float(((got.tensors[name] - wanted) * wanted).sum() / wanted.square().sum()))
            for name, wanted in moments
            if wanted.numel() >= _MANY and float(wanted.norm()) > floor
        ),
        default=0.0,
    )
