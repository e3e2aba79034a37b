"""The vocabularies of sentencepiece: a `.model` file, as of Llama 2, Mistral 7B and T5.

Encoding is the library's own, with what the file says of normalization, of a space before the text, and of characters
that it does not know. Control symbols (`</s>`) are never made from text that spells them. User-defined symbols always
are: that is what they are for. So a user-defined symbol cannot end documents.
"""

from pathlib import Path

import numpy as np

from penstock.base.errors import DataError
from penstock.base.files import MOST_JSON_BYTES, read_bounded
from penstock.data.end_of_document import find_end_of_document
from penstock.data.optional import require
from penstock.data.sources import Tokens, fingerprint_of
from penstock.data.token_bytes import bytes_between, bytes_by_repeating


class SentencePieceTokenizer:
    """The tokenizer that a `.model` file of sentencepiece describes."""

    def __init__(self, path: str | Path, *, end_of_document: str | None = None) -> None:
        """Reads the file.

        Args:
            path: a `.model` file.
            end_of_document: name of the control symbol that ends a document; None or empty takes the one that the file
                calls the end of a sentence.

        Raises:
            DataError: the library or the file is missing, the file is no such model, or it has no such symbol.
        """
        library = require("sentencepiece", extra="sentencepiece", purpose=f"data.tokenizer {path}")
        content = _read(Path(path))
        try:
            self._processor = library.SentencePieceProcessor(model_proto=content)
            self.vocabulary_size = self._processor.piece_size()
            # A damaged file may be a model all the same, with pieces that are no text.
            self._processor.id_to_piece(list(range(self.vocabulary_size)))
        except (RuntimeError, UnicodeDecodeError) as error:
            raise _no_model(path) from error
        self.end_of_document = self._find_end(end_of_document, path)
        self.fingerprint = fingerprint_of("sentencepiece", content, self.end_of_document)

    def encode(self, text: str) -> Tokens:
        """Returns the ids, int32, with no token added before or after."""
        return np.asarray(self._processor.encode(text.encode(), return_type="numpy"))

    def decode(self, tokens: Tokens) -> str:
        """Returns the text of the ids; control symbols are left out, unknown characters show as the file says."""
        known = tokens[tokens < self.vocabulary_size]
        return str(self._processor.decode(known.tolist()))

    def bytes_per_token(self, text: str) -> Tokens:
        """Returns int64; of several tokens that share a character, the last has its bytes (see `bytes_between`)."""
        content = text.encode()
        found = self._processor.encode(content, return_type="offset_mapping", return_bytes=True)
        return bytes_between([end for _, end in found["offsets"]], len(content))

    def bytes_of(self, tokens: Tokens) -> Tokens:
        """Returns what `bytes_per_token` gives for the text of the tokens."""
        return bytes_by_repeating(self, tokens)

    def token_id(self, name: str) -> int | None:
        """Returns the id of a piece, None if it has none of its own."""
        found = int(self._processor.piece_to_id(name))
        return None if found == self._processor.unk_id() else found

    def _find_end(self, name: str | None, path: str | Path) -> int:
        stated = int(self._processor.eos_id())
        if not name and stated >= 0:
            return stated
        found = find_end_of_document(self.token_id, name, path)
        if not self._processor.is_control(found):
            raise DataError(
                f"data.tokenizer {path} makes its token {self._processor.id_to_piece(found)} from text that spells it: "
                "it cannot end documents",
                fix="set data.end_of_document to a control symbol",
            )
        return found


def _read(path: Path) -> bytes:
    try:
        content = read_bounded(path, MOST_JSON_BYTES)
    except OSError as error:
        raise DataError(f"cannot read data.tokenizer {path}: {error.strerror}", fix="give a .model file") from error
    if not content:
        raise _no_model(path)
    return content


def _no_model(path: str | Path) -> DataError:
    return DataError(f"data.tokenizer {path} is not a tokenizer", allowed="a .model file of sentencepiece")
