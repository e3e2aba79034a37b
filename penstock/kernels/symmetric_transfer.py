"""What the kernels of `penstock.kernels.symmetric` are told: who is where, how tokens are cut, what is waited for."""

from dataclasses import dataclass

from torch import Tensor

from penstock.kernels.tuning import Launch

ROW_MULTIPLE = 16
"""Bytes that a row must be a multiple of: the widest store of one thread."""

MOST_RANKS = 31
"""Ranks of a token are bits of an int32."""


# Triton's `cdiv` and `next_power_of_2` take several microseconds on the host, and every launch needs some.


def ceil_div(size: int, part: int) -> int:
    """How many parts hold `size`."""
    return -(-size // part)


def power_of_two(size: int) -> int:
    """The smallest that is not smaller."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True, kw_only=True)
class PersistentLaunch(Launch):
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
class Homes:
    """Where experts live: id i on the ranks from i // per_rank x parts on, as many as there are parts.

    Attributes:
        per_rank: experts of which a rank holds a part.
        parts: ranks that hold a part of the same expert.
    """

    per_rank: int
    parts: int = 1


@dataclass(frozen=True, kw_only=True)
class Chunks:
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
    def cut(tokens: int, count: int) -> "Chunks":
        """All of so many chunks."""
        return Chunks(rows=ceil_div(tokens, count), count=count, first=0, last=count)


@dataclass(frozen=True, kw_only=True)
class Awaited:
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
class Choices:
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
class Places:
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
class Returned:
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
class Home:
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
