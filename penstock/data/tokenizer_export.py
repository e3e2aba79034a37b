"""A run's tokenizer as files that `transformers.AutoTokenizer` loads, with the ids that the run was trained on.

bytes            a tokenizer.json with the 256 bytes as its vocabulary and <|endoftext|> as id 256
tokenizer.json   the same file, without a post-processor that adds tokens: training added none
others           none: what transformers makes of files of sentencepiece and tiktoken gives other ids for some texts
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from penstock.base.errors import DataError
from penstock.config.data import Data
from penstock.data.open import Vocabulary, vocabulary_of
from penstock.data.tokenizer import BYTES
from penstock.data.tokenizer_json import CONFIG_FILE, TOKENIZER_FILE, FileTokenizer

END_OF_BYTES = "<|endoftext|>"
"""Name of the id that ends a document of bytes."""


@dataclass(frozen=True, kw_only=True)
class ExportedTokenizer:
    """What an export says of its tokenizer.

    Attributes:
        end_of_document: the id that ends a document; None if tokens stand for no text.
        files: content of each file by name; empty if the tokenizer is not exported.
        why_not: the reason then, without a full stop; else empty.
    """

    end_of_document: int | None
    files: Mapping[str, str] = field(default_factory=dict)
    why_not: str = ""


def export_tokenizer(data: Data, context: int) -> ExportedTokenizer:
    """The tokenizer of a run for `transformers`.

    Args:
        data: settings of the run.
        context: most tokens of a row.
    """
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
    special = {"eos_token": end, "pad_token": end}
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
    """A byte-level `tokenizer.json` that merges nothing, so that the id of a byte is its value."""
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=_byte_names(), merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([tokenizers.AddedToken(END_OF_BYTES, special=True, normalized=False)])
    return str(tokenizer.to_str(pretty=True))


def _byte_names() -> dict[str, int]:
    """The character that byte-level vocabularies write for each byte: itself if it is printable Latin-1."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte) if byte in printable else chr(256 + others.index(byte)): byte for byte in range(256)}


def _without_added_tokens(setting: str) -> str:
    """The `tokenizer.json` of a run, as it is unless it adds tokens before or after a text."""
    path = Path(setting)
    try:
        content = (path / TOKENIZER_FILE if path.is_dir() else path).read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    tokenizer = tokenizers.Tokenizer.from_str(content)
    if tokenizer.encode("a", add_special_tokens=True).ids != tokenizer.encode("a", add_special_tokens=False).ids:
        fields = json.loads(content) | {"post_processor": None}
        return json.dumps(fields, indent=2, ensure_ascii=False)
    return content
