"""Trains a cut of a model with TorchTitan and with Penstock in turn on the GPUs of this machine, and writes both down.

    python -m benchmarks.peers --output benchmarks/results/peers.json
    python -m benchmarks.peers --peers 0.2.2 --settings compile-fsdp-4 --ours auto-8 --steps 13

Each version of TorchTitan is installed from PyPI into a virtual environment of its own below `--folder`, which sees the
PyTorch of this one (`--wheels DIR`: all wheels of that folder, without a network). Its trainer runs unmodified; its
hooks take the cut of the model and the text (titan_0_2.py, titan_0_3.py). Both train the same architecture with as many
rows of the same text (the source of Python's standard library as bytes), AdamW with float32 state, bf16 products and no
recomputation. Each setting is a run; a peer is judged by its fastest. Tokens/s are medians of the
trainer's own figures after warm-up.

Settings of TorchTitan 0.2: eager or compile, amp or fsdp (see titan_0_2.py), rows of a micro-batch; of 0.3: the
attention and the rows. Megatron-Core is not among the peers: its wheel holds no trainer, and its expert and attention
kernels need Transformer Engine, which PyPI has as source only.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import venv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from benchmarks import record, runs
from penstock.config.load import load_run
from penstock.config.size import size_of

ROOT = Path(__file__).resolve().parents[2]
SEQUENCE_LENGTH = 4096
SETTINGS = {
    "0.2.2": ("compile-fsdp-4", "compile-amp-4", "compile-fsdp-8", "eager-fsdp-4"),
    "0.3.0": ("varlen-4", "flex-4", "varlen-8"),
}
FLOAT8 = ("float8.dense=blockwise-square", "float8.experts=blockwise-square", "float8.head=blockwise-square")
OURS: dict[str, tuple[str, ...]] = {"auto": (), "torch": ("kernels.all=torch",), "float8": FLOAT8}
STEP = re.compile(
    r"step:\s*(?P<step>\d+)\s+loss:\s*(?P<loss>[\d.]+).*?memory:\s*(?P<gib>[\d.]+)GiB.*?tps:\s*(?P<tps>[\d,]+)"
)
PARAMETERS = re.compile(r"size: ([\d,]+) total parameters")


def main() -> None:
    options = record.parser(
        __doc__,
        model=("deepseek-v2-lite-8l", "a preset that titan_0_2.py has too"),
        peers=(list(SETTINGS), f"versions of TorchTitan: {', '.join(SETTINGS)}"),
        settings=([str], "settings of the peers; default: all of each"),
        ours=(["auto-8", "torch-8", "float8-8"], "auto, torch (PyTorch's operators) or float8, and rows"),
        rows=(32, "of a step"),
        steps=13,
        warm_up=(4, "first steps that are not counted"),
        seconds=(240.0, "limit of a run"),
        folder=(ROOT / "build/peers", "where peers are installed"),
        wheels=(Path, "folder of wheels to install from, without a network"),
    ).parse_args()
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="penstock-peers-") as name:
        folder = Path(name)
        write_text(folder)
        jobs = [("penstock", setting, run_ours) for setting in options.ours]
        for version in options.peers:
            run = partial(run_titan, version)
            jobs += [(f"torchtitan {version}", setting, run) for setting in options.settings or SETTINGS[version]]
        for trainer, setting, run in jobs:
            key = f"{trainer}, {setting}"
            try:
                results[key] = run(options, setting, folder)
            except subprocess.CalledProcessError as error:
                results[key] = {"failed": last_error(error.output or "")}
            record.show({"run": key, **results[key]})
            record.write(options, summary(options, results), warm_up_steps=options.warm_up, steps=options.steps)


def write_text(folder: Path) -> None:
    """Write the standard library as JSON lines, and a tokenizer with 256 bytes and the end of a document."""
    library = Path(sysconfig.get_path("stdlib"))
    with (folder / "text.jsonl").open("w", encoding="utf-8") as lines:
        for path in sorted(library.rglob("*.py")):
            if "site-packages" not in path.parts:
                lines.write(json.dumps({"text": path.read_text(encoding="utf-8", errors="replace")}) + "\n")
    alphabet = {character: index for index, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    # Lines are encoded one by one: a document as a single word would make the peer's loader slow.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split("\n", "merged_with_previous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def run_ours(options: argparse.Namespace, setting: str, folder: Path) -> dict[str, Any]:
    """`penstock train` with the defaults of the preset, but for its rows and its schedule."""
    kind, _, rows = setting.partition("-")
    fixed = [f"training.steps={options.steps}", f"training.global_batch={options.rows}", f"training.micro_batch={rows}"]
    fixed += ["schedule.warmup_steps=10", *runs.QUIET, f"record.folder={folder / 'runs'}"]
    command = [sys.executable, "-m", "penstock", "train", options.model, *fixed, *OURS[kind], "--name", setting]
    execute(command, options.seconds)
    lines, run = runs.lines_of(folder / "runs" / setting), load_run(options.model)
    figures = runs.medians(lines, options.warm_up)
    return {name: figures[name] for name in ("tokens_per_second", "peak_memory_gib")} | {
        "first_loss": lines[0]["loss"],
        "last_loss": lines[-1]["loss"],
        "parameters": size_of(run.model, run.training.sequence_length).parameters,
        "command": shown(command, folder),
    }


def run_titan(version: str, options: argparse.Namespace, setting: str, folder: Path) -> dict[str, Any]:
    """TorchTitan's own trainer, started as its documents say."""
    given = (titan_0_2 if version.startswith("0.2") else titan_0_3)(options, setting, folder)
    common = {
        "training.global_batch_size": str(options.rows),
        "training.seq_len": str(SEQUENCE_LENGTH),
        "training.steps": str(options.steps),
        "lr_scheduler.warmup_steps": "10",
        "metrics.log_freq": "1",
    }
    words = [f"--{key}={value}" for key, value in (given | common).items()] + ["--metrics.disable_color_printing"]
    words += ["--compile.enable"] if setting.startswith("compile") else []
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1", "-m", "torchtitan.train"]
    command = [str(installed(options, version)), *launch, *words]
    output = execute(command, options.seconds)
    return read_log(output, options.warm_up) | {"command": shown(command, folder)}


def titan_0_2(options: argparse.Namespace, setting: str, folder: Path) -> dict[str, str]:
    """Options of TorchTitan 0.2 for a setting such as `compile-fsdp-4`."""
    _, cast, rows = setting.split("-")
    return {
        "experimental.custom_import": "benchmarks.peers.titan_0_2",
        "model.name": options.model + ("_fsdp" if cast == "fsdp" else ""),
        "model.flavor": options.model,
        "model.hf_assets_path": str(folder),
        "training.dataset": "text",
        "training.dataset_path": str(folder / "text.jsonl"),
        "training.local_batch_size": rows,
        "training.dataloader.num_workers": "1",  # encoding in the trainer's own process would cost it part of each step
        "training.dataloader.prefetch_factor": "16",
        "optimizer.lr": "4.2e-4",
        "activation_checkpoint.mode": "none",
        "job.dump_folder": str(folder / "titan"),
    }


def titan_0_3(options: argparse.Namespace, setting: str, folder: Path) -> dict[str, str]:
    """Options of TorchTitan 0.3 for a setting such as `varlen-4`."""
    attention, rows = setting.split("-")
    return {
        "module": "benchmarks.peers.titan_0_3",
        "config": f"{options.model.replace('-', '_')}_{attention}",
        "hf_assets_path": str(folder),
        "dataloader.dataset": "text",
        "dataloader.dataset_path": str(folder / "text.jsonl"),
        "dataloader.num_workers": "1",
        "dataloader.prefetch_factor": "16",
        "training.local_batch_size": rows,
        "dump_folder": str(folder / "titan"),
    }


def installed(options: argparse.Namespace, version: str) -> Path:
    """Python of the environment with this version of TorchTitan, which is made if it is missing."""
    place = options.folder / f"torchtitan-{version}"
    python = place / "bin/python"
    if not (place / "ready").exists():
        venv.create(place)
        # A virtual environment that is made from another one does not see its packages, PyTorch among them.
        (packages,) = place.glob("lib/python3*/site-packages")
        (packages / "parent.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        packages_wanted = [f"torchtitan=={version}"]
        if options.wheels is not None:
            others = [str(wheel) for wheel in options.wheels.glob("*.whl") if not wheel.name.startswith("torchtitan-")]
            packages_wanted = ["--no-index", "--no-deps", f"--find-links={options.wheels}", *packages_wanted, *others]
        subprocess.run(
            [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", *packages_wanted], check=True
        )
        (place / "ready").touch()
    return python


def execute(command: Sequence[str], seconds: float) -> str:
    """Output of a command, started in the root of the repository, where the peer finds our modules."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *_python_path()])}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            errors="replace",
        )
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        raise subprocess.CalledProcessError(124, command, text + f"\nError: over {seconds:.0f} s") from error
    if done.returncode:
        print(done.stdout[-6000:], flush=True)
        raise subprocess.CalledProcessError(done.returncode, command, done.stdout)
    return done.stdout


def _python_path() -> list[str]:
    return [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]


def read_log(text: str, warm_up: int) -> dict[str, Any]:
    """Figures of TorchTitan's log, with a line for every step."""
    steps = [match.groupdict() for match in STEP.finditer(text)]
    parameters = PARAMETERS.search(text)
    if len(steps) <= warm_up or parameters is None:
        raise subprocess.CalledProcessError(1, "torchtitan", f"Error: {len(steps)} steps in the log")
    return {
        "tokens_per_second": statistics.median(float(step["tps"].replace(",", "")) for step in steps[warm_up:]),
        "peak_memory_gib": max(float(step["gib"]) for step in steps),
        "first_loss": float(steps[0]["loss"]),
        "last_loss": float(steps[-1]["loss"]),
        "parameters": int(parameters[1].replace(",", "")),
    }


def last_error(text: str) -> str:
    """The line of a log that says why the run ended."""
    named = [line.strip() for line in text.splitlines() if re.search(r"\w*(Error|Exception)\b: ?\S", line)]
    return (named or text.strip().splitlines() or ["no output"])[0 if named else -1][:300]


def shown(command: Sequence[str], folder: Path) -> str:
    """The command as a person would type it."""
    return " ".join(["python", *command[1:]]).replace(str(folder), "TEXT")


def summary(options: argparse.Namespace, results: dict[str, Any]) -> dict[str, Any]:
    """All runs, the fastest of each trainer, and our speeds over those of the fastest peer."""
    speeds = {key: row["tokens_per_second"] for key, row in results.items() if "failed" not in row}
    best: dict[str, str] = {}
    for key in sorted(speeds, key=speeds.__getitem__):
        best[key.rpartition(", ")[0]] = key
    peers = {trainer: key for trainer, key in best.items() if trainer != "penstock"}
    ratios = {
        f"{key} over {peer}": speeds[key] / speeds[peer_key]
        for key in speeds
        if key.startswith("penstock")
        for peer, peer_key in peers.items()
    }
    return {
        "model": options.model,
        "rows": options.rows,
        "sequence_length": SEQUENCE_LENGTH,
        "runs": results,
        "best": best,
        "ratios": ratios,
    }


if __name__ == "__main__":
    main()
