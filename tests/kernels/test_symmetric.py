"""Kernels of the symmetric dispatcher alone: what they write where, and what they become on every chip.

How ranks work together through them is in tests/moe/test_symmetric.py.
"""

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.base.errors import KernelError
from penstock.kernels.symmetric import (
    LOCAL_LAUNCH,
    PUSH_LAUNCH,
    RETURN_LAUNCH,
    Homes,
    Peers,
    PersistentLaunch,
    Returned,
    gather_rows,
    push_metadata,
    push_rows,
    return_rows,
    signal,
    sum_ranks,
    wait,
)
from penstock.kernels.symmetric_kernels import (
    gather_rows_kernel,
    push_metadata_kernel,
    push_rows_kernel,
    return_rows_kernel,
    signal_kernel,
    sum_ranks_kernel,
    wait_kernel,
)
from tests.kernels.ahead_of_time import TARGETS, compile_for

W, T, D = 2, 5, 12
FEW = PersistentLaunch(block_rows=2, block_columns=8, warps=1, programs=2)
"""Tiles that end inside rows and columns, and more of them than programs."""


def _peers(rank: int, device: torch.device) -> tuple[list[Tensor], Peers]:
    """Float32 memories of W ranks on one device."""
    memories = [torch.full((256,), -1.0, device=device) for _ in range(W)]
    addresses_W = torch.tensor([memory.data_ptr() for memory in memories], device=device)
    return memories, Peers(addresses_W=addresses_W, rank=rank)


def test_a_row_goes_once_to_each_rank_that_holds_one_of_its_experts(device: torch.device) -> None:
    memories, peers = _peers(1, device)
    x_TD = torch.randn(T, D, device=device)
    experts_TK = torch.tensor([[0, 1], [1, 2], [3, 2], [4, 4], [4, 0]], device=device)
    push_rows(x_TD, experts_TK, Homes(per_rank=2), peers, offset=64, launch=FEW)
    for memory, wanted in zip(memories, ([0, 1, 4], [1, 2]), strict=True):
        rows_ND = memory[16 : 16 + W * T * D].view(W, T, D)
        assert torch.equal(rows_ND[1, wanted], x_TD[wanted])
        others = [token for token in range(T) if token not in wanted]
        assert (rows_ND[1, others] == -1).all() and (rows_ND[0] == -1).all()


def test_a_row_goes_to_all_ranks_that_share_its_expert(device: torch.device) -> None:
    memories, peers = _peers(0, device)
    x_TD = torch.randn(2, D, device=device)
    push_rows(x_TD, torch.tensor([[3], [4]], device=device), Homes(per_rank=4, parts=2), peers, 0, launch=FEW)
    for memory in memories:
        assert torch.equal(memory[:D], x_TD[0]) and (memory[D:] == -1).all()


def test_choices_and_weights_go_to_everybody(device: torch.device) -> None:
    memories, peers = _peers(1, device)
    experts_TK, weights_TK = torch.tensor([[3, 0], [1, 2]], device=device), torch.rand(2, 2, device=device)
    push_metadata(experts_TK, weights_TK, peers, ids_offset=0, weights_offset=64)
    for memory in memories:
        assert memory.view(torch.int32)[4:8].tolist() == [3, 0, 1, 2]
        assert torch.equal(memory[20:24], weights_TK.flatten())


def test_sums_and_scalars_return_to_the_rows_they_belong_to(device: torch.device) -> None:
    memories, peers = _peers(0, device)
    y_RD, scalars_NK = torch.randn(4, D, device=device), torch.rand(4, 2, device=device)
    places_NK = torch.tensor([[0, 3], [3, 3], [2, 1], [3, 1]], device=device)
    counts_e = torch.tensor([1, 2], dtype=torch.int32, device=device)
    returned = Returned(rows=y_RD, is_summed=True, scalars_NK=scalars_NK)
    return_rows(returned, places_NK, counts_e, peers, 0, 512, launch=FEW)
    torch.testing.assert_close(memories[0][:D], y_RD[0])
    assert (memories[0][D : 4 * D] == -1).all()
    torch.testing.assert_close(memories[1][: 2 * D].view(2, D), torch.stack((y_RD[2] + y_RD[1], y_RD[1])))
    for memory, scalars in zip(memories, scalars_NK.chunk(2), strict=True):
        assert torch.equal(memory[128:132].view(2, 2), scalars)


def test_sums_over_ranks_leave_out_those_that_had_no_expert_of_the_token(device: torch.device) -> None:
    parts_ND = torch.randn(6, D, device=device)
    parts_ND[3] = float("nan")  # rank 1 never had token 0
    experts_TK = torch.tensor([[0, 1], [1, 2], [4, 4]], device=device)
    scalars_NK = torch.arange(12.0, device=device).view(6, 2)
    y_TD, scalars_TK = sum_ranks(parts_ND, experts_TK, Homes(per_rank=2), scalars_NK, launch=FEW)
    torch.testing.assert_close(y_TD, torch.stack((parts_ND[0], parts_ND[1] + parts_ND[4], torch.zeros_like(y_TD[0]))))
    assert scalars_TK is not None and scalars_TK.tolist() == [[0, 1], [2, 9], [0, 0]]


def test_packed_bytes_are_gathered_as_they_are(device: torch.device) -> None:
    rows_ND = torch.randint(0, 255, (7, 48), dtype=torch.uint8, device=device)
    index_R = torch.tensor([6, 0, 3, 3, 1], device=device)
    counts_e = torch.tensor([1, 0, 3], dtype=torch.int32, device=device)
    out_RD = gather_rows(rows_ND, index_R, counts_e, launch=FEW)
    assert torch.equal(out_RD[:4], rows_ND[index_R[:4]])


def test_rows_of_odd_width_are_refused(device: torch.device) -> None:
    with pytest.raises(KernelError, match="16 bytes"):
        gather_rows(torch.zeros(2, 6, device=device), torch.zeros(1, dtype=torch.int64), torch.ones(1).int())


def test_a_wait_ends_when_all_have_signalled_and_gives_up_when_one_does_not(device: torch.device) -> None:
    flags = [torch.zeros(3, W, dtype=torch.int64, device=device) for _ in range(W)]
    addresses_W = torch.tensor([flag.data_ptr() for flag in flags], device=device)
    expected, late = (
        torch.zeros(3, dtype=torch.int64, device=device),
        torch.zeros((), dtype=torch.int32, device=device),
    )
    for rank in range(W):
        signal(Peers(addresses_W=addresses_W, rank=rank), offset=2 * W * 8)
    assert all(flag.tolist() == [[0, 0], [0, 0], [1, 1]] for flag in flags)
    wait(flags[0], expected, late, 2, looks=1)
    assert int(late) == 0 and expected.tolist() == [0, 0, 1]
    signal(Peers(addresses_W=addresses_W, rank=1), offset=2 * W * 8)
    wait(flags[0], expected, late, 2, looks=100)
    assert int(late) == 3 and expected.tolist() == [0, 0, 2]


HIDDEN, TOP_K, PER_RANK = 7168, 8, 64
"""V3 on 4 ranks."""


def _block(launch: PersistentLaunch) -> dict[str, int]:
    return {"BLOCK_T": launch.block_rows, "BLOCK_D": launch.block_columns}


@pytest.mark.parametrize("target", TARGETS)
def test_moves_compile_without_spills_and_with_wide_stores(target: str) -> None:
    hidden, top_k, per_rank = HIDDEN, TOP_K, PER_RANK
    homes = {"K": top_k, "PER_RANK": per_rank, "PARTS": 1, "W": 4}
    experts = {"K": top_k, "D": hidden, "EXPERTS": per_rank, "BLOCK_E": per_rank, "W": 4}
    table = {"addresses_ptr": "*i64:16", "offset": "i64:16", "rank": "i32", "tokens": "i32:16"}
    places = {"places_ptr": "*i64:16", "counts_ptr": "*i32:16", "scalars_offset": "i64:16"}
    words, rows, ids, scalars = "*i32:16", "*bf16:16", "*i64:16", "*fp32:16"
    cases: dict[str, tuple[Any, PersistentLaunch, dict[str, str], dict[str, int | None]]] = {
        "push": (
            push_rows_kernel,
            PUSH_LAUNCH,
            {"words_ptr": words, "ids_ptr": ids, **table},
            {"WORDS": hidden // 2, **homes},
        ),
        "return of sums": (
            return_rows_kernel,
            RETURN_LAUNCH,
            {"rows_ptr": rows, **places, **table},
            {"scalars_ptr": None, "SUMMED": True, **experts},
        ),
        "return of rows": (
            return_rows_kernel,
            RETURN_LAUNCH,
            {"rows_ptr": rows, "scalars_ptr": scalars, **places, **table},
            {"SUMMED": False, **experts},
        ),
        "sum": (
            sum_ranks_kernel,
            LOCAL_LAUNCH,
            {"parts_ptr": rows, "out_ptr": rows, "ids_ptr": ids, "tokens": "i32:16"}
            | {"scalars_ptr": scalars, "out_scalars_ptr": scalars},
            {"D": hidden, **homes},
        ),
        "gather": (
            gather_rows_kernel,
            LOCAL_LAUNCH,
            {"words_ptr": words, "out_ptr": words, "index_ptr": ids, "counts_ptr": words, "rows": "i32:16"},
            {"WORDS": hidden // 2, "EXPERTS": per_rank, "BLOCK_E": per_rank},
        ),
    }
    wide = r"st\.global\S*\.v4|st\.global\S*\.v2\.b64" if TARGETS[target].backend == "cuda" else r"_store_dwordx4"
    for name, (kernel, launch, signature, constants) in cases.items():
        block = {"BLOCK_T": launch.block_rows, "BLOCK_D": launch.block_columns}
        compiled = compile_for(kernel, signature, constants | block, TARGETS[target], num_warps=launch.warps)
        assert compiled.spills == 0, f"{name}: {compiled.summary}"
        assert re.search(wide, compiled.asm), f"{name} stores narrowly"


@pytest.mark.parametrize("target", TARGETS)
def test_signals_release_and_waits_acquire_across_the_node(target: str) -> None:
    one_warp = {"num_warps": 1}
    pushed = compile_for(
        push_metadata_kernel,
        {
            "ids_ptr": "*i64:16",
            "weights_ptr": "*fp32:16",
            "addresses_ptr": "*i64:16",
            "ids_offset": "i64:16",
            "weights_offset": "i64:16",
            "rank": "i32",
            "slots": "i32:16",
        },
        {"W": 4, "BLOCK_R": 1024},
        TARGETS[target],
    )
    signalled = compile_for(
        signal_kernel,
        {"addresses_ptr": "*i64:16", "offset": "i64", "rank": "i32"},
        {"W": 4, "BLOCK_W": 4},
        TARGETS[target],
        **one_warp,
    )
    waited = compile_for(
        wait_kernel,
        {
            "flags_ptr": "*i64:16",
            "expected_ptr": "*i64:16",
            "late_ptr": "*i32:16",
            "channel": "i32",
            "limit": "i32",
        },
        {"W": 4, "BLOCK_W": 4},
        TARGETS[target],
        **one_warp,
    )
    assert pushed.spills == signalled.spills == waited.spills == 0
    if TARGETS[target].backend == "cuda":
        # Ours is the order in which Triton writes the qualifiers.
        assert "red.global.sys.release.add" in signalled.asm and "atom.global.sys.acquire.add" in waited.asm
    else:
        # Caches are written back before the flag is counted up, and forgotten after it was seen.
        assert re.search(r"buffer_wbl2 sc0 sc1(?s:.*)global_atomic_add_x2", signalled.asm)
        assert re.search(r"global_atomic_add_x2(?s:.*)buffer_inv sc0 sc1", waited.asm)
