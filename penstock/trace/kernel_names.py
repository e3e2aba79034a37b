"""What a kernel or an operator does, told by its name: two tables of patterns, as data.

A name tells where in the model it stands (`route_kernel`, `flash_fwd_kernel`, `aten::_fused_adamw_`), or only what it
does to numbers (`nvjet_*` multiplies matrices, wherever). `TELLING` holds the former, `GENERAL` the latter. The first
pattern that is found wins; patterns are searched without regard to case, in kernels and operators alike.

`penstock.trace.phases` asks, for a kernel: a span around its launch, then `telling` of its own name, then `telling` of
the operators around the launch from the inside out, then `general` of both. A name of neither table is `Part.OTHER`,
and how much time that is stands in every report.
"""

import re
from enum import StrEnum
from functools import lru_cache

from penstock.trace.kinds import function_of


class Part(StrEnum):
    """What is done, in words that stand in tables."""

    EMBED = "embed"
    NORM = "norm"
    ATTENTION = "attention"
    POSITIONS = "positions"
    CACHE = "key-value cache"
    ROUTE = "route"
    INDEX = "index"
    DISPATCH = "dispatch"
    WAIT = "dispatch waiting"
    PERMUTE = "permute"
    EXPERTS = "experts"
    GROUPED = "grouped products"
    GROUPED_WEIGHTS = "grouped products of weight gradients"
    ACTIVATION = "activation"
    COMBINE = "combine"
    LOSS = "loss"
    CLIP = "clip"
    ACCUMULATE = "gradient sums"
    OPTIMIZER = "optimizer"
    ALL_TO_ALL = "all-to-all"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"
    REDUCE_SCATTER = "reduce-scatter"
    BROADCAST = "broadcast"
    POINT_TO_POINT = "send and receive"
    COLLECTIVE = "other collectives"
    PRODUCTS = "matrix products"
    CONVOLUTION = "convolution"
    POOLING = "pooling"
    QUANTIZE = "quantize"
    LOOK_UP = "gather and scatter"
    SORT = "sort"
    REDUCTION = "reductions"
    ELEMENTWISE = "elementwise"
    COPY = "copy"
    FILL = "fill"
    OTHER = "other"


MATRICES = "float8_matrices_kernel"
"""Products of dense matrices in 8 bits, and gradients of experts' weights: what stands around it tells them apart."""

COLLECTIVES = frozenset(
    {
        Part.ALL_TO_ALL,
        Part.ALL_REDUCE,
        Part.ALL_GATHER,
        Part.REDUCE_SCATTER,
        Part.BROADCAST,
        Part.POINT_TO_POINT,
        Part.COLLECTIVE,
    }
)

TELLING: tuple[tuple[Part, str], ...] = (
    # Our own kernels (penstock/kernels) and autograd functions.
    (Part.WAIT, r"^(wait|hold)_kernel$"),
    (Part.DISPATCH, r"^(push_rows|take_rows)_kernel$|^_Dispatch(Backward)?$"),
    (Part.COMBINE, r"^(return_rows|sum_ranks)_kernel$|^_Combine(Backward)?$"),
    (Part.INDEX, r"^(tile_table|count|scan|place|count_arrivals|place_arrivals)_kernel$"),
    (
        Part.PERMUTE,
        r"^(spread|sum_rows|gather_rows|gather_columns)_kernel$|^_(Permute|Unpermute|Reorder|PickKept|Spread|CollectPadded)",
    ),
    (Part.ROUTE, r"^(route|route_backward|sum_parts|balance_loss)_kernel$|^_(Route|LinearInParts)(Backward)?$"),
    (Part.GROUPED_WEIGHTS, r"^(weights|weight_gradient)_kernel$"),
    (Part.GROUPED, r"^(float8_|expert_)?rows_kernel$|^_(GroupedGemm|(Float8)?ExpertFfn)(Backward)?$"),
    (Part.ACTIVATION, r"^swiglu(_backward)?(_float8)?_kernel$|^_Swiglu"),
    (Part.QUANTIZE, r"^(quantize|measure|group_tiles|norm_quantize|pack_rows|unpack_rows|transpose)_kernel$"),
    (Part.EXPERTS, r"^bias_(parts|sums)_kernel$"),
    (Part.NORM, r"^rms_norm_(backward_)?kernel$|^sum_table_kernel$|^_RmsNorm|^_Float8Norm(Backward)?$"),
    (
        Part.ATTENTION,
        r"^(mla|latent)_heads_(backward_)?kernel$|^shared_key_backward_kernel$|^_(Mla|Latent)Heads(Backward)?$",
    ),
    (Part.POSITIONS, r"^rotate_kernel$|^_Rotate"),
    (Part.LOSS, r"^linear_cross_entropy_kernel$|^scale_kernel$|^_LinearCrossEntropy"),
    (Part.EMBED, r"^_LookUpInto"),
    # Dispatch and combine of others.
    (Part.WAIT, r"deep_ep::.*(notify|barrier)|DeepEP.*notify"),
    (Part.DISPATCH, r"deep_ep::.*dispatch|hybrid_ep.*dispatch|EpDispatch|moe_?a2a.*dispatch|uccl::.*dispatch"),
    (Part.COMBINE, r"deep_ep::.*combine|hybrid_ep.*combine|EpCombine|moe_?a2a.*combine|uccl::.*combine"),
    (
        Part.INDEX,
        r"deep_ep::layout|get_dispatch_layout|moe_align_block_size|moe::dev::routing::.*(Offsets|Histogram)Kernel",
    ),
    # Mixtures of experts of other libraries.
    (Part.ROUTE, r"moe::dev::routing|topk_gating|moe_fused_gate|grouped_topk|fused_topk|sbtopk|gatherTopK|moe_router"),
    (Part.INDEX, r"routing(Indices|Renormalize|Deep)|sort_chunks|compute_problem_sizes|expandInput|expert_?map"),
    (Part.COMBINE, r"moe::dev::finalize|finalizeMoe|moe_sum|unpermute_and_sum|moe_finalize"),
    (Part.PERMUTE, r"(un)?permute_(kernel|tokens|bwd|with_mask)|moe_permute|moe_unpermute|_permute_|sort_chunks_by"),
    (
        Part.GROUPED,
        r"^bmm_\w*dynBatch|GroupedGemm|grouped_gemm|grouped_mm|gmm\b|m_grouped|GemmUniversalMode.*Grouped|group_gemm"
        r"|fused_moe_kernel|_GroupedLinear|moe_gemm|MoeFCGemm|GroupProblemShape",
    ),
    (Part.EXPERTS, r"moe_forward|fused_moe|fused_experts|moe::|MoeRunner|mixture_of_experts"),
    # Attention.
    (Part.CACHE, r"reshape_and_cache|concat_and_cache|kv_cache|copy_page_indices|paged_kv"),
    (
        Part.ATTENTION,
        r"sdpa|(?<!cache_)flash(?!infer.*norm)|fmha|(?<!rope_)attention|cudnn.*(fort|mha|compute_dot_do_o|convert_dq)|flex_att|mla_"
        r"|paged|_attn_|attn_fwd|attn_bwd|aiter::.*fa_|splitkv|ScaledDotProduct",
    ),
    (Part.POSITIONS, r"rotary|rope(?!rty)|apply_rope"),
    # What stands around the layers.
    (
        Part.LOSS,
        r"cross_?entropy|nll_loss|NllLoss|mse_loss|mse_(backward_)?(cuda_)?kernel|MseLoss|log_?softmax|LogSoftmax",
    ),
    (Part.ACCUMULATE, r"AccumulateGrad"),
    (Part.CLIP, r"LpNormFunctor|lpnorm_cleanup|_foreach_norm|clip_grad"),
    (
        Part.OPTIMIZER,
        r"FusedAdam|FusedSgd|_fused_(adam|sgd)|adamw?_kernel|Optimizer\.(step|zero_grad)|multi_tensor_(adam|apply)|_foreach_"
        r"|muon|newton_schulz|rowwise_adagrad",
    ),
    (
        Part.NORM,
        r"(batch|layer|group|rms|instance)_?norm|GammaBeta|RowwiseMoments|SubTensorOpWith(Cast|Scalar)|bn_(fw|bw)"
        r"|BatchNorm|LayerNorm|rmsnorm|MIOpenBatchNorm",
    ),
    (Part.EMBED, r"embedding|embedding_bag|EmbeddingBackward|split_embedding|pooled_embs"),
    (
        Part.CONVOLUTION,
        r"conv(?!ert)|igemm_(fwd|bwd|wrw)|implicit_?gemm|winograd|bwd_weight|miopen.*(Winograd|Im2Col)|batched_transpose"
        r"|transpose_(CNHW2NCHW|NCHW2CNHW)|cudnn.*(dgrad|wgrad|fprop)|Im2d2Col|naive_conv",
    ),
    (Part.POOLING, r"(max|avg|average)_?pool|pool2d"),
    (Part.ACTIVATION, r"silu|swiglu|gelu|relu|act_and_mul|threshold|Sigmoid|swish|glu\b"),
)

GENERAL: tuple[tuple[Part, str], ...] = (
    (Part.ALL_TO_ALL, r"all_?to_?all|nccl.*SendRecv|exchangeSplit"),
    (Part.ALL_REDUCE, r"all_?reduce|cross_device_reduce|lamport"),
    (Part.REDUCE_SCATTER, r"reduce_?scatter"),
    (Part.ALL_GATHER, r"all_?gather"),
    (Part.BROADCAST, r"nccl.*broadcast|c10d::broadcast"),
    (Part.POINT_TO_POINT, r"c10d::(send|recv)|nccl:(send|recv)|put_signal|wait_signal"),
    (Part.COLLECTIVE, r"nccl|rccl|nvshmem|rocshmem|mori::|record_param_comms|c10d::"),
    (Part.QUANTIZE, r"quant|scaled_fp8|hfp8|FP8rowwise|mxfp|to_mx|amax_"),
    (
        Part.PRODUCTS,
        r"(?<!fb)gemm|nvjet|cutlass|Cijk_|splitK|cublas|aten::(addmm|mm|bmm|baddbmm|matmul|linear|_scaled_mm|addmv|mv|dot)\b"
        r"|matmul|wgmma|hipblaslt|AddmmBackward|MmBackward|BmmBackward|tensorop|gemv|dot_kernel|^_LinearInto"
        rf"|^{MATRICES}$|^_(Linear|Network)(Backward)?$",
    ),
    (
        Part.SORT,
        r"sort|topk|cub::.*(Scan|Select|Unique|Histogram)|prefix_sum|cumsum|kernelHistogram|bincount|ReduceByKey",
    ),
    (
        Part.LOOK_UP,
        r"gather|scatter|index(Select|Func|_select|_add|_put|ing_backward|_elementwise|_kernel|_copy)|aten::index"
        r"|take_along|permute_2D|permute_indices|linearize_index|bounds_check|nonzero|masked_(select|scatter)",
    ),
    (Part.COPY, r"^Memcpy|copy|CatArray|aten::(cat|clone|contiguous|to|_to_copy|stack)\b|transpose|cat_kernel"),
    (Part.FILL, r"^Memset|FillFunctor|fill|zero_|arange|distribution|rand|bernoulli|philox"),
    (
        Part.REDUCTION,
        r"reduce|softmax|aten::(sum|mean|max|min|norm|linalg_vector_norm|amax|argmax|any|all)\b|norm_kernel",
    ),
    (
        Part.ELEMENTWISE,
        r"^add_three_kernel$|^_(AddThree|FanOut)(Backward)?$"
        r"|elementwise|triton_(poi|red|per)|pointwise|_assert_async|where|clamp|dropout|masked_fill|tri[ul]_"
        r"|aten::(add|mul|sub|div|neg|pow|sqrt|exp|sigmoid|tanh|clamp|eq|ne|lt|gt)_?\b|nan_to_num|AddBackward|MulBackward",
    ),
)


_BACKWARD = re.compile(r"backward|bwd|bprop|dgrad|wgrad|_wrw_|_grad\b")


def _compiled(table: tuple[tuple[Part, str], ...]) -> tuple[tuple[Part, re.Pattern[str]], ...]:
    """Patterns in small letters, for texts in small letters: several times as fast as to look at both."""
    return tuple((part, re.compile(pattern.lower())) for part, pattern in table)


_TELLING, _GENERAL = _compiled(TELLING), _compiled(GENERAL)


def _first(table: tuple[tuple[Part, re.Pattern[str]], ...], text: str) -> Part | None:
    return next((part for part, pattern in table if pattern.search(text)), None)


def _essence(name: str) -> str:
    """The part of a name that says what is done, in small letters.

    PyTorch's elementwise kernels and CUTLASS's kernels are templates over what they do, so those keep the template.
    """
    return (name if "at::native" in name or "cutlass" in name else function_of(name)).lower()


@lru_cache(maxsize=65536)
def telling(name: str) -> Part | None:
    """Where in the model a kernel or operator stands, or None if the name does not say."""
    return _first(_TELLING, _essence(name))


@lru_cache(maxsize=65536)
def general(name: str) -> Part | None:
    """What a kernel or operator does to numbers, or None if nothing is known of it."""
    return _first(_GENERAL, _essence(name))


@lru_cache(maxsize=65536)
def is_gradient(name: str) -> bool:
    """Whether a kernel or operator computes gradients, whatever of, as far as its name says."""
    return _BACKWARD.search(name.lower()) is not None
