"""The Hugging Face hub: datasets, by name or in a folder that `datasets` reads or has written, and folders of weights.

On disk a dataset is memory-mapped Arrow with random access. Streamed, it stays on the network and comes in shards (see
`shards`): nothing is stored, and every rank reads all of it.

The fingerprint is of the size and some documents, evenly spaced; of a stream the first one. The newest revision on the
hub may change: set `data.revision` to pin one.
"""

import os.path
import re
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from threading import Thread
from types import ModuleType
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit
from urllib.request import getproxies

from penstock.base.errors import DataError
from penstock.data.documents import CorruptRecords, TextDocuments, checked_text
from penstock.data.shards import Shards
from penstock.data.sources import SplitFilter, fingerprint_of, require
from penstock.data.tokenizer_rules import Tokenizer

REACH_SECONDS = 3.0
"""Time limit for a first answer of the hub."""

_SAMPLES = 1024
_SAVED = ("state.json", "dataset_dict.json")
"""Files that `save_to_disk` writes."""


class DatasetName(NamedTuple):
    """Identifies a dataset."""

    dataset: str  # name on the hub, or a folder
    config: str  # empty for the default
    split: str
    revision: str  # empty for the newest one

    def __str__(self) -> str:
        return f"dataset {self.dataset}" + (f" ({self.config})" if self.config else "")


class DatasetOnDisk(TextDocuments):
    """The rows of a dataset on this machine; it is downloaded first if necessary.

    Raises a DataError if `datasets`, the dataset or its column is missing, or the dataset is empty.
    """

    def __init__(
        self, name: DatasetName, tokenizer: Tokenizer, *, text_field: str, keep: SplitFilter, corrupt: CorruptRecords
    ) -> None:
        self._name = name
        self._field = text_field
        rows = _load(name, streaming=False)
        _check_columns(name, rows.column_names, text_field)
        self._rows = rows.select_columns([text_field])
        if len(self._rows) == 0:
            raise _no_documents(name)
        step = max(1, len(self._rows) // _SAMPLES)
        # Rows for the fingerprint; all of a small dataset, whose column is read at once.
        samples = self._rows[0::step][text_field] if step == 1 else self._rows[list(range(0, len(self), step))]
        super().__init__(tokenizer, fingerprint_of(len(self._rows), samples), corrupt=corrupt, keep=keep)

    def __len__(self) -> int:
        return len(self._rows)

    def record(self, index: int) -> str:
        with _reading(self._name):
            value = self._rows[index][self._field]
        return checked_text(value, f"{self._name}, {self._name.split}: row {index}: column {self._field!a}")


class StreamedDataset(Shards):
    """The documents of a dataset that is read over the network, `block` neighbours together.

    Raises a DataError if `datasets`, the dataset or its field is missing, or the dataset is empty.
    """

    def __init__(
        self,
        name: DatasetName,
        tokenizer: Tokenizer,
        *,
        text_field: str,
        block: int,
        keep: SplitFilter,
        corrupt: CorruptRecords,
    ) -> None:
        self._name = name
        self._field = text_field
        rows = _load(name, streaming=True)
        with _reading(name):
            first = next(iter(rows), None)
        if first is None:
            raise _no_documents(name)
        _check_columns(name, list(first), text_field)
        self._rows = rows.select_columns([text_field]).with_format("arrow")
        content = fingerprint_of(self._rows.num_shards, name.config, name.split, name.revision, first[text_field])
        super().__init__(tokenizer, content, block=block, corrupt=corrupt, keep=keep)

    def __len__(self) -> int:
        return int(self._rows.num_shards)

    def blocks(self, shard: int, first: int) -> Iterator[Sequence[object]]:
        """Yields the documents of a shard in blocks, after `first` blocks."""
        rows = self._rows.shard(num_shards=len(self), index=shard)
        with _reading(self._name):
            for table in islice(rows.iter(batch_size=self.block), first, None):
                yield table.column(self._field).to_pylist()

    def place(self, shard: int, document: int) -> str:
        return f"{self._name}, {self._name.split}: document {document} of shard {shard}: field {self._field!a}"


def weights_of(source: Path) -> Path:
    """A folder of weights: `source` if it exists, else what the hub has under this name, downloaded once.

    Only safetensors, JSON and tokenizers are fetched. Raises a DataError if `huggingface_hub` is missing, or the hub
    cannot be reached or has no such name. Returns a path that cannot be a name, or whose first part is a folder here.
    """
    if source.exists() or source.parent.is_dir() or not _HUB_NAME.fullmatch(str(source)):
        return source
    hub = require("huggingface_hub", extra="huggingface", purpose=f"{source} is no folder here, and its download")
    reached = _hub_answers()
    try:
        return Path(hub.snapshot_download(str(source), allow_patterns=_WEIGHTS, ignore_patterns=_NO_WEIGHTS))
    except (OSError, ValueError, RuntimeError) as error:
        where = "it is no folder here, and the hub " + ("does not give it" if reached else "cannot be reached")
        fix = "correct ORG/NAME, or give a folder" if reached else "give a folder, or try again with a network"
        raise DataError(f"cannot fetch {source}: {where}", got=_first_line(error), fix=fix) from error


_HUB_NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_WEIGHTS = ["*.safetensors", "*.json", "tokenizer*", "*.model", "*.tiktoken"]
_NO_WEIGHTS = ["*/*", "consolidated*"]
"""Folders, and Mistral's second copy of the weights."""


def _load(name: DatasetName, *, streaming: bool) -> Any:
    datasets = _require("datasets")
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    _require("huggingface_hub.utils.logging").set_verbosity_error()
    _check_files(name)
    reached = os.path.exists(name.dataset) or _hub_answers()
    try:
        if not any(os.path.isfile(os.path.join(name.dataset, file)) for file in _SAVED):
            config, revision = name.config or None, name.revision or None
            return datasets.load_dataset(name.dataset, config, split=name.split, revision=revision, streaming=streaming)
        saved = datasets.load_from_disk(name.dataset)
    except _errors() as error:
        where = "" if reached else "the hub cannot be reached, and this machine has no copy: "
        raise DataError(
            f"cannot open {name}: {where}{_first_line(error)}",
            fix="correct data.dataset, data.dataset_config, data.split or data.revision, or see that it can be reached",
        ) from error
    splits = saved if isinstance(saved, dict) else {"train": saved}
    if name.split not in splits:
        raise DataError(f"{name} has no split {name.split}", allowed=", ".join(splits), fix="correct data.split")
    rows = splits[name.split]
    # One shard for each file of a saved dataset.
    return rows.to_iterable_dataset(num_shards=max(1, min(len(rows), len(rows.cache_files)))) if streaming else rows


def _check_files(name: DatasetName) -> None:
    """Refuse a folder with a pipe or a device, which `datasets` would wait for, by a DataError."""
    for folder, _, files in os.walk(name.dataset):
        for path in (os.path.join(folder, file) for file in files):
            if os.path.exists(path) and not os.path.isfile(path):
                raise DataError(f"cannot open {name}: {path}: it is a pipe or a device, no file", fix="remove it")


def _hub_answers() -> bool:
    """Whether the hub can be reached within REACH_SECONDS.

    If not, its libraries are switched to offline mode: they read their cache or fail at once. Otherwise they would
    retry for half a minute. With a proxy this check is skipped.
    """
    constants = _require("huggingface_hub.constants")
    url = urlsplit(constants.ENDPOINT)
    if constants.HF_HUB_OFFLINE or {"https", "http", "all"} & set(getproxies()):
        return not constants.HF_HUB_OFFLINE
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError), socket.create_connection((url.hostname, url.port or 443), REACH_SECONDS):
            answers.append(True)

    # In a thread: looking up the name has no timeout of its own.
    thread = Thread(target=connect, daemon=True)
    thread.start()
    thread.join(REACH_SECONDS)  # a thread without an answer is left behind
    for module in ("huggingface_hub.constants", "datasets.config") if not answers else ():
        if library := cast("Any", sys.modules.get(module)):
            library.HF_HUB_OFFLINE = True
    return bool(answers)


@contextmanager
def _reading(name: DatasetName) -> Iterator[None]:
    try:
        yield
    except _errors() as error:
        fix = "resume the run when the dataset can be reached"
        raise DataError(f"{name} cannot be read: {_first_line(error)}", fix=fix) from error


def _require(module: str) -> ModuleType:
    return require(module, extra="huggingface", purpose="data.source huggingface")


def _errors() -> tuple[type[Exception], ...]:
    """Returns the errors that `datasets` raises for missing or unreadable data."""
    exceptions, hub = _require("datasets.exceptions"), _require("huggingface_hub.errors")
    return OSError, ValueError, RuntimeError, exceptions.DatasetsError, hub.HfHubHTTPError


def _check_columns(name: DatasetName, columns: Sequence[str], text_field: str) -> None:
    if text_field not in columns:
        raise DataError(
            f"{name} has no column {text_field!a}",
            got=", ".join(map(ascii, columns[:10])) or "no column",
            fix="set data.text_field to the column with the text",
        )


def _no_documents(name: DatasetName) -> DataError:
    return DataError(f"split {name.split} of {name} is empty", fix="correct data.split")


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
