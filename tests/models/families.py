"""Tiny random models of each family, and the same model in `transformers`."""

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config.model import (
    GroupedQueryAttention,
    LatentAttention,
    Llama3Rope,
    LocalAttention,
    Model,
    Moe,
    Rope,
    Router,
    Yarn,
)
from penstock.config.run import Optimizer, Run, Training
from penstock.kernels.operators import REFERENCE, Operators
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.models.huggingface.config import huggingface_config
from penstock.models.huggingface.families import family_of
from penstock.models.huggingface.weights import WEIGHTS_FILE, by_file_tensor, join, weight_mappings
from penstock.models.model_inputs import ModelInputs, shifted_tokens

YARN = Yarn(factor=4.0, original_max_position_embeddings=8, truncate=False)
ATTENTIONS = {
    "llama": GroupedQueryAttention(
        heads=4, kv_heads=2, head_dim=8, rope=Rope(theta=5e5, llama3=Llama3Rope(original_max_position_embeddings=8))
    ),
    "qwen3": GroupedQueryAttention(heads=4, kv_heads=2, head_dim=16, qk_norm="head"),
    "olmoe": GroupedQueryAttention(heads=4, kv_heads=4, head_dim=8, qk_norm="projection"),
    "gpt-oss": GroupedQueryAttention(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=Rope(theta=150000.0, yarn=YARN),
        bias=True,
        sinks=True,
        local=LocalAttention(kind="window", size=5, global_every=2),
    ),
    "llama4": GroupedQueryAttention(
        heads=4,
        kv_heads=2,
        head_dim=8,
        rope=Rope(theta=5e5),
        qk_norm="rotated-head",
        local=LocalAttention(
            kind="chunk", size=6, global_every=2, global_rope=False, global_temperature=0.3, temperature_floor=3
        ),
    ),
}
"""By family; where layers differ, the first sees a part of the row and the second all of it."""

ROUTER_OF_V3 = Router(
    scoring_func="sigmoid",
    n_group=4,
    topk_group=2,
    group_score="top2",
    norm_topk_prob=True,
    routed_scaling_factor=2.5,
    expert_bias=True,
)


def to_huggingface(model: Decoder) -> dict[str, Tensor]:
    """Every weight under its Hugging Face name."""
    state = model.state_dict()
    return {
        lines[0].hf_name: join(lines, [line.write(line.place(state[line.name])) for line in lines]).contiguous()
        for lines in by_file_tensor(weight_mappings(model.config))
    }


def save_huggingface(model: Decoder, folder: Path, positions: int | None = None) -> None:
    """Write `config.json` and `model.safetensors` into a folder, which is made; `positions` as of its config."""
    fields = huggingface_config(model.config, positions) | {"dtype": str(model.head_VD.dtype).removeprefix("torch.")}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(to_huggingface(model), folder / WEIGHTS_FILE, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=2) + "\n")


def tiny_model(family: str = "deepseek-v3", **changes: object) -> Model:
    """A model of a few thousand parameters; `changes` replace fields of Model."""
    fields: dict[str, object] = {
        "family": family,
        "vocab_size": 61,
        "hidden_size": 32,
        "layers": 3,
        "dense_layers": 1,
        "intermediate_size": 48,
        "attention": tiny_attention(),
        "moe": Moe(
            experts=8,
            top_k=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=32,
            router=ROUTER_OF_V3 if family == "deepseek-v3" else Router(),
        ),
        "initializer_range": 0.2,
    }
    return Model.model_validate(fields | changes)


def tiny_attention(*, q_lora_rank: int = 0, yarn: Yarn | None = None) -> LatentAttention:
    """Latent attention with heads of 12 + 8 and values of 10."""
    return LatentAttention(
        heads=4,
        q_lora_rank=q_lora_rank,
        kv_lora_rank=24,
        qk_nope_head_dim=12,
        qk_rope_head_dim=8,
        v_head_dim=10,
        rope=Rope(yarn=yarn),
    )


def tiny_run(model: Model, *, precision: str = "fp32", seed: int = 3) -> Run:
    """A run that only serves to build the model."""
    training = Training.model_validate({"steps": 1, "sequence_length": 16, "precision": precision})
    return Run(name="tiny", seed=seed, model=model, training=training, optimizer=Optimizer(learning_rate=1e-3))


def tiny_decoder(model: Model, operators: Operators = REFERENCE, *, precision: str = "fp32", seed: int = 3) -> Decoder:
    """The model with weights, and a random expert bias where there is one."""
    decoder = build_model(tiny_run(model, precision=precision, seed=seed), torch.device("cpu"), operators)
    generator = torch.Generator().manual_seed(seed)
    for name, buffer in decoder.named_buffers():
        if name.endswith("expert_bias_E"):
            buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
    return decoder


def reading_of(
    tokens_BS: Tensor, positions_BS: Tensor, documents_BS: Tensor | None = None, *, depths: int = 0
) -> ModelInputs:
    """Whole rows, as one rank reads them."""
    ahead = shifted_tokens(tokens_BS, depths)
    return ModelInputs(tokens_BS=tokens_BS, positions_BS=positions_BS, ahead=ahead, documents_BS=documents_BS)


def in_transformers(decoder: Decoder, folder: Path) -> PreTrainedModel:
    """The same weights, loaded by `transformers` from the files that we write."""
    save_huggingface(decoder, folder)
    kind = getattr(transformers, family_of(decoder.config).architecture)  # the automatic ones lack Mistral 4
    model: PreTrainedModel = kind.from_pretrained(folder, dtype=torch.get_default_dtype())
    model.config._attn_implementation = "eager"
    model.config._experts_implementation = "eager"
    return model.eval()


def moe_with(base: Model, **changes: object) -> Model:
    """The model with fields of its router (`router=`), balance (`balance=`) or Moe changed."""
    assert base.moe is not None, "tiny models have experts"
    return base.model_copy(update={"moe": base.moe.model_copy(update=changes)})
