"""Whole models travel to files and back bit for bit, in every family and in the forms of the published files."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.base.errors import CheckpointError
from penstock.config.model import Model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.weights import from_huggingface, load_huggingface, to_huggingface, weight_mappings
from tests.models.families import in_transformers, tiny_decoder, tiny_model
from tests.models.huggingface.family_models import V3, VARIANTS, gpt_oss, moe
from tests.models.huggingface.parity import unsettled
from tests.models.huggingface.saved import save_huggingface

FIRSTS = {name: config for name, config in VARIANTS.items() if "," not in name}
"""One model of each family."""


def _assert_equal(ours: Decoder, other: Decoder) -> None:
    state = other.state_dict()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} changed on the way"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "config", [*FIRSTS.values(), tiny_model("deepseek-v3", mtp_layers=1)], ids=[*FIRSTS, "deepseek-v3 with prediction"]
)
def test_weights_return_bit_for_bit(config: Model, precision: str, tmp_path: Path) -> None:
    first = unsettled(tiny_decoder(config, precision=precision, seed=1))
    second = tiny_decoder(config, precision=precision, seed=2)
    save_huggingface(first, tmp_path)
    load_huggingface(second, tmp_path)
    _assert_equal(first, second)


@pytest.mark.parametrize("name", FIRSTS)
def test_weights_that_transformers_saved_load_bit_for_bit(name: str, tmp_path: Path) -> None:
    ours = unsettled(tiny_decoder(FIRSTS[name]))
    in_transformers(ours, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("ours", "theirs")]
    assert names[0] == names[1]
    other = tiny_decoder(FIRSTS[name], seed=9)
    load_huggingface(other, tmp_path / "theirs")
    _assert_equal(ours, other)


def test_lines_can_travel_one_at_a_time_in_any_order() -> None:
    ours, other = unsettled(tiny_decoder(FIRSTS["gpt-oss"])), tiny_decoder(FIRSTS["gpt-oss"], seed=9)
    theirs, state = dict(to_huggingface(ours)), other.state_dict()
    for line in reversed(weight_mappings(other.config)):
        line.place(state[line.name]).copy_(line.read(theirs[line.hf_name]))
    _assert_equal(ours, other)


def test_of_a_model_of_text_and_pictures_the_text_is_loaded(tmp_path: Path) -> None:
    ours, other = unsettled(tiny_decoder(FIRSTS["llama4"])), tiny_decoder(FIRSTS["llama4"], seed=9)
    weights = {f"language_model.{name}": tensor.contiguous() for name, tensor in to_huggingface(ours)}
    pictures = ("vision_model.layernorm_pre.weight", "multi_modal_projector.linear_1.weight")
    save_file(weights | {name: torch.ones(3) for name in pictures}, tmp_path / "model.safetensors")
    load_huggingface(other, tmp_path)
    _assert_equal(ours, other)


def test_what_published_files_repeat_is_left_out() -> None:
    config = V3.model_copy(update={"mtp_layers": 1})
    ours, other = tiny_decoder(config), tiny_decoder(config, seed=9)
    weights = dict(to_huggingface(ours))
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights[f"model.layers.{config.layers}.{copy}.weight"] = weights[f"{name}.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    from_huggingface(other, weights)
    _assert_equal(ours, other)

    tied = VARIANTS["qwen3, tied embeddings"]
    ours, other = tiny_decoder(tied), tiny_decoder(tied, seed=9)
    weights = dict(to_huggingface(ours))
    assert "lm_head.weight" not in weights
    from_huggingface(other, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    _assert_equal(ours, other)


def test_experts_of_four_bits_are_loaded_as_what_they_stand_for(tmp_path: Path) -> None:
    base = gpt_oss(rope=FIRSTS["gpt-oss"].attention.rope)
    assert base.moe is not None
    config = base.model_copy(update={"moe": base.moe.model_copy(update={"moe_intermediate_size": 32})})
    ours, other = unsettled(tiny_decoder(config)), tiny_decoder(config, seed=9)
    weights = {name: tensor.contiguous() for name, tensor in to_huggingface(ours)}
    stored = dict(weights)
    for name in [one for one in weights if one.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = stored.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 130, (experts, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        weights[name] = convert_moe_packed_tensors(blocks, scales)
    from_huggingface(ours, weights)
    save_file(stored, tmp_path / "model.safetensors")
    load_huggingface(other, tmp_path)
    _assert_equal(ours, other)


def test_weights_of_another_model_are_refused_and_nothing_is_copied() -> None:
    model, other = tiny_decoder(V3), tiny_decoder(V3.model_copy(update={"layers": 2}), seed=9)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="missing, 0 unknown.*model.layers.2"):
        from_huggingface(model, dict(to_huggingface(other)))
    weights = dict(to_huggingface(tiny_decoder(V3, seed=9)))
    weights["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has another shape.*\(5,\).*\(32,\)"):
        from_huggingface(model, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "weights changed"


def test_shapes_of_files_are_checked_before_anything_is_copied(tmp_path: Path) -> None:
    model = tiny_decoder(FIRSTS["mixtral"])
    narrow = VARIANTS["mixtral"].model_copy(
        update={"moe": moe(moe_intermediate_size=8, router=VARIANTS["mixtral"].moe.router)}
    )
    save_huggingface(tiny_decoder(narrow, seed=9), tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        CheckpointError, match=r"experts\.0\.w1\.weight has another shape; got \(8, 32\); allowed: \(16,"
    ):
        load_huggingface(model, tmp_path)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "weights changed"
