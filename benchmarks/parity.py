"""Every family beside the code of `transformers`: how far logits and gradients are apart, on tiny random models.

    python -m benchmarks.parity --output benchmarks/results/parity.json

The comparison is the tests' own (tests/models/huggingface/parity.py): float64 on a CPU, plain rows and packed ones. It
measures rounding, so it says what a correct model looks like and how much room the tests' tolerances leave.
"""

import argparse
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
import transformers

from benchmarks import record
from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.parity import DOCUMENTS, POSITIONS, ROWS, TOLERANCES, compare


def main() -> None:
    """Compare every variant and write what differs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    record.add_arguments(parser)
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    rows = []
    for name, config in VARIANTS.items():
        row: dict[str, object] = {"model": name, "family": config.family}
        for kind in ("plain", "packed"):
            with tempfile.TemporaryDirectory() as folder:
                row[kind] = asdict(compare(config, Path(folder), packed=kind == "packed"))
        rows.append(row)
        print(f"{name:<55}{row['plain']} {row['packed']}", flush=True)
    shape = {"rows": ROWS, "positions": POSITIONS, "documents": DOCUMENTS}
    environment = {"transformers": transformers.__version__}
    record.write(arguments, {"tolerances": TOLERANCES, "shape": shape, "models": rows}, **environment)


if __name__ == "__main__":
    main()
