"""What an absent key of `config.json` means: the defaults of each family's configuration class in `transformers`."""

import json
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from penstock.models.huggingface.families import FAMILIES

_NO_EFFECT = {"use_cache", "pretraining_tp", "router_aux_loss_coef", "output_router_logits", "rope_parameters"}
"""On logits; the rotary settings have a table of their own."""


def config_defaults() -> str:
    """penstock/models/huggingface/config_defaults.json."""
    from transformers import CONFIG_MAPPING, PreTrainedConfig, logging

    logging.set_verbosity_error()
    common = {one.name for one in fields(PreTrainedConfig)} | _NO_EFFECT
    tables: dict[str, Any] = {}
    for family in FAMILIES.values():
        kind = CONFIG_MAPPING[family.model_type]
        renamed = {
            (field if alias in family.values else alias): (alias if alias in family.values else field)
            for alias, field in kind.attribute_map.items()
        }
        defaults = {
            renamed.get(name, name): one.default
            for one in fields(kind)
            if (name := one.name) not in common and not name.endswith("_token_id")
        }
        defaults.pop("model_max_length", None)  # of a family without rotary embedding
        tables[family.model_type] = {
            "defaults": {key: None if value is MISSING else value for key, value in defaults.items()},
            "nullable": sorted(
                {renamed.get(one.name, one.name) for one in fields(kind) if "None" in str(one.type)} & defaults.keys()
            ),
            "renamed": renamed,
            "rope": getattr(kind(), "rope_parameters", None) or {},
        }
    lines = [f"{json.dumps(name)}: {{\n{rows}\n}}" for name, table in tables.items() for rows in (_rows(table),)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _rows(table: dict[str, Any]) -> str:
    return ",\n".join(f" {json.dumps(name)}: {json.dumps(row, sort_keys=True)}" for name, row in table.items())


if __name__ == "__main__":
    path = Path(__file__).resolve().parents[1] / "penstock/models/huggingface/config_defaults.json"
    path.write_text(config_defaults(), encoding="utf-8")
