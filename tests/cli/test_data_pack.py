"""`penstock data pack` and `penstock data tokenizer train`: what they write and say, and what they refuse."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from penstock.data.indexed_dataset import origin_of
from penstock.data.packed import open_packed
from penstock.data.sources import SplitFilter
from penstock.data.tokenizer import open_tokenizer
from tests.cli import answers

TEXTS = [f"the penstock feeds turbine {number}" for number in range(30)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text, "other": "x"}) + "\n" for text in TEXTS))
    return path


outcome = partial(answers.outcome, "data")


def packed_texts(prefix: Path) -> list[str]:
    source = open_packed([prefix], keep=SplitFilter(), vocab_size=100_000)
    assert source.tokenizer is not None
    return [source.tokenizer.decode(source.read(number)) for number in range(len(source))]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_lines_become_a_pair_of_files(corpus: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "packed" / "corpus"
    code, out, err = outcome("pack", corpus, "--output", prefix, "--tokenizer", "bytes", "--processes", 1)
    text_bytes = sum(map(len, TEXTS))
    assert (code, err) == (0, "")
    assert out.startswith(
        f"wrote {prefix}.bin and {prefix}.idx: 30 documents, {text_bytes + 30} tokens, {text_bytes} B"
    )
    assert "MB/s" in out
    assert "tokens/s" in out
    assert names(prefix.parent) == ["corpus.bin", "corpus.idx", "corpus.packed.json"]
    assert packed_texts(prefix) == TEXTS


def test_the_result_can_be_read_by_programs(corpus: Path, tmp_path: Path) -> None:
    words = ("pack", corpus, "--output", f"{tmp_path / 'a'}.bin", "--tokenizer", "bytes", "--processes", 2, "--json")
    code, out, _ = outcome(*words)
    told = json.loads(out)
    assert (code, told["documents"], told["prefix"], told["empty"]) == (0, 30, str(tmp_path / "a"), 0)
    assert told["tokens"] == len((tmp_path / "a.bin").read_bytes()) // 2  # two bytes a token


def test_files_can_be_documents_and_fields_have_names(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS[:3]):
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    prefix = tmp_path / "a"
    words = ("pack", tmp_path / "texts", "--output", prefix, "--tokenizer", "bytes", "--source", "text")
    assert outcome(*words, "--processes", 1)[0] == 0
    assert packed_texts(prefix) == TEXTS[:3]
    (tmp_path / "b.jsonl").write_text('{"body": "b"}')
    words = ("pack", tmp_path / "b.jsonl", "--output", tmp_path / "b", "--tokenizer", "bytes", "--text-field", "body")
    assert outcome(*words, "--processes", 1)[0] == 0
    assert packed_texts(tmp_path / "b") == ["b"]


def test_rows_of_a_table_are_packed(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": [*TEXTS, None]}), tmp_path / "a.parquet", row_group_size=7)
    words = ("pack", tmp_path / "a.parquet", "--source", "parquet", "--text-field", "body", "--tokenizer", "bytes")
    code, out, _ = outcome(*words, "--output", tmp_path / "a", "--corrupt", "skip", "--processes", 1)
    assert code == 0
    assert "1 corrupt document was left out" in out
    assert packed_texts(tmp_path / "a") == TEXTS


def test_corrupt_lines_stop_or_are_named(corpus: Path, tmp_path: Path) -> None:
    with corpus.open("ab") as file:
        file.write(b'{"text": "\xff"}\n{"text": ""}\n{"text": \n')  # no UTF-8, empty, cut
    words = ("pack", corpus, "--output", tmp_path / "out" / "a", "--tokenizer", "bytes", "--processes", 1)
    code, out, err = outcome(*words)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {corpus}:31 is not UTF-8")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists() or names(tmp_path / "out") == []
    code, out, _ = outcome(*words, "--corrupt", "skip")
    assert code == 0
    assert "1 empty document was left out\n2 corrupt documents were left out, all of them named in" in out
    assert f"{corpus}:31 is not UTF-8" in out
    origin = origin_of(tmp_path / "out" / "a")
    # An empty text is no fault.
    assert [fault.split(" ")[0] for fault in origin.left_out] == [f"{corpus}:31", f"{corpus}:33"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.json", "{}", "data.tokenizer t.json is not a tokenizer: "),
        ("t.model", "no model", "data.tokenizer t.model is not a tokenizer; allowed: a .model file of sentencepiece"),
        ("t.tiktoken", "IQ== 0", "data.tokenizer t.tiktoken is damaged; got no rank for byte 0"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_one_line(
    corpus: Path, name: str, content: str, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    Path(name).write_text(content)
    code, out, err = outcome("pack", corpus, "--output", "a", "--tokenizer", name, "--processes", 2)
    assert capfd.readouterr() == ("", ""), "the tokenizer's own library prints nothing"
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")
    assert names(corpus.parent) == ["corpus.jsonl", name]


STAYS_AFTER_THE_FIRST_WRITE = """
import signal, sys
from pathlib import Path
from penstock.cli.main import main
from penstock.data.indexed_dataset import IndexedDatasetWriter
write = IndexedDatasetWriter.write
def stay(*arguments):
    write(*arguments)
    Path("written").touch()
    signal.pause()
IndexedDatasetWriter.write = stay
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.often("2-130")
@pytest.mark.parametrize(("ended_by", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_leaves_no_file_and_no_process(corpus: Path, ended_by: signal.Signals, code: int) -> None:
    words = ["data", "pack", str(corpus), "--output", "out/a", "--tokenizer", "bytes"]
    with subprocess.Popen(
        [sys.executable, "-c", STAYS_AFTER_THE_FIRST_WRITE, *words, "--processes", "2"],
        start_new_session=True,  # a group, to which a terminal sends Ctrl-C
        stderr=subprocess.PIPE,
        # A job in the background ignores it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        while process.poll() is None and not Path("written").exists():
            time.sleep(0.01)
        assert names(Path("out"))
        os.killpg(process.pid, ended_by) if ended_by == signal.SIGINT else process.send_signal(ended_by)
        assert process.wait() == code, process.stderr.read().decode()
    assert names(Path("out")) == []
    while living_processes(process.pid):  # those that encode
        time.sleep(0.05)


def living_processes(group: int) -> list[int]:
    """Processes of a group that have not ended, from Linux's list."""
    living = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, its_group = path.read_text().rpartition(")")[2].split()[:3]
            living += [int(path.parent.name)] if int(its_group) == group and state != "Z" else []
    return living


def test_a_tokenizer_is_trained_and_packs(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "out" / "tokenizer.json"
    # 256 bytes, 2 special, 22 merges.
    words = ("tokenizer", "train", corpus, "--vocabulary", 280, "--output", path, "--special", "<|fim_prefix|>")
    code, out, err = outcome(*words)
    assert (code, err) == (0, "")
    assert out.startswith(f"wrote {path}: 280 tokens, <|endoftext|> ends a document\nnext:  penstock data pack ")
    trained = open_tokenizer(str(path))
    assert (trained.end_of_document, trained.token_id("<|fim_prefix|>")) == (0, 1)
    first = path.read_bytes()
    path.unlink()
    assert outcome(*words)[0] == 0
    assert path.read_bytes() == first  # training has no randomness
    words = ("pack", corpus, "--output", tmp_path / "a", "--tokenizer", path.parent, "--processes", 1)
    assert outcome(*words)[0] == 0
    assert packed_texts(tmp_path / "a") == TEXTS
