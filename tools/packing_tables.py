"""Tables of docs/tokenizers-and-packing.md, from a result of `benchmarks.packing`. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

PACKED = {
    "pack ours 1": ("`penstock data pack`", 1),
    "pack ours 2": ("`penstock data pack`", 2),
    "pack datasets 1": ("`datasets`: load, map", 1),
    "pack datasets 2": ("`datasets`: load, map", 2),
    "pack datasets transformers 2": ("`datasets`, tokenizer through `transformers`", 2),
}
READ = {
    "read ours": "`PackedTokens.read`, which checks ids and removes the end-of-document token",
    "read megatron": "Megatron-Core `IndexedDataset.get`",
    "read numpy": "NumPy alone",
}
ROWS = {
    "rows packed whole 1": ("`.bin`", "row", "1 rank"),
    "rows packed whole 8": ("`.bin`", "row", "first of 8"),
    "rows packed masked 1": ("`.bin`", "document", "1 rank"),
    "rows packed masked 8": ("`.bin`", "document", "first of 8"),
    "rows jsonl whole 1": ("JSON Lines, encoded", "row", "1 rank"),
    "rows jsonl whole 8": ("JSON Lines, encoded", "row", "first of 8"),
    "rows jsonl masked 1": ("JSON Lines, encoded", "document", "1 rank"),
    "rows jsonl masked 8": ("JSON Lines, encoded", "document", "first of 8"),
    "rows megatron whole": ("`.bin`, Megatron-Core `GPTDataset`", "row", "1 rank"),
    "rows megatron masked": ("`.bin`, Megatron-Core `GPTDataset`", "document", "1 rank"),
}


def origin(result: Result) -> str:
    """On what it was measured, and how busy that was."""
    environment = result["environment"]
    others = [row["others"] for row in result["numbers"]["cases"].values()]
    return (
        f"Medians of {environment['times']} runs on {environment['cpus']} cores ({environment['processor']}), commit "
        f"`{result['commit']}`. Other programs used {min(others):.1f} to {max(others):.1f} processors at the same "
        "time; this affects processor seconds less than wall-clock seconds."
    )


def packing(result: Result) -> str:
    """From JSON Lines to tokens on disk."""
    lines = ["| program | processes | MB/s | tokens/s | tokens/processor s |", "|---|---:|---:|---:|---:|"]
    for name, (way, processes) in PACKED.items():
        row = result["numbers"]["cases"][name]
        lines.append(
            f"| {way} | {processes} | {row['mb_per_second']:.2f} | {row['tokens_per_second']:,.0f} | "
            f"{row['tokens_per_processor_second']:,.0f} |"
        )
    return "\n".join(lines)


def reading(result: Result) -> str:
    """Documents in random order."""
    lines = ["| reader | documents/s | M tokens/s | M tokens/processor s |", "|---|---:|---:|---:|"]
    for name, reader in READ.items():
        row = result["numbers"]["cases"].get(name)
        if row is not None:
            lines.append(
                f"| {reader} | {row['documents_per_second']:,.0f} | {row['tokens_per_second'] / 1e6:.0f} | "
                f"{row['tokens_per_processor_second'] / 1e6:.0f} |"
            )
    return "\n".join(lines)


def rows(result: Result) -> str:
    """Batches that are ready for the model, beside what 8 GPUs train on."""
    needed = result["numbers"]["needed_tokens_per_second"]
    lines = [
        "| from | attention sees | rank | M tokens/s | M tokens/processor s | over need |",
        "|---|---|---|---:|---:|---:|",
    ]
    for name, (source, sees, rank) in ROWS.items():
        row = result["numbers"]["cases"].get(name)
        if row is not None:
            lines.append(
                f"| {source} | one {sees} | {rank} | {row['tokens_per_second'] / 1e6:.2f} | "
                f"{row['tokens_per_processor_second'] / 1e6:.2f} | {row['tokens_per_second'] / needed:.1f}x |"
            )
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {
    "packing-origin": origin,
    "packing-speed": packing,
    "packing-reading": reading,
    "packing-rows": rows,
}
