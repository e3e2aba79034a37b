"""The tables about layouts: one loss on all of them, and their speed on a node. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

SHOWN_STEPS = (1, 10, 20, 30, 40, 50)


def numerics(result: Result) -> str:
    """Every layout's largest difference from one process."""
    tolerances, cases = result["numbers"]["tolerances"], result["numbers"]["cases"]
    figures = list(tolerances)
    rows = [
        f"| layout | ranks | {' | '.join(figures)} |",
        f"|---|---:|{'---:|' * len(figures)}",
        f"| **allowed** | | {' | '.join(f'{tolerances[name]:.0e}' for name in figures)} |",
    ]
    for case in cases:
        values = " | ".join(f"{case[name]:.1e}" if name in case else "**failed**" for name in figures)
        rows.append(f"| {case['case']} | {case['ranks']} | {values} |")
    return "\n".join(rows)


def numerics_verdict(result: Result) -> str:
    """How many layouts pass, and the worst of each figure."""
    tolerances, cases = result["numbers"]["tolerances"], result["numbers"]["cases"]
    passed = [case for case in cases if all(case.get(name, 1.0) <= allowed for name, allowed in tolerances.items())]
    worst = ", ".join(f"{name} {max(case.get(name, 1.0) for case in cases):.1e}" for name in tolerances)
    return f"{len(passed)} of {len(cases)} layouts pass. The largest differences: {worst}."


def layouts_speed(result: Result) -> str:
    """Speed and memory of each layout."""
    environment = result["environment"]
    rows = [
        f"Measured on {environment['devices']} x {environment['device']} (torch {environment['torch']}), commit "
        f"`{result['commit']}`, {environment['steps']} steps, medians after {environment['warm_up_steps']}.",
        "",
        "| layout | rows a micro-batch | tokens/s/GPU | MFU | step, slowest | peak memory | fullest expert over mean |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, row in result["numbers"]["layouts"].items():
        micro = next(one.partition("=")[2] for one in row["overrides"] if one.startswith("training.micro_batch"))
        rows.append(
            f"| {name} | {micro} | {row['tokens_per_second_per_gpu']:,.0f} | {row['model_flops_utilization']:.1%} | "
            f"{row['step_seconds']:.2f} s, {row['step_seconds_highest']:.2f} s | {row['peak_memory_gib']:.1f} GiB | "
            f"{row['expert_load_max_over_mean']:.1f} |"
        )
    return "\n".join(rows)


def layouts_loss(result: Result) -> str:
    """Losses of the layouts, step by step, beside each other."""
    layouts = result["numbers"]["layouts"]
    rows = [f"| step | {' | '.join(layouts)} |", f"|---:|{'---:|' * len(layouts)}"]
    for step in SHOWN_STEPS:
        losses = (f"{row['losses'][step - 1]:.4f}" for row in layouts.values())
        rows.append(f"| {step} | {' | '.join(losses)} |")
    return "\n".join(rows)


TABLES: dict[str, Callable[[Result], str]] = {
    "numerics": numerics,
    "numerics-verdict": numerics_verdict,
    "layouts-speed": layouts_speed,
    "layouts-loss": layouts_loss,
}
