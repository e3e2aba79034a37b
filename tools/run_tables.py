"""Tables about training steps, layouts, plans and programs, as far as tables.toml cannot say them.

Each function takes a whole result and gives Markdown.
"""

from collections.abc import Callable, Iterator
from statistics import median

from tools.tables import Result, origin, shown, table

SHOWN_STEPS = (1, 10, 20, 30, 40, 50)
"""Of the losses of several layouts."""

TELLS = 0.05
"""Share of a step that the others wait for a rank, from which the table names it."""

BEYOND = 0.30
"""Errors of projected speeds that have a reason."""

CASES = {
    "deepseek": "DeepSeek-V2-Lite, 8 layers",
    "qwen3": "Qwen3-30B-A3B, 8 layers",
    "mixtral": "Mixtral-8x7B, 2 layers",
    "gpt-oss": "gpt-oss-20b, 4 layers",
    "short-rows": "DeepSeek-V2-Lite, 8 layers, 16 rows of 512",
}
"""Runs that `penstock tune` searched."""


def ladder(result: Result) -> str:
    """One row for each ladder step; those that did not run show the reason."""
    numbers, environment = result["numbers"], result["environment"]
    head = (
        "step | tokens/s/GPU: | ms, p99/p50: | MFU, TFLOP/s: | peak memory: | loss, largest gap: | x before: | "
        "by optimization: | by size: | x first:"
    )
    rows = []
    for step in _ladder_steps(numbers):
        name = f"{step['name']} (size)" if step["kind"] == "size" else step["name"]
        name += " (slower, left out)" if step["state"] == "slower" else ""
        figures, gain = step["figures"], step["gain"]
        if figures is None:
            rows.append(f"{name} | {step['state']}: {step['reason'].replace('|', '/')} |" + " |" * 7)
            continue
        ratios = " | ".join(f"{gain[key]:.2f}" for key in ("before", "by_optimization", "by_size", "first"))
        rows.append(
            f"{name} | {figures['tokens_per_second_per_device']:,.0f} | {figures['step_seconds_median'] * 1e3:.1f} ms, "
            f"{figures['jitter']:.2f} | {shown(figures['model_flops_utilization'], '.1%') or '-'}, "
            f"{figures['flops_per_second_per_device'] / 1e12:.3g} | {figures['peak_memory_bytes'] / 2**30:.1f} GiB | "
            f"{figures['losses'][0]:.4f} -> {figures['losses'][-1]:.4f}, {gain['loss_gap']:.1e} | {ratios}"
        )
    return (
        f"{origin(result)}; {environment['steps']} training steps each, medians after {environment['warm_up_steps']}. "
        f"`{' '.join([numbers['target'], *numbers['overrides']])}`; {numbers['routing']}.\n\n{table(head, rows)}"
    )


def ladder_changes(result: Result) -> str:
    """The description and the changes of each ladder step."""
    return table(
        "step | description | changed",
        (
            f"{step['name']} | {step['what']} | "
            f"{' '.join(f'`{change}`' for change in step['changed']) or 'nothing: ' + step['state']}"
            for step in _ladder_steps(result["numbers"])
        ),
    )


def _ladder_steps(numbers: Result) -> list[Result]:
    """Older results call them rungs."""
    steps: list[Result] = numbers["ladder_steps"] if "ladder_steps" in numbers else numbers["rungs"]
    return steps


def whole(result: Result) -> str:
    """Steps of whole runs, each after the first, as they were printed."""
    numbers = result["numbers"]
    speeds = [[step["tokens_per_second_per_device"] for step in run["steps"][1:]] for run in numbers["runs"]]
    rows = []
    for run, speed in zip(numbers["runs"], speeds, strict=True):
        first, *_, last = run["steps"]
        rows.append(
            f"{run['what']} | {', '.join(f'{value:,}' for value in speed)} | {last['model_flops_utilization']:.1%} | "
            f"{last['peak_memory_gb']:.1f} GB | {first['loss']:.4f} -> {last['loss']:.4f} | "
            f"{median(speed) / median(speeds[0]):.2f}"
        )
    head = "run | tokens/s/GPU in steps 2 and 3: | MFU: | peak memory: | loss: | x the first:"
    return (
        f"{origin(result)}, flash-attn-4 {result['environment']['flash_attn_4']}. "
        f"`{' '.join([numbers['target'], *numbers['overrides']])}`; {numbers['routing']}.\n\n{table(head, rows)}"
    )


def numerics(result: Result) -> str:
    """Every layout's largest difference from one process."""
    allowed, cases = result["numbers"]["tolerances"], result["numbers"]["cases"]
    rows = [f"**allowed** | | {' | '.join(f'{tolerance:.0e}' for tolerance in allowed.values())}"]
    for case in cases:
        values = " | ".join(f"{case[name]:.1e}" if name in case else "**failed**" for name in allowed)
        rows.append(f"{case['case']} | {case['ranks']} | {values}")
    return table(f"layout | ranks: | {' | '.join(f'{name}:' for name in allowed)}", rows)


def numerics_verdict(result: Result) -> str:
    """How many layouts pass, and the worst of each figure."""
    allowed, cases = result["numbers"]["tolerances"], result["numbers"]["cases"]
    return _verdict("layouts pass", allowed, [[case] for case in cases])


def parity(result: Result) -> str:
    """Every model's largest difference from transformers, in plain and in packed rows."""
    allowed = result["numbers"]["tolerances"]
    bounds = f"{allowed['logits']:.0e} | {allowed['gradient']:.0e} |"
    rows = [f"**allowed** | {bounds} | {bounds}"]
    for model in result["numbers"]["models"]:
        cells = [model["model"]]
        for figures in (model["plain"], model["packed"]):
            weight = figures["weight"].removeprefix("blocks.").lstrip("0123456789").removeprefix(".")  # in its layer
            cells.append(f"{figures['logits']:.1e} | {figures['gradient']:.1e} | `{weight}`")
        rows.append(" | ".join(cells))
    return table(
        "model | logits: | worst gradient: | of the weight | packed: logits: | worst gradient: | of the weight", rows
    )


def parity_verdict(result: Result) -> str:
    """How many models pass, and the worst of each figure."""
    numbers = result["numbers"]
    families = len({model["family"] for model in numbers["models"]})
    kind = f"models of {families} families pass, beside transformers {result['environment']['transformers']}"
    return _verdict(kind, numbers["tolerances"], [[model["plain"], model["packed"]] for model in numbers["models"]])


def _verdict(kind: str, allowed: dict[str, float], cases: list[list[Result]]) -> str:
    """Cases of which all rows are within tolerances; a figure that is missing is a failure."""
    passed = sum(all(row.get(name, 1.0) <= allowed[name] for row in rows for name in allowed) for rows in cases)
    worst = (f"{name} {max(row.get(name, 1.0) for rows in cases for row in rows):.1e}" for name in allowed)
    return f"{passed} of {len(cases)} {kind}. The largest differences: {', '.join(worst)}."


def layouts_speed(result: Result) -> str:
    """Speed and memory of each layout."""
    environment = result["environment"]
    rows = []
    for name, row in result["numbers"]["layouts"].items():
        micro = next(word.partition("=")[2] for word in row["overrides"] if word.startswith("training.micro_batch"))
        rows.append(
            f"{name} | {micro} | {row['tokens_per_second_per_gpu']:,.0f} | {row['model_flops_utilization']:.1%} | "
            f"{row['step_seconds']:.2f} s, {row['step_seconds_highest']:.2f} s | {row['peak_memory_gib']:.1f} GiB | "
            f"{row['expert_load_max_over_mean']:.1f}"
        )
    head = "layout | rows a micro-batch: | tokens/s/GPU: | MFU: | step, slowest: | peak memory: | fullest expert:"
    steps = f"{environment['steps']} steps, medians after {environment['warm_up_steps']}"
    return f"{origin(result)}, {steps}.\n\n{table(head, rows)}"


def layouts_loss(result: Result) -> str:
    """Losses of the layouts, step by step, beside each other."""
    layouts = result["numbers"]["layouts"]
    rows = []
    for step in SHOWN_STEPS:
        losses = (f"{row['losses'][step - 1]:.4f}" for row in layouts.values())
        rows.append(f"{step} | {' | '.join(losses)}")
    return table(f"step: | {' | '.join(f'{name}:' for name in layouts)}", rows)


def packing_origin(result: Result) -> str:
    """On what packing was measured, and how busy that was."""
    environment = result["environment"]
    others = [row["others"] for row in result["numbers"]["cases"].values()]
    return (
        f"Medians of {environment['times']} runs on {environment['cpus']} cores ({environment['processor']}), commit "
        f"`{result['commit']}`. Other programs used {min(others):.1f} to {max(others):.1f} processors at the same "
        "time; this affects processor seconds less than wall-clock seconds."
    )


def doctor_recorded(result: Result) -> str:
    """A row for each condition: its cause, the wall, the late ranks, and the change that would gain most."""
    rows = []
    for row in result["numbers"]["conditions"]:
        late = [
            f"{rank['rank']}: {'computing' if rank['cause'] == 'compute' else rank['cause']}, {rank['share']:.0%}"
            for rank in row["late"]
            if rank["share"] >= TELLS
        ]
        first, shares = row["remedies"][0], row["shares"]
        rows.append(
            f"{row['condition']} | {row['done']} | {row['ranks']} x {row['device'].removeprefix('NVIDIA ')} | "
            f"{row['wall']} | {shares['host']:.0%} | {shares['communication']:.0%} | {'; '.join(late) or 'none'} | "
            f"`{first['rule']}`, {first['share']:.0%}"
        )
    head = "condition | run | GPUs | wall | host: | communication: | late | first remedy"
    return (
        f"Commit `{result['commit']}`. Percentages are shares of the step. *Late* are ranks for which the others wait "
        f"{TELLS:.0%} of the step or more, with the cause.\n\n{table(head, rows)}"
    )


def projection_runs(result: Result) -> str:
    """What each projected run is."""
    rows = []
    for row in result["numbers"]["cases"]:
        words = " ".join(f"`{word}`" for word in (row["target"], *row["overrides"]))
        rows.append(f"{row['name']} | {words.replace('|', '/')}")
    return table("run | configuration", rows)


def projection_pictures(result: Result) -> str:
    """The scatter plots that `tools.projection_picture` draws."""
    runs = result["numbers"]["errors"]["all"]["runs"]
    return "\n\n".join(
        f"![{what} of {runs} runs, measured and projected](pictures/projection-{name}.svg)"
        for name, what in (("step-time", "Step time"), ("memory", "Peak memory"))
    )


def search_cost(result: Result) -> str:
    """Seconds and memory of each search, as a process."""
    searches = result["numbers"]["searches"]
    rows = (
        f"{row['model']} | {row['on']} | {row['seconds']:.1f} | {row['peak_bytes'] / 1e9:.2f} GB | "
        f"{row['considered']:,} | {row['candidates']} | {row['best'] or 'nothing fits'}"
        for row in searches
    )
    return (
        f"Whole processes on {result['environment']['cpus']} cores, start of Python and torch in it, commit "
        f"`{result['commit']}`; other programs used {max(row['others'] for row in searches):.1f} cores at most.\n\n"
        + table("model | devices | seconds: | memory: | layouts: | candidates: | fastest", rows)
    )


def tune_cases(result: Result) -> str:
    """What each search found, how far its projections were off, and how far it is from the best of the sweep."""
    rows = []
    for case, search in result["numbers"]["summary"]["cases"].items():
        ratios = " | ".join(
            shown(search.get(name), ".2f") for name in ("gain", "plain_over_tuned", "plain_again_over_tuned")
        )
        leader = " ".join(f"`{change}`" for change in result["numbers"][case]["tune"]["leader"])
        rows.append(
            f"{CASES[case]} | {search['trials']} | {search['seconds']:.0f} | {leader} | {ratios} | "
            f"{search['median_error']:.1%} | {search['median_error_corrected']:.1%} | "
            f"{search['tuned_over_best']:.3f}, of {search['configurations']}"
        )
    return table(
        "run | trials: | seconds: | found | x preset: | x torch: | or 4 rows: | plan off by: | corrected: | "
        "over the best swept:",
        rows,
    )


def trace_speed(result: Result) -> str:
    """CPU seconds and peak memory of reading every trace, HTA's beside ours where it was measured."""
    numbers = result["numbers"]
    rows = []
    for row in numbers["cases"]:
        hta = row.get("hta")
        beside = "| | " if hta is None else f"{_cost(hta)} | {'all of it' if hta['crashed'] else hta['failed'] or ''}"
        size = f"{row['files']} | {row['bytes'] / 1e6:,.0f} MB | {row['events']:,}"
        rows.append(f"{row['case']} | {size} | {_cost(row['trace'])} | {beside}")
    diff = numbers["diff"]
    rows.append(f"diff | 2 | {sum(diff['bytes']) / 1e6:,.0f} MB | 2 x {diff['events']:,} | {_cost(diff)} | | |")
    others = "; ".join(f"{name} {what}" for name, what in numbers["others"].items())
    return (
        f"CPU seconds and peak memory on {result['environment']['cpus']} cores, commit `{result['commit']}`. {others}."
        "\n\n"
        + table("trace | files: | size: | events: | CPU seconds: | memory: | HTA: | memory: | HTA failed in", rows)
    )


def recordings(result: Result) -> str:
    """Every recording: its length, whether our totals are those of an independent reading, and the doctor's verdict."""
    rows = []
    for row in result["numbers"]["rows"]:
        name = f"`{row['file'].replace(',', '/')}`"
        if row["refused"] is not None:
            rows.append(f"{row['from']} | {name} | | | | refused: {row['refused'].partition(';')[0]}")
            continue
        apart = row["largest_difference_us"]
        equal = "no device" if apart is None else "equal" if apart < 1.0 else f"{apart:,.0f} \u00b5s apart"
        rows.append(
            f"{row['from']} | {name} | {row['events']:,} | {row['total_ms']:,.1f} ms | {equal} | {row['verdict']}"
        )
    return table("from | recording | events: | length: | totals | the doctor", rows)


def _cost(cost: dict[str, float]) -> str:
    return f"{cost['cpu_seconds']:.2f} | {cost['peak_bytes'] / 1e6:,.0f} MB"


def published_errors(result: Result) -> str:
    """Errors of projected speeds of published runs: the halves, and kinds of chips."""
    rows = []
    for name, group in result["numbers"]["errors"].items():
        chips = "all" if name in ("all", "fitted", "held out") else ", ".join(group["chips"])
        label = name if chips == "all" else "in one node" if name.endswith("one node") else "over nodes"
        rows.append(
            f"{label} | {chips} | {group['rows']} | {100 * group['median']:.1f} % | {100 * group['largest']:.1f} % | "
            f"{group['beyond']}"
        )
    return (
        f"Projected at commit `{result['commit']}`. Error: projected over published tokens/s/GPU, minus 1.\n\n"
        + table("runs | chips | number: | median: | largest: | beyond 30 %:", rows)
    )


def published_runs(result: Result) -> str:
    """Every published speed beside the projected one."""
    rows = []
    for row in result["numbers"]["rows"]:
        ratio = f"**{row['ratio']:.2f}**" if abs(row["ratio"] - 1) > BEYOND else f"{row['ratio']:.2f}"
        kind = "fitted" if row["is_fitted"] else "held out"
        rows.append(
            f"`{row['id']}` | {row['devices']:,} {row['chip']} | {row['published']:,.0f} | {row['projected']:,.0f} | "
            f"{ratio} | {row['memory'] / 1e9:.0f} | {row['source']}, {kind}{'' if row['fits'] else ', does not fit'}"
        )
    return table("run | chips | tokens/s/GPU: | projected: | ratio: | memory, GB: | ", rows)


def published_sources(result: Result) -> str:
    """Where the speeds were published."""
    return "\n".join(f"- {name}: {where}" for name, where in result["numbers"]["sources"].items())


def published_reasons(result: Result) -> str:
    """Why some are off by more, or do not fit."""
    rows = result["numbers"]["rows"]
    lines = [f"- `{row['id']}`, {row['ratio']:.2f}: {row['reason']}." for row in rows if row["reason"]]
    by_reason: dict[str, list[str]] = {}
    for row in rows:
        if not row["fits"]:
            by_reason.setdefault(row["memory_reason"], []).append(f"`{row['id']}`")
    return "\n".join([*lines, *(f"- {', '.join(names)}: {reason}." for reason, names in by_reason.items())])


def published_commands(result: Result) -> str:
    """The command of every row."""
    lines = (f"# {row['id']}\n{row['command']}" for row in result["numbers"]["rows"])
    return "\n".join(["```text", *lines, "```"])


def published_fits(result: Result) -> str:
    """Whether layouts fit, and what is published of them."""
    rows = (
        f"`{row['model']}`, {row['chip']} | {row['layout']} | {_fits(row['published'])} | "
        f"{_fits(row['fits'])}, {row['memory'] / 1e9:.1f} of {row['capacity'] / 1e9:.1f} GB"
        for row in result["numbers"]["fits"]
    )
    return table("model, chip | layout | published | projected", rows)


def published_ways_in(result: Result) -> str:
    """What brings our own run of the larger model into the smaller chip."""
    names = ("as it is", "optimizer on the host", "FSDP")
    rows = (
        f"{name} | {_fits(row['fits'])} | {row['memory'] / 1e9:.1f} GB | {row['speed']:.0f}"
        for name, row in zip(names, result["numbers"]["ways_in"], strict=True)
    )
    return table("PP24 EP16 CP2, all-to-all | fits | memory: | tokens/s/GPU:", rows)


def _fits(fits: bool) -> str:
    return "fits" if fits else "does not fit"


def published_dispatch(result: Result) -> str:
    """Throughput by expert ranks and way to send."""
    return (
        f"Projected at commit `{result['commit']}`. Tokens/s/GPU of MoE-2T on 1,024 MI300X, and share of EP 8.\n\n"
        + table(
            "EP: | all-to-all: | de-duplicated, even routing: | de-duplicated, in turn: | over all-to-all:",
            _dispatch_rows(result["numbers"]["dispatch"]),
        )
    )


def _dispatch_rows(rows: list[Result]) -> Iterator[str]:
    first: tuple[float, ...] = ()
    for ranks in dict.fromkeys(row["expert"] for row in rows):
        plain, once = (row for row in rows if row["expert"] == ranks)
        name = "tokens_per_second_per_device"
        speeds = (plain[name], once[name], once["in_turn"])
        first = first or speeds
        cells = " | ".join(f"{speed:.0f} ({speed / of:.0%})" for speed, of in zip(speeds, first, strict=True))
        yield f"{ranks} | {cells} | {speeds[1] / speeds[0]:.2f}, {speeds[2] / speeds[0]:.2f}"


def published_scaling(result: Result) -> str:
    """Efficiency by devices, for several batches."""
    cells: dict[int, list[str]] = {}
    for row in result["numbers"]["scaling"]:
        speed = f"{row['tokens_per_second_per_device']:,.0f} tokens/s/GPU, {row['efficiency']:.1%}"
        cells.setdefault(row["rows_a_rank"], []).append(speed)
    devices = list(dict.fromkeys(row["devices"] for row in result["numbers"]["scaling"]))
    low, high = result["numbers"]["scaling"][0]["published"]
    head = f"rows of a step on a data-parallel rank: | {' | '.join(f'{count:,} MI325X:' for count in devices)}"
    return (
        f"Projected at commit `{result['commit']}`. Published at {devices[-1]:,}: {low:.0%} to {high:.0%}.\n\n"
        + table(head, (f"{each} | {' | '.join(speeds)}" for each, speeds in cells.items()))
    )


TABLES: dict[str, Callable[[Result], str]] = {
    "ladder": ladder,
    "ladder-changes": ladder_changes,
    "whole": whole,
    "numerics": numerics,
    "numerics-verdict": numerics_verdict,
    "parity": parity,
    "parity-verdict": parity_verdict,
    "layouts-speed": layouts_speed,
    "layouts-loss": layouts_loss,
    "packing-origin": packing_origin,
    "doctor-recorded": doctor_recorded,
    "projection-runs": projection_runs,
    "projection-pictures": projection_pictures,
    "search-cost": search_cost,
    "tune-cases": tune_cases,
    "trace-speed": trace_speed,
    "recordings": recordings,
    "published-errors": published_errors,
    "published-runs": published_runs,
    "published-sources": published_sources,
    "published-reasons": published_reasons,
    "published-commands": published_commands,
    "published-fits": published_fits,
    "published-ways-in": published_ways_in,
    "published-dispatch": published_dispatch,
    "published-scaling": published_scaling,
}
