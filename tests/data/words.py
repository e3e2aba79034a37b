"""A tokenizer for tests, of words and marks, and documents that name themselves."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.data.documents import CorruptRecords
from penstock.data.shards import Shards
from penstock.data.sources import SplitFilter, fingerprint_of
from penstock.data.tokenizer import ByteTokenizer, Tokenizer, open_tokenizer

MARKS = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


def letters(folder: Path) -> Tokenizer:
    """A tokenizer with a token for each printable character of ASCII, MARKS and an end of a document."""
    names = ["<|endoftext|>", *MARKS, *map(chr, range(32, 127))]
    model = {"type": "BPE", "vocab": {name: number for number, name in enumerate(names)}, "merges": []}
    added = [
        {"id": number, "content": name, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for number, name in enumerate(names[:4])
    ]  # fmt: skip
    (folder / "letters.json").write_text(json.dumps({"version": "1.0", "model": model, "added_tokens": added}))
    return open_tokenizer(str(folder / "letters.json"))


class InShards(Shards):
    """Documents in lists, a list for each shard. What is not a text is a corrupt record."""

    def __init__(
        self,
        shards: Sequence[Sequence[object]],
        *,
        block: int = 2,
        corrupt: CorruptRecords | None = None,
        keep: SplitFilter | None = None,
    ) -> None:
        super().__init__(
            ByteTokenizer(),
            fingerprint_of(shards),
            block=block,
            corrupt=corrupt or CorruptRecords(),
            keep=keep or SplitFilter(),
        )
        self._shards = shards
        self.opened: list[tuple[int, int]] = []

    def __len__(self) -> int:
        return len(self._shards)

    def blocks(self, shard: int, first: int) -> Iterator[Sequence[object]]:
        self.opened.append((shard, first))
        documents = self._shards[shard]
        for start in range(first * self.block, len(documents), self.block):
            yield documents[start : start + self.block]

    def place(self, shard: int, document: int) -> str:
        return f"document {document} of shard {shard}"
