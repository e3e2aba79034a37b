"""The `config.json` of an export, in the parsers of inference engines, where these are installed.

Run by hand with vLLM 0.33.0 and SGLang 0.5.23: their packages without their kernels are enough.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.models.huggingface.config import huggingface_config
from tests.models.huggingface.family_models import VARIANTS

PARSERS = ("vllm.transformers_utils.config", "sglang.srt.utils.hf_transformers.config")


@pytest.mark.parametrize("parser", PARSERS)
def test_an_engine_reads_the_configuration_of_every_family(parser: str, tmp_path: Path) -> None:
    get_config = pytest.importorskip(parser).get_config
    for name, model in VARIANTS.items():
        fields = huggingface_config(model, 64)
        folder = tmp_path / name.replace(" ", "-")
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(fields))
        read: Any = get_config(str(folder), trust_remote_code=False)
        text = getattr(read, "text_config", read)
        numbers = {key: value for key, value in fields.items() if isinstance(value, int) and hasattr(text, key)}
        numbers.pop("moe_layer_end_index", None)  # -1 is read as the number of the last layer
        assert {key: getattr(text, key) for key in numbers} == numbers, name
        assert len(numbers) > 5, name
