"""Presets have the sizes that their authors published: every parameter, and as many active ones as are advertised."""

import pytest
import torch
from transformers import AutoModelForCausalLM, DeepseekV4Config

from penstock.config.presets.registry import PRESETS, preset
from penstock.config.size import size_of
from penstock.models.huggingface.config import huggingface_config

IMAGES = 871_932_416  # of Llama 4's image encoder and of its projection, which the published totals include

# Parameters: sums over the tensors of the published files, each tensor counted once.
TOTALS = {
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "olmoe-1b-7b": 6_919_161_856,
    "llama4-scout": 108_641_793_536 - IMAGES,
    "llama4-maverick": 401_583_781_376 - IMAGES,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen1.5-moe-a2.7b": 14_315_784_192,
    "mistral-7b": 7_248_023_552,
    "qwen2.5-7b": 7_615_616_512,
    "seed-oss-36b": 36_151_104_512,
    "phi-4": 14_659_507_200,
    "ernie-4.5-0.3b": 360_748_032,
    "glm-4-9b": 9_399_951_360,
    "glm-4-32b": 32_566_081_536,
    "olmo-2-7b": 7_298_617_344,
    "exaone-4.0-32b": 32_003_216_384,
    "smollm3-3b": 3_075_098_624,
    "granite-3.3-8b": 8_170_864_640,
    "gemma-3-1b": 999_885_952,
}

ACTIVE = {
    "mixtral-8x7b": 12.9e9,
    "mixtral-8x22b": 39e9,
    "qwen3-30b-a3b": 3.3e9,
    "qwen3-235b-a22b": 22e9,
    "olmoe-1b-7b": 1.3e9,
    "llama4-scout": 17e9,
    "llama4-maverick": 17e9,
    "gpt-oss-20b": 3.61e9,  # without the embedding
    "gpt-oss-120b": 5.13e9,
    "qwen1.5-moe-a2.7b": 2.7e9,
}


@pytest.mark.parametrize("name", ACTIVE)
def test_as_many_parameters_are_active_as_is_advertised(name: str) -> None:
    model = preset(name).model
    active = size_of(model, 4096).active_parameters
    embedding = model.vocab_size * model.hidden_size if model.family == "gpt-oss" else 0  # which OpenAI leaves out
    assert active - embedding == pytest.approx(ACTIVE[name], rel=0.02)  # advertised with two or three digits


@pytest.mark.parametrize("name", TOTALS)
def test_a_model_has_its_published_size_and_the_first_line_of_its_preset_says_it(name: str) -> None:
    doc = (PRESETS[name].__doc__ or "").splitlines()[0]
    counted = size_of(preset(name).model, 4096)
    assert counted.parameters == TOTALS[name]
    billions = counted.parameters / 1e9
    assert any(f"{billions:.{digits}f} B parameters" in doc for digits in (0, 1, 2)), (doc, billions)
    if preset(name).model.moe is not None:
        active = counted.active_parameters / 1e9
        assert any(f"{active:.{digits}f} B active" in doc for digits in (0, 1, 2)), (doc, active)


@pytest.mark.parametrize("name", TOTALS)
def test_a_published_model_and_its_cuts_have_a_hugging_face_form(name: str) -> None:
    for layers in (1, 2, 5):  # also cuts that change the dense layers
        assert huggingface_config(preset(f"{name}-{layers}l").model)["num_hidden_layers"] == layers


def test_deepseek_v4_flash_has_the_parameters_of_its_class_in_transformers() -> None:
    model = preset("deepseek-v4-flash").model
    counted = size_of(model, 4096)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(DeepseekV4Config(**huggingface_config(model)))
    assert counted.parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(counted.parameters / 1e9) == 284
    embeddings = 2 * model.vocab_size * model.hidden_size
    assert 13e9 < counted.active_parameters - embeddings / 2 < 13.5e9  # advertised: 13 B
