"""A layout that is played beside one process, and the words that make one."""

from dataclasses import dataclass

from penstock.config.model import Balance, Model, Rope, Yarn
from penstock.config.schema import as_toml, leaves
from tests.models.families import moe_with
from tests.models.huggingface.family_models import (
    attention,
    dense,
    ernie,
    glm4_moe,
    gpt_oss,
    llama4,
    minimax_m2,
    mixtral,
    nope,
    olmoe,
    qwen3_moe,
    qwen3_next,
)


@dataclass(frozen=True)
class Case:
    """One layout."""

    name: str
    ranks: int
    overrides: tuple[str, ...]  # what makes the layout, on top of BASE
    model: tuple[str, ...] = ()  # what changes the model or the data, for the single process too


def layout(*settings: str) -> tuple[str, ...]:
    """Overrides of the section `parallel`, and whole paths as they are."""
    return tuple(setting if "." in setting else f"parallel.{setting}" for setting in settings)


SCHEDULES_V = ("zb-v", "v-half", "v-min", "dualpipe-v")  # two stages on a rank, down and up again
GQA = (
    'model.attention.kind="gqa"',
    "model.attention.heads=4",
    "model.attention.kv_heads=2",
    "model.attention.head_dim=16",
    'model.family="plain"',
)
DOCUMENTS = ("data.document_mask=true",)


def pipeline(schedule: str, ranks: int = 4, *more: str) -> tuple[str, ...]:
    """A pipeline by name of its schedule, with the stages per rank that it needs."""
    stages = 2 if schedule in SCHEDULES_V or schedule == "interleaved" else 1
    settings = (f"pipeline={ranks}", f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}")
    return layout(*settings, *more)


SINKS = (
    *GQA,
    "model.attention.rope={theta=150000.0, yarn={factor=4.0, original_max_position_embeddings=8, truncate=false}}",
    "model.attention.bias=true",
    "model.attention.sinks=true",
    "model.attention.local={size=5, global_every=2}",
)
CHUNKED = (
    *GQA,
    'model.attention.qk_norm="rotated-head"',
    'model.attention.local={kind="chunk", size=12, global_every=4, global_rope=false, global_temperature=0.3, '
    "temperature_floor=7}",
)
QWEN3 = (*GQA, 'model.attention.qk_norm="head"')
GLM = (*GQA, "model.attention.partial_rotary_factor=0.5", "model.attention.qkv_bias=true")
DELTA = (
    *GQA,
    "model.linear_attention={key_heads=4, value_heads=8, key_head_dim=8, value_head_dim=8, full_every=2}",
    "model.attention.output_gate=true",
    "model.moe.shared_expert_gate=true",
    "model.zero_centred_norms=true",
    'model.attention.qk_norm="head"',
)
KDA = (
    *GQA,
    'model.linear_attention={kind="kda", key_heads=4, value_heads=4, key_head_dim=8, value_head_dim=8, full_every=2}',
    *DOCUMENTS,
)
INDEXER = (
    *("model.attention.q_lora_rank=32", "model.attention.indexer={index_n_heads=2, index_head_dim=16, index_topk=8}"),
    *DOCUMENTS,
)
WARM_UP = (*INDEXER, "model.attention.indexer.stage=dense")
MUON = ("optimizer.method=muon", "optimizer.muon.precision=fp32")
CLIPPED = (*MUON, "optimizer.muon.qk_clip=0.02")
DELTA_PACKED = (*DELTA, *DOCUMENTS)
OLMOE = (*GQA, 'model.attention.qk_norm="projection"')

SINKS_PACKED, CHUNKED_PACKED = (*SINKS, *DOCUMENTS), (*CHUNKED, *DOCUMENTS)

HALVES = ("dispatch.overlap=halves", "training.micro_batch=2")  # halves of a micro-batch are rows

GATHERED, EXCHANGED = "context_method=all-gather", "context_method=ulysses"

ATTENTION_CASES = (
    Case("TP 2, windows, sinks, biases, documents", 2, layout("tensor=2"), SINKS_PACKED),
    Case("CP 2, heads exchanged, windows, sinks", 2, layout("context=2", EXCHANGED), SINKS),
    Case("CP 2, keys gathered, windows, sinks, documents", 2, layout("context=2", GATHERED), SINKS_PACKED),
    Case("TP 2 x CP 2, keys gathered, windows, sinks", 4, layout("tensor=2", "context=2", GATHERED), SINKS),
    Case("EP 2 x EDP 2, FSDP, windows, sinks, documents", 4, layout("expert=2", "shard=full"), SINKS_PACKED),
    Case("PP 2 x EP 2, ZB-V, windows, sinks", 4, pipeline("zb-v", 2, "expert=2"), SINKS),
    Case("FSDP 2, windows, sinks, recompute attention", 2, layout("shard=full", "recompute.modules=attention"), SINKS),
    Case("EP 2, windows, sinks, recompute layer", 2, layout("expert=2", "recompute.modules=layer"), SINKS_PACKED),
    Case("TP 2, chunks without positions between", 2, layout("tensor=2"), CHUNKED),
    Case("CP 2, heads exchanged, chunks, documents", 2, layout("context=2", EXCHANGED), CHUNKED_PACKED),
    Case("CP 2, keys gathered, chunks", 2, layout("context=2", GATHERED), CHUNKED),
    Case("CP 4, keys gathered, chunks, documents", 4, layout("context=4", GATHERED), CHUNKED_PACKED),
    Case("PP 4, interleaved, chunks", 4, pipeline("interleaved"), CHUNKED),
    Case("TP 2, norm of each head", 2, layout("tensor=2"), QWEN3),
    Case("EP 2 x EDP 2, FSDP, norm of each head", 4, layout("expert=2", "shard=full"), QWEN3),
    Case("TP 2, half of each head rotated, biases", 2, layout("tensor=2"), GLM),
    Case(
        "CP 2, keys gathered, half of each head rotated, documents", 2, layout("context=2", GATHERED), GLM + DOCUMENTS
    ),
    Case("TP 2, linear attention, documents", 2, layout("tensor=2"), DELTA_PACKED),
    Case("CP 2, heads exchanged, linear attention, documents", 2, layout("context=2", EXCHANGED), DELTA_PACKED),
    Case("CP 2, keys gathered, linear attention, documents", 2, layout("context=2", GATHERED), DELTA_PACKED),
    Case("TP 2 x CP 2, keys gathered, linear attention", 4, layout("tensor=2", "context=2", GATHERED), DELTA),
    Case("EP 2 x EDP 2, FSDP, linear attention", 4, layout("expert=2", "shard=full"), DELTA_PACKED),
    Case("PP 2 x EP 2, ZB-V, linear attention, documents", 4, pipeline("zb-v", 2, "expert=2"), DELTA_PACKED),
    Case(
        "FSDP 2, linear, recompute attention", 2, layout("shard=full", 'recompute.modules=["attention", "norm"]'), DELTA
    ),
    Case("EP 2, linear attention, recompute layer", 2, layout("expert=2", "recompute.modules=layer"), DELTA_PACKED),
    Case("TP 2 x CP 2, keys gathered, decays by feature", 4, layout("tensor=2", "context=2", GATHERED), KDA),
    Case("EP 2, overlap halves, decays by feature", 2, layout("expert=2", *HALVES), KDA),
    Case("EP 2 x EDP 2, FSDP, chosen keys, documents", 4, layout("expert=2", "shard=full"), INDEXER),
    Case("PP 2 x EP 2, ZB-V, chosen keys", 4, pipeline("zb-v", 2, "expert=2"), INDEXER),
    Case("EP 2, chosen keys, recompute layer", 2, layout("expert=2", "recompute.modules=layer"), INDEXER),
    Case("EP 2, FSDP, warm-up of the indexer", 2, layout("expert=2", "shard=full"), WARM_UP),
    Case("PP 2, warm-up of the indexer", 2, pipeline("1f1b", 2), WARM_UP),
    Case("TP 2, norm of all heads", 2, layout("tensor=2"), OLMOE),
    Case("TP 2 x CP 2 folded with EP 4, norm of all heads", 4, layout("tensor=2", "context=2", "expert=4"), OLMOE),
    Case("PP 2 x EP 2, norm of all heads", 4, pipeline("1f1b", 2, "expert=2"), OLMOE),
)


MUON_CASES = (
    Case("Muon: DP 2, optimizer whole", 2, layout("shard=none"), MUON),
    Case("Muon: DP 4, ZeRO-1 in pairs", 4, layout("shard=optimizer", "shard_size=2"), MUON),
    Case("Muon: EP 2 x EDP 2, FSDP", 4, layout("expert=2", "shard=full"), MUON),
    Case("Muon: EP 2 x ETP 2", 4, layout("expert=2", "expert_tensor=2"), MUON),
    Case("Muon: TP 2 x DP 4 folded with EP 4 x EDP 2, FSDP", 8, layout("tensor=2", "expert=4", "shard=full"), MUON),
    Case("Muon: TP 2 folded with EP 4", 4, layout("tensor=2", "expert=4"), MUON),
    Case("Muon: CP 2 x TP 2, grouped queries", 4, layout("context=2", "tensor=2"), GQA + MUON),
    Case("Muon: PP 2 x VPP 2 x EP 2", 4, pipeline("interleaved", 2, "expert=2"), MUON),
    Case("Muon: TP 2 folded with EP 4, FSDP, QK-clip", 4, layout("tensor=2", "expert=4", "shard=full"), CLIPPED),
    Case("Muon: PP 2 x EP 2, QK-clip, grouped queries", 4, pipeline("1f1b", 2, "expert=2"), GQA + CLIPPED),
    Case("Muon: PP 2 x TP 2 folded with EP 2, ZB-V", 4, pipeline("zb-v", 2, "tensor=2", "expert=2"), MUON),
)


GPT_OSS = (
    'model.family="plain"',
    "model.moe.bias=true",
    "model.moe.clamped={alpha=1.702, limit=0.05}",
    'model.moe.router={scoring_func="softmax", softmax_after_top_k=true, '
    "norm_topk_prob=false, expert_bias=false, logit_bias=true}",
)
LLAMA4 = (
    'model.family="plain"',
    "model.dense_layers=0",
    "model.moe.moe_layer_freq=2",
    "model.moe.top_k=1",
    'model.moe.router={scoring_func="sigmoid", norm_topk_prob=false, apply_probs_on_input=true}',
)
DEEPSEEK_V4 = (
    'model.family="plain"',
    "model.attention.sinks=true",
    "model.moe.clamped={alpha=1.0, limit=0.05, up_offset=0.0}",
    "model.moe.clamp_shared=true",
    'model.moe.router={scoring_func="sqrt-softplus", norm_topk_prob=true, expert_bias=true, num_hash_layers=1}',
)
NEMOTRON = ('model.family="plain"', "model.hidden_act=relu2")
CAPACITY = ("model.moe.balance.capacity_factor=1.0",)
PADDED = (*CAPACITY, "model.moe.balance.pad_to_capacity=true")

GATHERED_TOKENS = ("dispatch.method=all-gather", "dispatch.sync_free=3")
BY_NODE = ("dispatch.method=hierarchical", "dispatch.sync_free=2")
NO_ROOM = ("dispatch.method=all-gather", "dispatch.sync_free=2", "dispatch.row_capacity_factor=1.0")  # steps run twice
EXPERT_CASES = (
    Case("EP 4, biases", 4, layout("expert=4"), GPT_OSS),
    Case("ETP 2, biases", 2, layout("expert_tensor=2"), GPT_OSS),
    Case("EP 2 x ETP 2, FSDP, biases", 8, layout("expert=2", "expert_tensor=2", "shard=full"), GPT_OSS),
    Case("EP 2 x EDP 2, ZeRO-1, biases", 4, layout("expert=2"), GPT_OSS),
    Case("TP 2 folded with ETP 2, biases", 2, layout("tensor=2", "expert_tensor=2"), GPT_OSS),
    Case("EP 4, all-gather, sync-free 3, biases", 4, layout("expert=4", *GATHERED_TOKENS), GPT_OSS),
    Case("EP 4, all-gather, too little room, biases", 4, layout("expert=4", *NO_ROOM), GPT_OSS),
    Case("EP 2 x ETP 2 on 2 nodes, sync-free 2, biases", 4, layout("expert=2", "expert_tensor=2", *BY_NODE), GPT_OSS),
    Case("EP 2, drop and pad, biases", 2, layout("expert=2"), (*GPT_OSS, *PADDED)),
    Case("PP 2 x EP 2, ZB-1F1B, biases", 4, pipeline("zb-1f1b", 2, "expert=2"), GPT_OSS),
    Case("PP 2 x ETP 2, ZB-V, biases", 4, pipeline("zb-v", 2, "expert_tensor=2"), GPT_OSS),
    Case("EP 2, recompute experts, biases", 2, layout("expert=2", "recompute.modules=expert-activation"), GPT_OSS),
    Case("EP 2, recompute moe, biases", 2, layout("expert=2", "recompute.modules=moe"), GPT_OSS),
    Case("EP 2, overlap halves, biases", 2, layout("expert=2", *HALVES), GPT_OSS),
    Case("EP 4, weighted inputs", 4, layout("expert=4"), LLAMA4),
    Case("EP 2 x ETP 2, weighted inputs", 4, layout("expert=2", "expert_tensor=2"), LLAMA4),
    Case("EP 2 x EDP 2, FSDP, weighted inputs", 4, layout("expert=2", "shard=full"), LLAMA4),
    Case("EP 4, all-gather, sync-free 3, weighted inputs", 4, layout("expert=4", *GATHERED_TOKENS), LLAMA4),
    Case("EP 2, capacity, weighted inputs", 2, layout("expert=2"), (*LLAMA4, *CAPACITY)),
    Case("PP 4, interleaved, weighted inputs", 4, pipeline("interleaved"), LLAMA4),
    Case("PP 2 x EP 2, ZB-V, weighted inputs", 4, pipeline("zb-v", 2, "expert=2"), LLAMA4),
    Case(
        "EP 2, recompute experts, weighted inputs", 2, layout("expert=2", "recompute.modules=expert-activation"), LLAMA4
    ),
    Case("EP 2, overlap halves, weighted inputs", 2, layout("expert=2", *HALVES), LLAMA4),
    Case("TP 2 x CP 2 folded with EP 4, hashed", 4, layout("tensor=2", "context=2", "expert=4"), DEEPSEEK_V4),
    Case("EP 4, all-gather, sync-free 3, hashed", 4, layout("expert=4", *GATHERED_TOKENS), DEEPSEEK_V4),
    Case("EP 2 x EDP 2, FSDP, hashed", 4, layout("expert=2", "shard=full"), DEEPSEEK_V4),
    Case("PP 2 x EP 2, ZB-V, hashed", 4, pipeline("zb-v", 2, "expert=2"), DEEPSEEK_V4),
    Case("PP 4, interleaved, hashed", 4, pipeline("interleaved"), DEEPSEEK_V4),
    Case("EP 2, recompute moe, hashed", 2, layout("expert=2", "recompute.modules=moe"), DEEPSEEK_V4),
    Case("EP 2, overlap halves, hashed", 2, layout("expert=2", *HALVES), (*DEEPSEEK_V4, *DOCUMENTS)),
    Case("TP 2 folded with EP 2, squares", 2, layout("tensor=2", "expert=2"), NEMOTRON),
    Case("EP 2 x ETP 2, squares", 4, layout("expert=2", "expert_tensor=2"), NEMOTRON),
    Case("EP 2 x EDP 2, FSDP, squares", 4, layout("expert=2", "shard=full"), NEMOTRON),
    Case("EP 4, all-gather, sync-free 3, squares", 4, layout("expert=4", *GATHERED_TOKENS), NEMOTRON),
    Case("PP 2 x ETP 2, ZB-V, squares", 4, pipeline("zb-v", 2, "expert_tensor=2"), NEMOTRON),
    Case("Muon: EP 2, squares", 2, layout("expert=2"), NEMOTRON + MUON),
)


BALANCE = Balance(aux_loss="sequence", aux_loss_coef=0.01, z_loss_coef=0.001)
YARN = Yarn(factor=2.0, original_max_position_embeddings=16, truncate=False)
SIZES = {"vocab_size": 64, "layers": 4, "intermediate_size": 64, "initializer_range": 0.02}


def _overrides(model: Model) -> tuple[str, ...]:
    model = model if model.moe is None else moe_with(model, balance=BALANCE)
    return tuple(f"model.{path}={as_toml(value)}" for path, value in leaves(model).items())


FAMILIES = {
    "Mixtral": _overrides(mixtral(**SIZES)),
    "Qwen3-MoE": _overrides(qwen3_moe(**SIZES)),
    "OLMoE": _overrides(olmoe(**SIZES)),
    "GLM-4.5": _overrides(glm4_moe(bias=True, qk_norm="head", **SIZES)),
    "ERNIE-4.5": _overrides(ernie(**SIZES)),
    "MiniMax-M2": DOCUMENTS + _overrides(minimax_m2(**SIZES)),
    "Qwen3-Next": DOCUMENTS + _overrides(qwen3_next(**SIZES)),
    "Llama 4": DOCUMENTS + _overrides(llama4(local=nope(2), qk_norm="rotated-head", rope=Rope(), every=2, **SIZES)),
    "gpt-oss": DOCUMENTS + _overrides(gpt_oss(rope=Rope(yarn=YARN), **SIZES)),
    "Qwen3, dense": _overrides(
        dense("qwen3", dense_layers=4, attention=attention(qk_norm="head"), tie_word_embeddings=True, **SIZES)
    ),
}
"""Overrides of the model by family. Llama has nothing that Qwen3 and Mixtral lack."""


def _of_family(family: str, model: tuple[str, ...]) -> tuple[Case, ...]:
    expert = () if "model.moe=none" in model else ("expert=2",)  # dense models have none to share
    layouts = {
        "EP 2, FSDP" if expert else "FSDP 2": layout("shard=full", *expert),
        "TP 2 folded with EP 2" if expert else "TP 2": layout("tensor=2", *expert),
        "PP 2": pipeline("1f1b", 2),
    }
    return tuple(Case(f"{family}: {name}", 2, one, model) for name, one in layouts.items())


FAMILY_CASES = tuple(case for family, model in FAMILIES.items() for case in _of_family(family, model))
