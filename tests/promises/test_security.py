"""SECURITY.md: a test for each sentence of its list, which is the first line of the test's docstring."""

import gzip
import json
import os
import re
import shlex
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
import yaml
from datasets import Dataset

from penstock.base import child
from penstock.base.errors import CheckpointError, ConfigError, DataError, TraceError
from penstock.base.files import MOST_JSON_BYTES, MOST_TOML_BYTES, draft_of, most_unpacked, open_to_append, write_whole
from penstock.config.load import dump_toml, load_run
from penstock.config.run import Record
from penstock.data import tables
from penstock.data.text import JsonLines
from penstock.data.tokenizer import ByteTokenizer
from penstock.parallel.launch import local
from penstock.report.figure import Figure, plotly_json
from penstock.report.run_evidence import gather
from penstock.report.run_page import run_page
from penstock.train import manifest as manifest_module
from penstock.train.manifest import FACTS, check_files, read_manifest
from penstock.train.run_folder import RunFolder
from tests import warm
from tests.cli import answers
from tests.data.vocabularies import json_file
from tests.models.families import save_huggingface, tiny_decoder
from tests.models.huggingface.family_models import VARIANTS
from tests.report.made_runs import run_folder
from tests.trace.tiny import load_trace
from tests.train.tiny_run import byte_run, random_model, save_run, tiny_run

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "</script><a href='javascript:alert(1)'>x"
NAMES = ("a\n#SBATCH --wrap=x", "a$(touch x)", "a`touch x`", "a;b", "a 'b", 'a"b', "a\x1b[2J", "")

PICKLES = re.compile(
    r"^\s*(?:import|from) (?:pickle|cPickle|dill|shelve|marshal|cloudpickle|joblib)\b|\btorch\.load\(|allow_pickle=True"
    r"|_object_list\(|_object\(|\bPipe\(|ProcessPoolExecutor\(|multiprocessing\.(?:Queue|Pool|Manager)",
    re.MULTILINE,
)


def test_the_list_and_the_tests_are_the_same() -> None:
    told = re.findall(r"^- (.*(?:\n  .*)*)$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    tests = [test for name, test in globals().items() if name.startswith("test_") and test.__doc__]
    assert [test.__doc__.split("\n\n")[0] for test in tests] == told


def watched(words: list[str], noticed: str) -> int:
    """`penstock WORDS` in a process that notices if a pickle asks for a class."""

    def notice(event: str, arguments: object) -> None:
        if event == "pickle.find_class":
            Path(noticed).write_text(repr(arguments))

    sys.addaudithook(notice)
    return warm.penstock(words)


def trained(folder: Path, *words: str, **variables: str) -> str:
    """What `penstock train` prints."""
    tiny = dump_toml(tiny_run(folder / "runs")).replace("vocab_size = 17", "vocab_size = 257")
    (folder / "tiny.toml").write_text(tiny)
    noticed = folder / "pickles.txt"
    environment = {**os.environ, **variables, "TMPDIR": str(folder)}
    done = warm.run(watched, ["train", *words], str(noticed), folder=folder, environment=environment)
    assert done.returncode == 0, done.stderr
    assert not noticed.exists()
    return done.stdout + done.stderr


def test_no_pickle(tmp_path: Path) -> None:
    """No pickle is loaded, neither from a file, nor from another process, nor from a cache of a library."""
    for path in (ROOT / "penstock").rglob("*.py"):
        assert not PICKLES.search(path.read_text()), path
    trained(tmp_path, "tiny.toml", "--processes", "2", "parallel.expert=2")
    trained(tmp_path, "runs/tiny", "--resume", "training.steps=6", "parallel.expert=1")


def test_pickles_are_data(tmp_path: Path) -> None:
    """Pickles in a folder of torch.distributed.checkpoint are read as data, and nothing that they name is called."""
    made = tmp_path / "made"
    (tmp_path / ".metadata").write_bytes(b"\x80\x02cposix\nmkdir\n(V" + f"{made}".encode() + b"\ntR.")
    assert "cannot read" in answers.refused("import", str(tmp_path), "--output", "out", "--preset", "debug")
    assert not made.exists()


def test_no_unsafe_file(tmp_path: Path) -> None:
    """A file that no part of Penstock can read safely, such as a pickled checkpoint, is refused."""
    torch.save({"a": torch.zeros(1)}, tmp_path / "0.distcp")
    (tmp_path / ".metadata").write_bytes(b"\x80\x04N.")
    with pytest.raises(CheckpointError, match="got a pickled one, which is never loaded"):
        read_manifest(tmp_path)
    (tmp_path / ".metadata").rename(tmp_path / "pytorch_model.bin")
    assert "no safetensors file" in answers.refused("import", str(tmp_path), "--output", "out", "--preset", "debug")


def test_pages(tmp_path: Path) -> None:
    """A name in a report or a plan is text there: it is no HTML, no link and no script."""
    page = run_page(gather(run_folder(tmp_path / "run", device=HOSTILE)))
    assert "<a href='javascript" not in page and "</script><a" not in page
    trace = {"type": "bar", "x": [1.0], "y": [HOSTILE], "hovertemplate": f"<b>{HOSTILE}</b><br>%{{x}}<extra></extra>"}
    figure = Figure(name="a", title="a", caption="a", data=[trace], layout={"yaxis": {"ticktext": [HOSTILE]}})
    drawn = json.dumps(plotly_json(figure))
    assert "<a" not in drawn and "<script" not in drawn and "</script" not in drawn
    assert "<b>&lt;/script>&lt;a href='javascript:alert(1)'>x</b><br>%{x}<extra></extra>" in drawn


@pytest.mark.parametrize("name", NAMES)
def test_job_names(name: str) -> None:
    """A name in a job script is refused if the shell, Slurm or Kubernetes would not take it as one word."""
    machines = ["debug-2l", "--nodes", "1", "--gpus-per-node", "1"]
    for option in ("--name", "--partition", "--account", "--time", "--container"):
        if option != "--container" or "\n" in name or " " in name or not name:  # an image is quoted
            assert "would be refused" in answers.refused("launch", "slurm", *machines, option, name)
    kubernetes = {"--image": "image", "--claim": "claim"}
    for option in ("--name", "--namespace", "--image", "--claim"):
        words = [word for pair in {**kubernetes, option: name}.items() for word in pair]
        assert "would be refused" in answers.refused("launch", "kubernetes", *machines, *words)


def test_job_words(tmp_path: Path) -> None:
    """An override or a path in a job script is quoted for the shell, or written as a JSON string in YAML."""
    word = f"record.folder={tmp_path}/a$(touch {tmp_path}/x) 'b\": c"
    machines = ["debug-2l", word, "--nodes", "1", "--gpus-per-node", "1"]
    script = answers.printed("launch", "slurm", *machines, "--container", f"a$(touch{tmp_path}/x)")
    assert shlex.quote(word) in script
    assert f"--container-image={shlex.quote(f'a$(touch{tmp_path}/x)')}" in script
    manifest = yaml.safe_load(answers.printed("launch", "kubernetes", *machines, "--image", "a", "--claim", "b"))
    container = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert word.replace("$", "$$") in container["args"]  # Kubernetes makes one dollar of two


def test_terminal(tmp_path: Path) -> None:
    """Control characters of a name are escaped in the terminal."""
    event = {"ph": "X", "cat": "kernel", "name": "k\x1b[2J\u202e", "pid": 0, "tid": 7, "ts": 0, "dur": 1.0}
    (tmp_path / "rank-0.json").write_text(json.dumps({"traceEvents": [event]}))
    assert "\x1b" not in answers.printed("trace", str(tmp_path / "rank-0.json"))
    assert "\x1b" not in answers.refused("config", "show", "a\x1b[2J\nb")


def test_checkpoints(tmp_path: Path) -> None:
    """A checkpoint names files of its own folder only, and a link among them is refused."""
    trained(tmp_path, "tiny.toml")
    (folder,) = RunFolder(tmp_path / "runs/tiny").checkpoints.glob("step-000004")
    manifest = read_manifest(folder)
    (folder / FACTS).rename(tmp_path / "facts.json")
    (folder / FACTS).symlink_to(tmp_path / "facts.json")
    with pytest.raises(CheckpointError, match=r"facts\.json is damaged; got a link to another place"):
        check_files(folder, {FACTS: manifest.files[FACTS]})
    content = json.loads((folder / "manifest.json").read_text())
    del content["seal"]
    content["files"]["../../config.toml"] = "1 bytes, crc32 00000000"
    (folder / "manifest.json").write_text(json.dumps({**content, "seal": manifest_module._seal(content)}))
    with pytest.raises(CheckpointError, match=r"a file outside of the folder: \.\./\.\./config\.toml"):
        read_manifest(folder)


def test_links(tmp_path: Path) -> None:
    """A link under the name of a draft, or in place of a file to append to, is not followed."""
    other = tmp_path / "other"
    other.write_text("mine")
    for name in (".config.toml.draft", draft_of(tmp_path / "config.toml").name):
        (tmp_path / name).symlink_to(other)
    write_whole(tmp_path / "config.toml", "new")
    (tmp_path / "metrics.jsonl").symlink_to(other)
    with pytest.raises(OSError, match="symbolic links"):
        open_to_append(tmp_path / "metrics.jsonl")
    assert (other.read_text(), (tmp_path / "config.toml").read_text()) == ("mine", "new")


def test_growth(tmp_path: Path) -> None:
    """Compressed text and traces may grow to 64 MiB and 100 times their size, and no further."""
    assert most_unpacked(1000) == 64 * 2**20 + 100_000
    packed = gzip.compress(b'[{"text": "a"}' + bytes(96 << 20))
    (tmp_path / "a.json.gz").write_bytes(packed)
    with pytest.raises(TraceError, match="more than 100 times as large"):
        load_trace(tmp_path / "a.json.gz")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' * (8 << 20)))
    with pytest.raises(DataError, match="more than 100 times as large"):
        JsonLines([tmp_path / "a.jsonl.gz"], ByteTokenizer(), cache=tmp_path)


def test_sizes(tmp_path: Path) -> None:
    """A configuration has at most 4 MiB, and a JSON file that is read whole at most 128 MiB."""
    assert (MOST_TOML_BYTES, MOST_JSON_BYTES) == (4 * 2**20, 128 * 2**20)
    for name, most in (("a.toml", MOST_TOML_BYTES), ("tokenizer.json", MOST_JSON_BYTES)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(most + 1)
    with pytest.raises(ConfigError, match="larger than 4 MiB"):
        load_run(str(tmp_path / "a.toml"))
    assert "larger than 128 MiB" in answers.refused(
        "train", "debug-2l", "--dry-run", f"data.tokenizer={tmp_path}/tokenizer.json", starts=True
    )


def test_pipes(tmp_path: Path) -> None:
    """A pipe or a device in place of a file is refused, and is not waited for.

    By a process of its own, because a library that waits for a pipe hears no signal but the last one.
    """
    done = warm.run(refuse_pipes, folder=tmp_path, environment=os.environ)
    assert done.returncode == 0, done.stderr
    refusals = json.loads((tmp_path / "refusals.json").read_text())
    assert len(refusals) == 24
    for call, line in refusals.items():
        assert "it is a pipe or a device, no file" in line or "no such file" in line, call


def refuse_pipes() -> int:
    """Give `penstock` a pipe in place of each kind of file, and write what it said."""
    save_huggingface(tiny_decoder(VARIANTS["llama"]), Path("llama"))
    Path("tokens").mkdir()
    json_file(Path("tokens/tokenizer.json"))
    run = byte_run(Path("runs"))
    save_run(run, random_model(run))
    (saved,) = Path("runs").glob("*/checkpoints/*/*.safetensors")
    Path("packed").mkdir()
    Path("packed/b.idx").write_bytes(b"MMIDIDX\0\0" + struct.pack("<QBQQiqqq", 1, 8, 1, 2, 1, 0, 0, 1))
    Dataset.from_dict({"text": ["a"]}).save_to_disk("dataset")
    (table,) = Path("dataset").glob("*.arrow")

    def train(words: str) -> list[str]:
        return ["train", "debug-2l", "--dry-run", *words.split()]

    calls: dict[str, list[str]] = {"trace.json": ["trace", "trace.json"], "hardware.toml": ["plan", "debug", "--on"]}
    calls["hardware.toml"].append("8xhardware.toml")
    calls |= {"run.toml": ["config", "show", "run.toml"], "config.json": ["plan", "config.json", "--on", "8xH100"]}
    for kind, name in (("text", "a.txt"), ("jsonl", "a.jsonl"), ("parquet", "a.parquet"), ("parquet", "a.arrow")):
        calls[name] = train(f"data.source={kind} data.files={name}")
    for name in ("tokenizer.json", "a.model", "a.tiktoken", "tokens/tokenizer_config.json"):
        calls[name] = train(f"data.tokenizer={Path(name).parent if '/' in name else name}")
    for name in ("packed/a.idx", "packed/b.bin"):
        calls[name] = train(f"data.source=packed data.files={name}")
    for name in ("text/train.jsonl", "text/train.parquet", str(table)):
        calls[name] = train(f"data.source=huggingface data.dataset={Path(name).parent}")
    for name in ("config.json", "model.safetensors", "model.safetensors.index.json"):
        calls[f"llama/{name}"] = ["import", "llama", "--output", "start"]
    calls[str(saved)] = ["sample", str(saved.parents[2]), "a"]
    refusals = {}
    for name, call in calls.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).rename("aside") if Path(name).exists() else None
        os.mkfifo(name)
        refusals[name] = answers.refused(*call, starts=call[0] == "train")
        Path(name).unlink()
        Path("aside").rename(name) if Path("aside").exists() else None
    for call in (
        ["trace", "/dev/zero"],
        train("data.source=text data.files=/dev/zero"),
        ["config", "show", "/dev/zero"],
    ):
        refusals[" ".join(call)] = answers.refused(*call, starts=call[0] == "train")
    Path("refusals.json").write_text(json.dumps(refusals))
    return 0


def test_tables() -> None:
    """Parquet and Arrow files are read by a process of its own, with 4 GiB of memory, whose end is an error line.

    tests/base/test_child.py and tests/data/test_tables.py end it, and damage files.
    """
    assert child.MOST_BYTES == 4 * 2**30
    code = f"import sys, {tables.__name__}; assert not any(name.split('.')[0] == 'pyarrow' for name in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_prometheus() -> None:
    """The endpoint for Prometheus listens on the loopback unless `record.prometheus_address` says otherwise."""
    assert Record().prometheus_address == "127.0.0.1"


def test_rendezvous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that `penstock train` starts meet at a port of the loopback."""
    made: list[tuple[str, int]] = []
    make = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda address: made.append(address) or make(address))
    monkeypatch.setattr(local, "start_rank", lambda work, words, variables, lifeline: _Ended())
    facts = local.LaunchFacts(vendor="cpu", world=1, local_world=1, cores=1)
    assert local.run_processes(len, [], local.LocalLaunch(processes=1, facts=facts)) == 0
    assert made == [("127.0.0.1", 0)]


class _Ended:
    """A rank that has ended."""

    pid = 0

    def poll(self) -> int:
        """Its exit code."""
        return 0


def test_keys(tmp_path: Path) -> None:
    """The key of Weights & Biases stands in no file of a run and in nothing that a run prints."""
    pytest.importorskip("wandb")
    key = "0123456789abcdef" * 2 + "01234567"
    printed = trained(tmp_path, "tiny.toml", "record.wandb=offline", WANDB_API_KEY=key)
    assert key not in printed
    assert list((tmp_path / "runs/tiny/wandb").glob("offline-run-*"))
    for folder, _, names in os.walk(tmp_path):
        for path in (Path(folder, name) for name in names):
            with suppress(FileNotFoundError):  # W&B's service, which outlives the run, removes what it has used
                assert not path.is_file() or key.encode() not in path.read_bytes(), path


def test_fetches(tmp_path: Path) -> None:
    """A report fetches nothing from the network."""
    page = run_page(gather(run_folder(tmp_path / "run")))
    assert not re.search(r"""(?:src|href)=["']?(?:https?:|//)|@import|url\(["']?(?:https?:|//)|\bfetch\(""", page)
