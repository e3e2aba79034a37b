"""Categories of kernels and operators by name: patterns as data.

Some names say which part of the model they belong to (`route_kernel`, `flash_fwd_kernel`, `aten::_fused_adamw_`):
`SPECIFIC_PATTERNS`. Others only say which operation they are (`nvjet_*` is a matrix product): `GENERIC_PATTERNS`. The
first pattern that matches wins; matching ignores case and is the same for kernels and operators. For a kernel,
`penstock.trace.phases` uses the span around its launch, then the specific category of its own name, then that of the
operators around the launch from the inside out, then the generic category of both. Other names are `Category.OTHER`.

Communication kernels are known by name too. Only the name of the function counts; template arguments and parameters are
cut off, because a block-level reduction can name a type after an all-reduce. Communication is:

- NCCL and RCCL in all spellings of their history, MSCCL, Gloo's and vendors' own,
- DeepEP, Hybrid-EP, NCCL EP, MORI, pplx, UCCL, Mooncake, NIXL, UCX, NVSHMEM, rocSHMEM: kernels that write into other
  devices' memory themselves,
- dispatch and combine in a namespace of expert parallelism (`acme::ep::dispatch`, `acme::internode::combine`), as forks
  and in-house libraries name them (penstock.trace.recognize finds those whose names say nothing),
- PyTorch's symmetric memory and multimem kernels, custom all-reduces of inference engines, user buffers,
- Penstock's own: rows pushed, taken and returned through symmetric memory, sums over ranks, numbers that ranks
  gather, and waits for flags.

What these libraries compute beside it stays on the device: counting the rows of each destination, staging copies, sums
of received rows (`_LOCAL`). Copies to another device are copies, as in other tools.
"""

import re
from enum import StrEnum
from functools import lru_cache
from typing import TypeVar

from penstock.trace.events import GpuKind


class Category(StrEnum):
    """The operation of a kernel, in the words of the tables."""

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
    SAMPLE = "sampling"
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


FLOAT8_GEMM = "float8_matrices_kernel"
"""Products of dense matrices in 8 bits and weight gradients of experts; the surroundings tell them apart."""

ATEN = "aten::"  # beginning of the names of PyTorch's own operators
_CATEGORIES = tuple(Category)
COLLECTIVES = _CATEGORIES[_CATEGORIES.index(Category.ALL_TO_ALL) : _CATEGORIES.index(Category.COLLECTIVE) + 1]
"""Categories of communication, which stand together in `Category`."""


def _table(text: str) -> tuple[tuple[Category, str], ...]:
    """Rows of a category and a pattern; of several rows the first that matches decides."""
    rows = (line.split(maxsplit=1) for line in text.splitlines() if line and not line.startswith("#"))
    return tuple((Category[member], pattern) for member, pattern in rows)


_EP = (
    r"(?<![a-z0-9])(ep|deepep|hybridep|expert_parallel|intranode|internode(_ll)?|low_latency|mori|pplx|uccl|mooncake)"
    r"(::|_|\.)"
)
"""A part of a name that says expert parallelism: a namespace (`acme::ep::`) or a prefix (`nccl_ep_jit_`)."""

_PRODUCT = r"gemm|xmma|cutlass|nvjet|Cijk_|wgmma|tensorop|triton_tem"
"""Parts of the names of products, to which an activation can be fused."""

SPECIFIC_PATTERNS = _table(rf"""
# Penstock's kernels and autograd functions
WAIT            ^(wait|hold|take_numbers)_kernel$
DISPATCH        ^(push_rows|take_rows|push_numbers)_kernel$|^_Dispatch(Backward)?$
COMBINE         ^(return_rows|sum_ranks)_kernel$|^_Combine(Backward)?$
INDEX           ^(tile_table|count|scan|place|count_arrivals|place_arrivals)_kernel$
PERMUTE         ^(spread|sum_rows|gather_rows|gather_columns)_kernel$
PERMUTE         ^_(Permute|Unpermute|Reorder|PickKept|Spread|CollectPadded)
ROUTE           ^(route|route_backward|sum_parts|balance_loss)_kernel$|^_(Route|LinearInParts)(Backward)?$
GROUPED_WEIGHTS ^(weights|weight_gradient)_kernel$
GROUPED         ^(float8_|expert_)?rows_kernel$|^_(GroupedGemm|(Float8)?ExpertFfn)(Backward)?$
ACTIVATION      ^swiglu(_backward)?(_float8)?_kernel$|^_Swiglu
QUANTIZE        ^(quantize|mxfp4|measure|group_tiles|norm_quantize|pack_rows|unpack_rows|transpose)_kernel$
EXPERTS         ^bias_(parts|sums)_kernel$
NORM            ^(unit_length|gated_norm)_(backward_)?kernel$|^_(UnitLength|GatedNorm)(Backward)?$
NORM            ^rms_norm_(backward_)?kernel$|^sum_table_kernel$|^_RmsNorm|^_Float8Norm(Backward)?$
ATTENTION       ^(mla|latent)_heads_(backward_)?kernel$|^shared_key_backward_kernel$|^_(Mla|Latent)Heads(Backward)?$
ATTENTION       ^delta_\w+_kernel$|^convolution_\w*kernel$|^_(DeltaRule|ShortConvolution)(Backward)?$
POSITIONS       ^rotate_kernel$|^_Rotate
LOSS            ^(linear_cross_entropy|logits_gradient)_kernel$|^scale_kernel$|^_LinearCrossEntropy
EMBED           ^_LookUpInto|^(sum|join)_runs_kernel$
NORM            ^triton_(red|per|poi)_\w*(rsqrt|native_layer_norm|rms_norm)
# dispatch and combine of other libraries, kernels and operators
INDEX           {_EP}.*(layout|scan|routing_map|preprocess|update_expected)|moe_?a2a(prepare|sanitize)
PERMUTE         dispatch_copy_epilogue|EpDispatchCopyToStaging|skipped_token_\w*dispatch
WAIT            {_EP}.*(notify|barrier|device_sync)|DeepEP.*notify|EpCombineSync
DISPATCH        {_EP}.*dispatch|EpDispatch|a2a.*dispatch|^dispatchKernel$|kernel_dispatch_token(?!_moe)
COMBINE         {_EP}.*combine|EpCombine|a2a.*combine|^combineKernel$|kernel_combine_token|post_reorder|_ep_gather
DISPATCH        (Fused|HybridEP|DeepEP|MoE|Token)_?Dispatch(Backward)?$
COMBINE         (Fused|HybridEP|DeepEP|MoE|Token)_?Combine(Backward)?$
INDEX           get_dispatch_layout|moe_align_block_size|moe::dev::routing::.*(Offsets|Histogram)Kernel
# MoE kernels of other libraries
COMBINE         _finalize_(matmul|scatter)|moe::dev::finalize|finalizeMoe|moe_(sum|reduc|finalize)|unpermute_and_sum
INDEX           combined_routing|bitmatrix|_expt_data|moe_?(\w+_)?sort|count_and_sort|src2dst|seg_indptr|masked_m_
ROUTE           moe::dev::routing|topk_?gating|moe_fused_gate|(grouped|fused|v3)_topk|sbtopk|gatherTopK
ROUTE           moe_?rout(er|ing)|topk_?soft|moeTopK|score_for_moe|topk_with_score|router_(gemm|triton)|^_topk_forward$
INDEX           expertPrefixSum|expert_?map|row_id_map|computeStrides|prepare_grouped|compute_problem|routingIndices
PERMUTE         (un)?permute_(kernel|triton|tokens|bwd|with_mask)|moe_(un)?permute|^_(un)?permute_|sort_chunks
PERMUTE         expandInput|pre_reorder|_ep_scatter
ACTIVATION      moe::dev::activation|doActivation
GROUPED         ^bmm_\w*_dynB|grouped_?gemm|grouped_mm|gmm\b|m_grouped|GemmUniversalMode.*Grouped|group_gemm
GROUPED         matmul_ogs|fused_moe(_kernel|::run)|_GroupedLinear|MoeFCGemm|GroupProblemShape|marlin_moe|fmoe_|mfma_moe
GROUPED         moe_?(mx)?gemm|moe::gemm|MoeFlatmm|GemmType\)[12]
EXPERTS         ^(?!triton_).*moe_forward|fused_moe|fused_experts|moe::|MoeRunner|mixture_of_experts
SAMPLE          (?<!up)(?<!down)sampl(ing|e(_|m))|topk_topp|_(min_p|temperature)_kernel|penalties_kernel|RenormProb
# attention
CACHE           (reshape|concat|quant)_and_cache|copy_(page_indices|blocks_kernel)|paged_kv|kv_(buffer|indices)
CACHE           (?<!paged)(?<!ragged)(?<!with)kv_?cache|appendPaged|slot_mapping|req_to_token|get_last_loc
ATTENTION       sdpa|(?<!cache_)flash(?!infer|_?comm)|fmha|(?<!rope_)attention|flex_att|(?<!quant_)mla_|mla::|paged
ATTENTION       (?<![a-z])sage(?![a-z])|sage_?attn|qk_int8_sv|(prefill|decode)_?with|merge_?(attn_)?states|splitkv
ATTENTION       cudnn.*(fort|mha|compute_dot_do_o|convert_dq)|_attn_|attn_fwd|attn_bwd|aiter::(.*fa_|pa_)
ATTENTION       ScaledDotProduct|masked_softmax|_fwd_(grouped_)?kernel_stage|reduce_segments|mqa_logits|kernel_mha
ATTENTION       (^|_|::)(chunk|fused_recurrent)_\w*(fwd|bwd)_|chunk_(scan|state)|kkt|recompute_w_u|64_inverse
ATTENTION       causal_?conv1d|concat_mla
POSITIONS       rotary|rope(?!rty)|(compute|clamp)_position|kn_entry_\w*cached
# outside of the layers
LOSS            cross_?entropy|nll_?loss|mse_?loss|mse_(backward_)?(cuda_)?kernel|log_?softmax|ClassNLL|online_softmax_k
ACCUMULATE      AccumulateGrad
CLIP            LpNormFunctor|lpnorm_cleanup|L2NormFunctor|_foreach_norm|clip_grad
COPY            _foreach_copy|multi_tensor_apply.*[ ,]copy<
OPTIMIZER       FusedAdam|FusedSgd|_fused_(adam|sgd)|adamw?_kernel|Optimizer\.(step|zero_grad)|multi_tensor_(adam|apply)
OPTIMIZER       _foreach_|muon|newton_schulz|rowwise_adagrad
NORM            (batch|layer|group|rms|instance)_?norm|GammaBeta|RowwiseMoments|SubTensorOpWith(Cast|Scalar)|bn_(fw|bw)
NORM            (^|::)ln_(fwd|bwd)|normalization::|_rms_|Compute(Backward)?FusedParams|ComputeInternalGradients
EMBED           embedding|pooled_embs|compute_grad_weight
CONVOLUTION     conv(?!ert)|igemm_(fwd|bwd|wrw)|implicit_?gemm|winograd|bwd_weight|miopen.*Im2Col|im2col
CONVOLUTION     scudnn|cask_cudnn|cudnn::(ops|engines_precompiled)|wgrad_alg|fft2d_|(nchw|nhwc)To(nchw|nhwc)
CONVOLUTION     transpose_(CNHW2NCHW|NCHW2CNHW)|cudnn.*(dgrad|wgrad|fprop)|Im2d2Col|naive_conv
POOLING         (max|avg|average)_?pool|pool2d
ACTIVATION      ^(?!.*({_PRODUCT})).*(silu|glu(?!on)|gelu|relu|act_and_mul|threshold|Sigmoid|swish|activation_k|gated_)
""")
"""Patterns of the part of the model. Kernels of Penstock come first: their short names match in full."""

GENERIC_PATTERNS = _table(rf"""
ALL_TO_ALL      all_?(to|2)_?all|nccl.*SendRecv|exchangeSplit
ALL_REDUCE      all_?reduce|cross_device_reduce|lamport
REDUCE_SCATTER  reduce_?scatter
ALL_GATHER      all_?gather
BROADCAST       nccl.*broadcast|c10d::broadcast|gloo:broadcast
POINT_TO_POINT  (c10d::|nccl:|gloo:)(send|recv)|put_signal|wait_signal
COLLECTIVE      nccl|rccl|gloo:|nvshmem|rocshmem|mori::|record_param_comms|c10d::
QUANTIZE        quant|scaled_fp8|hfp8|fp8_qparam|FP8row|mxfp|to_mx|amax_|cast_transpose|to_fp[48]|delayed_|scale_1x128
PRODUCTS        (?<!fb)(?<!deep_)gemm|nvjet|cutlass|Cijk_|splitK|cublas|matmul|wgmma|hipblaslt|MmBackward|tensorop|gemv
PRODUCTS        aten::(addmm|mm|bmm|baddbmm|linear|_scaled_mm|addmv|mv|dot)\b|epilogue::impl
PRODUCTS        ^_LinearInto|^{FLOAT8_GEMM}$|^_(Linear|Network)(Backward)?$|dot_kernel|marlin|triton_tem|scaled_mm
SORT            sort|topk|cub::.*(Scan|Select|Unique|Histo|Compact|ByKey)|prefix_sum|cumsum|Histogram1D|bincount|rocprim
LOOK_UP         gather|scatter|index(Select|Func|_select|_add|_put|ing_backward|_elementwise|_kernel|_copy)|aten::index
LOOK_UP         bucketize|offsets_range|future_token|compute_cuda_kernel
LOOK_UP         take_along|permute_2D|permute_indices|linearize_index|bounds_check|nonzero|masked_(select|scatter)
COPY            ^triton_(poi|red|per)_fused_(to_copy|clone|copy|cat|view|transpose|permute|slice|unsafe|split|_|\d)+$
ELEMENTWISE     ^triton_poi|^add_three_kernel$|^_(AddThree|FanOut)(Backward)?$|_assert_async|tri[ul]_
REDUCTION       ^triton_(red|per)
COPY            ^Memcpy|copy|CatArray|chunk_cat|aten::(cat|clone|contiguous|to|_to_copy|stack)\b|transpose|cat_kernel
FILL            ^Memset|(?<!pre)(?<!masked_)fill|zero_|arange|distribution|rand|bernoulli|philox
REDUCTION       reduce|softmax|aten::(sum|mean|max|min|norm|linalg_vector_norm|amax|argmax|any|all)\b|norm_kernel
ELEMENTWISE     elementwise|pointwise|element_?mul|scal_kernel|upsample|where|clamp|dropout|masked_fill
ELEMENTWISE     aten::(add|mul|sub|div|neg|pow|sqrt|exp|sigmoid|tanh|eq|ne|lt|gt)_?\b|nan_to_num|AddBackward|MulBackward
""")
"""Patterns of the operation."""

_BACKWARD = re.compile(r"backward|bwd|bprop|dgrad|wgrad|_wrw_|_grad\b")  # wrw: gradient of weights in MIOpen


_Label = TypeVar("_Label")
_Compiled = tuple[tuple[_Label, re.Pattern[str]], ...]


def _compiled(table: tuple[tuple[_Label, str], ...]) -> _Compiled[_Label]:
    """Patterns and texts are in lower case, which is several times as fast as ignoring case."""
    return tuple((label, re.compile(pattern.lower())) for label, pattern in table)


_SPECIFIC, _GENERIC = _compiled(SPECIFIC_PATTERNS), _compiled(GENERIC_PATTERNS)


def _first(table: _Compiled[_Label], text: str) -> _Label | None:
    return next((label for label, pattern in table if pattern.search(text)), None)


_TEMPLATES = ("at::native", "_ZN2at6native", "cutlass", "ck_tile::kentry", "ck_tile6kentry", "multi_tensor_", "_gemm::")


def _essence(name: str) -> str:
    """The relevant part of a name, in lower case.

    PyTorch's elementwise kernels and those of CUTLASS, CK and others keep their templates, which name their operation.
    """
    is_whole = any(part in name for part in _TEMPLATES)
    return (name[:_LONGEST] if name.startswith("_Z") and is_whole else name if is_whole else function_of(name)).lower()


@lru_cache(maxsize=65536)
def specific_category(name: str) -> Category | None:
    """The part of the model that a kernel or operator belongs to, or None if the name does not say."""
    return _first(_SPECIFIC, _essence(name))


@lru_cache(maxsize=65536)
def generic_category(name: str) -> Category | None:
    """The operation of a kernel or operator, or None if unknown."""
    return _first(_GENERIC, _essence(name))


@lru_cache(maxsize=65536)
def is_gradient(name: str) -> bool:
    """The name of a kernel or operator says that it computes gradients."""
    return _BACKWARD.search(name.lower()) is not None


# ---------------------------------------------------------------------------------------------------------------- kinds

OWN = "penstock"  # the library name of Penstock's own kernels

_TRANSPORTS = r"dispatch|combine|notify|barrier|sync|send|recv|exchange"
"""Parts of the names of kernels that carry tokens, or that wait for other ranks before or after it."""

_LOCAL = re.compile(
    r"src2dst|layout|epilogue|prologue|::scan|_scan_|permute|prepare|sanitize|routing_map|preprocess|update_expected|"
    r"copytostaging|epcombineall|skipped_token|mega_kernel"
)
"""Parts of the names of kernels of these libraries that stay on their device."""

_BY_LIBRARY = _compiled(
    (
        ("hybrid_ep", r"hybrid_?ep"),
        ("deep_ep", r"deep_?ep"),
        ("mori", r"mori::|ep(?:dispatch|combine)\w"),
        ("pplx", r"pplx|a2a_(?:dispatch|combine)_(?:send|recv)|^(?:dispatch|combine)kernel$"),
        ("expert_parallel", rf"{_EP}(?:\w|::)*(?:{_TRANSPORTS})|kernel_(?:dispatch|combine)_token"),
        ("expert_parallel", r"moe_?a2a|moe_?all_?(?:to|2)_?all"),
        ("nccl", r"^(?:\w+::)*(?:nccl(?!_ep)|rccl|msccl|hccl|oneccl)|nccldevkernel|ncclkernel|ncclsym|mscclkernel"),
        ("nvshmem", r"nvshmem|rocshmem|roc_shmem|ishmem|barrier_on_stream_kernel"),
        ("ucx", r"(?:^|::)(?:ucx|ucp|uct|ucc)(?:_|::)"),
        (OWN, r"^(?:push_rows|take_rows|return_rows|sum_ranks|push_numbers|take_numbers|wait|hold|signal)_kernel$"),
        ("symmetric", r"multimem|symmetric_memory|symm_mem|(?:one|two)_?shot_all_?reduce|alltoallv"),
        ("symmetric", r"(?:put|wait)_signal_kernel|exchangesplitandoffset"),
        ("userbuffers", r"userbuffers"),
        # A block or a warp that reduces stays on its device.
        ("custom", r"cross_device_reduce|lamport|(?<!block)(?<!warp)(?<!block_)(?<!warp_)all_?reduce"),
        ("custom", r"all_?gather|reduce_?scatter|all_?(?:to|2)_?all"),
    )
)
"""Libraries that communicate, and patterns of their kernels' functions. Expert parallelism first: NCCL has one too."""

EXPERT_PARALLEL = frozenset({"hybrid_ep", "deep_ep", "mori", "pplx", "expert_parallel"})
"""Libraries whose kernels carry tokens between experts and nothing else."""

_LONGEST = 256  # characters of a name that are searched: mangled names continue for thousands with template arguments
_LENGTH = re.compile(r"[0-9]{1,3}")


@lru_cache(maxsize=65536)
def function_of(kernel: str) -> str:
    """The name of a kernel's function, with namespaces, without return type, template and parameters.

    `void at::native::(anonymous namespace)::sum<float>(float*)` is `at::native::sum`, `_ZN2ck4gemmIfEvv` is `ck::gemm`.
    """
    bare = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    if bare.startswith("std::enable_if"):
        bare = bare.partition("::type ")[2]  # the return type of a template; the function is behind it
    if bare.startswith("_Z"):
        return _demangled(bare)[:_LONGEST]
    return re.split(r"[<(]", bare, maxsplit=1)[0][:_LONGEST].strip()


def _demangled(name: str) -> str:
    """The nested name in a mangled one, which is a list of lengths and words: `_ZN2ck4gemmI...`."""
    parts, at = [], 3 if name.startswith("_ZN") else 2
    while length := _LENGTH.match(name, at):
        at = length.end() + int(length[0])
        parts.append(name[length.end() : at])
    names = [part for part in parts if part and not part.startswith("_GLOBAL_")]
    return "::".join(names) or name


@lru_cache(maxsize=65536)
def library_of(kernel: str) -> str | None:
    """The library through which a kernel communicates with other ranks, or None if it does not."""
    function = function_of(kernel).lower()
    # Kernels of PyTorch's operators stay on their device, whatever their names have in them.
    library = None if function.startswith("at::native::") else _first(_BY_LIBRARY, function)
    return None if library in EXPERT_PARALLEL and _LOCAL.search(function) else library


def kind_of(category: str, name: str) -> GpuKind:
    """The kind of a GPU event, by category (`kernel`, `gpu_memcpy`, in old files `Memcpy`) and name in the file."""
    if category.lower().endswith("memcpy"):
        return GpuKind.COPY
    if category.lower().endswith("memset"):
        return GpuKind.SET
    return GpuKind.COMPUTE if library_of(name) is None else GpuKind.COMMUNICATION
