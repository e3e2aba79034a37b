"""Kernels of the symmetric dispatcher on one device and compiled for every chip; ranks: tests/moe/test_symmetric.py."""

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.symmetric import (
    SUM_ALL_LAUNCH,
    ChannelWait,
    CombineBuffers,
    ExpertRanks,
    LocalPlaces,
    Peers,
    PersistentLaunch,
    ReturnPayload,
    RoutingPayload,
    TokenChunks,
    push_numbers,
    push_rows,
    return_rows,
    signal,
    sum_ranks,
    take_numbers,
    take_rows,
    wait,
)
from tests.closeness import assert_close
from tests.kernels.ahead_of_time import TARGETS, compile_without_spills, on_meta

W, T, D = 2, 5, 12
# Tiles that end inside rows and columns, and more of them than programs.
FEW = PersistentLaunch(block_rows=2, block_columns=8, warps=1, programs=2)
ONE = TokenChunks.cut(T, 1)
FLAGS_AT = 4096  # bytes; flags stand behind everything else


def _peers(rank: int, device: torch.device) -> tuple[list[Tensor], Peers]:
    """Float32 memories of W ranks on one device, the flags in the last part of each."""
    memories = [torch.full((1024 + 64,), -1.0, device=device) for _ in range(W)]
    for memory in memories:
        memory[1024:] = 0
    addresses_W = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    return memories, Peers(addresses_W=addresses_W, rank=rank)


def _flags(memory: Tensor) -> Tensor:
    return memory[1024:].view(torch.int64).view(-1, W)  # 16 channels, one flag for each sending rank


def _awaited(flags_CW: Tensor, signals: int) -> ChannelWait:
    device = flags_CW.device
    expected = torch.zeros(16, dtype=torch.int64, device=device)
    left, late = (torch.zeros(size, dtype=torch.int32, device=device) for size in ((3,), ()))
    return ChannelWait(flags_CW, expected, left, late, channel=2, signals=signals, looks=1)


def _arrived(device: torch.device) -> ChannelWait:
    """All flags are set."""
    return _awaited(torch.ones(16, W, dtype=torch.int64, device=device), 1)


def _places(places_NK: list[list[int]], counts_e: list[int], device: torch.device) -> LocalPlaces:
    return LocalPlaces(torch.tensor(places_NK, device=device), torch.tensor(counts_e, dtype=torch.int32, device=device))


@pytest.mark.parametrize("rank", range(W))
def test_a_row_goes_once_to_each_other_rank_that_holds_one_of_its_experts(rank: int, device: torch.device) -> None:
    memories, peers = _peers(rank, device)
    x_TD = torch.randn(T, D, device=device)
    experts_TK = torch.tensor([[0, 1], [1, 2], [3, 2], [4, 4], [4, 0]], device=device)
    push_rows(x_TD, experts_TK, ExpertRanks(per_rank=2), peers, (64, FLAGS_AT), ONE, launch=FEW)
    wanted = ([0, 1, 4], [1, 2])[1 - rank]
    rows_ND = memories[1 - rank][16 : 16 + W * T * D].view(W, T, D)
    assert torch.equal(rows_ND[rank, wanted], x_TD[wanted])
    others = [token for token in range(T) if token not in wanted]
    assert (rows_ND[rank, others] == -1).all() and (rows_ND[1 - rank] == -1).all()
    assert (memories[rank][:1024] == -1).all(), "this rank's own rows are not copied"
    # Each of the two programs counts this rank's flag up.
    assert all(_flags(memory)[0].tolist() == [2 * (rank == 0), 2 * (rank == 1)] for memory in memories)


def test_a_row_goes_to_all_ranks_that_share_its_expert(device: torch.device) -> None:
    memories, peers = _peers(0, device)
    x_TD = torch.randn(2, D, device=device)
    experts_TK = torch.tensor([[3], [4]], device=device)
    push_rows(x_TD, experts_TK, ExpertRanks(per_rank=4, parts=2), peers, (0, FLAGS_AT), ONE, launch=FEW)
    assert torch.equal(memories[1][:D], x_TD[0]) and (memories[1][D:1024] == -1).all()


def test_choices_and_weights_go_to_all_ranks_with_the_first_chunk(device: torch.device) -> None:
    memories, peers = _peers(1, device)
    experts_TK, weights_TK = torch.tensor([[3, 0], [1, 2]], device=device), torch.rand(2, 2, device=device)
    choices = RoutingPayload(weights_TK=weights_TK, ids_offset=0, weights_offset=64, flags_offset=FLAGS_AT + 64)
    x_TD, placement = torch.zeros(2, D, device=device), ExpertRanks(per_rank=2)
    for part in (TokenChunks(rows=16, count=2, first=0, last=1), TokenChunks(rows=16, count=2, first=1, last=2)):
        push_rows(x_TD, experts_TK, placement, peers, (256, FLAGS_AT), part, choices, launch=FEW)
    for memory in memories:
        assert memory.view(torch.int32)[4:8].tolist() == [3, 0, 1, 2]
        assert torch.equal(memory[20:24], weights_TK.flatten())
        assert _flags(memory)[:5].tolist() == [[0, 1], [0, 1], [0, 0], [0, 0], [0, 1]]


@pytest.mark.parametrize("programs", [1, 2, 5])
def test_chunks_cover_every_token_once_with_any_number_of_programs(programs: int, device: torch.device) -> None:
    tokens, chunks = 39, TokenChunks.cut(39, 3)
    flags = torch.zeros(16, W, dtype=torch.int64, device=device)
    launch = replace(FEW, programs=programs)
    x_TD = torch.arange(1.0, 1 + tokens * 4, device=device).view(tokens, 4)
    assert chunks == TokenChunks(rows=13, count=3, first=0, last=3)
    awaited = _awaited(flags.fill_(programs), programs)
    out = torch.full((W * tokens, 4), -1.0, device=device)
    places = _places([[place] for place in range(W * tokens)], [W * tokens], device)
    came = torch.randn(W * tokens, 4, device=device)
    take_rows(came, x_TD, places, out, awaited, chunks, rank=1, is_spread=False, launch=launch)
    assert torch.equal(out, torch.cat((came[:tokens], x_TD))) and int(awaited.late) == 0
    assert awaited.expected[:4].tolist() == [programs, programs, programs, 0] and not awaited.left.any()


def test_sums_and_scalars_return_to_the_rows_they_belong_to(device: torch.device) -> None:
    memories, peers = _peers(0, device)
    y_RD, scalars_R = torch.randn(4, D, device=device), torch.rand(4, device=device)
    places = _places([[0, 3], [3, 3], [2, 1], [3, 1]], [1, 2], device)
    returned = ReturnPayload(rows=y_RD, is_summed=True, scalars_R=scalars_R)
    return_rows(returned, places, peers, (0, 512, FLAGS_AT), TokenChunks.cut(2, 1), launch=FEW)
    assert_close(memories[0][:D], y_RD[0])
    assert (memories[0][D : 4 * D] == -1).all()
    assert_close(memories[1][: 2 * D].view(2, D), torch.stack((y_RD[2] + y_RD[1], y_RD[1])))
    scalars_NK = torch.where(places.places_NK < 3, scalars_R[places.places_NK], 0)
    for memory, scalars in zip(memories, scalars_NK.chunk(2), strict=True):
        assert torch.equal(memory[128:132].view(2, 2), scalars)
        assert _flags(memory)[0].tolist() == [2, 0]


def test_sums_over_ranks_leave_out_those_that_had_no_expert_of_the_token(device: torch.device) -> None:
    parts_ND = torch.randn(6, D, device=device)
    parts_ND[3] = float("nan")  # rank 1 never had token 0
    experts_TK = torch.tensor([[0, 1], [1, 2], [4, 4]], device=device)
    scalars_NK, scalars_TK = torch.arange(12.0, device=device).view(6, 2), torch.empty(3, 2, device=device)
    y_TD = torch.empty(3, D, device=device)
    buffers = CombineBuffers(parts_ND=parts_ND, y_TD=y_TD, scalars_NK=scalars_NK, scalars_TK=scalars_TK)
    sum_ranks(buffers, experts_TK, ExpertRanks(per_rank=2), _arrived(device), TokenChunks.cut(3, 1), launch=FEW)
    assert_close(y_TD, torch.stack((parts_ND[0], parts_ND[1] + parts_ND[4], torch.zeros_like(y_TD[0]))))
    assert scalars_TK.tolist() == [[0, 1], [2, 9], [0, 0]]


def test_rows_of_this_rank_may_be_in_another_buffer(device: torch.device) -> None:
    parts_ND, own_TD = torch.randn(6, D, device=device), torch.randn(3, D, device=device)
    experts_TK = torch.tensor([[0, 1], [1, 2], [3, 4]], device=device)
    buffers = CombineBuffers(parts_ND=parts_ND, y_TD=torch.empty(3, D, device=device), own_TD=own_TD, rank=1)
    sum_ranks(buffers, experts_TK, ExpertRanks(per_rank=2), _arrived(device), TokenChunks.cut(3, 1), launch=FEW)
    assert_close(buffers.y_TD, torch.stack((parts_ND[0], parts_ND[1] + own_TD[1], own_TD[2])))


def test_packed_bytes_are_taken_to_their_places_as_they_are(device: torch.device) -> None:
    came, own = torch.randint(0, 255, (2, 4, 48), dtype=torch.uint8, device=device)
    places = _places([[4, 0], [1, 4], [4, 4], [2, 3]], [1, 0, 3], device)
    out = torch.zeros(5, 48, dtype=torch.uint8, device=device)
    take_rows(came, own[:2], places, out, _arrived(device), TokenChunks.cut(2, 1), rank=0, is_spread=True, launch=FEW)
    assert torch.equal(out, torch.stack((own[0], own[1], came[3], came[3], torch.zeros_like(own[0]))))


def test_a_chunk_that_one_rank_has_not_written_is_noticed(device: torch.device) -> None:
    awaited = _awaited(torch.full((16, W), 2, dtype=torch.int64, device=device), 2)
    awaited.flags_CW[1, 1] = 1
    buffers = CombineBuffers(parts_ND=torch.zeros(6, D, device=device), y_TD=torch.empty(3, D, device=device))
    experts_TK, placement = torch.zeros(3, 1, dtype=torch.int64, device=device), ExpertRanks(per_rank=2)
    for last, late in ((1, 0), (2, 3)):
        sum_ranks(buffers, experts_TK, placement, awaited, TokenChunks(rows=2, count=2, first=0, last=last), launch=FEW)
        assert int(awaited.late) == late


def test_a_wait_ends_when_all_ranks_have_written_and_rows_of_odd_width_are_refused(device: torch.device) -> None:
    awaited = _awaited(torch.full((16, W), 3, dtype=torch.int64, device=device), 3)
    wait(awaited)
    assert int(awaited.late) == 0 and awaited.expected[:2].tolist() == [3, 0] and not awaited.left.any()
    awaited.flags_CW[0, 1] += 3
    wait(awaited._replace(looks=100))  # gives up: one rank never writes
    assert int(awaited.late) == 3 and awaited.expected[:2].tolist() == [6, 0]
    facts = torch.tensor([5, 0], dtype=torch.int32, device=device)
    wait(awaited, facts[1])  # nothing is waited for or counted where it is not needed
    assert awaited.expected[:2].tolist() == [6, 0]
    awaited.flags_CW[0, :] = 9
    wait(awaited, facts[0])
    assert awaited.expected[:2].tolist() == [9, 0]
    with pytest.raises(KernelError, match="16 bytes"):
        push_rows(
            torch.zeros(2, 6), torch.zeros(2, 1).long(), ExpertRanks(per_rank=1), _peers(0, device)[1], (0, 0), ONE
        )


# Launches for DeepSeek-V3 on 4 ranks.
PEERS, PLACEMENT = Peers(addresses_W=on_meta(4, dtype=torch.int64), rank=1), ExpertRanks(per_rank=64)
CHUNKS = TokenChunks.cut(8192, 4)
AWAITED = _awaited(on_meta(16, 4, dtype=torch.int64), 32)
X_TD, PARTS_ND, Y_RD = on_meta(8192, 7168), on_meta(4 * 8192, 7168), on_meta(65_536, 7168)
EXPERTS_TK, WEIGHTS_TK = on_meta(8192, 8, dtype=torch.int64), on_meta(8192, 8, dtype=torch.float32)
SCALARS_R, SCALARS_NK = on_meta(65_536, dtype=torch.float32), on_meta(4 * 8192, 8, dtype=torch.float32)
PLACES = LocalPlaces(places_NK=on_meta(4 * 8192, 8, dtype=torch.int64), counts_e=on_meta(64, dtype=torch.int32))
CHOICES = RoutingPayload(weights_TK=WEIGHTS_TK, ids_offset=0, weights_offset=2**20, flags_offset=2**21)
SUMS = ReturnPayload(rows=Y_RD, is_summed=True)
ROWS = ReturnPayload(rows=PARTS_ND, is_summed=False, scalars_R=SCALARS_R)
COUNTS_WE = on_meta(4, 64, dtype=torch.int32)
COMBINE = CombineBuffers(parts_ND=PARTS_ND, y_TD=X_TD, scalars_NK=SCALARS_NK, scalars_TK=WEIGHTS_TK)

SENDS = {
    "push": lambda: push_rows(X_TD, EXPERTS_TK, PLACEMENT, PEERS, (2**22, 2**30), CHUNKS, CHOICES),
    "return of sums": lambda: return_rows(SUMS, PLACES, PEERS, (2**22, 2**20, 2**30), CHUNKS),
    "return of rows": lambda: return_rows(ROWS, PLACES, PEERS, (2**22, 2**20, 2**30), CHUNKS),
}
WAITS = {
    "take": lambda: take_rows(PARTS_ND, X_TD, PLACES, PARTS_ND, AWAITED, CHUNKS, rank=1, is_spread=False),
    "take to places": lambda: take_rows(PARTS_ND, X_TD, PLACES, Y_RD, AWAITED, CHUNKS, rank=1, is_spread=True),
    "sum": lambda: sum_ranks(COMBINE, EXPERTS_TK, PLACEMENT, AWAITED, CHUNKS),
    "sum with own rows elsewhere": lambda: sum_ranks(
        replace(COMBINE, own_TD=X_TD, rank=1), EXPERTS_TK, PLACEMENT, AWAITED, CHUNKS, launch=SUM_ALL_LAUNCH
    ),
}


@pytest.mark.often("*sm_90*")
@pytest.mark.parametrize("target", TARGETS)
def test_moves_compile_without_spills_with_wide_stores_and_ordered_flags(target: str) -> None:
    is_nvidia = TARGETS[target].backend == "cuda"
    wide = r"st\.global\S*\.v4|st\.global\S*\.v2\.b64" if is_nvidia else r"_store_dwordx4"
    for name, launch in (SENDS | WAITS).items():
        (compiled,) = compile_without_spills(target, launch)
        assert re.search(wide, compiled.asm), f"{name} stores narrowly"
        # All warps have written before one of them sets the flag, and none reads before one has seen it.
        barrier = _BARRIER[is_nvidia]
        order = (barrier, _RELEASE[is_nvidia]) if name in SENDS else (_ACQUIRE[is_nvidia], barrier)
        assert re.search("(?s:.*)".join(order), compiled.asm), f"{name}: flags have no order"


# Of each, AMD's form and NVIDIA's. On AMD the caches are written back before a flag is counted up, and invalidated
# after it was read. Triton 3.6 emits `atom` where 3.9 emits `red`, and a load where 3.9 adds zero.
_RELEASE = r"buffer_wbl2 sc0 sc1(?s:.*)global_atomic_add_x2", r"(?:red|atom)\.global\.sys\.release\.add"
_ACQUIRE = (
    r"(?:global_atomic_add_x2|global_load_dwordx2)(?s:.*)buffer_inv sc0 sc1",
    r"atom\.global\.sys\.acquire\.add",
)
_BARRIER = "s_barrier", r"bar\.sync"


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_a_wait_of_one_warp_acquires_across_the_node(target: str) -> None:
    acquire = _ACQUIRE[TARGETS[target].backend == "cuda"]
    needed = on_meta(dtype=torch.int32)
    for await_flags in (
        wait,
        lambda awaited: wait(awaited, advances=False),
        lambda awaited: wait(awaited, needed),
        lambda awaited: take_numbers(on_meta(512, dtype=torch.int32), COUNTS_WE, awaited),
    ):
        (waited,) = compile_without_spills(target, lambda await_flags=await_flags: await_flags(AWAITED))
        assert re.search(acquire, waited.asm)


@pytest.mark.often("gfx942")
@pytest.mark.parametrize("target", TARGETS)
def test_sums_for_copy_engines_set_no_flag_and_kernels_that_send_little_set_one(target: str) -> None:
    release = _RELEASE[TARGETS[target].backend == "cuda"]

    def launches() -> None:
        return_rows(SUMS, PLACES, PEERS, (2**22, 2**20, 2**30), CHUNKS, staged_ND=PARTS_ND)
        signal(PEERS, 2**30)
        signal(PEERS, 2**30, on_meta(dtype=torch.int32))
        push_numbers(COUNTS_WE[0], PEERS, AWAITED.expected, (2**22, 2**30))

    staged, *said = compile_without_spills(target, launches)
    assert not re.search(release, staged.asm), "no flag is set before the copies are sent"
    assert all(re.search(release, one.asm) for one in said)
