"""Configurations for TorchTitan 0.3, whose trainer imports this module (`--module benchmarks.peers.titan_0_3`).

Its language models mask by document and shard with FSDP2 on one GPU too. `deepseek_v2_lite_8l` is its
`deepseek_v3_16b` with 8 layers, no recomputation and everything compiled; `--config` names a function of this module.
"""

import dataclasses

from datasets import load_dataset
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.config import CompileConfig
from torchtitan.hf_datasets import DatasetConfig
from torchtitan.hf_datasets.text_datasets import DATASETS
from torchtitan.models.common.config_utils import decoder_vocab_size
from torchtitan.models.deepseek_v3 import model_registry
from torchtitan.models.deepseek_v3.config_registry import deepseek_v3_16b
from torchtitan.trainer import Trainer

DATASETS["text"] = DatasetConfig(
    path="",
    loader=lambda path: load_dataset("json", data_files=path, split="train"),
    sample_processor=lambda sample: sample["text"],
)


def _cut(attention: str) -> Trainer.Config:
    spec = model_registry("16B", attn_backend=attention)
    spec = dataclasses.replace(spec, model=dataclasses.replace(spec.model, layers=spec.model.layers[:8]))
    config = deepseek_v3_16b()
    config.model_spec = spec
    config.loss = ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config(global_vocab_size=decoder_vocab_size(spec)))
    config.parallelism.expert_parallel_degree = 1
    config.activation_checkpoint = None
    config.compile = CompileConfig(enable=True, components=["model", "loss"])
    return config


def deepseek_v2_lite_8l_varlen() -> Trainer.Config:
    """Attention by PyTorch's operator for rows of several documents."""
    return _cut("varlen")


def deepseek_v2_lite_8l_flex() -> Trainer.Config:
    """Attention by FlexAttention, as its own configuration has it."""
    return _cut("flex")
