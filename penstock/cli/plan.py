"""`penstock plan`: which layout of a run fits a cluster, how fast it will be, and why the others are left out.

    penstock plan deepseek-v3 --on 512xMI325X                          search, the fastest first
    penstock plan moe-1t --on 768xMI300X --only micro_batch=1          search among some
    penstock plan moe-1t --on 768xMI300X training.micro_batch=1        the same: an override of a layout binds a search
    penstock plan moe-1t --on 768xMI300X --layout pp=24,vpp=4,ep=8,cp=2    one layout, also if it does not fit
    penstock plan mine.toml --on 8xH200 --layout own                   the run as it is written
    penstock plan Qwen3-30B-A3B/config.json --on 8xH200                a model of Hugging Face; its folder too
    penstock plan moe-1t --on 768xMI300X --write best.toml             and train it: penstock train best.toml
    penstock plan --on 8xH200 --compare a.toml b.toml                  which term of two runs differs
    penstock plan ... --scale 128,256,512 | --sweep ep=8,16,32         what if
    penstock plan ... --on 1000xH100 --worlds auto                     use all of them, or keep some spare
    penstock plan ... --layout pp=16,ep=8 --software megatron          as another trainer runs it

Nothing is started: a laptop plans for a cluster. docs/plan.md says how to read what is printed. Here it is settled what
is asked; the answers come from penstock/plan/search.py (many layouts), project.py (one) and what_if.py.
"""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from math import isfinite
from pathlib import Path
from typing import Literal

from rich.console import Console

from penstock.base.errors import PenstockError, did_you_mean
from penstock.base.numbers import bytes_text, time_text
from penstock.cli import plan_options as options
from penstock.cli.options import Force, Json, Overrides
from penstock.cli.output import print_next, print_table, write_file
from penstock.cli.plan_print import (
    cluster_text,
    comparison_json,
    conclusion,
    explain,
    grounds,
    points_json,
    print_campaign,
    print_comparison,
    print_plan,
    print_scaling,
    print_searches,
    print_sweep,
)
from penstock.config.load import dump_toml
from penstock.config.run import Run, with_values
from penstock.models.huggingface.config import load_run_or_model
from penstock.plan.asked_layout import rows_to_share, with_layout
from penstock.plan.assumptions import Assumptions
from penstock.plan.balance import BalanceCase, balance_cases, balance_json
from penstock.plan.campaign import HOUR, Campaign, Failures, plan_campaign
from penstock.plan.candidates import fixed_by
from penstock.plan.composer import meta_workers
from penstock.plan.costs import assumed_imbalance
from penstock.plan.hardware import Cluster
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.layout_names import parse_layout
from penstock.plan.loads import RecordedLoads, read_loads
from penstock.plan.phases import TrainingPhase, phases_of
from penstock.plan.project import advice_for, project
from penstock.plan.projection import Plan, Projection, Refusal, plan_json
from penstock.plan.search import Progress, search
from penstock.plan.search_request import SearchRequest
from penstock.plan.software import OWN as OWN_SOFTWARE
from penstock.plan.software import parse_software
from penstock.plan.what_if import (
    Planner,
    SweepPoint,
    SweptSearch,
    answer_to,
    compare,
    scale,
    sweep,
    swept_runs,
    swept_searches,
    usable_worlds,
    with_smallest_state,
    with_state_in_host_memory,
    world_searches,
)
from penstock.report.curves import scaling_pictures, sweep_pictures
from penstock.report.export import write_image
from penstock.report.figure import Figure
from penstock.report.page import write_page

OWN = "own"  # asks for the layout of the run itself
NOTHING_FITS = "nothing-fits"  # rule of a number of devices that no layout fits
TOP = 10  # candidates that a search shows
PROGRESS_SECONDS = 10.0  # between two lines of progress where no terminal shows them
KINDS: tuple[Literal["strong", "weak"], ...] = ("strong", "weak")  # ways to scale


def plan(  # noqa: PLR0913 - one argument for each option
    on: options.On,
    target: options.Target = None,
    overrides: Overrides = None,
    layout: options.Layout = None,
    only: options.Only = "",
    tokens: options.Tokens = None,
    top: options.Top = None,
    network: options.Network = None,
    host_memory: options.HostMemory = None,
    topic: options.Topic = None,
    compared: options.Compared = None,
    scales: options.Scales = None,
    worlds: options.Worlds = None,
    swept: options.Swept = None,
    imbalance: options.Imbalance = None,
    routing: options.Routing = None,
    saving: options.Saving = "run",
    software: options.Trainer = "own",
    train_tokens: options.TrainTokens = None,
    ramp: options.Ramp = None,
    stages: options.Stages = None,
    price: options.Price = None,
    watts: options.Watts = None,
    mtbf: options.Mtbf = None,
    as_json: Json = False,
    write: options.Write = None,
    force: Force = False,
    html: options.Html = None,
    png: options.Png = None,
    svg: options.Svg = None,
) -> None:
    """Rank layouts of a run on a cluster by speed, and say why others are left out. Nothing is started."""
    files = {"--write": write, "--html": html, "--png": png, "--svg": svg}
    asked = {"--explain": topic, "--compare": compared, "--scale": scales, "--sweep": swept, "--worlds": worlds}
    phases, costs = phases_of(train_tokens, ramp, stages), {"--price": price, "--watts": watts, "--mtbf": mtbf}
    options.check_questions(asked | {"--tokens": phases or None}, files, force=force)
    said = {"--on": on, "--network": network, "--host-memory": host_memory, "--only": only or None, "--layout": layout}
    others = {"--global-batch-tokens": tokens, "--top": top, "--json": as_json or None, "--force": force or None}
    options.check_used({**said, **asked, **files, **others, "--tokens": phases or None}, {} if phases else costs)
    searches = layout is None and compared is None
    assumptions = _assumptions(imbalance, saving, routing, software, writes=write is not None, searches=searches)
    cluster, planner = parse_cluster(on, network, host_memory), partial(project, assumptions=assumptions)
    changes = overrides or []
    if compared is not None:
        _write(_compare(compared, cluster, planner, target, changes, as_json=as_json), files, assumptions)
        return
    if target is None:
        raise PenstockError("there is nothing to plan", fix="name it: penstock plan deepseek-v3 --on 512xMI325X")
    # A layout that is asked for completes the run; its rules are asked when it is projected.
    run = load_run_or_model(target, changes, is_whole=layout in (None, OWN))
    _check_what_if(run, cluster, scales, swept)
    fixed = {} if layout is not None else fixed_by(run, changes, parse_layout(only) if only else {})

    def plan_of(run: Run, tokens: float | None, cluster: Cluster = cluster, fixed: Mapping[str, str] = fixed) -> Plan:
        rows = None if tokens is None else rows_to_share(tokens / run.training.sequence_length, cluster.devices)
        if layout is not None:
            return _asked(run, cluster, {} if layout == OWN else parse_layout(layout), planner, rows)
        question = SearchRequest(run=run, cluster=cluster, fixed=fixed, top=top or TOP, assumptions=assumptions)
        return _searched(replace(question, global_batch=rows), planner)

    if phases:
        _print_campaign(run, cluster, phases, plan_of, costs, as_json=as_json)
        return
    if worlds is not None or (swept is not None and layout is None):
        searches = _searches(run, cluster, worlds, swept, fixed, tokens)
        answer, more = _answer_searches(searches, plan_of, cluster, as_json=as_json)
    else:
        answer = plan_of(run, tokens)
        if scales is not None or swept is not None:
            more = _what_if(_first(answer), planner, scales, swept, as_json=as_json)
        else:
            more = _tell(answer, assumptions, run, topic, as_json=as_json)
    _write(answer, files, assumptions, more)
    if write is not None:
        print_next("train", write, to_stderr=True)
    elif not as_json and worlds is None and _can_be_written(answer, assumptions):
        assumed = {"--imbalance": imbalance, "--routing": routing, "--global-batch-tokens": tokens}
        _print_next_plan([target, *changes], {**said, **assumed})


def _print_campaign(
    run: Run,
    cluster: Cluster,
    phases: Sequence[TrainingPhase],
    plan_of: Callable[[Run, float | None], Plan],
    costs: Mapping[str, float | None],
    *,
    as_json: bool,
) -> None:
    price, watts, mtbf = (costs[option] for option in ("--price", "--watts", "--mtbf"))
    parts = plan_campaign(run, phases, plan_of, None if mtbf is None else Failures(mtbf_seconds=mtbf * HOUR))
    power = cluster.hardware.peaks.power_watts if watts is None else watts
    print_campaign(Campaign(cluster=cluster, phases=parts, price=price, watts=power), as_json=as_json)


def _searched(question: SearchRequest, planner: Planner) -> Plan:
    # Processes are forked before the thread that draws progress starts.
    with meta_workers() as workers, _working() as progress:
        answer = search(question, progress, workers)
        nearest = answer.nearest
        if nearest is None or question.fixed or nearest.cluster.devices > 1:
            return answer
        if nearest.memory.parameters > nearest.capacity_bytes:
            return answer
        progress("state in host memory")
        rows = question.global_batch or question.run.training.global_batch
        run = with_values(question.run, training={"global_batch": rows})
        there = with_state_in_host_memory(run, question.cluster, planner, answer.margin)
        faster = None if there is None else with_smallest_state(run, question.cluster, planner, there)
    helps = (
        f"--layout own {shlex.join(option[0])}, {conclusion(option[1])}"
        for option in (there, faster)
        if option is not None
    )
    return replace(answer, helps=(*helps, *answer.helps))


def _print_next_plan(arguments: Sequence[str], options: Mapping[str, object]) -> None:
    """The command that also writes the run."""
    said = [word for name, value in options.items() if value is not None for word in (name, f"{value}")]
    print_next("plan", *arguments, *said, "--write", "best.toml")


def _tell(answer: Plan, assumptions: Assumptions, run: Run, topic: str | None, *, as_json: bool) -> list[Figure]:
    """Print a plan; there are no pictures beyond its own."""
    if as_json:
        print(json.dumps(plan_json(answer) | balance_json(_balance(answer, assumptions)), indent=2))
    elif topic is not None:
        explain(answer, topic)
    else:
        _print(answer, assumptions, run)
    return []


def _can_be_written(answer: Plan, assumptions: Assumptions) -> bool:
    is_ours = assumptions.saving == "run" and assumptions.software == OWN_SOFTWARE
    return is_ours and bool(answer.candidates)


def _assumptions(
    imbalance: float | None, saving: str, routing: str | None, software: str, *, writes: bool, searches: bool
) -> Assumptions:
    routing = "router" if routing is None else routing
    if saving not in _SAVING:
        raise _unknown("--saving", saving, tuple(_SAVING))
    if imbalance is not None and not isfinite(imbalance):
        raise PenstockError("--imbalance is no number", got=imbalance, allowed="1 or more, such as 1.2")
    recorded = _recorded_loads(routing, goes_with_imbalance=imbalance is None, searches=searches)
    trainer = parse_software(software)
    if trainer != OWN_SOFTWARE and searches:
        raise PenstockError("--software is of one layout, and a search is of runs of ours", fix="name it: --layout")
    if writes and (saving == "conventional" or trainer != OWN_SOFTWARE):
        asked = "keeps what --saving conventional counts" if saving == "conventional" else "is run by that --software"
        raise PenstockError(f"--write writes a run, and no run of ours {asked}")
    in_turn = routing == "in-turn"
    even = imbalance or (1.0 if in_turn else 1.2)
    kept: Literal["run", "conventional"] = "conventional" if saving == "conventional" else "run"
    return Assumptions(imbalance=even, saving=kept, in_turn=in_turn, software=trainer, loads=recorded)


def _recorded_loads(routing: str, *, goes_with_imbalance: bool, searches: bool) -> RecordedLoads | None:
    """The loads of a metrics.jsonl; None for another routing."""
    if routing in _ROUTING:
        return None
    if not Path(routing).exists():
        raise _unknown("--routing", routing, (*_ROUTING, "a metrics.jsonl"))
    if searches or not goes_with_imbalance:
        asked = "a search, whose layouts share experts in many ways" if searches else "--imbalance"
        raise PenstockError(f"--routing {routing} does not go with {asked}", fix="name a layout: --layout own, or ep=8")
    return read_loads(Path(routing))


def _unknown(option: str, word: str, allowed: Sequence[str]) -> PenstockError:
    hint = did_you_mean(word, allowed)
    return PenstockError(f"{option} is unknown", got=word, allowed=", ".join(allowed), fix=hint)


_SAVING: Mapping[str, str] = {
    "run": "activations are those that the run itself keeps (--saving)",
    "conventional": "activations as operators that are not fused keep them (--saving)",
}
_ROUTING: Mapping[str, str] = {
    "router": "every choice of a token is as likely (--routing)",
    "in-turn": "tokens take the experts in turn, as benchmarks that force balance do (--routing)",
}


def _assumed(assumptions: Assumptions, run: Run) -> list[str]:
    """A line for each assumption about the run that may be changed."""
    lines = []
    if run.model.moe is not None:
        forced = "model.moe.balance.force_load_balance" if run.model.moe.balance.force_load_balance else "--imbalance"
        share = f"{assumed_imbalance(run, assumptions.in_time):.4g} x their even share of rows, at most all"
        loads = assumptions.loads
        if loads is not None and forced == "--imbalance":
            forced = f"mean of {loads.layers} layers and {len(loads.steps_LE)} steps, --routing {loads.path}"
        lines.append(f"the fullest rank's experts get {share} ({forced})")
        lines += [_ROUTING["in-turn"]] if assumptions.in_turn else []
    if run.data.document_mask:
        lines.append("each row is one document in attention, so shorter ones take less time (data.document_mask)")
    lines.append(_SAVING[assumptions.saving])
    software = assumptions.software
    return lines if software == OWN_SOFTWARE else [*lines, f"{software} (--software); {software.source}"]


def _asked(run: Run, cluster: Cluster, choices: Mapping[str, str], planner: Planner, rows: int | None) -> Plan:
    """The plan of one layout, also if it does not fit; with `rows` of a step, those of a search, or about as many."""
    tokens = None if rows is None else rows * run.training.sequence_length
    there = with_layout(run, choices, cluster.devices, tokens)
    with _working():
        answer = answer_to(there, cluster, planner)
    refused = (answer,) if isinstance(answer, Refusal) else ()
    candidates = () if isinstance(answer, Refusal) else (answer,)
    advice = advice_for(there, cluster) if candidates else ()
    return Plan(model=run.name, cluster=cluster, candidates=candidates, refused=refused, considered=1, advice=advice)


def _print(answer: Plan, assumptions: Assumptions, run: Run) -> None:
    has_loads = assumptions.loads is not None and bool(answer.candidates)
    print_plan(answer, _assumed(assumptions, answer.candidates[0].run if has_loads else run))
    _print_balance(_balance(answer, assumptions))


def _print_balance(cases: Sequence[BalanceCase]) -> None:
    """The run with and without replicas of experts, if there are cases; forced balance, the last one, is the limit."""
    if not cases:
        return
    least = cases[-1].step_seconds
    rows = [
        (
            case.name,
            f"{case.loads.fullest:.3f}",
            f"{case.loads.replicas:.1f}" if case.loads.replicas else "",
            time_text(case.exposed_seconds) if case.exposed_seconds else "",
            time_text(case.step_seconds),
            f"{least / case.step_seconds:.1%}",
        )
        for case in cases
    ]
    head = ("dispatch.balance", "fullest rank", "replicas", "waiting for them", "step", "of forced")
    print_table(head, rows, ("waiting for them", "replicas"))
    print("fullest rank: its rows over the even share; replicas of a layer on all ranks: means of layers and steps")


def _balance(answer: Plan, assumptions: Assumptions) -> tuple[BalanceCase, ...]:
    """The first candidate with and without `dispatch.balance`, if its loads are recorded."""
    if assumptions.loads is None or not answer.candidates:
        return ()
    with _working():
        return balance_cases(answer.candidates[0].run, answer.cluster, assumptions)


@contextmanager
def _working() -> Iterator[Progress]:
    """Progress: a line that changes on a terminal, elsewhere a new line at most every `PROGRESS_SECONDS`."""
    console = Console(stderr=True)
    if console.is_terminal:
        with console.status("projecting") as status:
            yield status.update
        return
    printed = time.monotonic()

    def update(text: str) -> None:
        nonlocal printed
        if time.monotonic() - printed >= PROGRESS_SECONDS:
            printed = time.monotonic()
            print(text, file=sys.stderr, flush=True)

    yield update


def _first(answer: Plan) -> Projection:
    """The candidate that what-ifs start from."""
    if answer.candidates:
        return answer.candidates[0]
    lacks = [] if answer.nearest is None else [f" (the nearest lacks {bytes_text(answer.nearest.over_bytes)})"]
    (reason, *_) = [*lacks, *(f" ({refusal.rule}: {refusal.reason})" for refusal in answer.refused)] or [""]
    raise PenstockError(f"no layout of {answer.model} fits{reason}", fix="name one: --layout pp=8,ep=8")


def _compare(
    names: tuple[str, str], cluster: Cluster, planner: Planner, target: str | None, changes: list[str], *, as_json: bool
) -> Plan:
    """Project two runs as they are, print the differing terms, and return both for pictures."""
    overrides = [target, *changes] if target else changes  # the first override may stand in the place of a target
    if any("=" not in override for override in overrides):
        raise PenstockError("--compare names both runs", got=overrides[0], allowed="overrides a.b=c of both")
    runs = [load_run_or_model(name, overrides) for name in names]
    with _working():
        left, right = (planner(run, cluster) for run in runs)
    comparison = compare(left, right)
    if as_json:
        _print_json(left, comparison_json(comparison))
    else:
        print_comparison(comparison, *names)
    model = " and ".join(dict.fromkeys(run.name for run in runs))
    return Plan(model=model, cluster=cluster, candidates=(left, right), refused=(), considered=len(runs))


def _what_if(
    base: Projection, planner: Planner, scales: str | None, swept: str | None, *, as_json: bool
) -> list[Figure]:
    """Project the layout on other numbers of devices or with other values, and return pictures of the answers."""
    if scales is not None:
        worlds = _parsed_scale(scales)
        with _working():
            kinds = {f"{kind}": scale(base.run, base.cluster, worlds, planner, kind) for kind in KINDS}
        if as_json:
            _print_json(base, {kind: points_json(points) for kind, points in kinds.items()})
        else:
            print_scaling(kinds, base)
        return scaling_pictures(kinds, base)
    name, values = _parsed_sweep(swept or "")
    with _working():
        points = sweep(base.run, base.cluster, name, values, planner)
    if as_json:
        _print_json(base, {"sweep": name, "points": points_json(points)})
    else:
        print_sweep(points, base)
    return sweep_pictures(points, base)


def _check_what_if(run: Run, cluster: Cluster, scales: str | None, swept: str | None) -> None:
    """Refuse before a search what no layout could answer."""
    if swept is not None:
        swept_runs(run, cluster, *_parsed_sweep(swept))
    if scales is not None:
        _parsed_scale(scales)


def _parsed_scale(text: str) -> list[int]:
    return [_whole(word, "--scale") for word in text.split(",")]


def _parsed_sweep(text: str) -> tuple[str, list[str]]:
    name, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise PenstockError("--sweep is no name with values", got=text, allowed="micro_batch=1,2,4")
    return name.strip(), [value.strip() for value in values.split(",")]


def _searches(
    run: Run,
    cluster: Cluster,
    worlds: str | None,
    swept: str | None,
    fixed: Mapping[str, str],
    tokens: float | None,
) -> list[SweptSearch]:
    """A search for each number of devices, or for each value of a sweep."""
    if worlds is None:
        return swept_searches(run, cluster, *_parsed_sweep(swept or ""), fixed, tokens)
    counts = usable_worlds(cluster) if worlds == "auto" else [_whole(word, "--worlds") for word in worlds.split(",")]
    if max(counts) > cluster.devices:
        raise PenstockError("--worlds are devices of the cluster", got=max(counts), allowed=f"up to {cluster.devices}")
    return world_searches(run, cluster, counts, tokens, fixed)


def _answer_searches(
    searches: Sequence[SweptSearch], plan_of: Callable[..., Plan], cluster: Cluster, *, as_json: bool
) -> tuple[Plan, list[Figure]]:
    """Search each, print the points, and return the plan of the fastest one and pictures of a sweep."""
    plans = [plan_of(search.run, search.tokens, search.cluster, search.fixed) for search in searches]
    points = [
        SweepPoint(asked=search.asked, answer=_best_or_refusal(plan), gap=plan.gap)
        for search, plan in zip(searches, plans, strict=True)
    ]
    (name, *_), run = searches[0].asked, searches[0].run
    if as_json:
        head = {"model": run.name, "hardware": cluster.hardware.name, "world": cluster.devices}
        key = {"worlds": points_json(points)} if name == "devices" else {"sweep": name, "points": points_json(points)}
        print(json.dumps({**head, **key}, indent=2))
    else:
        print_searches(points, cluster)
    fastest = max(
        plans, key=lambda plan: plan.candidates[0].time.tokens_per_second_per_device if plan.candidates else 0
    )
    has_pictures = name != "devices" and bool(fastest.candidates)
    return fastest, sweep_pictures(points, fastest.candidates[0], is_search=True) if has_pictures else []


def _best_or_refusal(plan: Plan) -> Projection | Refusal:
    if plan.candidates:
        return plan.candidates[0]
    nearest = "" if plan.nearest is None else f"; the nearest lacks {bytes_text(plan.nearest.over_bytes)}: "
    layout = "" if plan.nearest is None else f"{plan.nearest.layout}"
    return Refusal(layout={}, rule=NOTHING_FITS, reason=f"nothing fits{nearest}{layout}")


def _print_json(base: Projection, answer: Mapping[str, object]) -> None:
    """Print an answer with the model, the hardware and the world."""
    cluster = base.cluster
    head = {"model": base.run.name, "hardware": cluster.hardware.name, "world": cluster.devices}
    print(json.dumps({**head, **answer}, indent=2))


def _whole(word: str, option: str) -> int:
    if not word.strip().isdecimal() or int(word) < 1:
        raise PenstockError(f"{option} is a list of numbers of devices", got=repr(word), allowed="128,256,512")
    return int(word)


def _write(
    answer: Plan, files: Mapping[str, Path | None], assumptions: Assumptions, more: Sequence[Figure] = ()
) -> None:
    for option, path in files.items():
        if path is None:
            continue
        written = [path]
        if option == "--write":
            write_run(path, answer)
        else:
            runs = [candidate.run for candidate in answer.candidates]
            assumed = _assumed(assumptions, runs[0]) if runs else []
            written = write_pictures(path, answer, more, grounds(answer.cluster, assumed))
        # Standard output may be JSON that a program reads.
        print(f"written to {', '.join(str(file) for file in written)}", file=sys.stderr)


def write_run(path: Path, plan: Plan) -> None:
    """Write the run of a plan's first candidate, whole or not at all; a PenstockError if there is none."""
    if not plan.candidates:
        raise PenstockError(f"no layout of {plan.model} fits, so {path} is not written", fix="see --explain refused")
    best = plan.candidates[0]
    head = (f"planned by penstock for {cluster_text(best.cluster)}", conclusion(best))
    write_file(path, "".join(f"# {line}\n" for line in head) + f"\n{dump_toml(best.run)}")


def write_pictures(path: Path, plan: Plan, more: Sequence[Figure], rests_on: Sequence[str]) -> list[Path]:
    """Write a page of a plan, or an image of each of its pictures, by the suffix of the path; returns the files.

    `more` are pictures of what-ifs, `rests_on` assumptions and origins. Raises a PicturesError if Plotly or a
    browser is not installed.
    """
    if path.suffix == ".html":
        write_page(plan, path, more=more, grounds=rests_on)
        return [path]
    return write_image(plan, path, more=more)
