"""The tables of what was measured beside what was projected. As `tools.kernel_tables`."""

from collections.abc import Callable
from typing import Any

Result = dict[str, Any]

GROUPS = {"all": "all", "made": "used to develop the time model", "frozen": "after the model was frozen"}


def projection(result: Result) -> str:
    """Every run: step time and peak memory, measured, projected, and how far apart."""
    numbers, environment = result["numbers"], result["environment"]
    hardware = numbers["projected_by"]["hardware"]
    commits = sorted({row["commit"] for row in numbers["cases"]})
    lines = [
        f"Measured on {environment['device']} (torch {environment['torch']}), commit "
        f"{', '.join(f'`{commit}`' for commit in commits)}; {environment['steps']} steps, medians after "
        f"{environment['warm_up_steps']}. Projected for {hardware} by commit `{numbers['projected_by']['commit']}`. "
        "*After the freeze*: the run was made after the time model was frozen. *Fullest expert rank*: its rows over "
        "the mean.",
        "",
        "| run | GPUs | after the freeze | fullest expert rank | step | projected | error | peak memory | projected | "
        "error |",
        "|---|---:|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in numbers["cases"]:
        late = "yes" if row["chosen"] == "after it was frozen" else ""
        head = f"| {row['name']} | {row['processes']} | {late} |"
        figures, projected, errors = row["figures"], row.get("projected"), row.get("errors")
        if figures is None or projected is None or errors is None:
            lines.append(f"{head} {row['reason'].replace('|', '/')} |" + " |" * 6)
            continue
        load = figures["expert_rank_load_max_over_mean"]
        lines.append(
            f"{head} {'' if load is None else f'{load:.2f}'} | {figures['step_seconds_median'] * 1e3:.1f} ms | "
            f"{projected['step_seconds'] * 1e3:.1f} ms | {errors['step']:+.1%} | "
            f"{figures['peak_memory_bytes'] / 1e9:.1f} GB | {projected['peak_memory_bytes'] / 1e9:.1f} GB | "
            f"{errors['memory']:+.1%} |"
        )
    return "\n".join(lines)


def projection_errors(result: Result) -> str:
    """Sizes of the errors, of all runs and of each half."""
    lines = [
        "| runs | number | step time, median error | largest | over 10% | memory, median error | largest | over 5% |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for key, sizes in result["numbers"]["errors"].items():
        cells = [
            cell
            for name in ("step", "memory")
            for cell in (
                f"{sizes[f'{name}_median']:.1%}",
                f"{sizes[f'{name}_largest']:.1%}",
                f"{sizes[f'{name}_beyond']}",
            )
        ]
        lines.append(f"| {GROUPS[key]} | {sizes['runs']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def projection_runs(result: Result) -> str:
    """What each run is."""
    lines = ["| run | configuration |", "|---|---|"]
    lines += [f"| {row['name']} | {_words(row)} |" for row in result["numbers"]["cases"]]
    return "\n".join(lines)


def _words(row: dict[str, Any]) -> str:
    return " ".join(f"`{word}`" for word in (row["target"], *row["overrides"])).replace("|", "/")


def projection_pictures(result: Result) -> str:
    """The scatter plots that `tools.projection_picture` draws."""
    runs = result["numbers"]["errors"]["all"]["runs"]
    return "\n\n".join(
        f"![{what} of {runs} runs, measured and projected](pictures/projection-{name}.svg)"
        for name, what in (("step-time", "Step time"), ("memory", "Peak memory"))
    )


TABLES: dict[str, Callable[[Result], str]] = {
    "projection": projection,
    "projection-errors": projection_errors,
    "projection-runs": projection_runs,
    "projection-pictures": projection_pictures,
}
