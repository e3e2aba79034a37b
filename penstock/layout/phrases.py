"""Schedules that are said in phrases: `(3, "F0 B0")` is three times a forward and a backward of a rank's first stage.

A word is a kind and which of the rank's stages, counted from 0. The micro-batch is not said: each stage takes its own
in order. Without a number (`F`, `B`) a word goes over all stages of the rank, a group of micro-batches through each
before the next (`grouped`). `W` is the oldest weight gradient that waits. So 1F1B with 4 micro-batches is on the second
of 4 ranks, which has two ranks behind it:

    (2, "F0") (2, "F0 B0") (2, "B0")      1F0 1F1 | 1F2 1B0 1F3 1B1 | 1B2 1B3

Each function below says the phrases of one rank; `spell` makes the actions. The notation is DualPipe's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from penstock.layout.actions import Action, Kind

Phrase = tuple[int, str]
"""How often, and which words."""


def gpipe(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """GPipe (arXiv 1811.06965): all forwards, then all backwards. With several stages, breadth first (2211.05953)."""
    del ranks, rank
    return [(chunks * micro_batches, "F"), (chunks * micro_batches, "B")]


def one_forward_one_backward(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """1F1B with a flush (PipeDream-flush, arXiv 2006.09503): a rank starts as many as it has ranks behind it."""
    del chunks
    ahead = min(ranks - 1 - rank, micro_batches)
    return [(ahead, "F0"), (micro_batches - ahead, "F0 B0"), (ahead, "B0")]


def interleaved(ranks: int, rank: int, chunks: int, micro_batches: int, more: int = 0) -> list[Phrase]:
    """Interleaved 1F1B (Megatron, arXiv 2104.04473): several stages a rank, for a shorter ramp.

    Any number of micro-batches: the groups are even. One short group at the end would let ranks wait for one another
    for ever. With `more` forwards ahead, those beside a backward are of a later micro-batch.
    """
    steps = chunks * micro_batches
    group = -(-micro_batches // groups_to_fill(ranks, micro_batches))
    ahead = min(2 * (ranks - 1 - rank) + (chunks - 1) * group + more, steps)
    return [(ahead, "F"), (steps - ahead, "F B"), (ahead, "B")]


def zero_bubble_1f1b(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """ZB-H1 (arXiv 2401.10241): 1F1B whose weight gradients wait, so that every rank holds as much as the first."""
    del chunks
    ahead = min(ranks - 1 - rank, micro_batches)
    waiting = min(rank, micro_batches)
    paired = min(waiting, micro_batches - ahead)
    return [
        (ahead, "F0"),
        (paired, "F0 I0"),
        (micro_batches - ahead - paired, "F0 I0 W"),
        (waiting - paired, "I0"),
        (ahead - waiting + paired, "I0 W"),
        (waiting, "W"),
    ]


def dualpipe_v(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """DualPipeV (DeepSeek's DualPipe cut in half): both directions on one v, forwards beside backwards of the other.

    A backward right after a forward of the other stage is meant to overlap with it.
    """
    del chunks
    behind = ranks - 1 - rank
    whole = (rank + 1) // 2
    mixed = 1 - rank % 2
    return [
        (2 * behind, "F0"),
        (rank + 1, "F0 F1"),
        (behind, "I1 W F1"),
        (micro_batches - ranks - behind, "F0 B1 F1 B0"),
        (behind, "B1 F1 B0"),
        (whole, "B1 B0"),
        (mixed, "B1 I0"),
        (rank + 1 - whole - mixed, "I1 I0"),
        (behind, "W I0"),
        (rank + 1, "W"),
    ]


def forwards(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """Evaluation where ranks hold stages in a loop."""
    del ranks, rank
    return [(chunks * micro_batches, "F")]


def forwards_on_v(ranks: int, rank: int, chunks: int, micro_batches: int) -> list[Phrase]:
    """Evaluation on a v: a rank works ahead until its first micro-batch is back from the ranks behind it."""
    del chunks
    ahead = min(2 * (ranks - 1 - rank), micro_batches)
    return [(ahead, "F0"), (micro_batches - ahead, "F0 F1"), (ahead, "F1")]


Grammar = Callable[[int, int, int, int], list[Phrase]]
"""(ranks, rank, stages of a rank, micro-batches) -> the phrases of that rank."""

GRAMMARS: dict[str, Grammar] = {
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "interleaved": interleaved,
    "zb-1f1b": zero_bubble_1f1b,
    "dualpipe-v": dualpipe_v,
}

BESIDE: dict[str, Grammar] = {"interleaved": partial(interleaved, more=1), "dualpipe-v": dualpipe_v}
"""The same, for schedules whose forwards and backwards can be done in pairs."""


def groups_to_fill(ranks: int, micro_batches: int) -> int:
    """The most groups of which each has a micro-batch for every rank, so that all work before it comes round again."""
    return max(1, micro_batches // ranks)


def grouped(stages: Sequence[int], micro_batches: int, groups: int) -> Iterator[tuple[int, int]]:
    """(stage, micro-batch): a group through the first stage, through the second, ...; then the next group.

    Sizes of groups differ by one at most.
    """
    for group in range(groups):
        members = range(group * micro_batches // groups, (group + 1) * micro_batches // groups)
        for stage in stages:
            for micro_batch in members:
                yield stage, micro_batch


def spell(phrases: list[Phrase], stages: Sequence[int], micro_batches: int, groups: int) -> tuple[Action, ...]:
    """The actions that the phrases of a rank mean.

    Args:
        phrases: of the rank.
        stages: that it holds.
        micro_batches: of a step.
        groups: of micro-batches, for words without a number.
    """
    orders = {
        "F": grouped(stages, micro_batches, groups),
        "B": grouped(stages[::-1], micro_batches, groups),
    }
    for chunk, stage in enumerate(stages):
        orders[f"F{chunk}"] = grouped([stage], micro_batches, 1)
        orders[f"B{chunk}"] = orders[f"I{chunk}"] = grouped([stage], micro_batches, 1)
    waiting: deque[Action] = deque()
    actions = []
    for count, words in phrases:
        for word in words.split() * count:
            if word == Kind.WEIGHT:
                actions.append(waiting.popleft())
                continue
            stage, micro_batch = next(orders[word])
            actions.append(Action(stage, Kind(word[0]), micro_batch))
            if word[0] == Kind.INPUT:
                waiting.append(Action(stage, Kind.WEIGHT, micro_batch))
    return tuple(actions)
