"""Metadata of collectives, from the args and names of kernels."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.trace.calls import CollectiveCalls, SyncKind, calls_of
from penstock.trace.events import NONE
from penstock.trace.load import decode_trace

SAID = {
    "Collective name": "all_to_allv",
    "Process Group Name": "3",
    "Process Group Ranks": "[0, 2, 4]",
    "Group size": 3,
    "Seq": 17,
    "In msg nelems": 600,
    "Out msg nelems": 900,
    "dtype": "BFloat16",
    "In split size": "[1, 2, 3]",
    "Out split size": "[4, 0, 5]",
}


def calls_with(args: dict[str, Any], kernel: str = "ncclDevKernel_SendRecv(ncclDevKernelArgs)") -> CollectiveCalls:
    """The table of one kernel with these args."""
    event = {"ph": "X", "cat": "kernel", "name": kernel, "ts": 10.0, "dur": 5.0, "pid": 0, "tid": 7}
    text = json.dumps({"traceEvents": [event | {"args": {"stream": 7, "device": 0} | args}]})
    return calls_of({0: decode_trace(text.encode(), path=Path("one"))})


def test_group_number_sizes_and_rows_are_read() -> None:
    calls = calls_with(SAID)
    assert (calls.name(0), calls.seq[0], calls.sync[0]) == ("all_to_allv", 17, SyncKind.UNEVEN)
    assert (calls.groups[0].name, calls.groups[0].members, calls.groups[0].size) == ("3", (0, 2, 4), 3)
    assert (calls.sent_bytes[0], calls.received_bytes[0]) == (1200.0, 1800.0)
    assert (calls.sent_rows[0], calls.received_rows[0]) == (6, 9)


def test_parts_that_are_counted_in_elements_are_no_rows() -> None:
    calls = calls_with(SAID | {"In split size": "[100, 200, 300]", "Out split size": "[]"})
    assert (calls.sent_rows[0], calls.received_rows[0]) == (NONE, NONE)


def test_members_of_a_large_group_are_told_by_first_and_stride_where_the_list_is_cut_short() -> None:
    cut = {"Process Group Ranks": "[0, 8, 16, ...]", "Global rank start": 0, "Global rank stride": 8, "Group size": 64}
    assert calls_with(SAID | cut).groups[0].members == tuple(range(0, 512, 8))
    assert calls_with(SAID | cut | {"Global rank stride": -1}).groups[0].members == ()


@pytest.mark.parametrize(("dtype", "width"), [("Float", 4), ("Float8_e4m3fn", 1), ("Long", 8), ("c10::Half", 2)])
def test_bytes_follow_the_type(dtype: str, width: int) -> None:
    assert calls_with(SAID | {"dtype": dtype}).sent_bytes[0] == 600 * width


@pytest.mark.parametrize("damage", [{"dtype": "Quaternion"}, {"In msg nelems": -1, "Out msg nelems": -1}])
def test_unknown_bytes_are_nan(damage: dict[str, Any]) -> None:
    assert np.isnan(calls_with(SAID | damage).sent_bytes[0])


@pytest.mark.parametrize("damage", [{"Seq": "x"}, {"Seq": 10**30}, {"Group size": None}, {"Process Group Name": []}])
def test_args_of_other_types_are_ignored(damage: dict[str, Any]) -> None:
    calls = calls_with(SAID | damage)
    assert (calls.group[0], calls.seq[0], calls.name(0)) == (NONE, NONE, "ncclDevKernel_SendRecv")


@pytest.mark.parametrize(
    ("kernel", "sync"),
    [
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgs)", SyncKind.TOGETHER),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", SyncKind.TOGETHER),
        ("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(ncclDevKernelArgs)", SyncKind.TOGETHER),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgs)", SyncKind.UNEVEN),
        ("ncclDevKernel_Generic(ncclDevKernelArgs)", SyncKind.UNEVEN),
        ("ncclDevKernel_Broadcast_RING_LL(ncclDevKernelArgs)", SyncKind.ROOTED),
        ("push_rows_kernel", SyncKind.ALONE),
        ("return_rows_kernel", SyncKind.ALONE),
        ("wait_kernel", SyncKind.DEVICE),
        ("sum_ranks_kernel", SyncKind.DEVICE),
        ("void deep_ep::intranode::combine<__nv_bfloat16, 8, 768, 4096>(void*)", SyncKind.DEVICE),
        ("void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)", SyncKind.DEVICE),
    ],
)
def test_a_kernel_without_metadata_is_known_by_its_name(kernel: str, sync: SyncKind) -> None:
    calls = calls_with({}, kernel)
    assert calls.sync[0] == sync
    assert calls.group[0] == NONE


@pytest.mark.parametrize(
    ("name", "sync"),
    [
        ("allreduce_coalesced", SyncKind.TOGETHER),
        ("_allgather_base", SyncKind.TOGETHER),
        ("_reduce_scatter_base", SyncKind.TOGETHER),
        ("all_to_all", SyncKind.TOGETHER),
        ("all_to_allv", SyncKind.UNEVEN),
        ("broadcast", SyncKind.ROOTED),
        ("reduce", SyncKind.ROOTED),
        ("gather", SyncKind.ROOTED),
        ("send", SyncKind.PAIR),
        ("recv", SyncKind.PAIR),
    ],
)
def test_the_name_of_a_collective_gives_its_kind_of_synchronization(name: str, sync: SyncKind) -> None:
    assert calls_with(SAID | {"Collective name": name}).sync[0] == sync
