"""Weights between models and files: rearrangements, names, and whole models bit for bit."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from penstock.base.errors import CheckpointError, ConfigError
from penstock.config.model import Model
from penstock.config.presets.registry import preset
from penstock.models.build import meta_model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.weight_folder import WeightFolder, from_float8, from_mxfp4
from penstock.models.huggingface.weight_names import grid_transposed, transposed
from penstock.models.huggingface.weights import from_huggingface, load_huggingface, weight_mappings
from tests.closeness import assert_equal, assert_within
from tests.models.families import in_transformers, moe_with, save_huggingface, tiny_decoder, tiny_model, to_huggingface
from tests.models.huggingface.family_models import V3, VARIANTS
from tests.models.huggingface.parity import TOLERANCES, compare, unsettled


def test_members_of_a_pair_become_neighbours() -> None:
    theirs = torch.tensor([10, 20, 30, 11, 21, 31, 40, 50, 60, 41, 51, 61])  # two heads of 6: halves of 3 pairs
    ours = grid_transposed(0, 2, 3).read(theirs)
    assert ours.tolist() == [10, 11, 20, 21, 30, 31, 40, 41, 50, 51, 60, 61]


def test_rows_of_gate_and_up_are_told_apart() -> None:
    theirs = torch.tensor([[1, -1, 2, -2, 3, -3], [4, -4, 5, -5, 6, -6]])  # two experts
    ours = grid_transposed(1, 3, 2).read(theirs)
    assert ours.tolist() == [[1, 2, 3, -1, -2, -3], [4, 5, 6, -4, -5, -6]]


@given(dim=st.integers(0, 1), rows=st.integers(1, 5), columns=st.integers(1, 5), blocks=st.integers(1, 3))
def test_what_was_read_is_written_as_it_was(dim: int, rows: int, columns: int, blocks: int) -> None:
    length = blocks * rows * columns
    theirs = torch.arange(length * length * 2).view(length, length, 2)
    for form in (grid_transposed(dim, rows, columns), transposed(tiny_model())):
        assert torch.equal(form.write(form.read(theirs)), theirs)
        assert torch.equal(form.read(form.write(theirs)), theirs)


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
    config = moe_with(VARIANTS["mixtral"], shared_expert_intermediate_size=16)
    message = r"mixtral has no Hugging Face name for blocks\.0\.ffn\.shared\.gate_up\.weight"
    with pytest.raises(ConfigError, match=message):
        weight_mappings(config)


FIRSTS = {name: config for name, config in VARIANTS.items() if "," not in name}
"""One model of each family."""


def _assert_equal(ours: Decoder, other: Decoder) -> None:
    assert_equal(other.state_dict(), ours.state_dict())


@pytest.mark.parametrize("name", FIRSTS)
def test_weights_in_bfloat16_return_bit_for_bit(name: str, tmp_path: Path) -> None:
    first = unsettled(tiny_decoder(FIRSTS[name], precision="bf16", seed=1))
    second = tiny_decoder(FIRSTS[name], precision="bf16", seed=2)
    save_huggingface(first, tmp_path)
    load_huggingface(second, tmp_path)
    _assert_equal(first, second)


@pytest.mark.parametrize("name", FIRSTS)
def test_weights_that_transformers_saved_load_bit_for_bit(name: str, tmp_path: Path) -> None:
    ours = unsettled(tiny_decoder(FIRSTS[name]))
    in_transformers(ours, tmp_path / "ours").save_pretrained(tmp_path / "theirs")
    names = [set(load_file(tmp_path / folder / "model.safetensors")) for folder in ("ours", "theirs")]
    if name == "kimi-linear":  # transformers names the dense layer's network as if it had experts
        names[1] = {one.replace("layers.0.block_sparse_moe", "layers.0.mlp") for one in names[1]}
    assert names[0] == names[1]
    other = tiny_decoder(FIRSTS[name], seed=9)
    load_huggingface(other, tmp_path / "theirs")
    _assert_equal(ours, other)


def test_of_a_model_of_text_and_pictures_the_text_is_loaded(tmp_path: Path) -> None:
    ours, other = unsettled(tiny_decoder(FIRSTS["llama4"])), tiny_decoder(FIRSTS["llama4"], seed=9)
    weights = {f"language_model.{name}": tensor for name, tensor in to_huggingface(ours).items()}
    pictures = ("vision_model.layernorm_pre.weight", "multi_modal_projector.linear_1.weight")
    save_file(weights | {name: torch.ones(3) for name in pictures}, tmp_path / "model.safetensors")
    load_huggingface(other, tmp_path)
    _assert_equal(ours, other)


def test_what_published_files_repeat_is_left_out() -> None:
    config = V3.model_copy(update={"mtp_layers": 1})
    ours, other = tiny_decoder(config), tiny_decoder(config, seed=9)
    weights = to_huggingface(ours)
    for copy, name in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
        weights[f"model.layers.{config.layers}.{copy}.weight"] = weights[f"{name}.weight"]
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    from_huggingface(other, weights)
    _assert_equal(ours, other)

    tied = VARIANTS["qwen3, tied embeddings"]
    ours, other = tiny_decoder(tied), tiny_decoder(tied, seed=9)
    weights = to_huggingface(ours)
    assert "lm_head.weight" not in weights
    from_huggingface(other, weights | {"lm_head.weight": weights["model.embed_tokens.weight"]})
    _assert_equal(ours, other)


def test_experts_of_four_bits_are_loaded_as_what_they_stand_for(tmp_path: Path) -> None:
    config = moe_with(FIRSTS["gpt-oss"], moe_intermediate_size=32)
    ours, other = unsettled(tiny_decoder(config)), tiny_decoder(config, seed=9)
    weights = to_huggingface(ours)
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
        from_huggingface(model, to_huggingface(other))
    weights = to_huggingface(tiny_decoder(V3, seed=9))
    weights["model.norm.weight"] = torch.zeros(5)
    with pytest.raises(CheckpointError, match=r"model.norm.weight has another shape.*\(5,\).*\(32,\)"):
        from_huggingface(model, weights)
    assert_equal(dict(model.state_dict()), before)


def test_shapes_of_files_are_checked_before_anything_is_copied(tmp_path: Path) -> None:
    model = tiny_decoder(FIRSTS["mixtral"])
    save_huggingface(tiny_decoder(moe_with(FIRSTS["mixtral"], moe_intermediate_size=8), seed=9), tmp_path)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = r"experts\.0\.w1\.weight has another shape; got \(8, 32\); allowed: \(16,"
    with pytest.raises(CheckpointError, match=message):
        load_huggingface(model, tmp_path)
    assert_equal(dict(model.state_dict()), before)


@pytest.mark.often("*-packed", "mixtral-plain", "deepseek-v3-plain")
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_loss_and_every_gradient_equal_transformers(name: str, packed: bool, tmp_path: Path) -> None:
    parity = compare(VARIANTS[name], tmp_path, packed=packed)
    assert_within({figure: vars(parity)[figure] for figure in TOLERANCES}, TOLERANCES, what=parity.weight)


ONE_BLOCK = torch.tensor([[[[*range(16)]]]], dtype=torch.uint8) * 17  # bytes 0x00, 0x11, ..., 0xff


def _random_mxfp4(*sizes: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (*sizes, 16), generator=generator, dtype=torch.uint8)
    return blocks, torch.randint(100, 140, sizes, generator=generator, dtype=torch.uint8)


def test_four_bits_stand_for_what_the_format_says() -> None:
    values = from_mxfp4(ONE_BLOCK, torch.tensor([[[128]]], dtype=torch.uint8))
    assert values.dtype == torch.bfloat16
    expected = [0, 1, 2, 3, 4, 6, 8, 12]  # twice as much, because the exponent is 1
    assert values[0, ::2, 0].tolist() == values[0, 1::2, 0].tolist() == expected + [-value for value in expected]


@given(rows=st.integers(1, 300), columns=st.integers(1, 300))
def test_each_block_of_eight_bits_has_its_scale(rows: int, columns: int) -> None:
    generator = torch.Generator().manual_seed(rows * columns)
    w_FD = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
    scale_fd = torch.rand(-(-rows // 128), -(-columns // 128), generator=generator)
    read = from_float8(w_FD, scale_fd)
    row, column = rows - 1, columns // 2
    expected = w_FD[row, column].float() * scale_fd[row // 128, column // 128]
    assert read.shape == w_FD.shape
    assert read[row, column] == expected.bfloat16()


EIGHT_BITS: dict[str, tuple[Tensor, list[int] | None, Tensor]] = {
    "blocks of 64 x 64": (torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [64, 64], torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
    "blocks of 128 x 32": (torch.tensor([[1.0, 2.0, 3.0, 4.0]]), [128, 32], torch.tensor([[1.0, 3.0], [1.0, 3.0]])),
    "one scale": (torch.tensor(2.0), None, torch.full((2, 2), 2.0)),
    "exponents as bytes": (torch.tensor([[126]], dtype=torch.uint8), [128, 128], torch.full((2, 2), 0.5)),
    "exponents as e8m0": (torch.tensor([[4.0]]).to(torch.float8_e8m0fnu), [128, 128], torch.full((2, 2), 4.0)),
}


def _eight_bits(folder: Path, scale: Tensor | None, block: object, sizes: tuple[int, ...] = (128, 128)) -> WeightFolder:
    tensors = {"x.weight": torch.ones(sizes).to(torch.float8_e4m3fn)}
    save_file(tensors | ({} if scale is None else {"x.weight_scale_inv": scale}), folder / "model.safetensors")
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    (folder / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    return WeightFolder(folder)


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_eight_bits_have_the_scales_that_the_configuration_says(name: str, tmp_path: Path) -> None:
    scale, block, expected = EIGHT_BITS[name]
    read = _eight_bits(tmp_path, scale, block)["x.weight"]
    assert torch.equal(read[::64, ::64].float(), expected)


def test_a_configuration_may_give_the_name_of_the_method_alone(tmp_path: Path) -> None:
    _eight_bits(tmp_path, torch.tensor([[2.0]]), [128, 128])
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": "fp8"}))
    assert torch.equal(WeightFolder(tmp_path)["x.weight"][::64, ::64].float(), torch.full((2, 2), 2.0))


def test_a_stack_of_eight_bits_has_scales_for_each_matrix(tmp_path: Path) -> None:
    scale = torch.arange(1.0, 7.0).reshape(3, 2, 1)
    read = _eight_bits(tmp_path, scale, [64, 128], (3, 100, 8))["x.weight"]
    assert torch.equal(read[:, ::64, 0].float(), scale[..., 0])


@pytest.mark.parametrize(
    ("scale", "block", "message"),
    [
        (None, [128, 128], r"x\.weight is float8 and has no scale; allowed: x\.weight_scale_inv"),
        (torch.ones(1, 1), [64, 64], r"scales of x\.weight do not fit .*got \(1, 1\); allowed: \(2, 2\): blocks of"),
        (torch.ones(128, 1), None, r"scales of x\.weight do not fit .*allowed: \(1, 1\): one for the whole tensor"),
        (torch.ones(1, 1), [0, 128], r"weight_block_size cannot be used; got \[0, 128\]"),
    ],
)
def test_scales_that_do_not_fit_are_refused_by_name(
    scale: Tensor | None, block: list[int] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError, match=message):
        _eight_bits(tmp_path, scale, block)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors", "bitsandbytes", 3])
@pytest.mark.parametrize("is_inside", [False, True])
def test_other_quantized_weights_are_refused_by_name_with_a_way(
    method: object, is_inside: bool, tmp_path: Path
) -> None:
    fields: dict[str, object] = {"quantization_config": {"quant_method": method}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": fields} if is_inside else fields))
    save_file({"x": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"quant_method {method} cannot be read; .*dequantize\(\)"):
        WeightFolder(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_value_that_is_no_number_is_refused_and_a_large_one_is_read(
    value: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    large = torch.full((3, 3), torch.finfo(dtype).max, dtype=dtype)
    save_file({"a": large, "b": torch.tensor([0, value, 1]).to(dtype)}, tmp_path / "model.safetensors")
    weights = WeightFolder(tmp_path)
    assert torch.equal(weights["a"], large)
    with pytest.raises(CheckpointError, match=r"b in .*model\.safetensors has values that are NaN or infinite"):
        weights["b"]


def _index(folder: Path, **files: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def test_the_index_says_which_files_count(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, folder / "consolidated.safetensors")
    first, second = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    _index(folder, a=first, b=second)
    assert len(WeightFolder(folder)) == 4
    (folder / second).unlink()
    with pytest.raises(CheckpointError, match=rf"{second} is missing; got .*index\.json names it; fix: fetch it"):
        WeightFolder(folder)
    _index(folder, a="x" * 5000)
    with pytest.raises(CheckpointError, match="xxx is missing; got "):
        WeightFolder(folder)
    for name in ("../x.safetensors", "/etc/passwd"):
        _index(folder, a=name)
        with pytest.raises(CheckpointError, match=r"names files outside of its folder"):
            WeightFolder(folder)


def test_a_pointer_is_no_weights(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n")
    with pytest.raises(CheckpointError, match=r"is a pointer of Git LFS, no weights; fix: run `git lfs pull`"):
        WeightFolder(tmp_path)


def test_tensors_that_stand_for_others_are_compared() -> None:
    tied = VARIANTS["qwen3, tied embeddings"]
    weights = to_huggingface(tiny_decoder(tied))
    weights["lm_head.weight"] = 2 * weights["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match=r'lm_head\.weight differs from .*"tie_word_embeddings": false'):
        from_huggingface(tiny_decoder(tied), weights)
    config = V3.model_copy(update={"mtp_layers": 1})
    for copy in ("embed_tokens", "shared_head.head"):
        weights = to_huggingface(tiny_decoder(config))
        name = f"model.layers.{config.layers}.{copy}.weight"
        weights[name] = torch.ones_like(weights["lm_head.weight"])
        with pytest.raises(CheckpointError, match=rf"{name} differs from "):
            from_huggingface(tiny_decoder(config), weights)
        from_huggingface(tiny_decoder(V3), weights)  # without prediction they have no effect


def test_tensors_of_no_size_are_not_there(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(0, 4)}, tmp_path / "model.safetensors")
    assert list(WeightFolder(tmp_path)) == ["a"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two files: plain weights, and weights of 8 and of 4 bits with their scales."""
    blocks, scales = _random_mxfp4(2, 6, 1)
    plain = {"model.norm.weight": torch.ones(3), "experts.down_proj_bias": torch.zeros(2, 6)}
    packed = {
        "q_proj.weight": torch.ones(130, 4).to(torch.float8_e4m3fn),
        "q_proj.weight_scale_inv": torch.tensor([[2.0], [3.0]]),
        "experts.down_proj_blocks": blocks,
        "experts.down_proj_scales": scales,
    }
    save_file(plain, tmp_path / "model-00001-of-00002.safetensors")
    save_file(packed, tmp_path / "model-00002-of-00002.safetensors")
    return tmp_path


def test_files_are_read_as_one_and_scales_are_not_seen(folder: Path) -> None:
    weights = WeightFolder(folder)
    shapes = {name: weights.shape(name) for name in weights}
    assert shapes == {
        "model.norm.weight": (3,),
        "experts.down_proj_bias": (2, 6),
        "q_proj.weight": (130, 4),
        "experts.down_proj": (2, 32, 6),
    }
    assert len(weights) == 4
    assert all(tuple(weights[name].shape) == shape for name, shape in shapes.items())
    assert weights["q_proj.weight"][[0, 129], 0].tolist() == [2.0, 3.0]


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no safetensors file; got .*; fix: give a folder"):
        WeightFolder(tmp_path)


def test_a_tensor_that_is_there_twice_is_named(folder: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, folder / "more.safetensors")
    with pytest.raises(CheckpointError, match=r"more\.safetensors repeats model\.norm\.weight; got it is in .*00001"):
        WeightFolder(folder)


def test_scales_that_are_missing_are_named(tmp_path: Path) -> None:
    save_file({"experts.down_proj_blocks": _random_mxfp4(2, 6, 1)[0]}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no tensor experts\.down_proj_scales"):
        WeightFolder(tmp_path)["experts.down_proj"]
