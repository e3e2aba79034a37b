"""The text of a script that runs one collective as it was recorded, on as many ranks as torchrun starts.

A trace of one rank says what that rank sent to each other and got from each. What other ranks exchanged among
themselves is in their traces; where these are missing, it is an even share of what this rank sends, and the script says
so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.base.errors import TraceError

DTYPES: dict[str, str] = {
    "BFloat16": "bfloat16",
    "Half": "float16",
    "Float": "float32",
    "Double": "float64",
    "Byte": "uint8",
    "Char": "int8",
    "Short": "int16",
    "Int": "int32",
    "Long": "int64",
    "Bool": "bool",
    "ComplexFloat": "complex64",
    "ComplexDouble": "complex128",
    "Float8_e4m3fn": "float8_e4m3fn",
    "Float8_e4m3fnuz": "float8_e4m3fnuz",
    "Float8_e5m2": "float8_e5m2",
    "Float8_e5m2fnuz": "float8_e5m2fnuz",
}
"""PyTorch's names for those of the metadata of collectives."""

_MOST_RANKS = 1 << 20
"""Groups that say to be larger are damaged."""

_MOST_EXCHANGING = 1024
"""A script holds the square of it."""

_CALLS: tuple[tuple[str, str], ...] = (
    ("reducescatter", "scatter"),
    ("allreduce", "reduce"),
    ("allgather", "gather"),
    ("alltoall", "exchange"),
    ("broadcast", "broadcast"),
    ("reduce", "to_first"),
)
"""Beginnings of names without `_`, and what they are; the first that fits."""

_BODIES: dict[str, str] = {
    "reduce": "x = torch.zeros(IN, dtype=DTYPE, device=DEVICE)\n\n\ndef run():\n    dist.all_reduce(x)\n",
    "broadcast": "x = torch.zeros(IN, dtype=DTYPE, device=DEVICE)\n\n\ndef run():\n    dist.broadcast(x, 0)\n",
    "to_first": "x = torch.zeros(IN, dtype=DTYPE, device=DEVICE)\n\n\ndef run():\n    dist.reduce(x, 0)\n",
    "gather": (
        "x = torch.zeros(IN, dtype=DTYPE, device=DEVICE)\n"
        "gathered = torch.zeros(IN * RANKS, dtype=DTYPE, device=DEVICE)\n\n\n"
        "def run():\n    dist.all_gather_into_tensor(gathered, x)\n"
    ),
    "scatter": (
        "x = torch.zeros(OUT * RANKS, dtype=DTYPE, device=DEVICE)\n"
        "part = torch.zeros(OUT, dtype=DTYPE, device=DEVICE)\n\n\n"
        "def run():\n    dist.reduce_scatter_tensor(part, x)\n"
    ),
    "exchange": (
        "sends = SENT[RANK][:RANKS]\n"
        "gets = [row[RANK] for row in SENT[:RANKS]]\n"
        "x = torch.zeros(sum(sends), dtype=DTYPE, device=DEVICE)\n"
        "got = torch.zeros(sum(gets), dtype=DTYPE, device=DEVICE)\n\n\n"
        "def run():\n    dist.all_to_all_single(got, x, gets, sends)\n"
    ),
}

_START = """
dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
RANK, RANKS = dist.get_rank(), dist.get_world_size()
DEVICE = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
if torch.cuda.is_available():
    torch.cuda.set_device(DEVICE)
if RANKS > RECORDED_RANKS:
    sys.exit(f"the trace has {RECORDED_RANKS} ranks, torchrun started {RANKS}")

"""

_CLOCK = '''

def once_us():
    """One call on this rank, from a moment at which all ranks are ready."""
    dist.barrier()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e6


samples = [once_us() for _ in range(30)][5:]
slowest = torch.tensor(samples, dtype=torch.float64, device=DEVICE)
dist.all_reduce(slowest, dist.ReduceOp.MAX)
if RANK == 0:
'''


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One collective as one rank's trace has it; numbers are of elements.

    Attributes:
        name: as in the metadata, `all_to_allv`.
        dtype: PyTorch's name.
        sent: of this rank's input.
        got: of this rank's output.
        ranks: of the group.
        place: of this rank in the group.
        sends: to each rank of the group; empty if even.
        gets: from each rank.
    """

    name: str
    dtype: str
    sent: int
    got: int
    ranks: int
    place: int
    sends: tuple[int, ...]
    gets: tuple[int, ...]

    @property
    def call(self) -> str | None:
        """Which of `torch.distributed`'s calls it is, None if none that is known."""
        return call_of(self.name)


def call_of(name: str) -> str | None:
    """Which of `torch.distributed`'s calls a name means: `all_to_allv`, `c10d::alltoall_base_`, `nccl:all_reduce`."""
    plain = name.rpartition(":")[2].lower().replace("_", "")
    return next((call for start, call in _CALLS if plain.startswith(start)), None)


def collective_of(args: Mapping[str, Any], rank: int) -> Collective | None:
    """The collective that an event's metadata describe, None if there are none.

    Args:
        args: of a kernel, or of a `record_param_comms`.
        rank: of the trace.

    Raises:
        TraceError: they are damaged.
    """
    if "Collective name" not in args or "In msg nelems" not in args:
        return None
    name = str(args["Collective name"])
    try:
        members = _numbers(args.get("Process Group Ranks", "[]"))
        sent, got, ranks = (int(args[key]) for key in ("In msg nelems", "Out msg nelems", "Group size"))
        sends, gets = (_numbers(args.get(key, "[]")) for key in ("In split size", "Out split size"))
    except (KeyError, ValueError, TypeError, OverflowError, msgspec.MsgspecError) as error:
        raise TraceError(f"the metadata of {name} are damaged in this trace", got=error) from error
    if not 0 < ranks <= _MOST_RANKS or min(sent, got) < 0 or min([*sends, *gets], default=0) < 0:
        raise TraceError(f"the metadata of {name} are damaged in this trace", got=f"{ranks} ranks, {sent} elements")
    dtype = DTYPES.get(str(args.get("dtype")))
    if dtype is None:
        raise TraceError(f"{name} has a dtype that replay does not know", got=args.get("dtype"))
    return Collective(
        name=name,
        dtype=dtype,
        sent=sent,
        got=got,
        ranks=ranks,
        place=members.index(rank) if rank in members[:ranks] else rank % ranks,
        sends=_elements(sends, sent, ranks),
        gets=_elements(gets, got, ranks),
    )


def _numbers(text: Any) -> list[int]:
    return msgspec.json.decode(text, type=list[int]) if isinstance(text, str) else msgspec.convert(text, list[int])


def _elements(splits: Sequence[int], total: int, ranks: int) -> tuple[int, ...]:
    """Splits in elements; PyTorch counts them in rows of the first dim."""
    if len(splits) != ranks or not sum(splits):
        return ()
    return tuple(split * total // sum(splits) for split in splits)


def exchanged(known: Sequence[Collective]) -> tuple[list[list[int]], bool]:
    """How many elements each rank sends to each other.

    Args:
        known: one collective as it is in the traces of some of its ranks, the chosen one first.

    Returns:
        Rows of senders; and whether every number was recorded.
    """
    ranks, share = known[0].ranks, known[0].sent // max(1, known[0].ranks)
    sent: list[list[int | None]] = [[None] * ranks for _ in range(ranks)]
    for one in reversed(known):
        for other in range(ranks):
            sent[other][one.place] = one.gets[other] if one.gets else one.got // ranks
    for one in reversed(known):
        for other in range(ranks):
            sent[one.place][other] = one.sends[other] if one.sends else one.sent // ranks
    is_whole = all(cell is not None for row in sent for cell in row)
    return [[share if cell is None else cell for cell in row] for row in sent], is_whole


def collective_script(known: Sequence[Collective], *, seen: Sequence[str], recorded_us: float) -> str:
    """A script that runs a collective under torchrun.

    Args:
        known: one collective as it is in the traces of some of its ranks, the chosen one first.
        seen: lines for the script's docstring.
        recorded_us: how long it took in the trace, waiting included.

    Raises:
        TraceError: it is none that can be replayed.
    """
    chosen = known[0]
    if chosen.call is None:
        raise TraceError(
            f"{chosen.name} cannot be replayed",
            allowed="all-reduce, all-gather, reduce-scatter, all-to-all, broadcast, reduce",
        )
    sizes = [f"DTYPE = torch.{chosen.dtype}", f"RECORDED_RANKS = {chosen.ranks}"]
    lines = list(seen)
    if chosen.call == "exchange" and chosen.ranks > _MOST_EXCHANGING:
        raise TraceError(f"{chosen.name} has too many ranks for a script", got=chosen.ranks, allowed=_MOST_EXCHANGING)
    if chosen.call == "exchange":
        sent, is_whole = exchanged(known)
        rows = "\n".join(f"    {row}," for row in sent)
        sizes += [f"SENT = [\n{rows}\n]", '"""Elements that each rank (rows) sends to each (columns)."""']
        if not is_whole:
            lines.append("What other ranks send to each other is not in the traces that were given: even shares.")
    else:
        sizes += [f"IN, OUT = {chosen.sent}, {chosen.got}"]
    text = "\n".join(lines)
    return (
        f'"""{chosen.name} as a trace has it. Written by `penstock trace replay`; run it with\n'
        f"`torchrun --nproc-per-node {min(chosen.ranks, 8)} FILE`; with fewer ranks than recorded, the first ones run."
        f'\n\n{text}\n"""\n\n'
        "import os\nimport statistics\nimport sys\nimport time\n\nimport torch\nimport torch.distributed as dist\n\n"
        + "\n".join(sizes)
        + "\n"
        + _START
        + _BODIES[chosen.call]
        + _CLOCK
        + f"    median = statistics.median(slowest.tolist())\n"
        f'    print(f"{chosen.name}: {{median:.1f}} us on {{RANKS}} ranks of {{DEVICE.type}}, '
        f'{recorded_us:.1f} us on {chosen.ranks} in the trace")\n'
        "dist.destroy_process_group()\n"
    )
