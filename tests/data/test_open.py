"""From the settings of a run to its text, the standard library included, and refused settings."""

import json
import re
import sysconfig
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DataError
from penstock.cli.main import main
from penstock.config.load import load_run
from penstock.config.run import Data, MixturePart
from penstock.data.evaluation import EvaluationRows, evaluation_batches
from penstock.data.mixture import Text
from penstock.data.open import open_standard_library, open_text
from penstock.data.sources import DocumentPart, Source, Split, SplitFilter, fingerprint_of, in_split
from penstock.data.text import PlainText
from penstock.data.tokenizer import ByteTokenizer


def open_split(split: Split) -> PlainText:
    return open_standard_library(split, ByteTokenizer(), validation_share=0.03)


def make_library(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(folder))
    folder.mkdir(exist_ok=True)
    return folder


def test_the_splits_share_no_file_and_cover_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(tmp_path / "lib", monkeypatch)
    for number in range(200):
        (library / f"module_{number}.py").write_text(f"number = {number}\n")
    sources = open_split("train"), open_split("validation")
    train, held_out = ({source.record(index) for index in range(len(source))} for source in sources)
    assert not train & held_out
    assert train | held_out == {f"number = {number}\n" for number in range(200)}
    assert len(held_out) > 0


def test_only_source_files_that_every_build_has_are_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    library = make_library(tmp_path / "lib", monkeypatch)
    others = "notes.txt", "__pycache__/b.py", "site-packages/numpy/core.py", "dist-packages/apt.py", "sitecustomize.py"
    built = "config-3.11-x86_64-linux-gnu/python-config.py", "_sysconfigdata__linux_x86_64-linux-gnu.py"
    for name in ("b.py", "a/z.py", "a.py", "a/tests/test_z.py", *others, *built):
        path = library / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (library / "empty.py").touch()
    (library / "latin.py").write_bytes(b"# -*- coding: latin-1 -*-\n# caf\xe9\n")
    source = open_standard_library("train", ByteTokenizer(), validation_share=0.0)
    assert [source.record(index) for index in range(len(source))] == ["a/tests/test_z.py", "a/z.py", "a.py", "b.py"]


def test_two_machines_with_the_same_files_have_the_same_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fingerprints = set()
    for name in ("first", "second"):
        library = make_library(tmp_path / name, monkeypatch)
        for number in reversed(range(20)) if name == "second" else range(20):
            (library / f"module_{number}.py").write_text(f"number = {number}\n")
        fingerprints.add(open_split("train").fingerprint)
    assert len(fingerprints) == 1


def test_a_python_without_sources_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_library(tmp_path / "lib", monkeypatch)
    with pytest.raises(DataError, match=r'this Python has no source files in .*lib; fix: set data.source to "text"'):
        open_split("train")


def opened(data: Data, split: Split, *, vocab_size: int = 257, cache: Path = Path("unused")) -> Text:
    return open_text(data, split, vocab_size=vocab_size, seed=0, cache=cache)


def open_files(source: Any, split: Split, files: list[str], held_out: tuple[str, ...] = (), share: float = 0.3) -> Any:
    data = Data(source=source, files=tuple(files), validation_files=held_out, validation_share=share)
    (part,) = opened(data, split).parts
    return part.documents


def contents(source: Source) -> list[bytes]:
    return [bytes(source.read(index).tolist()) for index in range(len(source))]


@pytest.fixture
def lines(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps({"text": f"document {number}"}) for number in range(40)))
    return str(path)


@pytest.fixture
def plain(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{number}.txt" for number in range(40)]
    for number, path in enumerate(paths):
        path.write_text(f"text {number}")
    return [str(path) for path in paths]


@pytest.mark.parametrize("source", ["standard-library", "synthetic-random", "synthetic-learnable"])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_sources_that_need_no_files_open(source: Any, split: Split) -> None:
    (part,) = opened(Data(source=source), split, vocab_size=300).parts
    assert len(part.documents) > 0
    assert part.documents.read(0).max() < part.documents.vocab_size <= 300


def test_lines_are_split_by_content_whatever_their_order(lines: str) -> None:
    train, validation = (contents(open_files("jsonl", split, [lines])) for split in ("train", "validation"))
    assert sorted(train + validation) == sorted(f"document {number}".encode() for number in range(40))
    assert 4 <= len(validation) <= 20
    path = Path(lines)
    path.write_text("\n".join(reversed(path.read_text().split("\n"))))
    assert contents(open_files("jsonl", "validation", [lines])) == validation[::-1]


def in_one_document(kind: str, folder: Path, text: str) -> tuple[str, str]:
    """Source and files of a corpus that is one document, or a few lines of it."""
    path = folder / f"book.{kind}"
    if kind == "txt":
        path.write_text(text)
        return "text", str(path)
    lines = folder / "book.jsonl"
    lines.write_text("".join(json.dumps({"text": part}) + "\n" for part in (text[:3000], text[3000:])))
    if kind == "jsonl":
        return "jsonl", str(lines)
    assert main(["data", "pack", str(lines), "--tokenizer", "bytes", "--output", str(folder / "book")]) == 0
    return "packed", str(folder / "book")


@pytest.mark.parametrize("kind", ["txt", "jsonl", "packed"])
def test_few_documents_are_divided_and_their_ends_are_held_out(kind: str, tmp_path: Path) -> None:
    text = "".join(f"{number} bottles of beer on the wall, caf\u00e9. " for number in range(300))
    source, file = in_one_document(kind, tmp_path, text)
    train, validation = (open_files(source, split, [file], share=0.02) for split in ("train", "validation"))
    whole = [b"".join(pair) for pair in zip(contents(train), contents(validation), strict=True)]
    assert b"".join(whole).decode() == text, "nothing is in both, and nothing is lost"
    ends = [len(end) for end in contents(validation)]
    assert min(ends) >= 250  # 256 characters or tokens of a document are held out
    assert sum(ends) < 0.1 * len(text)
    assert [train.bytes_per_token(index).sum() for index in range(len(train))] == [*map(len, contents(train))]
    assert train.fingerprint != validation.fingerprint
    assert train.fingerprint != open_files(source, "train", [file], share=0.05).fingerprint
    assert contents(open_files(source, "train", [file], share=0.0)) == whole


def test_a_document_of_a_few_letters_gives_a_quarter(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("abcdefgh")
    files = [str(tmp_path / "a.txt")]
    assert contents(open_files("text", "train", files, share=0.01)) == [b"abcdef"]
    assert contents(open_files("text", "validation", files, share=0.01)) == [b"gh"]


def test_separate_validation_files_leave_all_files_to_training(plain: list[str]) -> None:
    own = tuple(plain[30:])
    assert len(open_files("text", "train", plain[:30], held_out=own)) == 30
    assert len(open_files("text", "validation", plain[:30], held_out=own)) == 10


def test_a_folder_and_a_glob_stand_for_their_files(plain: list[str]) -> None:
    folder = str(Path(plain[0]).parent)
    whole = open_files("text", "train", [folder], share=0.0)
    assert len(whole) == 40
    some = contents(open_files("text", "train", [f"{folder}/1?.txt"], share=0.0))
    assert some == [f"text {number}".encode() for number in range(10, 20)]
    assert open_files("text", "train", [f"{folder}/*.txt", plain[3]], share=0.0).fingerprint == whole.fingerprint


def test_a_file_in_both_splits_is_refused(plain: list[str]) -> None:
    again = plain[0].replace("0.txt", "./0.txt")
    with pytest.raises(DataError, match=r"0\.txt is in data\.files and in data\.validation_files; fix: take it out"):
        open_files("text", "train", plain, held_out=(again,))
    with pytest.raises(DataError, match=r"39\.txt is in data\.files and in data\.validation_files"):
        open_files("text", "train", [str(Path(plain[0]).parent)], held_out=(plain[39],))


def test_a_split_without_a_document_and_ids_outside_the_vocabulary_of_the_model_are_refused(plain: list[str]) -> None:
    told = r"the validation split of data holds no document; got data\.validation_share 0; fix: raise"
    with pytest.raises(DataError, match=told):
        open_files("text", "validation", plain, share=0.0)
    told = "data.tokenizer bytes has token ids outside the model's vocabulary; got ids up to 256 .* vocabulary of 256"
    with pytest.raises(DataError, match=f"{told}; fix: give the model a vocabulary of 257 or more"):
        opened(Data(), "train", vocab_size=256)


@pytest.fixture
def mixture(lines: str, plain: list[str]) -> dict[str, MixturePart]:
    return {
        "web": MixturePart(source="jsonl", files=(lines,), weight=3.0),
        "code": MixturePart(source="text", files=tuple(plain), weight=1.0),
    }


def test_each_part_of_a_mixture_is_split_by_the_same_rule(mixture: dict[str, MixturePart]) -> None:
    train, held_out = (opened(Data(mixture=mixture, validation_share=0.3), split) for split in ("train", "validation"))
    assert [(part.name, part.weight) for part in held_out.parts] == [("web", 3.0), ("code", 1.0)]
    for one, other in zip(train.parts, held_out.parts, strict=True):
        assert len(one.documents) + len(other.documents) == 40
    web, code = (len(part.documents) for part in train.parts)
    assert str(train) == f"{web} documents of web, {code} documents of code"


def test_without_a_share_only_parts_with_files_of_their_own_are_held_out(
    mixture: dict[str, MixturePart], plain: list[str]
) -> None:
    update = {"files": tuple(plain[:30]), "validation_files": tuple(plain[30:])}
    mixture["code"] = mixture["code"].model_copy(update=update)
    (part,) = opened(Data(mixture=mixture, validation_share=0.0), "validation").parts
    assert (part.name, len(part.documents)) == ("code", 10)


def test_a_part_of_a_mixture_that_holds_out_no_text_is_left_out_of_evaluations(
    mixture: dict[str, MixturePart], tmp_path: Path
) -> None:
    """If all do, nothing can be evaluated; to train, each part needs text."""
    (tmp_path / "short.jsonl").write_text('{"text": "a"}')
    mixture["short"] = MixturePart(source="jsonl", files=(str(tmp_path / "short.jsonl"),), weight=1.0)

    def evaluated(parts: dict[str, MixturePart]) -> EvaluationRows:
        text = opened(Data(mixture=parts, validation_share=0.1), "validation")
        return evaluation_batches(text, rows=1, sequence_length=8, limit_rows=8, document_mask=False)

    rows, others = (evaluated(parts) for parts in (mixture, {name: mixture[name] for name in ("web", "code")}))
    assert (rows.tokens, rows.text_bytes) == (others.tokens, others.text_bytes)
    with pytest.raises(DataError, match="the validation data hold no text: .*; fix: .* hold out nothing: evaluation"):
        evaluated({"short": mixture["short"]})


def test_an_error_names_the_part(mixture: dict[str, MixturePart]) -> None:
    mixture["web"] = mixture["web"].model_copy(update={"files": ("nothing/*.jsonl",)})
    with pytest.raises(DataError, match=r"data\.mixture\.web\.files: the glob nothing/\*\.jsonl has no file"):
        opened(Data(mixture=mixture), "train")


def test_held_out_text_is_never_cut_for_fill_in_the_middle(lines: str, tmp_path: Path) -> None:
    names = {"[UNK]": 0, "<p>": 1, "<s>": 2, "<m>": 3, "</s>": 4}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps({"model": {"type": "WordLevel", "vocab": names, "unk_token": "[UNK]"}}))
    middle = {"fill_in_middle": 1.0, "fill_in_middle_tokens": ("<p>", "<s>", "<m>")}
    data = Data(source="jsonl", files=(lines,), tokenizer=str(path), **middle)
    assert opened(data, "train").parts[0].middle is not None
    assert opened(data, "validation").parts[0].middle is None
    missing = data.model_copy(update={"fill_in_middle_tokens": ("<p>", "<s>", "<x>")})
    with pytest.raises(DataError, match=r"tokenizer\.json has no token <x>; fix: correct data\.fill_in_middle_tokens"):
        opened(missing, "train")
    with pytest.raises(DataError, match="has no tokens for fill-in-the-middle"):
        opened(data.model_copy(update={"fill_in_middle_tokens": ()}), "train")


PAGE = Path(__file__).resolve().parents[2] / "docs" / "data.md"
BLOCKS = re.findall(r"^```toml\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_settings_that_are_shown_can_be_loaded(tmp_path: Path, block: str) -> None:
    path = tmp_path / "shown.toml"
    path.write_text(f'preset = "debug"\n{block}', encoding="utf-8")
    assert load_run(str(path)).name == "shown"


def test_settings_are_shown() -> None:
    assert len(BLOCKS) >= 4


@given(st.binary(), st.floats(0, 0.99))
def test_a_document_is_in_one_split_exactly(key: bytes, share: float) -> None:
    assert in_split("train", key, share) != in_split("validation", key, share)


def test_the_split_is_the_same_forever() -> None:
    held_out = [number for number in range(100) if in_split("validation", str(number).encode(), 0.05)]
    assert held_out == [29, 72, 90, 99], "a change of the hash moves held-out text into training"


def test_the_share_is_met_and_a_larger_share_only_adds() -> None:
    keys = [str(number).encode() for number in range(4000)]
    small = {key for key in keys if in_split("validation", key, 0.05)}
    large = {key for key in keys if in_split("validation", key, 0.2)}
    assert small < large
    assert 150 < len(small) < 250
    assert not any(in_split("validation", key, 0.0) for key in keys)


def test_fingerprints_fit_an_int64_and_see_where_parts_end() -> None:
    assert 0 <= fingerprint_of("x") < 2**56
    assert fingerprint_of(b"ab", b"c") != fingerprint_of(b"a", b"bc")
    assert fingerprint_of(1, "a") == fingerprint_of(1, "a")


def test_fingerprints_of_split_settings_never_change() -> None:
    """Checkpoints hold them: names of classes have no part in them."""
    parts = SplitFilter("train", 0.05).identity(), DocumentPart("validation", 0.05).identity()
    assert fingerprint_of(*parts) == 48966791030401258
