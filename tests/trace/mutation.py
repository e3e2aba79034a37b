"""Damage to a trace, at random but from a seed."""

import copy
import gzip
import random
from collections.abc import Callable
from typing import Any

from tests.trace.tiny import text_of

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, -(2**63) - 1, 2**64 - 1, 10**40, 1.5, -1e300, 1e308, "", "7", "\ud800", "\u00e9", [],
    {}, [[]], {"a": 1}, [1, None], "kernel", "X",
)  # fmt: skip
_TOKENS = (
    b"NaN",
    b"inf",
    b"-Infinity",
    b"1e999",
    b"null",
    b"{",
    b"}",
    b"[" * 3000,
    b'"',
    b",",
    b"\xff",
    b"\x00",
    b"\\u12",
)


def damaged(trace: dict[str, Any], random_: random.Random) -> bytes:
    """The bytes of a file in which something is wrong, or by luck nothing."""
    ways: tuple[Callable[[], bytes], ...] = (
        lambda: _spoiled(text_of(trace), random_),
        lambda: text_of(_with_strange_values(trace, random_)),
        lambda: _spoiled(gzip.compress(text_of(trace), 1), random_),
    )
    return random_.choice(ways)()


def _spoiled(text: bytes, random_: random.Random) -> bytes:
    """Bytes flipped, cut out, cut off, doubled or replaced by tokens."""
    for _ in range(random_.randint(1, 3)):
        at, length = random_.randrange(len(text) + 1), random_.choice((1, 1, 5, 200))
        piece = text[at : at + length]
        replacement = random_.choice(
            (b"", random_.randbytes(len(piece)), piece * 2, random_.choice(_TOKENS), piece + random_.choice(_TOKENS))
        )
        text = text[:at] + replacement + (b"" if random_.random() < 0.1 else text[at + length :])
    return text


def _with_strange_values(trace: dict[str, Any], random_: random.Random) -> Any:
    """JSON that is right, with values that are not."""
    changed = copy.deepcopy(trace)
    for holder, key in random_.sample(list(places(changed)), random_.randint(1, 4)):
        if random_.random() < 0.2:
            holder[key] = [holder[key]]
        else:
            holder[key] = random_.choice(STRANGE)
    return random_.choice((changed, changed, changed, changed["traceEvents"]))


def places(node: Any) -> Any:
    """Everything that can be replaced, as what holds it and the key there."""
    keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from places(node[key])
