"""Multi-token prediction in files: bit for bit both ways, and one depth as `transformers` computes it."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_layers import MtpModel

from penstock.config.model import Model
from penstock.models.huggingface.weights import from_huggingface, weight_mappings, with_prediction
from penstock.models.model_inputs import ModelInputs, shifted_tokens
from tests.closeness import assert_close, assert_equal
from tests.float64 import EXACT, in_float64
from tests.models.families import in_transformers, tiny_decoder, tiny_model, to_huggingface
from tests.models.huggingface.family_models import glm4_moe, qwen3_next
from tests.models.huggingface.parity import unsettled

GLM = glm4_moe(bias=True, qk_norm="head", mtp_layers=1)
WITH_PREDICTION = {
    "deepseek-v3": tiny_model(mtp_layers=2),
    "glm4-moe": GLM,
    "qwen3-next": qwen3_next(intermediate_size=48, mtp_layers=1),
    "qwen3.5-moe": qwen3_next("qwen3.5-moe", mtp_layers=1),
}
NAMES = {
    "deepseek-v3": ("model.layers.4.eh_proj.weight", "model.layers.3.mlp.experts.7.up_proj.weight"),
    "glm4-moe": ("model.layers.3.shared_head.norm.weight", "model.layers.3.self_attn.q_norm.weight"),
    "qwen3-next": ("mtp.pre_fc_norm_embedding.weight", "mtp.layers.0.mlp.shared_expert_gate.weight"),
    "qwen3.5-moe": ("mtp.fc.weight", "mtp.layers.0.mlp.experts.gate_up_proj"),
}


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_weights_of_prediction_are_written_and_read_bit_for_bit(name: str) -> None:
    model = unsettled(tiny_decoder(WITH_PREDICTION[name]))
    files = to_huggingface(model)
    assert set(NAMES[name]) <= files.keys()
    other = tiny_decoder(WITH_PREDICTION[name], seed=9)
    from_huggingface(other, files)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_a_file_says_how_deep_it_predicts_and_a_model_without_leaves_that_out(name: str) -> None:
    config = WITH_PREDICTION[name]
    without = config.model_copy(update={"mtp_layers": 0})
    files = to_huggingface(tiny_decoder(config))
    assert with_prediction(without, files) == config
    assert with_prediction(without, to_huggingface(tiny_decoder(without))) == without
    model = tiny_decoder(without, seed=9)
    from_huggingface(model, files)
    assert_equal(model.head_VD, files["lm_head.weight"])


def test_a_family_without_prediction_takes_no_layer_for_one() -> None:
    config = Model.model_validate({**GLM.model_dump(), "family": "plain"}).model_copy(update={"family": "qwen3-moe"})
    assert with_prediction(config, ["model.layers.7.input_layernorm.weight"]).mtp_layers == 0


@in_float64()
def test_a_depth_and_its_gradients_equal_those_of_transformers(tmp_path: Path) -> None:
    """`transformers` runs the depth only to draft tokens, but its layer has gradients."""
    ours = unsettled(tiny_decoder(GLM).train())
    theirs = in_transformers(ours, tmp_path / "main")
    theirs._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{GLM.layers}.*"]  # where it looks for the depth
    ahead = MtpModel.from_pretrained(theirs, dtype=torch.float64).train()
    ahead.config._attn_implementation = "eager"
    ahead.config._experts_implementation = "eager"
    tokens_BS = torch.randint(61, (2, 12), generator=torch.Generator().manual_seed(5))
    positions_BS = torch.arange(12).expand(2, -1)
    (ahead_BS,) = shifted_tokens(tokens_BS, 1)
    hidden = ours(ModelInputs(tokens_BS=tokens_BS, positions_BS=positions_BS, ahead=(ahead_BS,)))
    main_BSD = theirs.model(tokens_BS, use_cache=False).last_hidden_state
    expected_BSD = ahead.forward_layer(0, main_BSD, positions_BS, None, input_ids=ahead_BS)
    assert_close(hidden.mtp[0], expected_BSD, tolerance=EXACT)

    targets_T = tokens_BS.roll(-2, dims=1).flatten()
    loss = F.cross_entropy(F.linear(hidden.mtp[0], ours.head_VD).flatten(0, 1), targets_T)
    expected = F.cross_entropy(ahead.shared_head(expected_BSD).flatten(0, 1), targets_T)
    loss.backward()
    expected.backward()
    assert_close(loss, expected, tolerance=EXACT)
    pairs = {
        "mtp.0.join.weight": ahead.layers[0].eh_proj.weight,
        "mtp.0.embed_norm.weight_D": ahead.layers[0].enorm.weight,
        "mtp.0.hidden_norm.weight_D": ahead.layers[0].hnorm.weight,
        "mtp.0.norm.weight_D": ahead.layers[0].post_norm.weight,
        "mtp.0.block.ffn.experts.down_eDF": ahead.layers[0].mtp_block.mlp.experts.down_proj,
        "mtp.0.block.attention.value.weight": ahead.layers[0].mtp_block.self_attn.v_proj.weight,
        "embed.weight": theirs.model.embed_tokens.weight,
        "blocks.2.ffn.router.weight_ED": theirs.model.layers[2].mlp.gate.weight,
    }
    found = dict(ours.named_parameters())
    for name, parameter in pairs.items():
        assert_close(found[name].grad, parameter.grad, tolerance=EXACT, what=name)


@pytest.mark.parametrize("name", WITH_PREDICTION)
def test_every_name_is_there_once(name: str) -> None:
    lines = weight_mappings(WITH_PREDICTION[name])
    places = [(line.hf_name, line.share) for line in lines]
    assert len(places) == len(set(places))
