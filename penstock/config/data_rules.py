"""Rules between fields of `data`. Each docstring is the rule as users read it.

Fields of a source are in `data`, or in each part of `data.mixture`; most rules check all of these places.
"""

import re
from collections.abc import Iterator

from penstock.config.data import Documents
from penstock.config.problem import Problem
from penstock.config.run import Run
from penstock.config.schema import fields_of

FILE_SOURCES = ("text", "jsonl", "parquet", "packed")  # sources that read `files`
SYNTHETIC_SOURCES = ("synthetic-random", "synthetic-learnable")  # sources without text
_DATASET_FIELDS = ("dataset", "dataset_config", "split", "validation_split", "revision", "streaming")
_PART_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,49}")
BYTES_VOCABULARY = 257  # 256 values of a byte and the end of a document
_LEARNABLE_VOCABULARY = 5  # the synthetic language continues in one of 4 ways, and needs an end of document


def _places(run: Run) -> Iterator[tuple[str, Documents]]:
    """Every source of documents, with the path of its fields."""
    if not run.data.mixture:
        yield "data", run.data
    for name, part in run.data.mixture.items():
        yield f"data.mixture.{name}", part


def bytes_are_encoded(run: Run) -> bool:
    """Whether text is encoded with `data.tokenizer` bytes."""
    # Text, not tokens.
    is_encoded = any(documents.source not in (*SYNTHETIC_SOURCES, "packed") for _, documents in _places(run))
    return is_encoded and run.data.tokenizer == "bytes"


def a_mixture_is_of_parts_only(run: Run) -> Problem | None:
    """With `data.mixture`, fields of `data` that its parts have too, such as `data.source`, keep their defaults."""
    if not run.data.mixture:
        return None
    given = dict(run.data)  # values by field
    for name, field in fields_of(Documents).items():
        if given[name] != field.default:
            return Problem.from_line(
                f"data.{name} is given beside data.mixture, whose parts have their own; "
                f"fix: leave it out, or move it to data.mixture.{next(iter(run.data.mixture))}.{name}"
            )
    return None


def parts_have_a_name_and_weight(run: Run) -> Problem | None:
    """Names in `data.mixture` are letters, digits, dashes and underscores.

    Each `data.mixture.NAME.weight` is above 0.
    """
    for name, part in run.data.mixture.items():
        if not _PART_NAME.fullmatch(name):
            return Problem.from_line(
                f"data.mixture has a part without a plain name; got {name[:60]!r}; "
                "allowed: up to 50 letters, digits, '_' and '-', the first a letter or digit"
            )
        if part.weight == 0:
            return Problem(f"data.mixture.{name}.weight", "must be above 0", got="0", fix="or leave the part out")
    return None


def files_are_of_file_sources(run: Run) -> Problem | None:
    """`data.source` text, jsonl, parquet and packed need `data.files`; the same of parts of `data.mixture`.

    `data.files` and `data.validation_files` are for these sources only.
    """
    for path, documents in _places(run):
        reads, given = documents.source in FILE_SOURCES, documents.files or documents.validation_files
        if reads and not documents.files:
            return Problem.from_line(
                f"{path}.files is empty, but {path}.source {documents.source} reads files; "
                f"fix: set {path}.files to the files to train on"
            )
        if given and not reads:
            name = "files" if documents.files else "validation_files"
            return Problem.from_line(
                f"{path}.{name} is given, but {path}.source {documents.source} reads no files; "
                f"got {', '.join(given[:3])}; fix: set {path}.source to text, jsonl, parquet or packed"
            )
    return None


def held_out_text_is_not_trained_on(run: Run) -> Problem | None:
    """No file is in both `data.files` and `data.validation_files`, and `data.validation_split` is not `data.split`."""
    for path, documents in _places(run):
        # As they are written; globs are not expanded.
        shared = [name for name in documents.files if name in documents.validation_files]
        if shared:
            return Problem.from_line(
                f"{path}.validation_files has files of {path}.files: the model would be judged on what it learned; "
                f"got {', '.join(shared[:3])}; fix: take them out of one of the two"
            )
        if documents.source == "huggingface" and documents.validation_split == documents.split:
            return Problem.from_line(
                f"{path}.validation_split is {path}.split: the model would be judged on what it learned; "
                f"got {documents.split}; fix: leave it out to hold out a share of the documents"
            )
    return None


def datasets_have_a_name(run: Run) -> Problem | None:
    """`data.source` huggingface needs `data.dataset` and `data.split`; other sources have no field of a dataset."""
    for path, documents in _places(run):
        values = dict(documents)
        if documents.source == "huggingface":
            missing = next((name for name in ("dataset", "split") if not values[name]), None)
            if missing is not None:
                return Problem(f"{path}.{missing}", f"is empty, but {path}.source huggingface needs it")
            continue  # the rest is about other sources
        for name in _DATASET_FIELDS:
            if values[name] != fields_of(Documents)[name].default:
                return Problem.from_line(
                    f"{path}.{name} is given, but {path}.source {documents.source} is no dataset of Hugging Face; "
                    f"fix: leave it out, or set {path}.source to huggingface"
                )
    return None


def evaluation_has_text(run: Run) -> Problem | None:
    """`evaluation.rows` above 0 need held-out text: `data.validation_files`, or `data.validation_share` above 0."""
    is_held_out = run.data.validation_share > 0 or any(
        documents.validation_files or documents.validation_split or documents.source in SYNTHETIC_SOURCES
        for _, documents in _places(run)
    )
    if run.evaluation.rows == 0 or is_held_out:
        return None
    return Problem.from_line(
        "data.validation_share holds out no text for evaluation.rows; got 0; "
        "fix: raise it, give data.validation_files, or set evaluation.rows to 0"
    )


def vocabulary_holds_every_token(run: Run) -> Problem | None:
    """With `data.tokenizer` bytes, `model.vocab_size` is at least 257: 256 bytes and the end of a document.

    With `data.source` synthetic-learnable it is at least 5.
    """
    if bytes_are_encoded(run):
        option, least, why = "data.tokenizer bytes", BYTES_VOCABULARY, " (256 bytes and the end of a document)"
    elif run.data.source == "synthetic-learnable":
        option, least, why = "data.source synthetic-learnable", _LEARNABLE_VOCABULARY, ""
    else:
        return None
    if run.model.vocab_size >= least:
        return None
    return Problem.from_line(
        f"model.vocab_size is too small for {option}; got {run.model.vocab_size}; allowed: >= {least}{why}"
    )


def bytes_have_one_end(run: Run) -> Problem | None:
    """With `data.tokenizer` bytes, `data.end_of_document` stays empty; of packed tokens it may be an id in digits."""
    end = run.data.end_of_document
    packed = [part for _, part in _places(run) if part.source == "packed"]  # whose ids may be of any tokenizer
    if not end or run.data.tokenizer != "bytes" or (packed and end.isdecimal()):
        return None
    return Problem.from_line(
        "data.end_of_document names a token, but data.tokenizer bytes has its own end of a document; "
        f"got {run.data.end_of_document!r}; fix: leave it out, or set data.tokenizer to a tokenizer.json"
    )


def middles_are_of_text(run: Run) -> Problem | None:
    """`data.fill_in_middle` above 0 needs text: `data.source` is not packed and not synthetic.

    And it needs three tokens, which `data.tokenizer` bytes does not have.
    """
    if run.data.fill_in_middle == 0:
        return None
    for path, documents in _places(run):
        if documents.source == "packed" or documents.source in SYNTHETIC_SOURCES:
            return Problem.from_line(
                f"data.fill_in_middle cuts text, and {path}.source {documents.source} has tokens; "
                f"got {run.data.fill_in_middle:g}; fix: set it to 0, or train on the text itself"
            )
    if run.data.tokenizer != "bytes":
        return None
    return Problem.from_line(
        "data.fill_in_middle needs tokens before prefix, suffix and middle, which data.tokenizer bytes does not have; "
        "fix: set it to 0, or set data.tokenizer to a tokenizer.json"
    )


def middles_have_three_tokens(run: Run) -> Problem | None:
    """`data.fill_in_middle_tokens` are three different names, or none."""
    names = run.data.fill_in_middle_tokens
    if not names or len(names) == len({*names}) == 3:  # prefix, suffix, middle
        return None
    return Problem.from_line(
        "data.fill_in_middle_tokens must be three different names, of the tokens before prefix, suffix and middle; "
        f"got {', '.join(names)}"
    )
