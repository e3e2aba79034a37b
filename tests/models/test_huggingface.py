"""Our models equal `transformers`' own DeepSeek-V2 and V3 code, and weights travel both ways bit for bit."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.model import GroupedQueryAttention, Model, Router, Yarn
from penstock.models.huggingface import (
    from_huggingface,
    load_huggingface,
    save_huggingface,
    to_huggingface,
    weight_names,
)
from tests.models.families import in_transformers, moe_with, tiny_attention, tiny_decoder, tiny_model

YARN = Yarn(factor=8.0, original_positions=16, scale=0.707, scale_all_dims=0.707)
V2, V3 = tiny_model("deepseek-v2"), tiny_model("deepseek-v3")
GROUPED_V2 = Router(score="softmax", groups=4, groups_kept=2, group_score="max", scale=16.0)

MODELS = {
    "v2 direct queries": V2,
    "v2 latent queries and YaRN": V2.model_copy(update={"attention": tiny_attention(q_latent=20, yarn=YARN)}),
    "v2 groups and scale": moe_with(V2, router=GROUPED_V2),
    "v2 two dense layers": V2.model_copy(update={"dense_layers": 2}),
    "v3 direct queries": V3,
    "v3 latent queries and YaRN": V3.model_copy(update={"attention": tiny_attention(q_latent=20, yarn=YARN)}),
    "v3 raw weights": moe_with(V3, router=Router(score="sigmoid", expert_bias=True, group_score="top2")),
    "v3 top 4 of 8": moe_with(V3, top_k=4),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_loss_and_every_gradient_equal_transformers(name: str, tmp_path: Path) -> None:
    config = MODELS[name]
    ours = tiny_decoder(config).train()
    theirs = in_transformers(ours, tmp_path)
    generator = torch.Generator().manual_seed(5)
    tokens_BS = torch.randint(config.vocabulary, (3, 24), generator=generator)
    positions_BS = torch.arange(24).expand(3, -1)
    logits_BSV = ours.logits(tokens_BS, positions_BS)
    expected_BSV = theirs(tokens_BS, use_cache=False).logits
    torch.testing.assert_close(logits_BSV, expected_BSV, rtol=2e-5, atol=2e-5)

    loss = F.cross_entropy(logits_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    expected = F.cross_entropy(expected_BSV[:, :-1].flatten(0, 1), tokens_BS[:, 1:].flatten())
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    loss.backward()
    expected.backward()
    expected_gradients = _split_experts({n: p.grad for n, p in theirs.named_parameters() if p.grad is not None})
    gradients = _our_gradients(ours)
    assert set(gradients) == set(expected_gradients), "every weight has a gradient on both sides"
    for weight, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected_gradients[weight], rtol=2e-4, atol=2e-5, msg=weight)


def _our_gradients(ours: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients under Hugging Face names, by the same table that carries the weights."""
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    out: dict[str, torch.Tensor] = {}
    for line in weight_names(ours.config):
        gradient = gradients.get(line.ours)
        if gradient is not None:
            piece = gradient if line.expert is None else gradient[line.expert]
            out |= dict(zip(line.theirs, piece.chunk(len(line.theirs)), strict=True))
    return out


def _split_experts(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """`transformers` stacks experts in memory; their gradients under the names of the files."""
    out: dict[str, torch.Tensor] = {}
    for name, gradient in gradients.items():
        stem = name.rsplit(".", 1)[0]
        if name.endswith("experts.gate_up_proj"):
            for expert, matrix in enumerate(gradient):
                gate, up = matrix.chunk(2)
                out[f"{stem}.{expert}.gate_proj.weight"], out[f"{stem}.{expert}.up_proj.weight"] = gate, up
        elif name.endswith("experts.down_proj"):
            for expert, matrix in enumerate(gradient):
                out[f"{stem}.{expert}.down_proj.weight"] = matrix
        else:
            out[name] = gradient
    return out


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("config", [V2, V3.model_copy(update={"mtp_layers": 1})], ids=["v2", "v3 with mtp"])
def test_weights_return_bit_for_bit(config: Model, precision: str, tmp_path: Path) -> None:
    first = tiny_decoder(config, precision=precision, seed=1)
    second = tiny_decoder(config, precision=precision, seed=2)
    save_huggingface(first, tmp_path)
    load_huggingface(second, tmp_path)
    state = second.state_dict()
    for name, tensor in first.state_dict().items():
        assert torch.equal(tensor, state[name]), f"{name} changed on the way"


def test_weights_that_transformers_saved_load_bit_for_bit(tmp_path: Path) -> None:
    ours = tiny_decoder(V3)
    in_transformers(ours, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    other = tiny_decoder(V3, seed=9)
    load_huggingface(other, tmp_path / "theirs")
    for (name, tensor), (_, loaded) in zip(to_huggingface(ours), to_huggingface(other), strict=True):
        assert torch.equal(tensor, loaded), f"{name} changed on the way"


def test_files_hold_the_names_of_the_published_weights(tmp_path: Path) -> None:
    config = V3.model_copy(update={"mtp_layers": 1, "attention": tiny_attention(q_latent=20)})
    save_huggingface(tiny_decoder(config), tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    published = {
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.1.self_attn.kv_a_proj_with_mqa.weight",
        "model.layers.1.self_attn.q_a_layernorm.weight",
        "model.layers.2.mlp.gate.e_score_correction_bias",
        "model.layers.2.mlp.experts.7.up_proj.weight",
        "model.layers.2.mlp.shared_experts.down_proj.weight",
        "model.layers.3.eh_proj.weight",
        "model.layers.3.shared_head.norm.weight",
        "lm_head.weight",
    }
    assert published <= names, f"missing: {published - names}"


def test_weights_of_another_model_are_refused_and_nothing_is_copied() -> None:
    model, other = tiny_decoder(V3), tiny_decoder(V3.model_copy(update={"layers": 2}))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="missing, 0 unknown.*model.layers.2"):
        from_huggingface(model, dict(to_huggingface(other)))
    weights = dict(to_huggingface(model))
    weights["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has another shape.*\(5,\).*\(32,\)"):
        from_huggingface(model, weights)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items()), "weights changed"


def test_a_model_without_a_family_has_no_names() -> None:
    attention = GroupedQueryAttention(heads=4, kv_heads=2, head_dim=8)
    plain = V2.model_copy(update={"family": "plain", "attention": attention})
    with pytest.raises(ConfigError, match="no Hugging Face names"):
        weight_names(plain)
