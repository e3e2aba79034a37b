"""Names of other trainers for our fields: Megatron-Core, TorchTitan, Primus, Hugging Face, nanochat.

`make docs` writes other_names.json from the tables of docs/coming-from.md (tools/other_names.py).
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path


def fields_of_other_name(name: str) -> tuple[str, ...]:
    """Paths of our fields for a name such as `--seq-length`, `training.seq_len` or `lr`; empty for an unknown one."""
    known, plain = _names(), _plain(name)
    return known.get(plain) or known.get(plain.rpartition(".")[2], ())


@cache
def _names() -> Mapping[str, tuple[str, ...]]:
    text = Path(__file__).with_name("other_names.json").read_text(encoding="utf-8")
    whole = {_plain(name): tuple(fields) for name, fields in json.loads(text).items()}
    last = {name.rpartition(".")[2]: fields for name, fields in whole.items()}
    return last | whole


def _plain(name: str) -> str:
    return name.lstrip("-").replace("-", "_")
