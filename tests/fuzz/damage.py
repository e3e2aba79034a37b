"""Damage to the bytes of a file, or to a value of a JSON or TOML document, by a seed."""

import gzip
import json
import random
import re
from collections.abc import Callable
from typing import Any

NUMBERS = (0, 1, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**64 - 1)
TOKENS = (
    *("-1", "0", "1", "1e309", "-1e309", "1e-320", "0.5", "9" * 30, "9" * 5000, "null", "true", "nan", "inf", "-inf"),
    *('""', '"x"', '"\\u0000"', '"../../x"', "[]", "{}", "[[]]", "[" * 300, '"' + "x" * 5000 + '"', "NaN", "\ufeff"),
)
VALUES: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 0.5, 2**31, 2**63, 2**64, -(2**70), 1e308, 10**30),
    *("", "x", "\0", "../../x", "/etc/passwd", "a\nb", "\ud800", "x" * 5000, [], [[]], {}, [None], {"": None}),
)
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:e[+-]?\d+)?|true|false|null', re.IGNORECASE)


def of_bytes(content: bytes, draw: random.Random) -> bytes:
    """Some bytes flipped, cut, doubled, replaced by an odd number, or inserted."""
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, size = draw.randrange(len(changed) + 1), draw.choice((1, 2, 4, 8, 64, 1024))
        kind = draw.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            changed[at : at + size] = draw.randbytes(size)
        elif kind == 2:
            del changed[at : at + size]
        elif kind == 3:
            changed[at:at] = changed[at : at + size]
        elif kind == 4:
            width = draw.choice((1, 2, 4, 8))
            changed[at : at + width] = (draw.choice(NUMBERS) % 2 ** (8 * width)).to_bytes(width, "little")
        elif draw.random() < 0.3:
            del changed[at:]
    return bytes(changed)


def of_text(content: bytes, draw: random.Random) -> bytes:
    """A number, word or text of a document replaced; a line left out or doubled; or bytes damaged."""
    text, kind = content.decode(errors="replace"), draw.randrange(8)
    found = list(_TOKEN.finditer(text))
    if kind < 5 and found:
        for _ in range(draw.choice((1, 1, 3))):
            one = draw.choice(found)
            text = text[: one.start()] + draw.choice(TOKENS) + text[one.end() :]
        return text.encode(errors="replace")
    if kind < 7:
        lines = text.splitlines(keepends=True) or [""]
        at = draw.randrange(len(lines))
        lines[at : at + 1] = lines[at : at + 1] * draw.choice((0, 2))
        return "".join(lines).encode(errors="replace")
    return of_bytes(content, draw)


def of_json(content: bytes, draw: random.Random) -> bytes:
    """A value of a JSON document replaced or left out, or the text damaged."""
    if draw.random() < 0.3:
        return of_text(content, draw)
    document = json.loads(content)
    for _ in range(draw.choice((1, 1, 2))):
        places = [*_places(document)]
        if places:
            holder, key = draw.choice(places)
            if draw.random() < 0.2:
                del holder[key]
            else:
                holder[key] = draw.choice(VALUES)
    return json.dumps(document).encode()


def _places(value: Any) -> Any:
    keys = value.keys() if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


def packed(inner: Callable[[bytes, random.Random], bytes]) -> Callable[[bytes, random.Random], bytes]:
    """Damage inside of a gzip file, or to the file."""

    def damage(content: bytes, draw: random.Random) -> bytes:
        if draw.random() < 0.3:
            return of_bytes(content, draw)
        return gzip.compress(inner(gzip.decompress(content), draw), 1, mtime=0)

    return damage
