"""Kernels that talk to other ranks are known by the names of their functions."""

import ast
from pathlib import Path

import pytest

import penstock.kernels
from penstock.trace.events import GpuKind
from penstock.trace.kernel_names import OWN, function_of, kind_of, library_of

COMMUNICATION = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "ncclKernel_SendRecv(ncclDevComm*, unsigned long, ncclWork*)": "nccl",
    "ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)": "nccl",
    "mscclKernel_Sum_float_Simple_false(ncclDevComm*)": "nccl",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)": "deep_ep",
    "void deep_ep::internode_ll::combine<3, 7168, 9>(void*, void*)": "deep_ep",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": "deep_ep",
    "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8EEEvPT_": "deep_ep",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)": "mori",
    "nvshmemi_barrier_threadgroup_kernel(int)": "nvshmem",
    "void rocshmem::put_kernel(char*)": "nvshmem",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "symmetric",
    "void c10d::symmetric_memory::barrier_kernel(unsigned int**, unsigned long)": "symmetric",
    "void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)": "symmetric",
    "allToAllV(void*, void*, long*, long, nvshmemi_team_t*)": "symmetric",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)": "custom",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(y)": "custom",
    "void moeAllToAllKernel<8>(int)": "custom",
    "push_rows_kernel": OWN,
    "wait_kernel": OWN,
}

COMPUTE = (
    "void at::native::elementwise_kernel<128, 4, at::native::all_gather_copy<float> >(int)",
    "void cub::DeviceReduceKernel<BlockAllReduce<float, 256> >(float*)",
    "void softmaxBlockAllReduce<float>(float*)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "std::enable_if<(((8)>(0))), void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(int)",
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT",
    "rows_kernel",
    "sum_rows_kernel",
    "sum_table_kernel",
    "spread_kernel",
    "",
    "<<<",
)


@pytest.mark.parametrize(("name", "library"), COMMUNICATION.items())
def test_a_kernel_that_talks_to_other_ranks_is_communication(name: str, library: str) -> None:
    assert library_of(name) == library
    assert kind_of("kernel", name) is GpuKind.COMMUNICATION


@pytest.mark.parametrize("name", COMPUTE)
def test_a_kernel_that_stays_on_its_device_is_compute(name: str) -> None:
    assert kind_of("kernel", name) is GpuKind.COMPUTE


def test_every_symmetric_kernel_of_ours_is_known_and_no_other() -> None:
    folder = Path(penstock.kernels.__path__[0])
    ours = {file.name: _kernels_of(file) for file in folder.glob("*.py")}
    talking = {name for names in ours.values() for name in names if library_of(name) is not None}
    assert talking == set(ours["symmetric_kernels.py"])


def _kernels_of(file: Path) -> list[str]:
    functions = (node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.FunctionDef))
    return [
        one.name
        for one in functions
        if one.name.endswith("_kernel") and any("jit" in ast.unparse(by) for by in one.decorator_list)
    ]


def test_copies_and_fills_are_known_by_their_category() -> None:
    assert kind_of("gpu_memcpy", "Memcpy PtoP (Device -> Device)") is GpuKind.COPY
    assert kind_of("gpu_memset", "Memset (Device)") is GpuKind.SET
    assert [kind_of(old, "any") for old in ("Kernel", "Memcpy", "Memset")] == [
        GpuKind.COMPUTE,
        GpuKind.COPY,
        GpuKind.SET,
    ]


def test_a_function_has_its_namespaces_and_nothing_else() -> None:
    assert function_of("void at::native::(anonymous namespace)::sum<float>(float*)") == "at::native::sum"
    assert function_of("std::enable_if<((8)>(0)), void>::type vllm::norm<int>(int)") == "vllm::norm"
