"""Rows between the GPUs of one node, written by kernels straight into each other's memory.

    push_rows        choices and weights to all ranks; each row once to each other rank that holds an expert of it
    wait             until everybody's choices are here
    take_rows        rows that came, copied out, or to the places of the experts  (backward of combine)
    return_rows      for each row that came one row back, the sum over its places (combine; dispatch backward)
    sum_ranks        the rows that came back, summed for each token

There is no sort, no count and no host between a row and where it goes: token t of rank r stands at row r x T + t of
every receiver. A token crosses once to each rank, not once for each expert, and what its experts on one rank give is
summed there before it travels back.

Tokens travel in chunks. `push_rows` and `return_rows` say of each chunk that it is written, `take_rows` and `sum_ranks`
wait for a chunk when they come to it: run side by side, the one reads while the other still writes.

Copy engines take no multiprocessor, and know no choices: they bring all rows to all ranks, in one piece. Then
`push_rows` sends choices only, `return_rows` leaves its sums here, `signal` says that the copies are there, and `hold`
waits for those of the others.

`penstock.parallel.symmetric` owns the memory and says in which order these may be called; nothing here checks that.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.language import ceil_div, power_of_two
from penstock.kernels.launching import start_kernel
from penstock.kernels.symmetric_kernels import (
    hold_kernel,
    push_rows_kernel,
    return_rows_kernel,
    signal_kernel,
    sum_ranks_kernel,
    take_rows_kernel,
    wait_kernel,
)
from penstock.kernels.tuning import KernelLaunch

ROW_MULTIPLE = 16
"""Bytes that a row must be a multiple of: the widest store of one thread."""

MOST_RANKS = 31
"""Ranks of a token are bits of an int32."""


@dataclass(frozen=True, kw_only=True)
class PersistentLaunch(KernelLaunch):
    """How a kernel that walks over tiles of rows is launched; columns are words of 4 bytes, or numbers if it sums.

    Attributes:
        programs: that walk; as many multiprocessors are taken from others as there are programs, or fewer. Of kernels
            that send it must be the same on all ranks, because receivers count the programs. Kernels that wait must
            leave room on the chip for those that send.
    """

    programs: int

    def programs_for(self, rows: int) -> int:
        """Programs that are started: no more than there are tiles."""
        return max(1, min(self.programs, ceil_div(rows, self.block_rows)))


@dataclass(frozen=True, kw_only=True)
class Peers:
    """Where the memory of every rank begins, as this rank sees it.

    Attributes:
        addresses_W: int64, on the device, multiples of 16.
        rank: our place among them.
    """

    addresses_W: Tensor
    rank: int

    @property
    def size(self) -> int:
        """Ranks, ourselves included."""
        return self.addresses_W.numel()


@dataclass(frozen=True, kw_only=True)
class ExpertRanks:
    """Where experts live: id i on the ranks from i // per_rank x parts on, as many as there are parts.

    Attributes:
        per_rank: experts of which a rank holds a part.
        parts: ranks that hold a part of the same expert.
    """

    per_rank: int
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class TokenChunks:
    """How the tokens of each rank are cut, and which of the chunks a launch is for.

    Attributes:
        rows: tokens of a chunk; the last chunks may have fewer, or none.
        count: of chunks.
        first: of this launch.
        last: one past the last of this launch.
    """

    rows: int
    count: int
    first: int
    last: int

    @property
    def arguments(self) -> tuple[int, int, int, int]:
        """As the kernels that wait take them."""
        return self.rows, self.count, self.first, self.last

    @staticmethod
    def cut(tokens: int, count: int) -> "TokenChunks":
        """All of so many chunks."""
        return TokenChunks(rows=ceil_div(tokens, count), count=count, first=0, last=count)


@dataclass(frozen=True, kw_only=True)
class ChannelWait:
    """What a kernel that waits must know of those who send.

    Attributes:
        flags_CW: int64, our own flags of the channel, by chunk and rank.
        expected: int64, by chunk, of the channel: what flags had grown to when they were last waited for.
        left: int32, by channel, zero: programs that have done.
        late: int32 scalar; becomes channel + 1 if a rank does not come.
        channel: its number.
        signals: by how much a flag grows in one transfer: programs of the kernel that sends.
        looks: at the flags, before a rank is given up.
    """

    flags_CW: Tensor
    expected: Tensor
    left: Tensor
    late: Tensor
    channel: int
    signals: int
    looks: int

    @property
    def arguments(self) -> tuple[Tensor | int, ...]:
        """As the kernels take them."""
        return self.flags_CW, self.expected, self.left, self.late, self.channel, self.signals, self.looks


@dataclass(frozen=True, kw_only=True)
class RoutingPayload:
    """What goes to everybody before the rows; offsets are bytes.

    Attributes:
        weights_TK: float32.
        ids_offset: where expert ids go as int32, T x K numbers at rank x T x K.
        weights_offset: where the weights go, likewise.
        flags_offset: of the flags that say so; those of the first chunk are used.
    """

    weights_TK: Tensor
    ids_offset: int
    weights_offset: int
    flags_offset: int


@dataclass(frozen=True, kw_only=True)
class LocalPlaces:
    """Where the experts of this rank have the rows of all ranks' tokens.

    Attributes:
        places_NK: int64, N = W x T: places here of each choice of each row; those past the last expert's are elsewhere.
        counts_e: int32 places of each expert here.
    """

    places_NK: Tensor
    counts_e: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """As the kernels take them."""
        return self.places_NK, self.counts_e

    @property
    def constants(self) -> dict[str, int]:
        """Likewise."""
        experts = self.counts_e.shape[0]
        return {"K": self.places_NK.shape[1], "EXPERTS": experts, "BLOCK_E": power_of_two(experts)}


@dataclass(frozen=True, kw_only=True)
class ReturnPayload:
    """What `return_rows` sends.

    Attributes:
        rows: y_RD at the places of the experts, to be summed; or one row for each that came, N x D.
        is_summed: which of the two.
        scalars_R: float32 at the places of the experts, or None.
    """

    rows: Tensor
    is_summed: bool
    scalars_R: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class CombineBuffers:
    """What came back to the tokens' own rank, and what becomes of it.

    Attributes:
        parts_ND: N = W x T rows, those of rank r from r x T on; of a rank that had no expert of a token, anything.
        own_TD: those of our own rank, which need not stand there; None if they do.
        rank: our own, with `own_TD`.
        y_TD: sums, in the dtype of the parts; zero where all slots were dropped.
        scalars_NK: float32, or None.
        scalars_TK: for each choice the sum of the scalars of the ranks that hold it, 0 for dropped slots.
    """

    parts_ND: Tensor
    y_TD: Tensor
    scalars_NK: Tensor | None = None
    scalars_TK: Tensor | None = None
    own_TD: Tensor | None = None
    rank: int = 0


PUSH_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=32)
"""Enough rows on their way to fill the links. This and the three below: the fastest of those tried on two H200s."""

TAKE_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=132)
"""Must keep up with the links; what is left when the last chunk has come is in nobody's shadow."""

TAKE_ALL_LAUNCH = PersistentLaunch(block_rows=8, block_columns=1024, warps=8, programs=528)
"""Where all have come already, as much as the memory gives."""

RETURN_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=8, programs=264)
"""Sums K rows for each that it sends, so it needs more programs than a push."""

SUM_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=4, programs=132)
"""As `TAKE_LAUNCH`. Half as many take a fifth longer (benchmarks/results/dispatch-h200x2.json)."""

SUM_ALL_LAUNCH = PersistentLaunch(block_rows=4, block_columns=1024, warps=4, programs=1056)
"""Where all have come already, as much as the memory gives."""


def push_rows(
    x_TD: Tensor,
    experts_TK: Tensor,
    homes: ExpertRanks,
    peers: Peers,
    offsets: tuple[int, int],
    chunks: TokenChunks,
    choices: RoutingPayload | None = None,
    *,
    launch: PersistentLaunch = PUSH_LAUNCH,
) -> None:
    """Write each row once to each OTHER rank that holds one of its experts, to row rank x T + t of a section.

    Args:
        x_TD: rows of any dtype, a multiple of 16 bytes wide; packed scales may be part of a row.
        experts_TK: expert ids; the number of experts marks a dropped slot.
        homes: of the experts.
        peers: to whom.
        offsets: bytes, of the section (a multiple of 16) and of the channel's flags.
        chunks: of the tokens.
        choices: what goes before; None if it is there already.
        launch: rows and words at a time, and programs.

    Raises:
        KernelError: rows are not a multiple of 16 bytes.
    """
    words_TD = _words(x_TD)
    tokens, words = words_TD.shape
    start_kernel(
        push_rows_kernel, (launch.programs_for(tokens),),
        words_TD, experts_TK.contiguous(), None if choices is None else choices.weights_TK.contiguous(),
        peers.addresses_W, offsets[0], 0 if choices is None else choices.ids_offset,
        0 if choices is None else choices.weights_offset, offsets[1], 0 if choices is None else choices.flags_offset,
        peers.rank, tokens, chunks.rows, chunks.first, chunks.last,
        WORDS=words, K=experts_TK.shape[1], PER_RANK=homes.per_rank, PARTS=homes.parts, BLOCK_R=1024,
        **_ranks(peers.size), **_block(words, launch),
    )  # fmt: skip


def wait(awaited: ChannelWait) -> None:
    """Hold this stream until every rank has written the first chunk of a channel."""
    start_kernel(wait_kernel, (1,), *awaited.arguments, **_ranks(awaited.flags_CW.shape[1]), num_warps=1)


def hold(awaited: ChannelWait) -> None:
    """The same for a channel on which `take_rows` or `sum_ranks` comes next: that waits again, and finds all there."""
    flags, expected, _, late, *numbers = awaited.arguments
    start_kernel(hold_kernel, (1,), flags, expected, late, *numbers, **_ranks(awaited.flags_CW.shape[1]), num_warps=1)


def signal(peers: Peers, flags_offset: int) -> None:
    """Tell all ranks that what this stream was given before is written: the first chunk of a channel.

    Args:
        peers: to whom.
        flags_offset: bytes, of the channel's flags.
    """
    start_kernel(signal_kernel, (1,), peers.addresses_W, flags_offset, peers.rank, **_ranks(peers.size), num_warps=1)


def take_rows(
    rows_ND: Tensor,
    own_TD: Tensor,
    places: LocalPlaces,
    out: Tensor,
    awaited: ChannelWait,
    chunks: TokenChunks,
    *,
    rank: int,
    is_spread: bool,
    launch: PersistentLaunch = TAKE_LAUNCH,
) -> None:
    """Copy rows that came, as they come, and our own, of which `push_rows` wrote none; only those with a place here.

    Args:
        rows_ND: where they come, N = W x T, as in `push_rows`.
        own_TD: what we pushed.
        places: here, of their choices.
        out: N rows, or R if they are spread; what is not written holds anything.
        awaited: who writes the rows.
        chunks: of each rank's tokens.
        rank: our own.
        is_spread: a row goes to its places, instead of to the row of its number.
        launch: rows and words at a time, and programs.

    Raises:
        KernelError: rows are not a multiple of 16 bytes.
    """
    own_words_TD = _words(own_TD)
    tokens, words = own_words_TD.shape
    received = rows_ND.shape[0]
    start_kernel(
        take_rows_kernel, (launch.programs_for(received),),
        _words(rows_ND), own_words_TD, *places.arguments, _words(out), *awaited.arguments, rank, tokens,
        *chunks.arguments,
        WORDS=words, SPREAD=is_spread, **places.constants, **_ranks(awaited.flags_CW.shape[1]),
        **_block(words, launch),
    )  # fmt: skip


def return_rows(
    returned: ReturnPayload,
    places: LocalPlaces,
    peers: Peers,
    offsets: tuple[int, int, int],
    chunks: TokenChunks,
    *,
    staged_ND: Tensor | None = None,
    launch: PersistentLaunch = RETURN_LAUNCH,
) -> None:
    """Send a row back for each one that came: to row rank x T + t of the section of the rank that had sent it.

    Rows without a place here are not sent; scalars of all rows are, 0 for choices without a place here.

    Args:
        returned: rows and scalars.
        places: here, of the choices of the rows that came.
        peers: to whom.
        offsets: bytes, of the section of rows and of scalars (multiples of 16) and of the channel's flags.
        chunks: of each rank's tokens.
        staged_ND: somebody else sends the rows, who finds them here; given as `returned.rows` if nothing is summed.
            Scalars are sent all the same, and nobody is told of either.
        launch: rows and columns at a time, and programs.

    Raises:
        KernelError: rows are not a multiple of 16 bytes.
    """
    rows, scalars_R = returned.rows.contiguous(), returned.scalars_R
    _words(rows)
    received, top_k = places.places_NK.shape
    width = rows.shape[1]
    start_kernel(
        return_rows_kernel, (launch.programs_for(received),),
        rows, *places.arguments, None if scalars_R is None else scalars_R.contiguous(), staged_ND, peers.addresses_W,
        *offsets, peers.rank, received // peers.size, chunks.rows, chunks.first, chunks.last,
        ROWS=staged_ND is None or returned.is_summed, SUMMED=returned.is_summed, D=width, **places.constants,
        BLOCK_K=power_of_two(top_k), **_ranks(peers.size), **_block(width, launch),
    )  # fmt: skip


def sum_ranks(
    home: CombineBuffers,
    experts_TK: Tensor,
    homes: ExpertRanks,
    awaited: ChannelWait,
    chunks: TokenChunks,
    *,
    launch: PersistentLaunch = SUM_LAUNCH,
) -> None:
    """Sum what the ranks send back as it comes, in float32 and always in the same order.

    Args:
        home: where it comes, and where sums go.
        experts_TK: our choices, as in `push_rows`.
        homes: of the experts.
        awaited: who sends.
        chunks: of the tokens.
        launch: rows and columns at a time, and programs.
    """
    tokens, top_k = experts_TK.shape
    width = home.y_TD.shape[1]
    start_kernel(
        sum_ranks_kernel, (launch.programs_for(tokens),),
        home.parts_ND, None if home.own_TD is None else home.own_TD.contiguous(), home.rank, home.scalars_NK,
        experts_TK.contiguous(), home.y_TD, home.scalars_TK, *awaited.arguments, tokens, *chunks.arguments,
        D=width, K=top_k, PER_RANK=homes.per_rank, PARTS=homes.parts, **_ranks(awaited.flags_CW.shape[1]),
        **_block(width, launch),
    )  # fmt: skip


def _words(rows: Tensor) -> Tensor:
    """The same bytes as 32-bit words."""
    rows = rows.contiguous()
    if rows.shape[1] * rows.element_size() % ROW_MULTIPLE:
        raise KernelError(
            f"rows that travel must be a multiple of {ROW_MULTIPLE} bytes wide",
            got=f"{rows.shape[1]} numbers of {rows.dtype}",
        )
    return rows.view(torch.int32)


def _ranks(ranks: int) -> dict[str, int]:
    return {"W": ranks, "BLOCK_W": power_of_two(ranks)}


def _block(columns: int, launch: PersistentLaunch) -> dict[str, int]:
    block = min(launch.block_columns, power_of_two(columns))
    return {"BLOCK_T": launch.block_rows, "BLOCK_D": block, "num_warps": launch.warps}
