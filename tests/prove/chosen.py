"""The draws that test runs play: few, in which as many pairs of settings as possible meet.

    python -m tests.prove.chosen        the numbers for CHOSEN, after a change of the draws

Each number is the one of the first draws that has the most settings which those before it lack, and of equal ones the
most new pairs; draws of more ranks, for which the machines of tests have too few cores, are left to the slow tests.
"""

import re
import sys
from itertools import combinations

from penstock.prove.composition import Composition, refusal
from penstock.prove.draws import draw

SEED, FIRST, MANY, MOST_RANKS = 29, 1200, 38, 4

CHOSEN = (
    *(137, 419, 518, 308, 991, 838, 741, 639, 1143, 140, 112, 967, 684, 804, 160, 78, 243, 303, 540, 771, 474, 958),
    *(642, 1011, 976, 926, 1121, 493, 847, 648, 798, 291, 914, 361, 34, 869, 42, 1175),
)

OFTEN = tuple(number for number in CHOSEN[:24] if number not in (639, 804))
"""Those of `make test`. Two that take as long as eight have no setting alone but numbers of layers in 8 bits."""


def settings_of(composition: Composition) -> set[str]:
    """Overrides, each name of a list, and the kind of a table; of the settings of a family its name."""
    found = set()
    for override in (one for setting in composition.settings for one in _named(setting)):
        path, _, value = override.partition("=")
        if path == "prove.then":
            found.add(path)
        elif value.startswith("["):
            found |= {f"{path} {name}" for name in re.findall(r"[a-z-]+|\d+", value)}
        elif value.startswith("{"):
            found |= {path, *(f"{path} {kind}" for kind in re.findall('kind="([a-z]+)"', value))}
        else:
            found.add(override)
    return found


def _named(setting: tuple[str, ...]) -> tuple[str, ...]:
    is_family = setting[0].startswith("model.family=") and setting[0] != "model.family=plain"
    return setting[:1] if is_family else setting


def choose() -> list[int]:
    """The numbers, by settings that those before do not have, then by pairs of settings."""
    drawn = {number: one for number in range(FIRST) if (one := draw(SEED, number)).ranks <= MOST_RANKS}
    settings = {number: settings_of(one) for number, one in drawn.items() if refusal(one) is None}
    pairs = {number: set(combinations(sorted(one), 2)) for number, one in settings.items()}
    alone: set[str] = set()
    met: set[tuple[str, str]] = set()
    chosen: list[int] = []
    while len(chosen) < MANY:
        left = pairs.keys() - set(chosen)
        chosen.append(max(sorted(left), key=lambda one: (len(settings[one] - alone), len(pairs[one] - met))))
        alone |= settings[chosen[-1]]
        met |= pairs[chosen[-1]]
    return chosen


if __name__ == "__main__":
    sys.stdout.write(f"{choose()}\n")
