"""One small model of every family as overrides of the run that `one_loss` trains, so that layouts are tried on each.

Rows are 32 tokens, so windows and chunks are shorter than a row; where there are some, rows hold several documents.
Experts have a balance loss, as the run has.
"""

from penstock.config.model import (
    Balance,
    ClampedSwiglu,
    GroupedQueryAttention,
    LocalAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from penstock.config.schema import as_toml, leaves
from tests.distributed.case import DOCUMENTS, Case, layout, pipeline

BALANCE = Balance(aux_loss="sequence", aux_loss_coef=0.01, z_loss_coef=0.001)


def _attention(**changes: object) -> GroupedQueryAttention:
    return GroupedQueryAttention.model_validate({"heads": 4, "kv_heads": 2, "head_dim": 8} | changes)


def _moe(router: Router, **changes: object) -> Moe:
    sizes = {"experts": 8, "top_k": 2, "moe_intermediate_size": 32, "router": router, "balance": BALANCE}
    return Moe.model_validate(sizes | changes)


def _overrides(family: str, **changes: object) -> tuple[str, ...]:
    fields = {"family": family, "vocab_size": 64, "hidden_size": 32, "layers": 4, "intermediate_size": 64}
    model = Model.model_validate({**fields, "attention": _attention(), **changes})
    return tuple(f"model.{path}={as_toml(value)}" for path, value in leaves(model).items())


CHUNKS = LocalAttention(
    kind="chunk", size=12, global_every=2, global_rope=False, global_temperature=0.3, temperature_floor=8
)

FAMILIES = {
    "Mixtral": _overrides("mixtral", moe=_moe(Router(softmax_after_top_k=True))),
    "Qwen3-MoE": _overrides("qwen3-moe", moe=_moe(Router(norm_topk_prob=True)), attention=_attention(qk_norm="head")),
    "OLMoE": _overrides("olmoe", moe=_moe(Router()), attention=_attention(qk_norm="projection")),
    "Llama 4": DOCUMENTS
    + _overrides(
        "llama4",
        moe=_moe(
            Router(scoring_func="sigmoid", apply_probs_on_input=True),
            top_k=1,
            shared_expert_intermediate_size=32,
            moe_layer_freq=2,
        ),
        attention=_attention(qk_norm="rotated-head", local=CHUNKS),
    ),
    "gpt-oss": DOCUMENTS
    + _overrides(
        "gpt-oss",
        moe=_moe(Router(softmax_after_top_k=True, logit_bias=True), bias=True, clamped=ClampedSwiglu(limit=0.5)),
        attention=_attention(
            bias=True,
            sinks=True,
            local=LocalAttention(size=7, global_every=2),
            rope=Rope(yarn=Yarn(factor=2.0, original_max_position_embeddings=16, truncate=False)),
        ),
    ),
    "Qwen3, dense": _overrides("qwen3", dense_layers=4, attention=_attention(qk_norm="head"), tie_word_embeddings=True),
}
"""Overrides of the model by family. Llama has nothing that Qwen3 and Mixtral lack."""


def _of_family(family: str, model: tuple[str, ...]) -> tuple[Case, ...]:
    """A family in the layouts that all of them have."""
    expert = () if "model.moe=none" in model else ("expert=2",)
    layouts = {
        "EP 2, FSDP" if expert else "FSDP 2": layout("shard=full", *expert),
        "TP 2 folded with EP 2" if expert else "TP 2": layout("tensor=2", *expert),
        "PP 2": pipeline("1f1b", 2),
    }
    return tuple(Case(f"{family}: {name}", 2, one, model) for name, one in layouts.items())


FAMILY_CASES = tuple(case for family, model in FAMILIES.items() for case in _of_family(family, model))
