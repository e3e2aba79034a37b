"""Weights to and from Hugging Face names, bit for bit.

One table says everything: each of our tensors, or one expert's slice of it, is the concatenation along the first dim
of one or more of theirs. Gate and up projections are two tensors there and one here; experts are many there and a
stack here. Multi-token prediction layers stand behind the last decoder layer, as in the published DeepSeek-V3
weights.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.model import LatentAttention, Model
from penstock.models.decoder import Decoder

FAMILIES = ("deepseek-v2", "deepseek-v3")
WEIGHTS_FILE = "model.safetensors"


@dataclass(frozen=True)
class WeightName:
    """One line of the table.

    Attributes:
        ours: name in `Decoder.state_dict()`.
        theirs: names there whose tensors, concatenated along the first dim, are ours.
        expert: index along our first dim if only that slice is meant, else None.
    """

    ours: str
    theirs: tuple[str, ...]
    expert: int | None = None


def weight_names(config: Model) -> list[WeightName]:
    """The table of a model. Raises ConfigError if its family has no Hugging Face names."""
    if config.family not in FAMILIES or not isinstance(config.attention, LatentAttention):
        raise ConfigError(
            "this model has no Hugging Face names", got=f"model.family={config.family}", allowed=", ".join(FAMILIES)
        )
    names = [
        WeightName("embed.weight", ("model.embed_tokens.weight",)),
        WeightName("norm.weight_D", ("model.norm.weight",)),
    ]
    if not config.tied_embeddings:
        names.append(WeightName("head.weight", ("lm_head.weight",)))
    for layer in range(config.layers):
        names += _block_names(config, f"blocks.{layer}", f"model.layers.{layer}", layer)
    for depth in range(config.mtp_layers):
        ours, theirs = f"mtp.{depth}", f"model.layers.{config.layers + depth}"
        names += [
            WeightName(f"{ours}.embed_norm.weight_D", (f"{theirs}.enorm.weight",)),
            WeightName(f"{ours}.hidden_norm.weight_D", (f"{theirs}.hnorm.weight",)),
            WeightName(f"{ours}.join.weight", (f"{theirs}.eh_proj.weight",)),
            WeightName(f"{ours}.norm.weight_D", (f"{theirs}.shared_head.norm.weight",)),
        ]
        names += _block_names(config, f"{ours}.block", theirs, config.layers + depth)
    return names


def _block_names(config: Model, ours: str, theirs: str, layer: int) -> list[WeightName]:
    names = [
        WeightName(f"{ours}.attention_norm.weight_D", (f"{theirs}.input_layernorm.weight",)),
        WeightName(f"{ours}.ffn_norm.weight_D", (f"{theirs}.post_attention_layernorm.weight",)),
        *_attention_names(config, f"{ours}.attention", f"{theirs}.self_attn"),
    ]
    if config.moe is None or layer < config.dense_layers:
        return names + _ffn_names(f"{ours}.ffn", f"{theirs}.mlp")
    names.append(WeightName(f"{ours}.ffn.router.weight_ED", (f"{theirs}.mlp.gate.weight",)))
    if config.moe.router.expert_bias:
        bias = f"{theirs}.mlp.gate.e_score_correction_bias"
        names.append(WeightName(f"{ours}.ffn.router.expert_bias_E", (bias,)))
    for expert in range(config.moe.experts):
        stem = f"{theirs}.mlp.experts.{expert}"
        gate_up = (f"{stem}.gate_proj.weight", f"{stem}.up_proj.weight")
        names.append(WeightName(f"{ours}.ffn.experts.gate_up_eFD", gate_up, expert))
        names.append(WeightName(f"{ours}.ffn.experts.down_eDF", (f"{stem}.down_proj.weight",), expert))
    if config.moe.shared_ffn_size:
        names += _ffn_names(f"{ours}.ffn.shared", f"{theirs}.mlp.shared_experts")
    return names


def _attention_names(config: Model, ours: str, theirs: str) -> list[WeightName]:
    assert isinstance(config.attention, LatentAttention), "weight_names lets only latent attention pass"
    if config.attention.q_latent:
        query = {"query.down.weight": "q_a_proj", "query.norm.weight_D": "q_a_layernorm", "query.up.weight": "q_b_proj"}
    else:
        query = {"query.weight": "q_proj"}
    table = query | {
        "kv_down.weight": "kv_a_proj_with_mqa",
        "kv_norm.weight_D": "kv_a_layernorm",
        "kv_up.weight": "kv_b_proj",
        "out.weight": "o_proj",
    }
    return [WeightName(f"{ours}.{mine}", (f"{theirs}.{other}.weight",)) for mine, other in table.items()]


def _ffn_names(ours: str, theirs: str) -> list[WeightName]:
    return [
        WeightName(f"{ours}.gate_up.weight", (f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight")),
        WeightName(f"{ours}.down.weight", (f"{theirs}.down_proj.weight",)),
    ]


def to_huggingface(model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Every weight under its Hugging Face name, in the dtype and on the device it has; views, not copies."""
    state = model.state_dict()
    for line in weight_names(model.config):
        tensor = state[line.ours] if line.expert is None else state[line.ours][line.expert]
        yield from zip(line.theirs, tensor.chunk(len(line.theirs)), strict=True)


@torch.no_grad()
def from_huggingface(model: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy weights with Hugging Face names into a model.

    Args:
        model: the model, on any device; values are cast to its dtypes.
        weights: exactly the tensors of the model's table.

    Raises:
        CheckpointError: a tensor is missing, has another shape, or is left over. Nothing is copied then.
    """
    state = model.state_dict()
    lines = weight_names(model.config)
    expected = {name for line in lines for name in line.theirs}
    _refuse_unless_equal(expected, set(weights))
    pairs = []
    for line in lines:
        target = state[line.ours] if line.expert is None else state[line.ours][line.expert]
        source = torch.cat([weights[name] for name in line.theirs])
        if source.shape != target.shape:
            raise CheckpointError(
                f"weight {line.theirs[0]} has another shape",
                got=tuple(source.shape),
                allowed=tuple(target.shape),
                fix="choose the preset that these weights belong to",
            )
        pairs.append((target, source))
    for target, source in pairs:
        target.copy_(source)


def _refuse_unless_equal(expected: set[str], given: set[str]) -> None:
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing or extra:
        raise CheckpointError(
            f"weights do not belong to this model: {len(missing)} missing, {len(extra)} unknown",
            got=f"missing {missing[:2]}, unknown {extra[:2]}",
            fix="choose the preset that these weights belong to",
        )


def huggingface_config(config: Model) -> dict[str, object]:
    """The `config.json` with which `transformers` builds the same model."""
    attention, moe = config.attention, config.moe
    if config.family not in FAMILIES or not isinstance(attention, LatentAttention) or moe is None:
        raise ConfigError("this model has no Hugging Face form", got=config.family, allowed=", ".join(FAMILIES))
    is_v3 = config.family == "deepseek-v3"
    rope: dict[str, object] = {"rope_type": "default", "rope_theta": attention.rope.theta}
    positions = 4096
    if attention.rope.yarn is not None:
        yarn = attention.rope.yarn
        positions = int(yarn.original_positions * yarn.factor)
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.factor,
            "original_max_position_embeddings": yarn.original_positions,
            "beta_fast": yarn.beta_fast,
            "beta_slow": yarn.beta_slow,
            "mscale": yarn.scale,
            "mscale_all_dim": yarn.scale_all_dims,
        }
    fields: dict[str, object] = {
        "architectures": ["DeepseekV3ForCausalLM" if is_v3 else "DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v3" if is_v3 else "deepseek_v2",
        "vocab_size": config.vocabulary,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.dense_ffn_size,
        "moe_intermediate_size": moe.ffn_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": attention.heads,
        "num_key_value_heads": attention.heads,
        "n_shared_experts": moe.shared_ffn_size // moe.ffn_size,
        "n_routed_experts": moe.experts,
        "routed_scaling_factor": moe.router.scale,
        "kv_lora_rank": attention.kv_latent,
        "q_lora_rank": attention.q_latent or None,
        "qk_rope_head_dim": attention.rotary_head_dim,
        "v_head_dim": attention.value_head_dim,
        "qk_nope_head_dim": attention.plain_head_dim,
        "n_group": moe.router.groups,
        "topk_group": moe.router.groups_kept,
        "num_experts_per_tok": moe.top_k,
        "first_k_dense_replace": config.dense_layers,
        "norm_topk_prob": moe.router.normalize,
        "max_position_embeddings": positions,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "initializer_range": config.initial_std,
        "num_nextn_predict_layers": config.mtp_layers,
        "rope_parameters": rope,
    }
    if is_v3:
        return fields | {"rope_interleave": True}
    return fields | {"topk_method": "group_limited_greedy" if moe.router.groups > 1 else "greedy"}


def save_huggingface(model: Decoder, folder: Path) -> None:
    """Write `config.json` and `model.safetensors`, which `transformers` loads."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.contiguous() for name, tensor in to_huggingface(model)}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(huggingface_config(model.config), indent=2) + "\n")


def load_huggingface(model: Decoder, folder: Path) -> None:
    """Read all safetensors files of a folder into a model. Raises CheckpointError as `from_huggingface` does."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError("no safetensors file", got=folder, fix="give a folder with Hugging Face weights")
    weights: dict[str, Tensor] = {}
    for file in files:
        weights |= load_file(file)
    from_huggingface(model, weights)
