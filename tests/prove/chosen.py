"""The draws that test runs play: few, in which as many pairs of settings as possible meet.

    python -m tests.prove.chosen        the numbers for CHOSEN, after a change of the draws

Each number is the one of the first draws whose settings make the most new pairs beside those before it; draws of eight
ranks, for which the machines of tests have too few cores, are left to the slow tests.
"""

import re
import sys
from itertools import combinations

from penstock.prove.draws import Composition, draw, refusal

SEED, FIRST, MANY, MOST_RANKS = 29, 1200, 38, 4

CHOSEN = (
    *(723, 159, 191, 1000, 1149, 961, 371, 330, 543, 1077, 1133, 0, 166, 638, 1107, 932, 678, 879, 924, 1111, 76, 1192),
    *(430, 154, 492, 276, 394, 739, 1194, 68, 100, 903, 200, 517, 981, 30, 1020, 456),
)

OFTEN = (*CHOSEN[:22], 68, 456)
"""Those of `make test`: four fifths of the pairs of all; the last two have a size and a schedule more."""


def settings_of(composition: Composition) -> set[str]:
    """Overrides, each name of a list, and the kind of a table."""
    found = set()
    for override in composition.overrides:
        path, _, value = override.partition("=")
        if value.startswith("["):
            found |= {f"{path} {name}" for name in re.findall(r"[a-z-]+|\d+", value)}
        elif value.startswith("{"):
            found |= {path, *(f"{path} {kind}" for kind in re.findall('kind="([a-z]+)"', value))}
        else:
            found.add(override)
    return found


def choose() -> list[int]:
    """The numbers, by pairs of settings."""
    drawn = {number: one for number in range(FIRST) if (one := draw(SEED, number)).ranks <= MOST_RANKS}
    left = {
        number: set(combinations(sorted(settings_of(one)), 2)) for number, one in drawn.items() if refusal(one) is None
    }
    met: set[tuple[str, str]] = set()
    chosen: list[int] = []
    while len(chosen) < MANY:
        chosen.append(max(left, key=lambda number: len(left[number] - met)))
        met |= left.pop(chosen[-1])
    return chosen


if __name__ == "__main__":
    sys.stdout.write(f"{choose()}\n")
