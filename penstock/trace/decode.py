"""The text of a trace, parsed: one typed pass over the JSON in which the `args` of an event stay text.

Profilers have written numbers that are not JSON (`inf`, `nan`) and bytes that are not UTF-8 into names. A text that
does not parse is therefore mended once before it is refused.
"""

import re
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.base.errors import TraceError
from penstock.trace.events import NONE

_NO_TEXT = msgspec.Raw()


class Event(msgspec.Struct, gc=False):
    """An event as Chrome's format has it: phase, category, process, thread, microseconds."""

    ph: str = ""
    cat: str | None = None
    name: str = ""
    pid: int | str = 0
    tid: int | str = 0
    ts: float | None = None
    dur: float | None = None
    id: int | str | None = None
    args: msgspec.Raw = _NO_TEXT


class TraceFile(msgspec.Struct):
    """Events and what torch.profiler writes beside them."""

    traceEvents: list[Event]  # noqa: N815  (keys of the file)
    deviceProperties: msgspec.Raw = _NO_TEXT  # noqa: N815
    distributedInfo: msgspec.Raw = _NO_TEXT  # noqa: N815
    schemaVersion: msgspec.Raw = _NO_TEXT  # noqa: N815
    traceName: msgspec.Raw = _NO_TEXT  # noqa: N815
    baseTimeNanoseconds: msgspec.Raw = _NO_TEXT  # noqa: N815
    record_shapes: msgspec.Raw = _NO_TEXT
    with_stack: msgspec.Raw = _NO_TEXT
    with_flops: msgspec.Raw = _NO_TEXT
    profile_memory: msgspec.Raw = _NO_TEXT
    cuda_runtime_version: msgspec.Raw = _NO_TEXT
    cuda_driver_version: msgspec.Raw = _NO_TEXT
    hip_runtime_version: msgspec.Raw = _NO_TEXT
    hip_driver_version: msgspec.Raw = _NO_TEXT
    penstock: msgspec.Raw = _NO_TEXT


class Joins(msgspec.Struct, gc=False):
    """The numbers of `args` that join events to each other; `external_once` is how old profilers spelled it."""

    correlation: int = NONE
    stream: int | None = None
    device: int | None = None
    external: int = msgspec.field(name="External id", default=NONE)
    external_once: int = msgspec.field(name="external id", default=NONE)
    sequence: int = msgspec.field(name="Sequence number", default=NONE)


_FILE = msgspec.json.Decoder(TraceFile)
_LIST = msgspec.json.Decoder(list[Event])
_JOINS = msgspec.json.Decoder(Joins, strict=False)
_NOTHING = Joins()
_UNNUMBER = re.compile(rb"(:\s*)[-+]?(?:infinity|inf|nan)\b", re.IGNORECASE)


def parse(text: bytes, path: Path) -> TraceFile:
    """The events that a text holds.

    Raises:
        TraceError: it is empty, no JSON, or no list of events.
    """
    start = text[:64].lstrip()[:1]
    if not start and not text.strip():
        raise TraceError(f"{path} is empty", fix="record it again")
    try:
        return _parsed(text, start)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        try:
            return _parsed(_mended(text), start)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise TraceError(
                f"{path} is no trace of torch.profiler, or damaged: {reason(error)}",
                fix="if it was cut off while it was written or copied, record or copy it again",
            ) from error


def joins_of(events: Iterable[Event], path: Path) -> list[Joins]:
    """What joins each of these events to others.

    Raises:
        TraceError: the `args` of one are damaged.
    """
    decode = _JOINS.decode
    try:
        return [decode(event.args) if event.args else _NOTHING for event in events]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise TraceError(f"{path}: args of an event are damaged: {reason(error)}", fix="record it again") from error


def value_of(text: msgspec.Raw) -> object:
    """The value that a piece of text of a file stands for; None if there is none."""
    return msgspec.json.decode(text) if bytes(text) else None


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


def _parsed(text: bytes, start: bytes) -> TraceFile:
    return TraceFile(traceEvents=_LIST.decode(text)) if start == b"[" else _FILE.decode(text)


def _mended(text: bytes) -> bytes:
    """The text with null for numbers that are none, and with a mark for bytes that are no UTF-8."""
    return _UNNUMBER.sub(rb"\1null", text).decode(errors="replace").encode()
