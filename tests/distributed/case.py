"""A layout that is played beside one process, and the words that make one."""

from dataclasses import dataclass

from penstock.config.model import Balance, Model, Rope, Yarn
from penstock.config.schema import as_toml, leaves
from tests.models.families import moe_with
from tests.models.huggingface.family_models import (
    SCALED,
    afmoe,
    attention,
    deepseek_v4,
    dense,
    ernie,
    flint,
    gemma3,
    glm4_moe,
    gpt_oss,
    hunyuan_moe,
    llama4,
    minimax_m2,
    mistral4,
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
    stages = 1 if schedule in ("gpipe", "1f1b", "zb-1f1b") else 2
    settings = (f"pipeline={ranks}", f"pipeline.schedule={schedule}", f"pipeline.stages_per_rank={stages}")
    return layout(*settings, *more)


WARM_UP = (
    *("model.attention.q_lora_rank=32", "model.attention.indexer={index_n_heads=2, index_head_dim=16, index_topk=8}"),
    *("model.attention.indexer.stage=dense", *DOCUMENTS),
)
STREAMS = ("model.hyper_connections={streams=3, sinkhorn_iters=4}", "model.mtp_layers=0")
IN_MXFP4 = ("qat.experts=mxfp4", "model.moe.moe_intermediate_size=64")
MUON = ("optimizer.method=muon", "optimizer.muon.precision=fp32")


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
    "DeepSeek-V4": DOCUMENTS + _overrides(deepseek_v4(**SIZES)),
    "FlexOlmo": _overrides(olmoe(family="flex-olmo", norm_position="post", **SIZES)),
    "Granite-MoE": _overrides(mixtral(family="granite-moe", **SCALED, **SIZES)),
    "Hunyuan MoE": DOCUMENTS + _overrides(hunyuan_moe(**SIZES)),
    "AFMoE": DOCUMENTS + _overrides(afmoe(**SIZES)),
    "Flint": DOCUMENTS + _overrides(flint(**SIZES)),
    "Mistral 4": DOCUMENTS + _overrides(mistral4(**SIZES)),
    "Gemma 3": DOCUMENTS + _overrides(gemma3(**SIZES)),
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
    if "model.attention.query_temperature=0.3" in model:
        layouts["CP 2"] = layout("context=2")  # temperatures of each rank's positions
    if 'model.attention.kind="compressed"' in model:  # which tensor-parallel ranks do not divide
        layouts = {name: words for name, words in layouts.items() if "TP" not in name}
    return tuple(Case(f"{family}: {name}", 2, one, model) for name, one in layouts.items())


FAMILY_CASES = tuple(case for family, model in FAMILIES.items() for case in _of_family(family, model))
