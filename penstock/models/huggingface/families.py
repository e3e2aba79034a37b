"""The families as data: names and layouts of their weights, and the keys of their `config.json`.

Names of weights are those of the published files. Within a layer, one of our tensors is filled by one tensor of the
file, or by several stacked along dim 0; `{expert}` marks names that exist once per expert. `forms` rearrange numbers.

A field of our configuration comes from a key of `config.json` (`values`), from a part (`parts`), or is the same in all
models of the family (`always`). Training settings (`model.moe.balance`, `model.moe.router.expert_bias_rate`) are not in
the file and have their defaults after reading.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from penstock.base.errors import ConfigError
from penstock.config.model import Model
from penstock.config.schema import as_toml
from penstock.models.huggingface import config_parts as keys
from penstock.models.huggingface import weight_names as tensors
from penstock.models.huggingface.config_parts import Keys, Part, Values, agreed, grouped, refused
from penstock.models.huggingface.weight_names import DivisionOf, Names, RearrangementOf


def rotary(*, scales_scores: bool = False, partial: bool = False) -> Part:
    """Rotary embedding in today's form (`rope_parameters`) and in the older one (`rope_theta`, `rope_scaling`).

    `transformers` reads `rope_scaling` instead of `rope_parameters`, and `rope_theta` where the section has none. With
    `scales_scores` the family's YaRN scales attention scores as well (`mscale_all_dim`). `partial`: heads of the family
    may be rotated in part; MiniMax's `rotary_dim` is in features.
    """

    def read(keys: Keys) -> Values:
        keys.skip("max_position_embeddings")
        sections = {name: keys.section(name) for name in ("rope_scaling", "rope_parameters")}
        readings = {
            name: _read_section(keys, section, scales_scores, partial)
            for name, section in sections.items()
            if section.values
        }
        if len(readings) == 2 and readings["rope_scaling"] != readings["rope_parameters"]:
            raise ConfigError(
                "config.json: rope_scaling and rope_parameters contradict each other",
                got=" and ".join(as_toml(dict(section.values)) for section in sections.values()),
                fix="keep one of them, with rope_theta in it",
            )
        if readings:
            return next(iter(readings.values()))
        usual = keys.rope if keys.get("rope_parameters", None) is None else {}
        section = Keys({key: usual[key] for key in usual.keys() - {"rope_theta", "partial_rotary_factor"}})
        return _read_section(keys, section, scales_scores, partial)

    def write(model: Model) -> Values:
        rope = model.attention.rope
        fields: Values = {"rope_type": "default", "rope_theta": rope.theta}
        if partial:
            fields["partial_rotary_factor"] = grouped(model).partial_rotary_factor
        if rope.yarn is not None:
            fields |= {"rope_type": "yarn", **rope.yarn.model_dump()}
            if not rope.yarn.mscale_all_dim:  # transformers derives both scales from the factor
                del fields["mscale"], fields["mscale_all_dim"]
        if rope.llama3 is not None:
            fields |= {"rope_type": "llama3", **rope.llama3.model_dump()}
        return {"rope_parameters": fields}

    return Part(read, write)


def _read_section(keys: Keys, section: Keys, scales_scores: bool, partial: bool) -> Values:
    kind = agreed({name: section.get(name, None) for name in ("rope_type", "type")}) or "default"
    if kind not in ("default", "yarn", "llama3"):
        raise refused("rope_type", kind, "default, yarn, llama3")
    shares = {
        "rope_parameters.partial_rotary_factor": section.get("partial_rotary_factor", None),
        "partial_rotary_factor": keys.get("partial_rotary_factor", None),
    }
    if keys.get("rotary_dim", None):
        shares["rotary_dim"] = keys.whole("rotary_dim") / keys.whole("head_dim", low=1)
    share = _number("partial_rotary_factor", agreed(shares), keys.rope.get("partial_rotary_factor", 1.0))
    if not partial and share != 1.0:
        raise refused("partial_rotary_factor", share, "1.0")
    theta = agreed(
        {"rope_parameters.rope_theta": section.get("rope_theta", None), "rope_theta": keys.get("rope_theta", None)}
    )
    extension: Values = {"theta": _number("rope_theta", theta, keys.rope["rope_theta"])}
    if kind != "default":
        positions = {"original_max_position_embeddings": keys.get("max_position_embeddings", None)}
        section = Keys({**positions, **section.values})
    if kind == "yarn":
        extension["yarn"] = _read_yarn(section, scales_scores)
    elif kind == "llama3":
        extension["llama3"] = {
            **{key: section.number(key) for key in ("factor", "low_freq_factor", "high_freq_factor")},
            "original_max_position_embeddings": section.whole("original_max_position_embeddings"),
        }
    return {"attention.rope": extension, **({"attention.partial_rotary_factor": share} if partial else {})}


def _number(key: str, value: Any, default: float) -> float:
    return Keys({key: value}).number(key, default)


def _read_yarn(scaling: Keys, scales_scores: bool) -> Values:
    scale, scale_all = scaling.number("mscale", 0.0), scaling.number("mscale_all_dim", 0.0)
    if scale_all and not (scales_scores and scale):
        raise refused("mscale_all_dim", scale_all, "none, or beside mscale in a DeepSeek model")
    if (given := scaling.get("attention_factor", None)) is not None:
        raise refused("attention_factor", given, "none: it follows from the factor")
    return {
        "factor": scaling.number("factor"),
        "original_max_position_embeddings": scaling.whole("original_max_position_embeddings"),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": scale if scale and scale_all else 1.0,
        "mscale_all_dim": scale_all,
        "truncate": bool(scaling.values.get("truncate", True)),
    }


# ----------------------------------------------------------------------------------------------------------- family


@dataclass(frozen=True, kw_only=True)
class Family:
    """Hugging Face form of the models of one family."""

    model_type: str
    also: tuple[str, ...] = ()  # other model types of the same form, which import reads
    architecture: str
    names: Names  # our name of each layer weight to its names in the file
    forms: Mapping[str, tuple[RearrangementOf, ...]] = field(default_factory=dict)  # in the order of reading
    instead: Names = field(default_factory=dict)  # other names that files may have, for the same of ours
    linear: Names = field(default_factory=dict)  # in place of the attention's, in layers with linear attention
    # Tensors of the file that several of ours fill, by their name in a layer, and ours in the file's order.
    divided: Mapping[str, tuple[DivisionOf, tuple[str, ...]]] = field(default_factory=dict)
    prediction: Names = field(default_factory=dict)  # multi-token prediction weights outside its decoder layer
    # Beginnings of these names, and of those of its decoder layer.
    prediction_prefixes: tuple[str, str] = ("model.layers.{layer}.", "model.layers.{layer}.")
    values: Mapping[str, str]  # key of `config.json` to the path of our field
    renamed: Mapping[str, str] = field(default_factory=dict)  # other spellings that the class of `transformers` lacks
    absent: Values = field(default_factory=dict)  # defaults of keys that the class of `transformers` lacks
    always: Values = field(default_factory=dict)  # path of our field to its value in every model of the family
    fixed: Values = field(default_factory=dict)  # keys with their only supported value
    parts: tuple[Part, ...]  # readers and writers of other keys
    prefix: str = ""  # part of all names in files of multimodal models
    left_out: str = r".*\.rotary_emb\.inv_freq"  # matches names of tensors that are not weights of the text model

    def text_name(self, name: str) -> str | None:
        """The name of a file's tensor without prefix; None if it is not a weight of the text model."""
        return None if re.fullmatch(self.left_out, name) else name.replace(self.prefix, "", 1)

    def depth_of(self, name: str, layers: int) -> int | None:
        """The depth of multi-token prediction, from 0, to which a `text_name` belongs; None for other weights."""
        if self.prediction and (match := _IN_LAYER.match(name)):
            behind = int(match["layer"]) - (0 if match["mtp"] else layers)
            return behind if behind >= 0 else None
        # Files with a prefix of its own have one depth.
        return 0 if self.prediction and name.startswith("mtp.") else None


_IN_LAYER = re.compile(r"(?:model|(?P<mtp>mtp))\.layers\.(?P<layer>\d+)\.")

# ---------------------------------------------------------------------------------------------- keys of config.json

_MODEL_VALUES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_hidden_layers": "layers",
    "rms_norm_eps": "rms_norm_eps",
    "tie_word_embeddings": "tie_word_embeddings",
    "initializer_range": "initializer_range",
}
_MODEL_FIXED: Values = {"hidden_act": "silu", "attention_dropout": 0.0}

_BIAS = {"attention_bias": "attention.bias"}
_DENSE_VALUES = {**_MODEL_VALUES, **_BIAS, "intermediate_size": "intermediate_size"}
_TOP_K = {"num_experts_per_tok": "moe.top_k"}
_EXPERTS = {
    **_TOP_K,
    "num_experts": "moe.experts",
    "moe_intermediate_size": "moe.moe_intermediate_size",
    "norm_topk_prob": "moe.router.norm_topk_prob",
}
_LOCAL_EXPERTS = {
    **_MODEL_VALUES,
    **_TOP_K,
    "num_local_experts": "moe.experts",
    "intermediate_size": "moe.moe_intermediate_size",
}

_DEEPSEEK_VALUES = {
    **_MODEL_VALUES,
    **_TOP_K,
    "intermediate_size": "intermediate_size",
    "first_k_dense_replace": "dense_layers",
    "num_attention_heads": "attention.heads",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.qk_nope_head_dim",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
    "n_routed_experts": "moe.experts",
    "moe_intermediate_size": "moe.moe_intermediate_size",
    "routed_scaling_factor": "moe.router.routed_scaling_factor",
}
_DEEPSEEK_FIXED: Values = {**_MODEL_FIXED, "attention_bias": False, "moe_layer_freq": 1}

_GROUPS = {
    "n_group": "moe.router.n_group",
    "topk_group": "moe.router.topk_group",
    "norm_topk_prob": "moe.router.norm_topk_prob",
}
_SIGMOID_WITH_BIAS: Values = {
    "moe.router.scoring_func": "sigmoid",
    "moe.router.expert_bias": True,
    "moe.router.group_score": "top2",
}
_REPEATED = r".*\.rotary_emb\.inv_freq|model\.layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""Names that files with multi-token prediction have twice: embedding and output projection are the main model's."""

_DEEPSEEK_V3 = Family(
    model_type="deepseek_v3",
    also=("kimi_k2",),
    architecture="DeepseekV3ForCausalLM",
    names=tensors.DEEPSEEK,
    prediction=tensors.PREDICTION,
    values={
        **_DEEPSEEK_VALUES,
        **_GROUPS,
        "num_nextn_predict_layers": "mtp_layers",
    },
    always=_SIGMOID_WITH_BIAS,
    fixed={**_DEEPSEEK_FIXED, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    parts=(keys.LATENTS, rotary(scales_scores=True), keys.SHARED),
    left_out=_REPEATED,
)

_DEEPSEEK_V32 = replace(
    _DEEPSEEK_V3,
    model_type="deepseek_v32",
    also=(),
    architecture="DeepseekV32ForCausalLM",
    names={**tensors.DEEPSEEK, **tensors.INDEXER},
    renamed={"num_experts": "n_routed_experts"},
    absent={"num_nextn_predict_layers": 0},
    forms=dict.fromkeys([*tensors.INDEXER][:-1], (tensors.rotary_halves_of_indexer,)),
    values={
        **_DEEPSEEK_V3.values,
        "index_n_heads": "attention.indexer.index_n_heads",
        "index_head_dim": "attention.indexer.index_head_dim",
        "index_topk": "attention.indexer.index_topk",
    },
    fixed={**_DEEPSEEK_V3.fixed, "mlp_bias": False},
    parts=(*_DEEPSEEK_V3.parts, keys.FIRST_DENSE, keys.INDEXERS),
)

_LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names={**tensors.ATTENTION, **tensors.dense_network("ffn", "mlp")},
    forms=tensors.ROTARY_HALVES,
    values=_DENSE_VALUES,
    fixed={**_MODEL_FIXED, "mlp_bias": False},
    parts=(keys.HEADS, rotary(), keys.DENSE),
)

_NOT_IN_QWEN35 = ("intermediate_size", "norm_topk_prob")
_QWEN3_NEXT = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names={
        **tensors.ATTENTION,
        **tensors.dense_network("ffn", "mlp"),
        **tensors.dense_network("ffn.shared", "mlp.shared_expert"),
        "ffn.shared.gate.weight": ("mlp.shared_expert_gate.weight",),
        **tensors.experts_one_by_one("mlp"),
    },
    linear={
        **tensors.DELTA_NAMES,
        **dict.fromkeys(tensors.PROJECTIONS, (f"{tensors.DELTA}.in_proj_qkvz.weight",)),
        **dict.fromkeys(("attention.beta.weight", "attention.decay.weight"), (f"{tensors.DELTA}.in_proj_ba.weight",)),
    },
    divided={
        f"{tensors.DELTA}.in_proj_qkvz.weight": (tensors.by_key_head, tensors.PROJECTIONS),
        f"{tensors.DELTA}.in_proj_ba.weight": (
            tensors.two_by_key_head,
            ("attention.beta.weight", "attention.decay.weight"),
        ),
        f"{tensors.DELTA}.conv1d.weight": (tensors.all_at_once, tensors.CONVOLUTIONS),
    },
    forms={
        **tensors.ROTARY_HALVES,
        "attention.query.weight": (tensors.rotary_halves_of_queries,),
        "attention.query.bias": (tensors.rotary_halves_of_queries,),
        **dict.fromkeys(tensors.CONVOLUTIONS, (tensors.channels,)),
    },
    values={
        **_DENSE_VALUES,
        **_EXPERTS,
        "shared_expert_intermediate_size": "moe.shared_expert_intermediate_size",
        "linear_num_key_heads": "linear_attention.key_heads",
        "linear_num_value_heads": "linear_attention.value_heads",
        "linear_key_head_dim": "linear_attention.key_head_dim",
        "linear_value_head_dim": "linear_attention.value_head_dim",
        "linear_conv_kernel_dim": "linear_attention.conv_size",
        "num_nextn_predict_layers": "mtp_layers",
    },
    renamed={"mtp_num_hidden_layers": "num_nextn_predict_layers"},
    absent={"num_nextn_predict_layers": 0},
    always={
        "attention.qk_norm": "head",
        "attention.output_gate": True,
        "linear_attention.kind": "gdn",
        "moe.shared_expert_gate": True,
        "zero_centred_norms": True,
    },
    fixed=_MODEL_FIXED,
    parts=(keys.HEADS, rotary(partial=True), keys.LINEAR, keys.EXCEPTIONS),
    prediction=tensors.PREDICTION_OF_QWEN,
    prediction_prefixes=("mtp.", "mtp.layers.{depth}."),
)

_KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    names={
        **tensors.LATENT_ATTENTION,
        **tensors.dense_network("ffn", "mlp"),
        **tensors.dense_network("ffn.shared", "block_sparse_moe.shared_experts"),
        **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
        "ffn.router.expert_bias_E": ("block_sparse_moe.gate.e_score_correction_bias",),
    },
    instead=tensors.dense_network("ffn", "block_sparse_moe"),  # transformers writes dense layers so, too
    linear=tensors.KDA_NAMES,
    forms={
        **dict.fromkeys(tensors.CONVOLUTIONS, (tensors.channels,)),
        "attention.mixing.decay_rate_H": (tensors.nested, tensors.nested, tensors.nested_last),
    },
    values={
        **_MODEL_VALUES,
        **{key: path for key, path in _DEEPSEEK_VALUES.items() if key not in (*_TOP_K, "n_routed_experts")},
        "num_experts": "moe.experts",
        "num_experts_per_token": "moe.top_k",
        "num_expert_group": "moe.router.n_group",
        "topk_group": "moe.router.topk_group",
        "moe_renormalize": "moe.router.norm_topk_prob",
    },
    absent={"first_k_dense_replace": 1},
    always={**_SIGMOID_WITH_BIAS, "attention.rotary": False, "linear_attention.kind": "kda"},
    fixed={
        **_DEEPSEEK_FIXED,
        "mla_use_nope": True,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
    },
    parts=(keys.LATENTS, keys.FIRST_DENSE, keys.KDA, keys.shared("num_shared_experts")),
)

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "deepseek-v2": Family(
            model_type="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            names=tensors.DEEPSEEK,
            values=_DEEPSEEK_VALUES,
            fixed={**_DEEPSEEK_FIXED, "norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False},
            parts=(keys.LATENTS, rotary(scales_scores=True), keys.SHARED, keys.GROUPS_OF_V2),
        ),
        "deepseek-v3": _DEEPSEEK_V3,
        "deepseek-v3.2": _DEEPSEEK_V32,
        "glm5-moe": replace(
            _DEEPSEEK_V32,
            model_type="glm_moe_dsa",
            architecture="GlmMoeDsaForCausalLM",
            forms={},  # the indexer's features are rotated in pairs, as ours are
            fixed={**_DEEPSEEK_V32.fixed, "indexer_rope_interleave": True, "index_topk_freq": 1},
        ),
        "mixtral": Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2")},
            forms=tensors.ROTARY_HALVES,
            values=_LOCAL_EXPERTS,
            always={"moe.router.softmax_after_top_k": True},
            fixed={**_MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(), keys.WINDOW),
        ),
        "qwen3-moe": Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            names={**tensors.ATTENTION, **tensors.dense_network("ffn", "mlp"), **tensors.experts_one_by_one("mlp")},
            forms=tensors.ROTARY_HALVES,
            values={
                **_DENSE_VALUES,
                **_EXPERTS,
            },
            always={"attention.qk_norm": "head"},
            fixed=_MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.SWITCHED_WINDOW, keys.EXCEPTIONS),
        ),
        "olmoe": Family(
            model_type="olmoe",
            architecture="OlmoeForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_one_by_one("mlp")},
            forms=tensors.ROTARY_HALVES,
            values={
                **_MODEL_VALUES,
                **_BIAS,
                **_TOP_K,
                "num_experts": "moe.experts",
                "intermediate_size": "moe.moe_intermediate_size",
                "norm_topk_prob": "moe.router.norm_topk_prob",
            },
            always={"attention.qk_norm": "projection"},
            fixed={**_MODEL_FIXED, "clip_qkv": None},
            parts=(keys.EQUAL_HEADS, rotary()),
        ),
        "llama4": Family(
            model_type="llama4_text",
            architecture="Llama4ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.dense_network("ffn", "feed_forward"),
                **tensors.dense_network("ffn.shared", "feed_forward.shared_expert"),
                **tensors.experts_stacked("feed_forward"),
            },
            forms={"ffn.experts.gate_up_eFD": (tensors.transposed,), "ffn.experts.down_eDF": (tensors.transposed,)},
            values={
                **_LOCAL_EXPERTS,
                **_BIAS,
                "intermediate_size_mlp": "intermediate_size",
            },
            always={"moe.router.scoring_func": "sigmoid", "moe.router.apply_probs_on_input": True},
            fixed={**_MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(), keys.CHUNKS, keys.QK_NORM_OF_LLAMA4, keys.LIST, keys.ONE_SHARED),
            prefix="language_model.",
            left_out=r".*\.rotary_emb\.inv_freq|(vision_model|multi_modal_projector)\..*",
        ),
        "gpt-oss": Family(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            names={**tensors.ATTENTION, **tensors.experts_stacked("mlp")},
            forms={
                **tensors.ROTARY_HALVES,
                "ffn.experts.gate_up_eFD": (tensors.transposed, tensors.interleaved),
                "ffn.experts.gate_up_bias_eF": (tensors.interleaved,),
                "ffn.experts.down_eDF": (tensors.transposed,),
            },
            values={
                **_LOCAL_EXPERTS,
                **_BIAS,
                "swiglu_alpha": "moe.clamped.alpha",
                "swiglu_limit": "moe.clamped.limit",
            },
            always={
                "attention.sinks": True,
                "moe.bias": True,
                "moe.router.logit_bias": True,
                "moe.router.softmax_after_top_k": True,
            },
            fixed=_MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_GPT_OSS),
        ),
        "glm4-moe": Family(
            model_type="glm4_moe",
            architecture="Glm4MoeForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.EXPERTS_BESIDE_SHARED,
                **tensors.EXPERT_BIAS,
            },
            forms=tensors.ROTARY_HALVES,
            prediction=tensors.PREDICTION,
            values={
                **_MODEL_VALUES,
                **_TOP_K,
                **_GROUPS,
                "attention_bias": "attention.qkv_bias",
                "intermediate_size": "intermediate_size",
                "first_k_dense_replace": "dense_layers",
                "n_routed_experts": "moe.experts",
                "moe_intermediate_size": "moe.moe_intermediate_size",
                "routed_scaling_factor": "moe.router.routed_scaling_factor",
                "num_nextn_predict_layers": "mtp_layers",
            },
            always=_SIGMOID_WITH_BIAS,
            fixed=_MODEL_FIXED,
            parts=(keys.HEADS, rotary(partial=True), keys.QK_NORM_OF_GLM, keys.SHARED),
            left_out=_REPEATED,
        ),
        "ernie4.5-moe": Family(
            model_type="ernie4_5_moe",
            architecture="Ernie4_5_MoeForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.EXPERTS_BESIDE_SHARED,
                "ffn.router.expert_bias_E": ("mlp.moe_statics.e_score_correction_bias",),
            },
            forms={"ffn.router.expert_bias_E": (tensors.nested,)},
            values={
                **_MODEL_VALUES,
                "intermediate_size": "intermediate_size",
                "moe_num_experts": "moe.experts",
                "moe_k": "moe.top_k",
                "moe_intermediate_size": "moe.moe_intermediate_size",
            },
            always={
                "moe.router.scoring_func": "softmax",
                "moe.router.expert_bias": True,
                "moe.router.norm_topk_prob": True,
            },
            fixed={"hidden_act": "silu", "use_bias": False, "moe_norm_min": 1e-12},
            parts=(keys.HEADS, rotary(), keys.RANGE, keys.shared("moe_num_shared_experts")),
        ),
        "minimax-m2": Family(
            model_type="minimax_m2",
            architecture="MiniMaxM2ForCausalLM",
            names={
                **tensors.ATTENTION,
                **tensors.experts_one_by_one("block_sparse_moe", "w1", "w3", "w2"),
                "ffn.router.expert_bias_E": ("block_sparse_moe.e_score_correction_bias",),
            },
            forms=tensors.ROTARY_HALVES,
            values=_LOCAL_EXPERTS,
            always={
                "attention.qk_norm": "projection",
                "moe.router.scoring_func": "sigmoid",
                "moe.router.expert_bias": True,
                "moe.router.norm_topk_prob": True,
            },
            fixed={**_MODEL_FIXED, "router_jitter_noise": 0.0},
            parts=(keys.HEADS, rotary(partial=True)),
        ),
        "qwen3-next": _QWEN3_NEXT,
        "qwen3.5-moe": replace(
            _QWEN3_NEXT,
            model_type="qwen3_5_moe_text",
            architecture="Qwen3_5MoeForCausalLM",
            names={
                **_QWEN3_NEXT.names,
                "ffn.experts.gate_up_eFD": ("mlp.experts.gate_up_proj",),
                "ffn.experts.down_eDF": ("mlp.experts.down_proj",),
            },
            linear={
                **tensors.DELTA_NAMES,
                **dict.fromkeys(tensors.PROJECTIONS[:3], (f"{tensors.DELTA}.in_proj_qkv.weight",)),
                "attention.gate.weight": (f"{tensors.DELTA}.in_proj_z.weight",),
                "attention.beta.weight": (f"{tensors.DELTA}.in_proj_b.weight",),
                "attention.decay.weight": (f"{tensors.DELTA}.in_proj_a.weight",),
            },
            divided={
                f"{tensors.DELTA}.in_proj_qkv.weight": (tensors.all_at_once, tensors.PROJECTIONS[:3]),
                f"{tensors.DELTA}.conv1d.weight": (tensors.all_at_once, tensors.CONVOLUTIONS),
            },
            instead=tensors.experts_one_by_one("mlp"),
            values={key: path for key, path in _QWEN3_NEXT.values.items() if key not in _NOT_IN_QWEN35},
            always={**_QWEN3_NEXT.always, "moe.router.norm_topk_prob": True},
            parts=(keys.HEADS, rotary(partial=True), keys.LINEAR),
            prefix="language_model.",
            left_out=r".*\.rotary_emb\.inv_freq|model\.visual\..*",
        ),
        "kimi-linear": _KIMI_LINEAR,
        "llama": _LLAMA,
        "qwen3": replace(
            _LLAMA,
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            always={"attention.qk_norm": "head"},
            fixed=_MODEL_FIXED,
            parts=(keys.HEADS, rotary(), keys.WINDOW_OF_QWEN3, keys.DENSE),
        ),
    }
)


def family_of(config: Model) -> Family:
    """The family of a model. Raises ConfigError if it has no Hugging Face form."""
    if config.family not in FAMILIES:
        got, allowed = f"model.family={config.family}", ", ".join(FAMILIES)
        raise ConfigError("this model has no Hugging Face form", got=got, allowed=allowed)
    return FAMILIES[config.family]
