"""Warnings before a run: one line on standard error, of what is allowed and hardly meant."""

import sys

from penstock.config.data_rules import bytes_are_encoded
from penstock.config.run import Run

BYTES_IDS = 257
"""256 values of a byte and the end of a document."""


def warn(message: str) -> None:
    """Print a warning, in one line."""
    print(f"warning: {' '.join(message.split())}", file=sys.stderr)


def warn_of_unfilled(run: Run) -> None:
    """Warn of a vocabulary of which the tokenizer fills less than half, as far as that is known of no file."""
    if not bytes_are_encoded(run) or run.model.vocab_size < 2 * BYTES_IDS:
        return
    library = run.data.source == "standard-library" and not run.data.mixture
    text = " and data.source standard-library is 30 MB of Python" if library else ""
    own = ", and data.source and data.files to your text" if library else ""
    warn(
        f"data.tokenizer bytes has {BYTES_IDS} ids of model.vocab_size {run.model.vocab_size:,}: the others are never "
        f"trained{text}; fix: set data.tokenizer to the model's tokenizer{own}, or model.vocab_size={BYTES_IDS}"
    )
