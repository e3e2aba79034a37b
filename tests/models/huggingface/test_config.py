"""`config.json` both ways: a model comes back as it was, published files are read, what cannot be said is refused."""

import contextlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, AutoConfig, GptOssConfig
from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1RotaryEmbedding

from penstock.base.errors import ConfigError
from penstock.config.model import Balance, LocalAttention, Model, Router, Yarn
from penstock.config.presets.registry import preset
from penstock.models.huggingface.config import TRAINING_ONLY, facts_of, huggingface_config, model_of_config
from penstock.models.huggingface.families import FAMILIES
from penstock.models.model_inputs import frequencies
from tests.closeness import assert_close
from tests.models.families import moe_with, tiny_model
from tests.models.huggingface.family_models import (
    V2,
    V3,
    VARIANTS,
    attention,
    dense,
    llama4,
    mixtral,
    moe,
    nope,
    olmoe,
    qwen3_moe,
)
from tests.models.huggingface.published_configs import PUBLISHED


@pytest.mark.parametrize("name", VARIANTS)
def test_a_model_comes_back_as_it_was(name: str) -> None:
    assert model_of_config(huggingface_config(VARIANTS[name])) == VARIANTS[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_file_that_transformers_wrote_is_read(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(huggingface_config(VARIANTS[name])))
    AutoConfig.from_pretrained(tmp_path).save_pretrained(tmp_path / "theirs")
    theirs = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert facts_of(model_of_config(theirs)) == facts_of(VARIANTS[name])


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_file_is_the_preset(name: str) -> None:
    read = model_of_config(PUBLISHED[name])
    expected = preset(name).model
    assert facts_of(read.model_copy(update={"initializer_range": expected.initializer_range})) == facts_of(expected)


def test_choices_of_training_have_their_defaults_after_reading() -> None:
    config = moe_with(
        V3,
        balance=Balance(aux_loss="sequence", aux_loss_coef=0.1),
        router=Router(scoring_func="sigmoid", expert_bias=True, expert_bias_rate=0.5, group_score="top2"),
    )
    read = model_of_config(huggingface_config(config)).moe
    assert read.balance == Balance()
    assert read.router.expert_bias_rate == Router().expert_bias_rate
    assert {path.rpartition(".")[0] or path for path in TRAINING_ONLY} == {
        "moe.balance",
        "moe.router",
        "attention.indexer",
    }


@given(st.data())
def test_any_model_that_is_written_comes_back(data: st.DataObject) -> None:
    layers, every = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 4))
    dense_first, heads = data.draw(st.integers(0, 3)), data.draw(st.sampled_from((2, 4, 8)))
    kv_heads, head_dim = data.draw(st.sampled_from((1, 2))), data.draw(st.sampled_from((4, 16)))
    router = Router(norm_topk_prob=data.draw(st.booleans()))
    experts = moe(moe_layer_freq=every, experts=data.draw(st.integers(2, 9)), router=router)
    assume(dense_first + every <= layers)
    counts = {"layers": layers, "dense_layers": dense_first}
    has_bias = data.draw(st.booleans())
    heads_of_qwen = attention(heads=heads, kv_heads=kv_heads, head_dim=head_dim, qk_norm="head", bias=has_bias)
    one = qwen3_moe(moe=experts, attention=heads_of_qwen, **counts)
    other = llama4(
        local=nope(data.draw(st.integers(1, layers))) if layers > 1 else None,
        qk_norm=data.draw(st.sampled_from(("none", "rotated-head"))),
        rope=attention().rope,
        every=every,
        **counts,
    )
    for config in (one, other):
        assert facts_of(model_of_config(huggingface_config(config))) == facts_of(config)


@pytest.mark.parametrize(
    ("positions", "config", "written"),
    [
        (None, VARIANTS["mixtral"], 4096),
        (8192, VARIANTS["mixtral"], 8192),
        (8192, VARIANTS["mixtral, top 4, YaRN"], 128),
        (None, VARIANTS["llama"], 128),
    ],
)
def test_the_context_is_what_the_model_saw_or_was_stretched_to(
    positions: int | None, config: Model, written: int
) -> None:
    assert huggingface_config(config, positions)["max_position_embeddings"] == written


LOCAL = LocalAttention(size=7)
CANNOT_BE_SAID = {
    "a window in an olmoe": (
        olmoe(attention=attention(qk_norm="projection", local=LOCAL)),
        "model.attention.local.kind cannot be stated in the config.json of olmoe",
    ),
    "no experts in a mixtral": (
        mixtral(moe=None, dense_layers=3, intermediate_size=8),
        "model.moe.top_k is missing: every model of the family mixtral has it",
    ),
    "prediction of more tokens in a V2": (
        V2.model_copy(update={"mtp_layers": 1}),
        "model.mtp_layers cannot be stated in the config.json of deepseek-v2; got 1; allowed: 0",
    ),
    "a V3 without expert bias": (
        moe_with(V3, router=Router(scoring_func="sigmoid", group_score="top2")),
        "model.moe.router.expert_bias cannot be stated in the config.json of deepseek-v3; got false; allowed: true",
    ),
    "a shared expert of one and a half": (
        moe_with(V3, shared_expert_intermediate_size=24),
        "model.moe.shared_expert_intermediate_size cannot be stated in the config.json of deepseek-v3; "
        "got 24; allowed: 16",
    ),
    "grouped queries in a V3": (
        tiny_model("deepseek-v3", attention=attention()),
        "model.attention.kv_lora_rank is missing: every model of the family deepseek-v3 has it",
    ),
    "scores scaled by YaRN in a llama": (
        dense("llama", attention=attention(rope={"yarn": Yarn(factor=2.0, mscale=0.5, mscale_all_dim=1.0)})),
        "config.json: mscale_all_dim cannot be used; got 1.0; allowed: none, or equal to mscale, or beside mscale in a",
    ),
}


@pytest.mark.parametrize("name", CANNOT_BE_SAID)
def test_what_the_format_cannot_say_is_refused_by_field(name: str) -> None:
    config, message = CANNOT_BE_SAID[name]
    with pytest.raises(ConfigError) as raised:
        huggingface_config(config)
    assert str(raised.value).startswith(message)


def _changed(name: str, **changes: Any) -> dict[str, Any]:
    """A file of a variant with keys changed; None removes one."""
    fields = huggingface_config(VARIANTS[name]) | changes
    return {key: value for key, value in fields.items() if value is not None}


CANNOT_BE_READ = {
    "an unknown family": (
        _changed("llama", model_type="arctic"),
        "config.json: model_type 'arctic' is not supported; got layers that no key tells apart from those here; fix: ",
    ),
    "no family": ({}, "config.json: model_type says no family; allowed: deepseek_v2, "),
    "a key that is not there and has no default": (
        _changed("deepseek-v2", num_experts_per_tok=None),
        "config.json lacks num_experts_per_tok",
    ),
    "a null where transformers takes none": (
        huggingface_config(VARIANTS["llama"]) | {"hidden_size": None},
        "config.json: hidden_size cannot be used; got none; allowed: a value, such as 4096",
    ),
    "YaRN beside other rotary settings": (
        _changed("qwen3", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        'config.json: rope_scaling and rope_parameters contradict each other; got {rope_type = "yarn", ',
    ),
    "two bases of the rotary embedding": (
        _changed("qwen3", rope_theta=5e5),
        "config.json: rope_parameters.rope_theta and rope_theta contradict each other; got 1000000.0 and 500000.0; ",
    ),
    "two spellings with two values": (
        _changed("mixtral", num_experts=3),
        "config.json: num_local_experts and num_experts contradict each other; got 8 and 3; fix: remove one of them",
    ),
    "layers of two kinds at other places": (
        _changed("deepseek-v3.2", mlp_layer_types=["sparse", "dense", "sparse"]),
        "config.json: mlp_layer_types cannot be used; got ",
    ),
    "a sum of weights that is at least something": (
        _changed("ernie4.5-moe", moe_norm_min=0.5),
        "config.json: moe_norm_min cannot be used; got 0.5; allowed: 1e-12",
    ),
    "heads that no key serves": (
        _changed("llama", num_key_value_heads=3),
        "config.json: num_key_value_heads cannot be used; got 3; allowed: a divisor of 4 (num_attention_heads)",
    ),
    "another activation": (
        _changed("llama", hidden_act="gelu"),
        'config.json: hidden_act cannot be used; got "gelu"; allowed: "silu"',
    ),
    "indexers that layers share": (
        _changed("glm5-moe", indexer_types=["full", "full", "shared"]),
        'config.json: indexer_types cannot be used; got ["full", "full", "shared"]; allowed: full in each layer',
    ),
    "full attention at other places": (
        _changed("kimi-linear", linear_attn_config={"full_attn_layers": [1, 3]}),
        "config.json: full_attn_layers cannot be used; got [1, 3]; allowed: every n-th layer from the n-th on",
    ),
    "layers of another kind": (
        _changed("gpt-oss", layer_types=["linear_attention"] * 4),
        'config.json: layer_types cannot be used; got "linear_attention"; allowed: full_attention, sliding_attention',
    ),
    "experts at other places": (
        _changed("qwen3-moe", mlp_only_layers=[1]),
        "config.json: mlp_only_layers or decoder_sparse_step cannot be used; got [0, 2]; allowed: dense layers first",
    ),
    "no layer with experts": (
        _changed("qwen3-moe", decoder_sparse_step=99),
        "config.json: mlp_only_layers or decoder_sparse_step cannot be used; got []; allowed: dense layers first",
    ),
    "chunks that do not rotate": (
        _changed("llama4", no_rope_layers=[1, 0, 1, 0]),
        "config.json: no_rope_layers cannot be used; got [1, 0, 1, 0]; allowed: 0 for the layers that see the",
    ),
    "a number that is text": (
        _changed("mixtral", num_local_experts="8"),
        'config.json: num_local_experts cannot be used; got "8"; allowed: whole number 1 to 65536 (experts)',
    ),
    "a window of nothing": (
        _changed("mixtral", sliding_window=0),
        "config.json: sliding_window cannot be used; got 0; allowed: whole number >= 1",
    ),
    "a list of layers that is too short": (
        _changed("gpt-oss", layer_types=["full_attention"]),
        'config.json: layer_types cannot be used; got ["full_attention"]; allowed: a list of 4',
    ),
    "a text part that is none": (
        {"model_type": "llama4", "text_config": 3},
        "config.json: text_config cannot be used; got 3; allowed: a table of keys",
    ),
}


LACKING = {
    "gemma2": ("activation gelu_pytorch_tanh", "logits with a soft cap", "(grouped-query attention, no experts, "),
    "phimoe": ("LayerNorm", "nearest preset, mixtral-8x7b (grouped-query attention, 8 experts, "),
    "jetmoe": ("experts in attention",),
    "jamba": ("state-space layers", "(linear attention, "),
    "cohere2_moe": ("scaled embeddings, scores or residuals", "LayerNorm", "minimax-m2"),
    "hy_v4": ("hyper-connections beside other parts",),
    "glm5_next_text": ("hyper-connections beside other parts",),
    "qwen4_exp_text": ("hyper-connections beside other parts",),
    "bert": ("activation gelu", "LayerNorm", "learned or relative positions"),
    "t5": ("an encoder",),
    "longcat_flash": ("experts without weights", "latent attention"),
}
"""Of what `transformers` saves by default: parts of the refusal, which names what is missing and the nearest preset."""


@pytest.mark.parametrize("model_type", LACKING)
def test_a_family_that_is_not_supported_is_refused_by_its_parts(model_type: str) -> None:
    with pytest.raises(ConfigError) as raised:
        model_of_config(CONFIG_MAPPING[model_type]().to_dict())
    message = str(raised.value)
    assert message.startswith(f"config.json: model_type '{model_type}' is not supported; got ")
    assert [part for part in LACKING[model_type] if part not in message] == []
    assert len(message) <= 3 * 120


# The estimate of parameters takes each layer of a model with experts to have some, which Llama 4's have not.
@pytest.mark.parametrize("name", [name for name in PUBLISHED if "llama4" not in name])
def test_a_published_file_under_another_name_has_its_own_preset_as_the_nearest(name: str) -> None:
    fields = PUBLISHED[name].get("text_config", PUBLISHED[name]) | {"model_type": "other"}
    with pytest.raises(ConfigError, match=rf"nearest preset, {re.escape(name)} "):
        model_of_config(fields)


@pytest.mark.parametrize("name", CANNOT_BE_READ)
def test_what_cannot_be_said_here_is_refused_by_key(name: str) -> None:
    fields, message = CANNOT_BE_READ[name]
    with pytest.raises(ConfigError) as raised:
        model_of_config(fields)
    assert str(raised.value).startswith(message)


JUNK = st.sampled_from(
    [-1, 0, 3, 0.5, 1e300, "x", "", [], ["x"], [1, None], {}, {"rope_type": 3}, {"factor": []}, True]
)


@given(name=st.sampled_from(sorted(VARIANTS)), data=st.data(), junk=JUNK)
def test_a_file_with_junk_in_it_is_read_or_refused(name: str, data: st.DataObject, junk: object) -> None:
    fields = huggingface_config(VARIANTS[name])
    section = "rope_parameters" if "rope_parameters" in fields else "linear_attn_config"
    inside = fields[section]
    key = data.draw(st.sampled_from([*fields, *inside, "rope_scaling", "mlp_only_layers", "layer_types", "head_dim"]))
    changed = fields | ({section: inside | {key: junk}} if key in inside else {key: junk})
    with contextlib.suppress(ConfigError):
        model_of_config(changed)


def test_of_a_model_of_text_and_pictures_the_text_is_read() -> None:
    text = huggingface_config(VARIANTS["llama4"])
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {"hidden_size": 7}}
    assert model_of_config(whole) == VARIANTS["llama4"]


def test_numbers_that_are_whole_may_be_written_with_a_point() -> None:
    assert model_of_config(_changed("llama4", floor_scale=5.0, num_local_experts=4.0)) == VARIANTS["llama4"]


WITHOUT_DEFAULT = ("deepseek-v2", "kimi-linear", "dots1")
"""Families with keys that have no default, or whose default layers stand in an order that ours cannot have."""


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {*WITHOUT_DEFAULT}))
def test_a_file_without_keys_is_the_default_of_transformers(family: str) -> None:
    kind = CONFIG_MAPPING[FAMILIES[family].model_type]
    whole = model_of_config(kind().to_dict())
    assert facts_of(model_of_config({"model_type": FAMILIES[family].model_type})) == facts_of(whole)


def test_without_rotary_settings_gpt_oss_stretches_by_yarn_and_a_base_alone_keeps_that() -> None:
    for base, keys in ((150000.0, {}), (7000.0, {"rope_theta": 7000.0})):
        fields = _changed("gpt-oss, plain rotary embedding", rope_parameters=None) | keys
        expected = GptOssConfig.from_dict(dict(fields)).rope_parameters
        rope = model_of_config(fields).attention.rope
        assert (
            (rope.theta, rope.yarn and rope.yarn.factor) == (expected["rope_theta"], expected["factor"]) == (base, 32)
        )


def test_a_base_that_hunyuan_stretches_is_read_as_the_larger_base() -> None:
    fields = huggingface_config(VARIANTS["hunyuan-moe"]) | {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
        "moe_topk": [2, 2, 2],
    }
    config = model_of_config(fields)
    theirs = HunYuanMoEV1RotaryEmbedding(CONFIG_MAPPING["hunyuan_v1_moe"](**fields)).inv_freq
    assert_close(frequencies(config.attention.rope, 8, torch.device("cpu")), theirs)
    assert config == model_of_config(huggingface_config(config))
    with pytest.raises(ConfigError, match="moe_topk of layer 0 and moe_topk of layer 2 contradict each other"):
        model_of_config(fields | {"moe_topk": [2, 2, 3]})


def test_sections_of_two_ages_that_say_the_same_are_read() -> None:
    fields = _changed("llama, tied embeddings, YaRN")
    older = {**fields["rope_parameters"], "type": "yarn"}
    assert model_of_config({**fields, "rope_scaling": older}) == model_of_config(fields)


def test_tied_embeddings_of_a_model_of_text_and_pictures_are_said_outside() -> None:
    text = huggingface_config(VARIANTS["llama4"])
    whole = {"model_type": "llama4", "text_config": text, "tie_word_embeddings": True}
    with pytest.raises(ConfigError, match=r"tie_word_embeddings and text_config.tie_word_embeddings contradict"):
        model_of_config(whole)
    del text["tie_word_embeddings"]
    assert model_of_config(whole).tie_word_embeddings


def test_more_dense_layers_than_there_are_is_all_of_them_whatever_else_says_so() -> None:
    """As the file that `transformers` writes for it, which lists the kinds of all layers too."""
    fields = _changed("glm5-moe", first_k_dense_replace=99)
    whole = CONFIG_MAPPING[fields["model_type"]].from_dict(dict(fields)).to_dict()
    assert model_of_config(fields).dense_layers == model_of_config(whole).dense_layers == fields["num_hidden_layers"]
    assert model_of_config({**fields, "first_k_dense_replace": 2.0}).dense_layers == 2
    for wrong in ("two", True, -1):
        with pytest.raises(ConfigError, match="first_k_dense_replace cannot be used"):
            model_of_config({**fields, "first_k_dense_replace": wrong})


def test_heads_without_a_width_share_the_hidden_states() -> None:
    read = model_of_config(_changed("llama", head_dim=None, num_key_value_heads=None)).attention
    assert (read.head_dim, read.kv_heads) == (8, 4)
