"""Trains a tokenizer on texts: byte-level BPE (arXiv 1508.07909) with GPT-2's cut of text, by the library `tokenizers`.

Every byte has a token from the start, so any text can be encoded and comes back as it was. The same texts in the same
order give the same file.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.base.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
"""The first special token of a trained tokenizer, id 0; `open_tokenizer` finds it by its name."""

_BYTES = 256


def train_tokenizer(
    texts: Iterable[str],
    path: Path,
    *,
    vocabulary_size: int,
    special_tokens: Sequence[str] = (),
    show_progress: bool = False,
) -> int:
    """Writes a `tokenizer.json`, whole or not at all.

    Args:
        texts: to train on, at least one that is not empty.
        path: of the file; must not be there yet.
        vocabulary_size: tokens, all 256 bytes and the special tokens among them; fewer if the texts have no more.
        special_tokens: more of them, such as those of fill-in-the-middle, with ids behind the end of a document.
        show_progress: draw bars on stderr.

    Returns:
        Tokens of the vocabulary.

    Raises:
        DataError: the vocabulary is too small, there is no text, or the file is there or cannot be written.
    """
    special = list(dict.fromkeys([END_OF_DOCUMENT, *special_tokens]))
    if vocabulary_size < _BYTES + len(special):
        raise DataError(
            "the vocabulary is too small",
            got=vocabulary_size,
            allowed=f">= {_BYTES + len(special)} (256 bytes and {len(special)} special tokens)",
        )
    if path.exists():
        raise DataError(f"{path} is there already", fix="give another name, or remove it")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    filled = (text for text in texts if text)
    tokenizer.train_from_iterator(filled, trainer)
    trained = tokenizer.get_vocab_size()
    if trained == _BYTES + len(special) < vocabulary_size:
        raise DataError("no two characters of the texts stand side by side", fix="give more text to train on")
    _write(path, tokenizer.to_str(pretty=True))
    return int(trained)


def _write(path: Path, content: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(content, encoding="utf-8")
            draft.replace(path)
        finally:
            draft.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}") from error
