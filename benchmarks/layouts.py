"""DeepSeek-V2-Lite, whole, on the GPUs of one node, in several layouts: speed, memory, and one loss.

    python -m benchmarks.layouts --output benchmarks/results/layouts-h200x4.json

Every layout is the product itself, `penstock train`, one process for each GPU, on the same rows with the same seed:
27 layers, sequence 4,096, bfloat16 compute, float32 masters, moments and gradient sums, natural routing. Text is the
source code of the running Python, through a byte-pair tokenizer that is made from it once (`--tokenizer` keeps it), so
that tokens, and so routing, are those of real text.

Speed is the median over the steps after warm-up, memory the largest of all ranks. Losses stand beside each other step
by step; in bfloat16 layouts differ by rounding, which grows with the steps.
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks import record, runs

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
    parser = record.parser(
        __doc__,
        preset="deepseek-v2-lite",
        ranks=4,
        steps=50,
        warm_up=(10, "first steps that are not counted"),
        tokenizer=(Path, "tokenizer.json; made there if it is missing"),
        only=("", "layouts whose name contains this"),
    )
    parser.add_argument("overrides", nargs="*", default=DEFAULTS)
    options, rows = parser.parse_args(), dict[str, Any]()
    with tempfile.TemporaryDirectory() as temporary:
        tokenizer = options.tokenizer or Path(temporary, "tokenizer.json")
        if not tokenizer.exists():
            runs.make_tokenizer(tokenizer)
        fixed = [f"training.steps={options.steps}", f"data.tokenizer={tokenizer}", "data.source=standard-library"]
        fixed += [*runs.QUIET, "record.tensorboard=false", *options.overrides]
        for name, overrides in LAYOUTS.items():
            if options.only not in name:
                continue
            run = name.replace(" ", "-").replace(",", "")
            lines = runs.trained(options.preset, [*fixed, *overrides], Path(temporary), run, processes=options.ranks)
            load = {"expert_load_max_over_mean": "expert_load_max_over_mean"}
            row = {"overrides": overrides, **runs.medians(lines, options.warm_up, **load)}
            row |= {"tokens_per_second_per_gpu": row["tokens_per_second"], "losses": [line["loss"] for line in lines]}
            first = next(iter(rows.values()), row)["losses"]
            gaps = (abs(loss - other) / other for loss, other in zip(row["losses"], first, strict=True))
            rows[name] = {**row, "largest_relative_loss_gap": max(gaps)}
            record.show({"layout": name, **rows[name]})
            numbers = {"preset": options.preset, "overrides": options.overrides, "layouts": rows}
            record.write(options, numbers, ranks=options.ranks, steps=options.steps, warm_up_steps=options.warm_up)


if __name__ == "__main__":
    main()
