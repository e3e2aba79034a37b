"""Tokenizers as files: trained on texts, or exported from a run for `transformers.AutoTokenizer`.

Training makes a byte-level BPE (arXiv 1508.07909) with GPT-2's pattern, by the library `tokenizers`. Every byte has a
token, so any text can be encoded and decoded without loss. The same texts in the same order give the same file.

An export gives the ids of the run:

    bytes            a tokenizer.json with the 256 bytes as its vocabulary and <|endoftext|> as id 256
    tokenizer.json   the same file, without a post-processor that adds tokens: training added none
    others           none: transformers converts sentencepiece and tiktoken files to other ids for some texts
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.base.errors import DataError, system_errors
from penstock.base.files import write_whole
from penstock.config.run import Data
from penstock.data.open import Vocabulary, vocabulary_of
from penstock.data.tokenizer import BYTES, CONFIG_FILE, TOKENIZER_FILE, FileTokenizer

END_OF_DOCUMENT = "<|endoftext|>"
"""First special token of a trained tokenizer (id 0, which `open_tokenizer` finds by name); name of exported id 256."""

_BYTES = 256


def train_tokenizer(
    texts: Iterable[str],
    path: Path,
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    show_progress: bool = False,
) -> int:
    """Writes a new `tokenizer.json`, whole or not at all, and returns the tokens of the vocabulary.

    Small texts give fewer than `vocab_size`, which includes all 256 bytes, the end of a document, and after it the
    special tokens. Raises a DataError if the vocabulary is too small, there is no text, or the file exists or cannot be
    written.
    """
    special = list(dict.fromkeys([END_OF_DOCUMENT, *special_tokens]))  # each once
    least = _BYTES + len(special)
    if vocab_size < least:
        allowed = f">= {least} (256 bytes and {len(special)} special tokens)"
        raise DataError("the vocabulary is too small", got=vocab_size, allowed=allowed)
    if path.exists():
        raise DataError(f"{path} is there already", fix="give another name, or remove it")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=show_progress,
    )
    tokenizer.train_from_iterator((text for text in texts if text), trainer)
    trained = tokenizer.get_vocab_size()
    if trained == least < vocab_size:  # nothing was merged
        raise DataError("no two characters of the texts stand side by side", fix="give more text to train on")
    _write(path, tokenizer.to_str(pretty=True))
    return trained


def _write(path: Path, content: str) -> None:
    with system_errors(DataError, f"cannot write {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)


@dataclass(frozen=True, kw_only=True)
class ExportedTokenizer:
    """The tokenizer of a run in the files of `transformers`."""

    end_of_document: int | None  # None if tokens have no text
    files: Mapping[str, str] = field(default_factory=dict)  # content by name
    why_not: str = ""  # the reason if there are no files


def export_tokenizer(data: Data, context: int) -> ExportedTokenizer:
    try:
        vocabulary = vocabulary_of(data)
        if vocabulary.setting != BYTES and not isinstance(vocabulary.tokenizer, FileTokenizer):
            return ExportedTokenizer(
                end_of_document=vocabulary.end_of_document,
                why_not=f"transformers would give other ids for some texts; encode with {vocabulary.setting} itself",
            )
        tokenizer = _byte_tokenizer() if vocabulary.setting == BYTES else _without_added_tokens(vocabulary.setting)
    except DataError as error:
        return ExportedTokenizer(end_of_document=None, why_not=str(error))
    return ExportedTokenizer(end_of_document=vocabulary.end_of_document, files=_files(vocabulary, tokenizer, context))


def _files(vocabulary: Vocabulary, tokenizer: str, context: int) -> dict[str, str]:
    end = tokenizers.Tokenizer.from_str(tokenizer).id_to_token(vocabulary.end_of_document)
    special = {"eos_token": end, "pad_token": end}  # names of the same token
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
    }
    if vocabulary.setting == BYTES:
        settings["split_special_tokens"] = True  # text that spells <|endoftext|> is bytes like any other
    generation = {"eos_token_id": vocabulary.end_of_document, "pad_token_id": vocabulary.end_of_document}
    return {
        TOKENIZER_FILE: tokenizer,
        CONFIG_FILE: json.dumps(settings, indent=2) + "\n",
        "special_tokens_map.json": json.dumps(special, indent=2) + "\n",
        "generation_config.json": json.dumps(generation, indent=2) + "\n",
    }


def _byte_tokenizer() -> str:
    """A byte-level `tokenizer.json` without merges, so that the id of a byte is its value."""
    # In byte-level vocabularies a byte is its own character if that is printable Latin-1, else one from 256 on.
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    names = {chr(byte) if byte in printable else chr(256 + others.index(byte)): byte for byte in range(256)}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=names, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_DOCUMENT, special=True, normalized=False)])
    return tokenizer.to_str(pretty=True)


def _without_added_tokens(setting: str) -> str:
    """The `tokenizer.json` of a run, without a post-processor that adds tokens."""
    path = Path(setting)
    with system_errors(DataError, f"cannot read {path}"):
        content = (path / TOKENIZER_FILE if path.is_dir() else path).read_text(encoding="utf-8")
    tokenizer = tokenizers.Tokenizer.from_str(content)
    # Any text shows whether the post-processor adds tokens.
    if tokenizer.encode("a", add_special_tokens=True).ids != tokenizer.encode("a", add_special_tokens=False).ids:
        fields = json.loads(content) | {"post_processor": None}
        return json.dumps(fields, indent=2, ensure_ascii=False)
    return content
