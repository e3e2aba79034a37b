"""DeepSeek-V2-Lite, whole, on the GPUs of one node, in several layouts: speed, memory, and one loss.

    python -m benchmarks.layouts --output benchmarks/results/layouts-h200x4.json

Every layout is the product itself, `penstock train`, one process for each GPU, on the same rows with the same seed:
27 layers, sequence 4,096, bfloat16 compute, float32 masters, moments and gradient sums, natural routing. Text is the
source code of the running Python, through a byte-pair tokenizer that is made from it once (`--tokenizer` keeps it), so
that tokens, and so routing, are those of real text.

Speed is the median over the steps after warm-up, memory the largest of all ranks. Losses stand beside each other step
by step; in bfloat16 layouts differ by rounding, which grows with the steps.
"""

import argparse
import json
import statistics
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from benchmarks import record

VOCABULARY = 32_768

DEFAULTS = [
    "training.global_batch=16",
    # The first 50 steps of the model's own warm-up, which is 2,000 steps to 4.2e-4.
    "optimizer.learning_rate=1.05e-5",
    "schedule.warmup_steps=50",
    "schedule.decay=constant",
]

LAYOUTS: dict[str, list[str]] = {
    "EP 4, FSDP": ["parallel.expert=4", "parallel.shard=full", "training.micro_batch=4"],
    "PP 2 x EP 2": ["parallel.pipeline=2", "parallel.expert=2", "training.micro_batch=2"],
    "TP 2 folded with EP 4": ["parallel.tensor=2", "parallel.expert=4", "training.micro_batch=4"],
    "EP 4, ZeRO-1": ["parallel.expert=4", "parallel.shard=optimizer", "training.micro_batch=4"],
}
"""The largest micro-batch of each that leaves room; the global batch is the same for all."""


def main() -> None:
    options = parse_arguments()
    rows: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        tokenizer = options.tokenizer or folder / "tokenizer.json"
        if not tokenizer.exists():
            make_tokenizer(tokenizer)
        for name, overrides in LAYOUTS.items():
            if options.only in name:
                row = measure(options, folder / name.replace(" ", "-").replace(",", ""), tokenizer, overrides)
                first = next(iter(rows.values()), row)["losses"]
                gaps = (abs(one - other) / other for one, other in zip(row["losses"], first, strict=True))
                rows[name] = {**row, "largest_relative_loss_gap": max(gaps)}
                print_row(name, rows[name])
                numbers = {"preset": options.preset, "overrides": options.overrides, "layouts": rows}
                record.write(options, numbers, ranks=options.ranks, steps=options.steps, warm_up_steps=options.warm_up)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="deepseek-v2-lite")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warm-up", type=int, default=10, help="first steps that are not counted")
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json; made there if it is missing")
    parser.add_argument("--only", default="", help="layouts whose name contains this")
    parser.add_argument("overrides", nargs="*", default=DEFAULTS)
    record.add_arguments(parser)
    return parser.parse_args()


def make_tokenizer(path: Path) -> None:
    """Byte-pair encoding of the standard library."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    files = sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py"))
    texts = (file.read_text(errors="ignore") for file in files if "-packages" not in str(file))
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(path))


def measure(options: argparse.Namespace, folder: Path, tokenizer: Path, overrides: list[str]) -> dict[str, Any]:
    """Train in processes of their own and read the run's metrics."""
    fixed = [
        f"training.steps={options.steps}",
        "checkpoint.enabled=false",
        "evaluation.rows=0",
        f"data.tokenizer={tokenizer}",
        "data.source=standard-library",
        f"record.folder={folder.parent}",
        "record.tensorboard=false",
    ]
    command = [sys.executable, "-m", "penstock", "train", options.preset, *fixed, *options.overrides, *overrides]
    subprocess.run([*command, "--name", folder.name, "--processes", str(options.ranks)], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = lines[options.warm_up :]
    return {
        "overrides": overrides,
        "tokens_per_second_per_gpu": statistics.median(line["tokens_per_second_per_device"] for line in timed),
        "step_seconds": statistics.median(line["step_seconds"] for line in timed),
        "step_seconds_lowest": min(line["step_seconds"] for line in timed),
        "step_seconds_highest": max(line["step_seconds"] for line in timed),
        "model_flops_utilization": statistics.median(line["model_flops_utilization"] for line in timed),
        "peak_memory_gib": max(line["peak_memory_bytes"] for line in lines) / 2**30,
        "expert_load_max_over_mean": statistics.median(line["expert_load_max_over_mean"] for line in timed),
        "losses": [line["loss"] for line in lines],
    }


def print_row(name: str, row: dict[str, Any]) -> None:
    print(
        f"{name:<24}{row['tokens_per_second_per_gpu']:>9,.0f} tokens/s/GPU  MFU {row['model_flops_utilization']:.3f}  "
        f"peak {row['peak_memory_gib']:.1f} GiB  loss {row['losses'][0]:.4f} -> {row['losses'][-1]:.4f}  "
        f"fullest expert {row['expert_load_max_over_mean']:.1f} x mean, "
        f"loss gap to the first layout {row['largest_relative_loss_gap']:.2%}",
        flush=True,
    )


if __name__ == "__main__":
    main()
