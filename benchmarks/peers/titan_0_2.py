"""Models and text for TorchTitan 0.2, whose trainer imports this module (`--experimental.custom_import`).

Each cut is a published flavor of TorchTitan with fewer layers and causal attention by PyTorch's operator, which has
cuDNN's kernel first. On one GPU its trainer casts weights by autocast; the specs named `*_fsdp` shard over that GPU
with its `apply_fsdp` instead, which casts each weight once for a micro-batch.
"""

import dataclasses
from typing import Any

import torch
from datasets import load_dataset
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.llama4.infra.parallelize import apply_fsdp
from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

CUTS = {
    "deepseek-v2-lite-8l": ("deepseek_v3", "16B", {"n_layers": 8}),
    "qwen3-30b-a3b-8l": ("qwen3", "30B-A3B", {"n_layers": 8}),
}

DATASETS["text"] = DatasetConfig(
    path="",
    loader=lambda path: load_dataset("json", data_files=path, split="train"),
    sample_processor=lambda sample: sample["text"],
)


def register(cut: str, model: str, flavor: str, changes: dict[str, Any]) -> None:
    """Register the specs `cut` and `cut_fsdp`, each with the one flavor `cut`."""
    spec = get_train_spec(model)
    args = {cut: dataclasses.replace(spec.model_args[flavor], **changes, attn_type="sdpa", attn_mask_type="causal")}

    def sharded(model: torch.nn.Module, parallel_dims: Any, job_config: Any) -> torch.nn.Module:
        model = spec.parallelize_fn(model, parallel_dims, job_config)
        if not parallel_dims.fsdp_enabled:
            training = job_config.training
            apply_fsdp(
                model,
                init_device_mesh("cuda", (1,), mesh_dim_names=("fsdp",)),
                param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
                reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
                pp_enabled=False,
                reshard_after_forward_policy="never",
            )
        return model

    register_train_spec(cut, dataclasses.replace(spec, model_args=args))
    register_train_spec(f"{cut}_fsdp", dataclasses.replace(spec, model_args=args, parallelize_fn=sharded))


for cut, of in CUTS.items():
    register(cut, *of)
