"""One HTML page of `penstock tune`: the path of the search, projected against measured, and what would win next."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from penstock.base.numbers import counted, duration_text, gigabytes, time_text
from penstock.report.figure import SERIES, Figure, axis
from penstock.report.frame import card, document, key_figures, table, write_whole
from penstock.tune.search_loop import Search, TrialRecord, median_error
from penstock.tune.tune_files import gain_of, short_source, short_steps_text


def write_tune_page(
    path: Path, name: str, search: Search, spent: Mapping[str, float], next_wins: Sequence[str], whole_rows: int
) -> None:
    """Write the page; `spent` are seconds by part. Raises a PicturesError if it cannot be written."""
    ran = [record for record in search.records if record.result.kind == "ran"]
    short = short_steps_text(search, whole_rows)
    short = f'<p class="faint">{escape(short[0].upper() + short[1:])}.</p>' if short else ""
    figures = [_path(search.records), _projected(ran)] if ran else []
    leader, first = search.leader, search.reference
    facts = {"trials": counted(len(search.records), "trial"), "time": duration_text(sum(spent.values()))}
    if leader is not None and first is not None:
        facts = {"step": time_text(leader.step), "gain": f"{gain_of(leader, first):.2f} x", **facts}
        facts["memory"] = gigabytes(leader.peak_memory_bytes)
    before, after = median_error(search.records, corrected=False), median_error(search.records, corrected=True)
    error = ""
    if before is not None and after is not None:
        error = f"Median error of the plan {before:.1%}, corrected by earlier trials {after:.1%}."
    parts = "".join(f"<li>{escape(part)}: {duration_text(seconds)}</li>" for part, seconds in spent.items())
    wins = (
        "".join(f"<li>{escape(next_win)}</li>" for next_win in next_wins) or "<li>nothing that the plan knows of</li>"
    )
    body = f"""
<header><h1>{escape(name)} <span class="faint">tuned</span></h1>
<p class="faint">{escape(search.ending)}. {error}</p>{short}{key_figures(facts)}</header>
<main>
{"".join(card(figure, is_wide=True) for figure in figures)}
<section class="wide"><h2>Trials</h2>{trials_table(search)}</section>
<section><h2>Time spent</h2><ul>{parts}</ul></section>
<section><h2>What would win next, by the plan</h2><ul>{wins}</ul></section>
</main>"""
    write_whole(path, document(f"{name} tuned", body, figures).encode())


def trials_table(search: Search) -> str:
    columns = {
        "": "",
        "change": "text",
        "from": "text",
        "projected": "",
        "expected": "",
        "measured": "",
        "result": "text",
    }
    rows, best = [], None if search.leader is None else search.leader.candidate.key
    for number, record in enumerate(search.records, 1):
        is_ran = record.result.kind == "ran"
        word: str = record.result.kind
        if is_ran and record.is_whole:
            word = "whole steps"
        elif record.candidate.key == best:
            word = "leader"
        elif record.result.was_stopped:
            word = "stopped early"
        rows.append(
            (
                f"{number}",
                escape(record.candidate.key or "the run as it is"),
                escape(record.candidate.source),
                time_text(record.projected),
                time_text(record.expected),
                f"{time_text(record.step)}{short_source(record)}" if is_ran else "",
                escape(word if is_ran else f"{word}: {record.result.reason}"),
            )
        )
    return table(columns, rows)


def _path(records: Sequence[TrialRecord]) -> Figure:
    """Measured steps of all trials, in their order, and the best so far."""
    numbers = [number for number, record in enumerate(records, 1) if record.result.kind == "ran"]
    ran = [record for record in records if record.result.kind == "ran"]
    unit, per_second = _unit([record.even_step for record in ran])
    steps = [per_second * record.even_step for record in ran]
    best = [min(steps[: index + 1]) for index in range(len(steps))]
    texts = [record.candidate.key or "the run as it is" for record in ran]
    data = [
        {"type": "scatter", "mode": "markers", "name": "trial", "x": numbers, "y": steps, "text": texts,
         "marker": {"color": SERIES[0], "size": 9}},
        {"type": "scatter", "mode": "lines", "name": "best so far", "x": numbers, "y": best,
         "line": {"shape": "hv", "color": SERIES[1]}},
    ]  # fmt: skip
    layout = {"xaxis": axis("trial", dtick=1), "yaxis": axis(f"{unit} for the tokens of a step", rangemode="tozero")}
    return Figure(name="path", title="The search", caption="Failed trials leave a gap.", data=data, layout=layout)


def _projected(ran: Sequence[TrialRecord]) -> Figure:
    """Measured over projected steps: by the bare plan, and as corrected by the trials before."""
    unit, per_second = _unit([record.step for record in ran])
    measured = [per_second * record.step for record in ran]
    bare = [per_second * record.projected for record in ran]
    known = [per_second * record.expected for record in ran[1:]]
    ends = [0.0, 1.05 * max([*measured, *bare, *known])]
    marks = {"type": "scatter", "mode": "markers"}
    data = [
        {**marks, "name": "plan", "x": bare, "y": measured, "marker": {"color": SERIES[0], "size": 9}},
        {**marks, "name": "corrected", "x": known, "y": measured[1:], "marker": {"color": SERIES[1], "size": 9}},
        {"type": "scatter", "mode": "lines", "name": "equal", "x": ends, "y": ends, "line": {"dash": "dot"}},
    ]
    layout = {"xaxis": axis(f"projected {unit}"), "yaxis": axis(f"measured {unit}")}
    caption = "Each trial by the plan alone, and by the plan corrected with the trials before it."
    return Figure(name="projected", title="Projected and measured", caption=caption, data=data, layout=layout)


def _unit(seconds: Sequence[float]) -> tuple[str, float]:
    """Unit of an axis with these times, and how many of it are a second."""
    return ("s", 1.0) if max(seconds) >= 10.0 else ("ms", 1e3)
