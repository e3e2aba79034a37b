"""The table of names covers every number of ours once, and its names and shapes are those of the published files."""

import pytest
import torch

from penstock.base.errors import ConfigError
from penstock.config.model import Model
from penstock.config.presets.registry import preset
from penstock.models.build import meta_model
from penstock.models.huggingface.weights import weight_mappings
from tests.models.families import tiny_model
from tests.models.huggingface.family_models import VARIANTS

PUBLISHED = {
    "deepseek-v3-5l": {
        "model.layers.0.mlp.gate_proj.weight": (18432, 7168),
        "model.layers.3.self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "model.layers.3.self_attn.q_a_layernorm.weight": (1536,),
        "model.layers.4.mlp.gate.e_score_correction_bias": (256,),
        "model.layers.4.mlp.experts.255.up_proj.weight": (2048, 7168),
        "model.layers.4.mlp.shared_experts.down_proj.weight": (7168, 2048),
        "model.layers.5.eh_proj.weight": (7168, 14336),
        "model.layers.5.shared_head.norm.weight": (7168,),
        "lm_head.weight": (129280, 7168),
    },
    "mixtral-8x7b-2l": {
        "model.embed_tokens.weight": (32000, 4096),
        "model.layers.1.block_sparse_moe.gate.weight": (8, 4096),
        "model.layers.1.block_sparse_moe.experts.7.w1.weight": (14336, 4096),
        "model.layers.1.block_sparse_moe.experts.7.w2.weight": (4096, 14336),
        "model.layers.1.block_sparse_moe.experts.7.w3.weight": (14336, 4096),
        "model.layers.1.self_attn.k_proj.weight": (1024, 4096),
    },
    "qwen3-30b-a3b-2l": {
        "model.layers.1.mlp.experts.127.gate_proj.weight": (768, 2048),
        "model.layers.1.mlp.gate.weight": (128, 2048),
        "model.layers.1.self_attn.q_norm.weight": (128,),
    },
    "olmoe-1b-7b-2l": {
        "model.layers.1.mlp.experts.63.down_proj.weight": (2048, 1024),
        "model.layers.1.self_attn.k_norm.weight": (2048,),
    },
    "llama4-maverick-2l": {
        "model.layers.0.feed_forward.gate_proj.weight": (16384, 5120),
        "model.layers.1.feed_forward.experts.gate_up_proj": (128, 5120, 16384),
        "model.layers.1.feed_forward.experts.down_proj": (128, 8192, 5120),
        "model.layers.1.feed_forward.router.weight": (128, 5120),
        "model.layers.1.feed_forward.shared_expert.up_proj.weight": (8192, 5120),
    },
    "gpt-oss-20b-2l": {
        "model.layers.1.mlp.experts.gate_up_proj": (32, 2880, 5760),
        "model.layers.1.mlp.experts.gate_up_proj_bias": (32, 5760),
        "model.layers.1.mlp.experts.down_proj": (32, 2880, 2880),
        "model.layers.1.mlp.experts.down_proj_bias": (32, 2880),
        "model.layers.1.mlp.router.bias": (32,),
        "model.layers.1.self_attn.sinks": (64,),
        "model.layers.1.self_attn.o_proj.bias": (2880,),
    },
    "qwen3-8b-2l": {"model.layers.1.self_attn.k_norm.weight": (128,), "lm_head.weight": (151936, 4096)},
    "llama3.1-8b-2l": {"model.layers.1.mlp.up_proj.weight": (14336, 4096), "model.norm.weight": (4096,)},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_names_and_shapes_are_those_of_the_published_files(name: str) -> None:
    shapes = {line.hf_name: line.shape for line in weight_mappings(preset(name).model)}
    assert {theirs: shapes.get(theirs) for theirs in PUBLISHED[name]} == PUBLISHED[name]


@pytest.mark.parametrize(("name", "tensors"), [("olmoe-1b-7b", 3219), ("qwen3-235b-a22b", 36945)])
def test_there_are_as_many_tensors_as_in_the_published_files(name: str, tensors: int) -> None:
    lines = weight_mappings(preset(name).model)
    assert len(lines) == len({line.hf_name for line in lines}) == tensors


@pytest.mark.parametrize("config", [*VARIANTS.values(), tiny_model(mtp_layers=2)], ids=[*VARIANTS, "with prediction"])
def test_every_number_of_ours_is_filled_once(config: Model) -> None:
    filled = {name: torch.zeros(tensor.shape) for name, tensor in meta_model(config).state_dict().items()}
    for line in weight_mappings(config):
        place = line.place(filled[line.name])
        assert line.read(torch.empty(line.shape)).shape == place.shape, line.hf_name
        place += 1
    assert all((count == 1).all() for count in filled.values())


def test_a_model_of_no_family_has_no_names() -> None:
    plain = VARIANTS["llama"].model_copy(update={"family": "plain"})
    with pytest.raises(ConfigError, match="no Hugging Face form; got model.family=plain; allowed: deepseek-v2, "):
        weight_mappings(plain)


def test_a_parameter_that_the_family_does_not_have_is_named() -> None:
    shared = VARIANTS["mixtral"].moe
    assert shared is not None
    config = VARIANTS["mixtral"].model_copy(
        update={"moe": shared.model_copy(update={"shared_expert_intermediate_size": 16})}
    )
    with pytest.raises(
        ConfigError, match=r"mixtral has no Hugging Face name for blocks\.0\.ffn\.shared\.gate_up\.weight"
    ):
        weight_mappings(config)
