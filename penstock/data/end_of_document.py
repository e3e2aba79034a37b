"""Which token of a vocabulary ends a document."""

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.base.errors import DataError

END_OF_DOCUMENT_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")
"""Tokens that end a document for GPT-2, Llama 2, Llama 3 and DeepSeek; the first that a tokenizer has is taken."""


def find_end_of_document(
    token_id: Callable[[str], int | None],
    name: str | None,
    path: str | Path,
    usual: Sequence[str] = END_OF_DOCUMENT_NAMES,
) -> int:
    """Returns the id of the token that ends a document.

    Args:
        token_id: gives the id of a token by its name, None if there is no such token.
        name: of the token, if the user says it; else None or empty.
        path: of the tokenizer.
        usual: names to look for if the user says none.

    Raises:
        DataError: there is no such token.
    """
    names = (name,) if name else usual
    for candidate in names:
        found = token_id(candidate)
        if found is not None:
            return found
    looked_for = ", ".join(ascii(candidate) for candidate in names)
    raise DataError(
        f"data.tokenizer {path} has no end-of-document token (looked for {looked_for})",
        fix="set data.end_of_document to a token of this tokenizer",
    )
