"""The tables of what optimizations are worth: ladder, scaling over expert ranks, jitter. As `tools.kernel_tables`."""

from collections.abc import Callable
from statistics import median
from typing import Any

from tools.dispatch_tables import origin

Result = dict[str, Any]


def ladder(result: Result) -> str:
    """One row for each ladder step; those that did not run show the reason."""
    numbers, environment = result["numbers"], result["environment"]
    lines = [
        f"{origin(result)}; {environment['steps']} training steps each, medians after {environment['warm_up_steps']}. "
        f"`{' '.join([numbers['target'], *numbers['overrides']])}`; {numbers['routing']}.",
        "",
        "| step | tokens/s/GPU | ms, p99/p50 | MFU, TFLOP/s | peak memory | loss, largest gap | x before | by "
        "optimization | by size | x first |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for step in _steps(numbers):
        name = f"{step['name']} (size)" if step["kind"] == "size" else step["name"]
        name += " (slower, left out)" if step["state"] == "slower" else ""
        figures, gain = step["figures"], step["gain"]
        if figures is None:
            lines.append(f"| {name} | {step['state']}: {_in_cell(step['reason'])} |" + " |" * 8)
            continue
        loss = f"{figures['losses'][0]:.4f} -> {figures['losses'][-1]:.4f}, {gain['loss_gap']:.1e}"
        ratios = " | ".join(f"{gain[key]:.2f}" for key in ("before", "by_optimization", "by_size", "first"))
        lines.append(
            f"| {name} | {figures['tokens_per_second_per_device']:,.0f} | "
            f"{figures['step_seconds_median'] * 1e3:.1f} ms, {figures['jitter']:.2f} | {_compute(figures)} | "
            f"{figures['peak_memory_bytes'] / 2**30:.1f} GiB | {loss} | {ratios} |"
        )
    return "\n".join(lines)


def ladder_changes(result: Result) -> str:
    """The description and the changes of each ladder step."""
    lines = ["| step | description | changed |", "|---|---|---|"]
    for step in _steps(result["numbers"]):
        changed = " ".join(f"`{one}`" for one in step["changed"])
        lines.append(f"| {step['name']} | {step['what']} | {changed or 'nothing: ' + step['state']} |")
    return "\n".join(lines)


def step_ranks(result: Result) -> str:
    """Where the time of a recorded step went on each rank."""
    numbers, environment = result["numbers"], result["environment"]
    lines = [
        f"Recorded on {environment['devices']} x {environment['device']} (torch {environment['torch']}), commit "
        f"`{result['commit']}`. `{numbers['run']}`: {numbers['tokens_per_second_per_device']:,.0f} tokens/s/GPU in the "
        "step that was not recorded. ms of the recorded one:",
        "",
        "| rank | step | computing | transfer | waiting for ranks that come later | idle |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for one in numbers["ranks"]:
        kept = (one[f"{name}_us"] / 1e3 for name in ("total", "compute", "pure", "wait", "idle"))
        lines.append(f"| {one['rank']} | " + " | ".join(f"{value:,.0f}" for value in kept) + " |")
    return "\n".join(lines)


def step_phases(result: Result) -> str:
    """Phases of a recorded step, the longest first, the mean of all ranks."""
    lines = ["| phase | pass | ms that nothing hides | of the step |", "|---|---|---:|---:|"]
    for row in result["numbers"]["phases"]:
        lines.append(f"| {row['phase']} | {row['pass']} | {row['exposed_us'] / 1e3:,.1f} | {row['share']:.1%} |")
    return "\n".join(lines)


def scaling(result: Result) -> str:
    """Throughput of each number of expert ranks over that of one and of two."""
    numbers, environment = result["numbers"], result["environment"]
    lines = [
        f"{origin(result)}; `{numbers['target']}`, {numbers['rows_per_device']} rows a step on each GPU in "
        f"micro-batches of {numbers['micro_batch']}, {environment['steps']} steps, medians after "
        f"{environment['warm_up_steps']}.",
        "",
        "| expert ranks | dispatch | tokens/s/GPU | over EP 1 | over EP 2 | peak memory |",
        "|---:|---|---:|---:|---:|---:|",
    ]
    for case in numbers["cases"]:
        ranks, method, figures = case["expert_ranks"], case["method"], case["figures"]
        if figures is None:
            lines.append(f"| {ranks} | {method} | {_in_cell(case['reason'])} | | | |")
            continue
        lines.append(
            f"| {ranks} | {method} | {figures['tokens_per_second_per_device']:,.0f} | {_share(case['over_1'])} | "
            f"{_share(case['over_2'])} | {figures['peak_memory_bytes'] / 2**30:.1f} GiB |"
        )
    return "\n".join(lines)


def jitter(result: Result) -> str:
    """Step times with and without collecting garbage by hand, and graphs."""
    numbers, environment = result["numbers"], result["environment"]
    lines = [
        f"{origin(result)}; `{' '.join([numbers['target'], *numbers['overrides']])}`, {environment['steps']} steps, "
        f"the first {environment['warm_up_steps']} left out.",
        "",
        "| garbage | graphs | p50 | p99 | slowest | p99/p50 | slowest/p50 |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for case in numbers["cases"]:
        figures = case["figures"]
        if figures is None:
            lines.append(f"| {case['garbage']} | {case['graphs']} | {_in_cell(case['reason'])} | | | | |")
            continue
        usual, p99, slowest = (figures[f"step_seconds_{name}"] for name in ("median", "p99", "highest"))
        lines.append(
            f"| {case['garbage']} | {case['graphs']} | {usual * 1e3:.1f} ms | {p99 * 1e3:.1f} ms | "
            f"{slowest * 1e3:.1f} ms | {p99 / usual:.3f} | {slowest / usual:.3f} |"
        )
    return "\n".join(lines)


def whole(result: Result) -> str:
    """Steps of whole runs, each after the first, as they were printed."""
    numbers = result["numbers"]
    lines = [
        f"{origin(result)}, flash-attn-4 {result['environment']['flash_attn_4']}. "
        f"`{' '.join([numbers['target'], *numbers['overrides']])}`; {numbers['routing']}.",
        "",
        "| run | tokens/s/GPU in steps 2 and 3 | MFU | peak memory | loss | x the first |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    speeds = [[step["tokens_per_second_per_device"] for step in run["steps"][1:]] for run in numbers["runs"]]
    for run, own in zip(numbers["runs"], speeds, strict=True):
        first, *_, last = run["steps"]
        lines.append(
            f"| {run['what']} | {', '.join(f'{speed:,}' for speed in own)} | {last['model_flops_utilization']:.1%} | "
            f"{last['peak_memory_gb']:.1f} GB | {first['loss']:.4f} -> {last['loss']:.4f} | "
            f"{median(own) / median(speeds[0]):.2f} |"
        )
    return "\n".join(lines)


def _steps(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """Ladder steps of a result; older results call them rungs."""
    found: list[dict[str, Any]] = numbers["ladder_steps"] if "ladder_steps" in numbers else numbers["rungs"]
    return found


def _compute(figures: dict[str, Any]) -> str:
    utilization, rate = figures["model_flops_utilization"], figures["flops_per_second_per_device"] / 1e12
    return f"{'-' if utilization is None else f'{utilization:.1%}'}, {rate:.3g}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.1%}"


def _in_cell(text: str) -> str:
    """A vertical bar would end the cell."""
    return text.replace("|", "/")


TABLES: dict[str, Callable[[Result], str]] = {
    "ladder": ladder,
    "ladder-changes": ladder_changes,
    "step-ranks": step_ranks,
    "step-phases": step_phases,
    "scaling": scaling,
    "jitter": jitter,
    "whole": whole,
}
