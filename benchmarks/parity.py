"""Every family beside the code of `transformers`: how far logits and gradients are apart, on tiny random models.

    python -m benchmarks.parity --output benchmarks/results/parity.json

The comparison is the tests' own (tests/models/huggingface/parity.py): float64 on a CPU, plain rows and packed ones. It
measures rounding, so it says what a correct model looks like and how much room the tests' tolerances leave.
"""

import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import transformers

from benchmarks import draws, record
from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.parity import DOCUMENTS, POSITIONS, ROWS, TOLERANCES, compare


def main() -> None:
    options, rows = record.parser(__doc__).parse_args(), list[dict[str, Any]]()
    draws.prepare()
    for name, config in VARIANTS.items():
        row: dict[str, Any] = {"model": name, "family": config.family}
        for kind in ("plain", "packed"):
            with tempfile.TemporaryDirectory() as folder:
                row[kind] = asdict(compare(config, Path(folder), packed=kind == "packed"))
        rows.append(row)
        record.show(row)
    shape = {"rows": ROWS, "positions": POSITIONS, "documents": DOCUMENTS}
    numbers = {"tolerances": TOLERANCES, "shape": shape, "models": rows}
    record.write(options, numbers, transformers=transformers.__version__)


if __name__ == "__main__":
    main()
