"""Tables of searches: how long those of plans take, and what `penstock tune` found. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]


def search_cost(result: Result) -> str:
    """Seconds and memory of each search, as a process."""
    others = max(row["others"] for row in result["numbers"]["searches"])
    lines = [
        f"Whole processes on {result['environment']['cpus']} cores, start of Python and torch in it, commit "
        f"`{result['commit']}`; other programs used {others:.1f} cores at most.",
        "",
        "| model | devices | seconds | memory | layouts | candidates | fastest |",
        "|---|---|---:|---:|---:|---:|---|",
    ]
    for row in result["numbers"]["searches"]:
        lines.append(
            f"| {row['model']} | {row['on']} | {row['seconds']:.1f} | {row['peak_bytes'] / 1e9:.2f} GB | "
            f"{row['considered']:,} | {row['candidates']} | {row['best'] or 'nothing fits'} |"
        )
    return "\n".join(lines)


CASES = {
    "deepseek": "DeepSeek-V2-Lite, 8 layers",
    "qwen3": "Qwen3-30B-A3B, 8 layers",
    "mixtral": "Mixtral-8x7B, 2 layers",
    "gpt-oss": "gpt-oss-20b, 4 layers",
    "short-rows": "DeepSeek-V2-Lite, 8 layers, 16 rows of 512",
}


def tune_cases(result: Result) -> str:
    """What each search found, how far its projections were off, and how far it is from the best of the sweep."""
    lines = [
        "| run | trials | seconds | found | x preset | x torch | or 4 rows | plan off by | corrected "
        "| over the best swept |",
        "|---|---:|---:|---|---:|---:|---:|---:|---:|---:|",
    ]
    ratios = ("gain", "plain_over_tuned", "plain_again_over_tuned")
    for case, found in result["numbers"]["summary"]["cases"].items():
        columns = [
            f"{found['trials']}",
            f"{found['seconds']:.0f}",
            " ".join(f"`{one}`" for one in result["numbers"][case]["tune"]["leader"]),
            *("" if found.get(name) is None else f"{found[name]:.2f}" for name in ratios),
            *(f"{found[name]:.1%}" for name in ("median_error", "median_error_corrected")),
            f"{found['tuned_over_best']:.3f}, of {found['configurations']}",
        ]
        lines.append(f"| {CASES[case]} | {' | '.join(columns)} |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[Result], str]] = {"search-cost": search_cost, "tune-cases": tune_cases}
