"""Phases of kernels by their names, which are those of other programs as profilers wrote them."""

import pytest

from penstock.trace.analysis import analyse_traces
from penstock.trace.kernel_names import Category, generic_category, specific_category
from penstock.tune.doctor.evidence import RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from tests.trace.tiny import decoded, operator, ran, span

NATIVE = "void at::native::"
COPY = f"{NATIVE}(anonymous namespace)::multi_tensor_apply_kernel<UnaryOpFunctor<long, 2>, Copy<long, long> >(long)"
CK_NORM = "void ck_tile::kentry<1, ck_tile::Rmsnorm2dFwd<ck_tile::Rmsnorm2dFwdPipelineOnePass<float> > >(int)"
CK_ATTENTION = "void ck_tile::kentry<256, 2, ck_tile::FmhaFwdKernel<ck_tile::BlockFmhaPipeline<float> > >(int)"


@pytest.mark.parametrize(
    ("name", "category"),
    [
        # Triton's kernels of experts, in vLLM
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1", "grouped products"),
        ("_matmul_ogs_NNT_bf16xbf16xmxfp4_16x128x256x1_swiglu", "grouped products"),
        ("_p_matmul_ogs_NNT_bf16xbf16xmxfp4_128x128x128x1", "grouped products"),
        ("_finalize_matmul_scatter_bf16", "combine"),
        ("_combined_routing_compute", "index"),
        ("_combined_routing_memset", "index"),
        ("_sum_bitmatrix_rows", "index"),
        ("_topk_forward", "route"),
        ("fused_moe_kernel", "grouped products"),
        # attention and its cache
        ("void flashinfer::BatchPrefillWithRaggedKVCacheKernel<Params>(Params)", "attention"),
        ("void flashinfer::BatchDecodeWithPagedKVCacheKernel<Params>(Params)", "attention"),
        ("void flashinfer::PersistentVariableLengthMergeStatesKernel<8>(int)", "attention"),
        ("qk_int8_sv_f8_accum_f32_attn_kernel", "attention"),
        ("sage_fwd", "attention"),
        ("kernel_unified_attention_2d", "attention"),
        (CK_ATTENTION, "attention"),
        ("store_kvcache", "key-value cache"),
        ("set_mla_kv_buffer_kernel", "key-value cache"),
        ("create_flashinfer_kv_indices_triton", "key-value cache"),
        ("void vllm::reshape_and_cache_flash_kernel<bf16>(int)", "key-value cache"),
        # norms
        (CK_NORM, "norm"),
        ("void vllm::fused_add_rms_norm_kernel<bf16, 8>(int)", "norm"),
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", "norm"),
        ("triton_per_fused__to_copy_add_mean_mul_pow_rsqrt_3", "norm"),
        # inductor
        ("triton_poi_fused__to_copy_1", "copy"),
        ("triton_poi_fused__to_copy_add_mul_2", "elementwise"),
        ("triton_poi_fused_add_cos_sin_0", "elementwise"),
        ("triton_poi_fused_cat_clone_4", "copy"),
        # copies, fills, quantization
        (COPY, "copy"),
        ("aten::_foreach_copy_", "copy"),
        ("aten::_foreach_add_", "optimizer"),
        (f"{NATIVE}vectorized_elementwise_kernel<4, {NATIVE[5:]}FillFunctor<float> >(int)", "fill"),
        ("void fbgemm_gpu::_get_FP8_qparam_cuda_kernel<float>(int)", "quantize"),
        # convolutions
        ("cudnn_volta_scudnn_128x128_relu_small_nn_v1", "convolution"),
        ("void wgrad_alg0_engine<float, 128, 5, 5, 3>(int)", "convolution"),
        ("void cudnn::ops::nchwToNhwcKernel<float>(int)", "convolution"),
        # products
        ("nvjet_tst_144x128_64x6_2x1_v_bz_bias_TNN", "matrix products"),
        ("Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT160x256x64_MI16x16x1", "matrix products"),
        ("ampere_sgemm_128x64_nn", "matrix products"),
    ],
)
def test_a_kernel_of_another_program_has_the_phase_of_what_it_does(name: str, category: str) -> None:
    assert (specific_category(name) or generic_category(name)) == Category(category)


def test_the_annotation_around_a_collective_decides_before_the_name_of_its_kernel() -> None:
    """Old versions of NCCL have one kernel for all collectives; trace and doctor call its time by one name."""
    kernel = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
    calls = {
        "nccl:all_reduce": "all-reduce",
        "nccl:_reduce_scatter_base": "reduce-scatter",
        "nccl:all_to_all": "all-to-all",
    }
    events = [
        one
        for place, name in enumerate(calls)
        for one in (
            span(name, 100 * place, 60),
            operator("record_param_comms", 100 * place + 5, 50),
            *ran(kernel, 100 * place + 10, 1000 + 100 * place, 90),
        )
    ]
    answer = analyse_traces({0: decoded(*events)})
    assert {row.name for row in answer.ranks[0].phases.rows()} == set(calls.values())
    assert set(evidence_of(answer, RunFacts()).kinds) == set(calls.values())
