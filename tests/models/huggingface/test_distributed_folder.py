"""Folders of torch.distributed.checkpoint under the names of TorchTitan and Megatron-Core are the weights they hold."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from penstock.base.errors import CheckpointError
from penstock.config.model import Model
from penstock.models.huggingface.distributed_folder import METADATA, DistributedFolder
from penstock.models.huggingface.weights import from_huggingface
from tests.closeness import assert_equal
from tests.models.families import tiny_decoder, to_huggingface
from tests.models.huggingface.family_models import VARIANTS

Weights = dict[str, Tensor]

TITAN = {
    "model.embed_tokens.weight": "tok_embeddings.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "output.weight",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.q_a_proj": "attention.wq_a",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.wq_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.wkv_b",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.shared_experts.gate_proj": "moe.shared_experts.w1",
    "mlp.shared_experts.up_proj": "moe.shared_experts.w3",
    "mlp.shared_experts.down_proj": "moe.shared_experts.w2",
    "mlp.gate": "moe.router.gate",
    "mlp.gate.e_score_correction_bias": "moe.expert_bias",
}
EXPERT = re.compile(r"(model\.layers\.\d+\.mlp)\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def _stacks(weights: Weights) -> dict[tuple[str, str], Tensor]:
    """Stacks of all experts by layer (the beginning of their names) and projection."""
    experts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in weights.items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault((match[1], match[3]), {})[int(match[2])] = tensor
    return {key: torch.stack([many[expert] for expert in sorted(many)]) for key, many in experts.items()}


def titan(model: Model, weights: Weights) -> Weights:
    """As its state_dict_adapter files say; Llama's rotary pairs are neighbours."""
    made = {}
    for name, tensor in weights.items():
        layer, rest = re.fullmatch(r"(?:model\.(layers\.\d+)\.)?(.+)", name).groups()  # type: ignore[union-attr]
        if EXPERT.fullmatch(name):
            continue
        kind = "" if rest in TITAN else "." + rest.rpartition(".")[2]
        if model.family == "llama" and re.search(r"\.[qk]_proj\.", name):
            tensor = tensor.unflatten(0, (-1, 2, model.attention.head_dim // 2)).transpose(1, 2).flatten(0, 2)
        made[(f"{layer}." if layer else "") + TITAN[rest.removesuffix(kind)] + kind] = tensor
    for (layer, which), stack in _stacks(weights).items():
        number = {"gate": 1, "down": 2, "up": 3}[which]
        made[layer.replace("model.", "").replace("mlp", f"moe.experts.w{number}")] = stack
    return made | {
        "optimizer.state.norm.weight.exp_avg": torch.ones(2),
        "layers.0.moe.tokens_per_expert": torch.ones(2),
    }


def _megatron_layer(model: Model, names: Weights, layer: str) -> Weights:
    """A layer as Megatron-Core names and fuses it; `names` are those of Hugging Face in the layer."""
    rest = {name.removeprefix(f"{layer}."): one for name, one in names.items() if name.startswith(f"{layer}.")}
    is_moe, made = f"{layer}.mlp.gate.weight" in names, {}
    plain = {
        "self_attn.o_proj": "self_attention.linear_proj",
        "self_attn.q_norm": "self_attention.q_layernorm",
        "self_attn.k_norm": "self_attention.k_layernorm",
        "self_attn.q_a_proj": "self_attention.linear_q_down_proj",
        "self_attn.q_b_proj": "self_attention.linear_q_up_proj",
        "self_attn.kv_a_proj_with_mqa": "self_attention.linear_kv_down_proj",
        "self_attn.kv_b_proj": "self_attention.linear_kv_up_proj",
        "mlp.gate": "mlp.router",
        "mlp.down_proj": "mlp.linear_fc2",
        "mlp.shared_experts.down_proj": "mlp.shared_experts.linear_fc2",
    }
    if "self_attn.k_proj.weight" not in rest:
        plain["self_attn.q_proj"] = "self_attention.linear_q_proj"
    made |= {f"{new}.weight": rest[f"{old}.weight"] for old, new in plain.items() if f"{old}.weight" in rest}
    whole = {
        "self_attn.q_a_layernorm.weight": "self_attention.linear_q_up_proj.layer_norm_weight",
        "self_attn.kv_a_layernorm.weight": "self_attention.linear_kv_up_proj.layer_norm_weight",
        "mlp.gate.e_score_correction_bias": "mlp.router.expert_bias",
        "post_attention_layernorm.weight": "pre_mlp_layernorm.weight" if is_moe else "mlp.linear_fc1.layer_norm_weight",
    }
    made |= {new: rest[old] for old, new in whole.items() if old in rest}
    for stem in ("mlp", "mlp.shared_experts"):
        if f"{stem}.gate_proj.weight" in rest:
            halves = [rest[f"{stem}.{one}_proj.weight"] for one in ("gate", "up")]
            made[f"{stem}.linear_fc1.weight"] = torch.cat(halves)
    if "self_attn.k_proj.weight" in rest:
        parts = [rest[f"self_attn.{one}_proj.weight"] for one in "qkv"]
        fused = torch.cat([part.unflatten(0, (model.attention.kv_heads, -1)) for part in parts], 1).flatten(0, 1)
        made["self_attention.linear_qkv.weight"] = fused
        made["self_attention.linear_qkv.layer_norm_weight"] = rest["input_layernorm.weight"]
    else:
        made["input_layernorm.weight"] = rest["input_layernorm.weight"]
    return made


def megatron(model: Model, weights: Weights, *, singles: bool = False) -> Weights:
    """As `sharded_state_dict` names them: equal layers are stacked, unless each tensor is one shard (`singles`)."""
    layers = [_megatron_layer(model, weights, f"model.layers.{layer}") for layer in range(model.layers)]
    for layer, made in enumerate(layers):
        stacks = {which: one for (name, which), one in _stacks(weights).items() if f".{layer}." in name}
        if stacks and not singles:
            made["mlp.experts.experts.linear_fc1.weight"] = torch.cat([stacks["gate"], stacks["up"]], 1)
            made["mlp.experts.experts.linear_fc2.weight"] = stacks["down"]
        for expert in range(len(stacks["down"])) if stacks and singles else ():
            stem = f"mlp.experts.experts.{expert}.linear_fc"
            made |= {f"{stem}1.weight_w": stacks["gate"][expert], f"{stem}1.weight_v": stacks["up"][expert]}
            made[f"{stem}2.weight"] = stacks["down"][expert]
    padding = torch.zeros(3, model.hidden_size)  # Megatron-Core pads the vocabulary
    made = {
        "embedding.word_embeddings.weight": torch.cat([weights["model.embed_tokens.weight"], padding]),
        "output_layer.weight": torch.cat([weights["lm_head.weight"], padding]),
        "decoder.final_layernorm.weight": weights["model.norm.weight"],
    }
    if singles or any(layer.keys() != layers[0].keys() for layer in layers):
        made |= {f"decoder.layers.{n}.{name}": one for n, layer in enumerate(layers) for name, one in layer.items()}
    else:
        made |= {f"decoder.layers.{name}": torch.stack([layer[name] for layer in layers]) for name in layers[0]}
    return made | {"optimizer.state.exp_avg.decoder.final_layernorm.weight": torch.ones(2)}


def _weights(model: Model) -> Weights:
    return to_huggingface(tiny_decoder(model))


def _read(folder: Path, model: Model, weights: Weights) -> None:
    read = DistributedFolder(folder, model)
    assert {name: read.shape(name) for name in read} == {name: tuple(one.shape) for name, one in weights.items()}
    assert_equal(dict(read), weights)
    from_huggingface(tiny_decoder(model, seed=4), read)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, titan) for name in ("llama", "qwen3", "qwen3-moe", "deepseek-v3")),
        *((name, megatron) for name in ("llama", "qwen3", "qwen3-moe", "deepseek-v3")),
        ("qwen3-moe", lambda *given: megatron(*given, singles=True)),
    ],
)
def test_weights_under_the_names_of_a_program_are_those_of_hugging_face(
    name: str, form: Callable[[Model, Weights], Weights], tmp_path: Path
) -> None:
    model = VARIANTS[name]
    weights = _weights(model)
    other: dict[str, Any] = {"train_state": "no tensor"}
    dcp.save(form(model, weights) | other, checkpoint_id=tmp_path, no_dist=True)
    torch.save({"args": Path("no pickle is read")}, tmp_path / "common.pt")
    _read(tmp_path, model, weights)


class _Halves(DefaultSavePlanner):
    """Writes each tensor with at least two rows as two chunks, as two ranks do."""

    def create_local_plan(self) -> SavePlan:
        plan = super().create_local_plan()
        return replace(plan, items=[half for item in plan.items for half in self._halves(item)])

    def _halves(self, item: WriteItem) -> list[WriteItem]:
        data = item.tensor_data
        if data is None or not data.size or data.size[0] < 2:
            return [item]
        rows, rest = data.size[0], data.size[1:]
        zeros = [0] * len(rest)
        return [
            WriteItem(
                index=MetadataIndex(item.index.fqn, (begin, *zeros)),
                type=WriteItemType.SHARD,
                tensor_data=replace(
                    data, chunk=ChunkStorageMetadata(torch.Size((begin, *zeros)), torch.Size((end - begin, *rest)))
                ),
            )
            for begin, end in ((0, rows // 3 + 1), (rows // 3 + 1, rows))
        ]

    def resolve_data(self, write_item: WriteItem) -> Any:
        data = self.state_dict[write_item.index.fqn]
        if write_item.type is not WriteItemType.SHARD:
            return data
        begin, size = write_item.index.offset[0], write_item.tensor_data.chunk.sizes[0]  # type: ignore[index,union-attr]
        return data[begin : begin + size].clone()


def test_tensors_in_several_chunks_are_put_together(tmp_path: Path) -> None:
    model = VARIANTS["qwen3-moe"]
    weights = _weights(model)
    dcp.save(titan(model, weights), checkpoint_id=tmp_path, no_dist=True, planner=_Halves())
    _read(tmp_path, model, weights)


def test_pickles_call_nothing_and_damage_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model, folder = VARIANTS["qwen3"], tmp_path / "theirs"
    dcp.save(titan(model, _weights(model)), checkpoint_id=folder, no_dist=True)
    sound = (folder / METADATA).read_bytes()
    harm = b"cposix\nmkdir\n(X\x04\x00\x00\x00harmtR."
    for content in (
        b"\x80\x02" + harm,
        b"",
        b"\x80\x04N.",
        sound[:-50],
        sound[:2] + b"R" + sound[2:],
        b"\x80\x02I1\n(",
    ):
        (folder / METADATA).write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata; got .*; fix: give a folder of torch"):
            DistributedFolder(folder, model)
    (folder / METADATA).write_bytes(sound)
    (file,) = folder.glob("*.distcp")
    saved = file.read_bytes()
    for content in (saved[:100], saved.replace(b"ctorch._utils\n_rebuild_tensor_v2\n", harm.ljust(34, b"N"))):
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"cannot read .*distcp"):
            dict(DistributedFolder(folder, model))
    assert not Path("harm").exists()


def test_a_tensor_that_no_table_names_keeps_its_name(tmp_path: Path) -> None:
    model = VARIANTS["qwen3"]
    state = titan(model, _weights(model)) | {"layers.0.attention.wx.weight": torch.ones(2)}
    dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    with pytest.raises(CheckpointError, match=r"0 missing, 1 unknown; got .*layers\.0\.attention\.wx\.weight"):
        from_huggingface(tiny_decoder(model), DistributedFolder(tmp_path, model))
