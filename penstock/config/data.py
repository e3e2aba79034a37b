"""Sources of text, tokenizer, and processing before the model reads it; see docs/data.md."""

from functools import partial
from typing import Literal

from penstock.config.schema import Section, knob

SourceOfText = Literal["standard-library", "text", "jsonl", "parquet", "packed", "huggingface"]  # packed: its tokens
SourceName = Literal[SourceOfText, "synthetic-random", "synthetic-learnable"]

_share = partial(knob, low=0.0, high=1.0)


class Documents(Section):
    """One source of documents."""

    source: SourceName = knob(
        "standard-library",
        doc="Source of documents; standard-library is the source code of the running Python, packed is tokens.",
    )
    files: tuple[str, ...] = knob(
        (),
        doc="Files, folders or globs of `text` (a document each), `jsonl` (a document a line), `parquet` or Arrow "
        "(a document a row), `packed` (pairs of .bin and .idx). Text and lines may be .gz, .bz2, .xz or .zst.",
    )
    validation_files: tuple[str, ...] = knob(
        (), doc="The same, held out; none holds out a share of the documents of `files`."
    )
    text_field: str = knob("text", doc="Field of a JSON line, or column of a table or dataset, that holds the text.")
    dataset: str = knob("", doc="Hugging Face dataset by its name on the hub, or a folder that `datasets` can read.")
    dataset_config: str = knob("", doc="Configuration of the dataset, such as a language; empty is its default.")
    split: str = knob("train", doc="Split of the dataset to train on.")
    validation_split: str = knob("", doc="Split that is held out; empty holds out a share of the documents of `split`.")
    revision: str = knob("", doc="Revision of the dataset on the hub; empty is the newest, which may change.")
    streaming: bool = knob(False, doc="Read the dataset while training, with no copy of it on this machine.")


class MixturePart(Documents):
    """One part of a mixture, under a name of its own."""

    source: SourceOfText = knob(doc="As `data.source`.")
    weight: float = knob(doc="Share of the tokens that come from this part, over the sum of all weights.", low=0.0)


class Data(Documents):
    """Text."""

    mixture: dict[str, MixturePart] = knob(
        {}, doc="Parts by name, each with a weight; then the fields above are those of the parts."
    )
    validation_share: float = knob(
        0.02, doc="Share of documents held out; of too few documents, the end of each.", low=0.0, high=0.5
    )
    tokenizer: str = knob(
        "bytes",
        doc="`bytes`, or the path of a tokenizer.json, of a folder with one, of a sentencepiece .model, or of ranks of "
        "tiktoken with their pattern, as in `ranks.tiktoken:cl100k`; see docs/tokenizers-and-packing.md.",
    )
    end_of_document: str = knob(
        "", doc="Name of the token that ends a document; empty takes the tokenizer's. For packed sources also an id."
    )
    corrupt: Literal["stop", "skip"] = knob(
        "stop", doc="An unreadable record ends the run, or is skipped, counted and named."
    )
    fill_in_middle: float = _share(
        0.0, doc="Share of training documents whose middle comes last (fill-in-the-middle, arXiv 2207.14255)."
    )
    fill_in_middle_spm: float = _share(
        0.5, doc="Share of these in the order suffix, prefix, middle; the others are prefix, suffix, middle."
    )
    fill_in_middle_tokens: tuple[str, ...] = knob(
        (), doc="Names of the tokens before prefix, suffix and middle; empty finds the usual ones."
    )
    document_mask: bool = knob(
        False,
        doc="Attention stays inside a document, and positions restart at each. Where our kernel does not run "
        "(`kernels.attention`), each pass makes a mask, a byte for each pair of positions of a row, and attention "
        "needs more.",
    )
    shuffle: bool = knob(True, doc="Visit documents in another order each epoch, 32 side by side.")
    shuffle_block: int = knob(
        1024,
        doc="Neighbouring documents of a streamed dataset's shard that are put in random order.",
        unit="documents",
        low=1,
    )
    cache: str = knob("", doc="Folder for decompressed copies of files; empty is `cache` in record.folder.")
