"""Time by phase: names from spans, operators and kernels, and exposed time that adds up to the busy time."""

import ast
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock.kernels
from penstock.base.spans import Span
from penstock.trace.events import GpuKind, Trace
from penstock.trace.kernel_names import (
    FLOAT8_GEMM,
    GENERIC_PATTERNS,
    OWN,
    SPECIFIC_PATTERNS,
    Category,
    function_of,
    generic_category,
    is_gradient,
    kind_of,
    library_of,
    specific_category,
)
from penstock.trace.phases import PASSES, charge, find_phases, plain_row
from penstock.trace.timeline import timeline_of
from penstock.trace.tree import NODE
from tests.trace.tiny import decoded, kernel, operator, read, span, started, tiny

GEMM = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT"
ALL_TO_ALL = "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)"


def named(trace: Trace) -> list[tuple[str, str]]:
    found = find_phases(trace)
    order = np.argsort(found.event, kind="stable")
    return [(found.names[found.name_id[one]], PASSES[found.pass_id[one]]) for one in order]


@pytest.mark.parametrize(
    ("around", "name", "phase"),
    [
        (Span.EXPERTS, "rows_kernel", "experts"),
        (Span.EXPERTS, "swiglu_kernel", "activation"),
        (Span.EXPERTS, "tile_table_kernel", "index"),
        (Span.EXPERTS, "sum_rows_kernel", "permute"),
        (Span.SORT, "some_kernel", "index"),
        (Span.DISPATCH, "push_rows_kernel", "dispatch"),
        (Span.DISPATCH, ALL_TO_ALL, "dispatch"),
        (Span.DISPATCH, "wait_kernel", "dispatch waiting"),
        (Span.COMBINE, "wait_kernel", "combine waiting"),
        (Span.ATTENTION, GEMM, "attention"),
        (Span.ATTENTION, "ncclDevKernel_AllGather_RING_LL(args)", "all-gather"),
        (Span.SHARED, "swiglu_kernel", "shared"),
        (Span.EXPERTS, "float8_rows_kernel", "experts"),
        (Span.EXPERTS, "swiglu_float8_kernel", "activation"),
        (Span.EXPERTS, "group_tiles_kernel", "quantize"),
        (Span.DISPATCH, "pack_rows_kernel", "quantize"),
        (Span.NORM, "norm_quantize_kernel", "norm"),
        (Span.NORM, "quantize_kernel", "norm"),
        (Span.ATTENTION, "quantize_kernel", "quantize"),
        (Span.ATTENTION, FLOAT8_GEMM, "attention"),
        (Span.DENSE, "swiglu_float8_kernel", "dense"),
        (Span.LOSS, "logits_gradient_kernel", "loss"),
        (Span.LOSS, "quantize_kernel", "quantize"),
        (None, "logits_gradient_kernel", "loss"),
        (None, "norm_quantize_kernel", "quantize"),
        (None, "swiglu_backward_float8_kernel", "activation"),
        (None, FLOAT8_GEMM, "matrix products"),
    ],
)
def test_a_span_names_the_phase_and_inside_a_mixture_of_experts_the_kernel_says_more(
    around: Span | None, name: str, phase: str
) -> None:
    spans = [] if around is None else [span(around, 0, 50)]
    ((found, pass_),) = named(decoded(*spans, *started(5, 1, name)))
    assert found == phase
    assert around is None or pass_ == ("backward" if is_gradient(name) else "forward")


@pytest.mark.parametrize("around", [Span.ZERO, Span.REDUCE, Span.CLIP, Span.READ, Span.OPTIMIZER, Span.BALANCE])
@pytest.mark.parametrize(
    ("name", "phase"),
    [
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(args)", "reduce-scatter"),
        ("ncclDevKernel_AllGather_RING_LL(args)", "all-gather"),
        ("ncclDevKernel_AllReduce_Sum_f64_RING_LL(args)", "all-reduce"),
        ("quantize_kernel", "quantize"),
        ("some_kernel", ""),
    ],
)
def test_what_stands_in_a_span_of_the_update_is_of_the_update(around: Span, name: str, phase: str) -> None:
    assert named(decoded(span(around, 0, 50), *started(5, 1, name))) == [(phase or around.value, "update")]


@pytest.mark.parametrize("around", [Span.DATA, Span.ATTENTION])
def test_a_collective_in_another_span_is_of_the_pass(around: Span) -> None:
    gathered = started(5, 1, "ncclDevKernel_AllGather_RING_LL(args)")
    assert named(decoded(span(around, 0, 50), *gathered)) == [("all-gather", "forward")]


@pytest.mark.parametrize(
    ("said", "phase"),
    [("recv", "send and receive"), ("send", "send and receive"), ("all_to_allv", "all-to-all"), ("", "all-to-all")],
)
def test_a_message_of_a_pipeline_is_told_from_an_all_to_all_by_what_the_kernel_says_of_itself(
    said: str, phase: str
) -> None:
    sent = kernel(ALL_TO_ALL, 50, 9, correlation=1, stream=20)
    sent["args"] |= {"Collective name": said} if said else {}
    assert named(decoded(sent)) == [(phase, "")]


def test_products_of_experts_are_told_apart_in_backward() -> None:
    numbers = {"Sequence number": 8, "Fwd thread id": 1}
    node = operator(NODE + "_ExpertFfnBackward", 200, 50, **numbers)
    trace = decoded(node, *started(205, 1, "rows_kernel"), *started(220, 2, "weights_kernel"))
    assert named(trace) == [("experts input gradient", "backward"), ("experts weight gradient", "backward")]


def test_an_operator_around_the_launch_names_a_kernel_that_does_not_tell() -> None:
    loss = operator("_LinearCrossEntropy", 0, 50)
    trace = decoded(loss, operator("aten::mm", 2, 20), *started(5, 1, GEMM), *started(100, 2, GEMM))
    assert named(trace) == [("loss", "forward"), ("matrix products", "forward")]


@pytest.mark.parametrize(
    ("made_by", "name", "phase"),
    [
        ("aten::miopen_convolution", "batched_transpose_32x32_dword", "convolution"),
        ("aten::cudnn_convolution_relu", "acme_fused_relu_epilogue", "convolution"),
        ("aten::addmm", "acme_fused_gelu_epilogue", "matrix products"),
        ("aten::silu", "void at::native::vectorized_elementwise_kernel<4, at::native::silu_kernel>(int)", "activation"),
        ("aten::copy_", "batched_transpose_32x32_dword", "copy"),
        ("vllm::moe_forward", "routingIndicesHistogramKernel", "index"),  # only PyTorch's own operators say more
    ],
)
def test_an_operator_of_pytorch_decides_before_what_is_fused_into_the_kernels_name(
    made_by: str, name: str, phase: str
) -> None:
    ((found, _),) = named(decoded(operator(made_by, 0, 50), *started(5, 1, name)))
    assert found == phase


def test_a_namespace_does_not_make_a_transport_part_of_the_model() -> None:
    names = ["void flashinfer::trtllm_alltoall::moeAllToAllKernel<true>(int)", "flashinfer::allreduce_fusion_kernel"]
    trace = decoded(*(one for place, name in enumerate(names) for one in started(100 * place, place + 1, name)))
    assert [phase for phase, _ in named(trace)] == ["all-to-all", "all-reduce"]


def test_an_exchange_without_a_span_is_dispatch_before_the_experts_and_combine_behind_them() -> None:
    kernels = [ALL_TO_ALL, "grouped_gemm_kernel", ALL_TO_ALL]
    trace = decoded(*(one for place, name in enumerate(kernels) for one in started(100 * place, place + 1, name)))
    assert [phase for phase, _ in named(trace)] == ["dispatch", "experts", "combine"]


def test_what_nothing_names_is_other_and_its_share_is_said() -> None:
    trace = decoded(*started(0, 1, "zorbl", lasts=30), *started(100, 2, GEMM, lasts=90))
    found = find_phases(trace)
    assert found.other_share == pytest.approx(0.25)  # 30 of 120 us
    assert [row.name for row in found.rows()] == ["matrix products", "other"]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<float> >(int)", "elementwise"),
        ("void fbgemm_gpu::permute_2D_data_kernel<false, int, int>(int)", "gather and scatter"),
        ("Cijk_Ailk_Bljk_BBS_BH_MT64x64x64_MI16x16x16x1_SN_1LDSB0", "matrix products"),
        ("ncclDevKernel_Generic(ncclDevKernelArgsStorage<4096ul>)", "other collectives"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor<float, 4> >()", "optimizer"),
        ("igemm_wrw_gtcx3_nhwc_bf16_bx0_ex1_bt64x64x64", "convolution"),
        ("void deep_ep::internode::dispatch<false, 8>(int4*)", "dispatch"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26", "attention"),
        ("add_three_kernel", "elementwise"),
        ("void acme::ep::intranode::notify_dispatch<8>(int*)", "dispatch waiting"),
        ("void hybrid_ep::combine_kernel<8>(hybrid_ep::combine_kernel_param_t<8>)", "combine"),
        ("EpDispatchCopyToStaging_bf16", "permute"),
        ("mega_kernel_dispatch_token_moe_grouped_gemm", "grouped products"),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_relu_f2f_stages_64x5_tn", "matrix products"),
        ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_relu_bf16_256x128>(Params)", "matrix products"),
        ("sm80_xmma_fprop_implicit_gemm_bf16bf16_bf16f32_f32_nhwckrsc_nhwc_relu_kernel", "convolution"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::relu_kernel>(int)", "activation"),
        ("batched_transpose_32x32_dword", "copy"),
        ("void flash_comm::all2all_kernel<8>(int)", "all-to-all"),
        ("void moe_a2a::kernel_dispatch<8>(int)", "dispatch"),
    ],
)
def test_kernels_of_libraries_are_known_by_name(name: str, part: str) -> None:
    assert (specific_category(name) or generic_category(name) or Category.OTHER).value == part


def test_exposed_time_is_charged_to_compute_before_communication_before_copies() -> None:
    trace = read(tiny())
    rows = {row.name: row.exposed_us for row in find_phases(trace).rows(by_layer=False) if row.name != "other"}
    assert rows == pytest.approx({"matrix products": 80, "all-reduce": 60, "copy": 20, "fill": 10})  # of two steps


def test_waiting_stands_in_rows_of_its_own_and_sums_stay() -> None:
    trace = decoded(span(Span.DISPATCH, 0, 50), *started(5, 1, ALL_TO_ALL, lasts=40))
    found = find_phases(trace, waited_us=np.array([30.0]))
    assert {row.name: row.kernel_us for row in found.rows()} == pytest.approx({"dispatch waiting": 30, "dispatch": 10})
    assert found.exposed_us.sum() == pytest.approx(40)


def test_rows_carry_layers_or_their_sum() -> None:
    spans = [span(f"layer {layer}", 100 * layer, 90) for layer in range(3)]
    launches = [one for layer in range(3) for one in started(100 * layer + 5, layer + 1, GEMM)]
    found = find_phases(decoded(*spans, *launches))
    assert sorted(row.layer or 0 for row in found.rows()) == [0, 1, 2]
    (row,) = found.rows(by_layer=False)
    assert (row.layer, row.count, row.share) == (None, 3, pytest.approx(1.0))
    assert plain_row(row)["pass"] == "forward"


@given(
    st.lists(
        st.tuples(st.sampled_from([GEMM, ALL_TO_ALL]), st.integers(0, 60), st.integers(0, 25), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    )
)
def test_exposed_times_add_up_to_what_the_timeline_says(made: list[tuple[str, int, int, int]]) -> None:
    events = [
        kernel(name, start, lasts, correlation=900 + one, stream=stream)
        for one, (name, start, lasts, stream) in enumerate(made)
    ]
    trace = decoded(*events)
    charged, expected = charge(trace), timeline_of(trace.gpu)
    assert (charged >= -1e-6).all()
    assert charged.sum() == pytest.approx(expected.busy_us, abs=1e-6)
    talks = np.array([trace.gpu.name(row) == ALL_TO_ALL for row in range(len(trace.gpu))])
    assert charged[talks].sum() == pytest.approx(expected.exposed_communication_us, abs=1e-6)


def test_a_pattern_means_the_same_in_small_letters() -> None:
    patterns = [pattern for _, pattern in (*SPECIFIC_PATTERNS, *GENERIC_PATTERNS)]
    wrong = [pattern for pattern in patterns if re.search(r"\\[A-Z]|\[[^\]]*[A-Z]", pattern)]
    assert wrong == [], "escapes and ranges would become others"


def test_names_are_searched_without_regard_to_case() -> None:
    assert specific_category("FLASH_fwd_kernel") is specific_category("flash_fwd_kernel") is Category.ATTENTION
    assert generic_category("Memset (Device)") is generic_category("memset (device)") is Category.FILL
    assert is_gradient("SomethingBackward0") and is_gradient("flash_BWD_dq") and not is_gradient("forward")


# ----------------------------------------------------------------------------------------------------------- test kinds

COMMUNICATION = {
    "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "nccl",
    "ncclSymDevKernel_AllGather_LLMC(ncclSymDevArgs)": "nccl",
    "mscclKernel_Sum_float_Simple_false(ncclDevComm*)": "nccl",
    "void deep_ep::intranode::dispatch<8, 768, 8192>(int4*, float*, int*)": "deep_ep",
    "void deep_ep::intranode::notify_dispatch<8>(int const*, int*)": "deep_ep",
    "_ZN7deep_ep9intranode7combineI13__nv_bfloat16Li8EEEvPT_": "deep_ep",
    "void primus_turbo::deep_ep::internode::combine<8>(int4*)": "deep_ep",
    "void deep_ep::elastic::hybrid_dispatch_impl<false, false, 24>(void*)": "deep_ep",
    "hybrid_ep::dispatch_kernel": "hybrid_ep",
    "void hybrid_ep::device_sync_kernel<8>(unsigned int*)": "hybrid_ep",
    "void mori::moe::EpDispatchIntraNodeKernel<hip_bfloat16>(mori::moe::EpDispatchCombineArgs)": "mori",
    "_ZN4mori3moe25EpDispatchIntraNodeKernelI12hip_bfloat16EEvNS0_21EpDispatchCombineArgsIT_EE": "mori",
    "EpCombineSyncBarrier_bf16": "mori",
    "a2a_dispatch_send_kernel": "pplx",
    "void (anonymous namespace)::combineKernel<16u, true, false>(int*)": "pplx",
    "void acme::ep::dispatch<8>(int*)": "expert_parallel",
    "void acme::moe::internode_ll::combine<7168>(int*)": "expert_parallel",
    "void mscclpp::ep::dispatch::latencyExpertMajorKernel<7168>(void*)": "expert_parallel",
    "void uccl::internode_ll::dispatch<true, false, 7168>(void*)": "expert_parallel",
    "void nixl_ep::kernels::dispatch<true>(void*)": "expert_parallel",
    "nccl_ep_jit_ht_dispatch_kernel": "expert_parallel",
    "mooncake_ep_jit_dispatch_kernel": "expert_parallel",
    "kernel_dispatch_token_intra_node": "expert_parallel",
    "tensorrt_llm::kernels::moe_alltoall::moeA2ACombineKernel<8>(int)": "expert_parallel",
    "barrier_on_stream_kernel_threadgroup(int, int*)": "nvshmem",
    "ucx_perf_cuda_put_multi_bw_kernel": "ucx",
    "nvshmemi_barrier_threadgroup_kernel(int)": "nvshmem",
    "void rocshmem::put_kernel(char*)": "nvshmem",
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, 16>(c10::BFloat16*)": "symmetric",
    "void two_shot_all_reduce_kernel_inplace<c10::BFloat16, 16, 8>(c10::BFloat16**)": "symmetric",
    "allToAllV(void*, void*, long*, long, nvshmemi_team_t*)": "symmetric",
    "void vllm::cross_device_reduce_2stage<__nv_bfloat16, 8>(vllm::RankData*)": "custom",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<x>(y)": "custom",
    "void moeAllToAllKernel<8>(int)": "expert_parallel",
    "push_rows_kernel": OWN,
    "wait_kernel": OWN,
}

COMPUTE = (
    "void at::native::elementwise_kernel<128, 4, at::native::all_gather_copy<float> >(int)",
    "void cub::DeviceReduceKernel<BlockAllReduce<float, 256> >(float*)",
    "void softmaxBlockAllReduce<float>(float*)",
    "void deep_ep::layout::get_dispatch_layout<256, 32, 8>(long const*, int*)",
    "void deep_ep::elastic::combine_reduce_epilogue_impl<false>(void*)",
    "void uccl::layout::get_dispatch_layout<256>(long const*)",
    "void hybrid_ep::scan<256>(bool*)",
    "nccl_ep_jit_ht_scan_kernel",
    "EpDispatchCopyToStaging_bf16",
    "EpCombineAll_bf16",
    "tensorrt_llm::kernels::moe_alltoall::moeA2APrepareDispatchKernel(int*)",
    "kernel_skipped_token_local_dispatch_intra_node",
    "mega_kernel_dispatch_token_moe_grouped_gemm",
    "void step::dispatch_optimizer(float*)",
    "std::enable_if<(((8)>(0))), void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(int)",
    "nvjet_tst_192x8_64x8_4x1_v_bz_TNT",
    "rows_kernel",
    "sum_rows_kernel",
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
    ours = {
        (file.name, node.name)
        for file in Path(penstock.kernels.__path__[0]).glob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any("jit" in ast.unparse(by) for by in node.decorator_list)
    }
    talking = {name for _, name in ours if library_of(name) is not None}
    assert talking == {name for file, name in ours if file == "symmetric_kernels.py"}


def test_copies_and_fills_are_known_by_their_category() -> None:
    assert kind_of("gpu_memcpy", "Memcpy PtoP (Device -> Device)") is GpuKind.COPY
    assert kind_of("gpu_memset", "Memset (Device)") is GpuKind.SET
    kinds = [GpuKind.COMPUTE, GpuKind.COPY, GpuKind.SET]
    assert [kind_of(old, "any") for old in ("Kernel", "Memcpy", "Memset")] == kinds


def test_a_function_has_its_namespaces_and_nothing_else() -> None:
    assert function_of("void at::native::(anonymous namespace)::sum<float>(float*)") == "at::native::sum"
    assert function_of("std::enable_if<((8)>(0)), void>::type vllm::norm<int>(int)") == "vllm::norm"
    assert function_of("_ZN2ck16kernel_gemm_xdl_I12hip_bfloat16EEvT_") == "ck::kernel_gemm_xdl_"
    assert function_of("_ZN12_GLOBAL__N_111fill_kernelEPf") == "fill_kernel"
    assert function_of("_Z11copy_kernelPfS_") == "copy_kernel"
    assert function_of("_Zoops") == "_Zoops"
