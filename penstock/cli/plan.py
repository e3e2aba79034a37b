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

Nothing is started: a laptop plans for a cluster. docs/plan.md says how to read what is printed. The options become a
request (plan_request.py), which is answered here from penstock/plan/search.py (many layouts), project.py (one) and
what_if.py, and printed (plan_answer.py, plan_print.py).
"""

import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from penstock.base.errors import PenstockError
from penstock.base.garbage import no_collection
from penstock.base.numbers import bytes_text
from penstock.cli.output import print_next, write_file
from penstock.cli.plan_answer import PlanAnswer, Result, Series, print_answer
from penstock.cli.plan_print import assumed_lines, cluster_text, conclusion, grounds
from penstock.cli.plan_request import OWN, RECORDED, PlanOptions, PlanRequest, request_of
from penstock.config.load import dump_toml
from penstock.config.run import Run, with_values
from penstock.models.huggingface.config import load_run_or_model
from penstock.plan.asked_layout import check_said_once, rows_to_share, with_layout
from penstock.plan.assumptions import Assumptions
from penstock.plan.balance import balance_cases
from penstock.plan.campaign import HOUR, Campaign, Failures, plan_campaign
from penstock.plan.candidates import fixed_by
from penstock.plan.composer import meta_workers
from penstock.plan.hardware import Cluster
from penstock.plan.loads import read_loads
from penstock.plan.project import advice_for, project
from penstock.plan.projection import Plan, Projection, Refusal
from penstock.plan.search import Progress, search
from penstock.plan.search_request import SearchRequest
from penstock.plan.what_if import (
    Planner,
    SweepPoint,
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
from penstock.report.figure import Figure
from penstock.report.page import scaling_pictures, sweep_pictures, write_image, write_page

NOTHING_FITS = "nothing-fits"  # rule of a number of devices that no layout fits
TOP = 10  # candidates that a search shows
PROGRESS_SECONDS = 10.0  # between two lines of progress where no terminal shows them
KINDS: tuple[Literal["strong", "weak"], ...] = ("strong", "weak")  # ways to scale
EVEN, USUAL = 1.0, 1.2  # rows of the fullest rank over the even share: in turn, and else


def plan(**options: Any) -> None:
    """Rank layouts of a run on a cluster by speed, and say why others are left out. Nothing is started."""
    request = request_of(options)
    with no_collection():
        answer = answer_of(request)
        print_answer(answer, request)
        _write(request, answer)
        _print_next(request, answer)


vars(plan)["__signature__"] = signature(PlanOptions)  # typer makes an option of each field


@dataclass(frozen=True, kw_only=True)
class _Question:
    """A request with its run, and how it is projected."""

    request: PlanRequest
    run: Run
    fixed: Mapping[str, str]  # parts of all layouts of a search
    assumptions: Assumptions
    planner: Planner

    def plan(
        self, run: Run, tokens: float | None, cluster: Cluster | None = None, fixed: Mapping[str, str] | None = None
    ) -> Plan:
        """The plan of a run with about so many tokens of a step: of one layout, or of a search."""
        request, length = self.request, run.training.sequence_length
        cluster = cluster or request.cluster
        rows = None if tokens is None else rows_to_share(tokens / length, cluster.devices)
        if request.layout is not None:
            # With the tokens of a step a layout has the rows of a search, or about as many.
            there = with_layout(run, request.layout, cluster.devices, None if rows is None else rows * length)
            return _asked(there, cluster, self.planner)
        question = SearchRequest(
            run=run, cluster=cluster, fixed=self.fixed if fixed is None else fixed, top=request.options.top or TOP,
            assumptions=self.assumptions, global_batch=rows,
        )  # fmt: skip
        return _searched(question, self.planner)

    def answer(self, result: Result, plan: Plan | None = None, figures: Sequence[Figure] = ()) -> PlanAnswer:
        """The answer with the lines of what it assumes; with recorded loads, also of `dispatch.balance`."""
        run, cases = self.run, ()
        if self.assumptions.loads is not None and plan is not None and plan.candidates:
            run = plan.candidates[0].run
            with _working():
                cases = balance_cases(run, plan.cluster, self.assumptions) if result is plan else ()
        return PlanAnswer(
            model=self.run.name if plan is None else plan.model, cluster=self.request.cluster, result=result, plan=plan,
            assumed=tuple(assumed_lines(self.assumptions, run)), figures=tuple(figures), balance=cases,
        )  # fmt: skip


def answer_of(request: PlanRequest) -> PlanAnswer:
    """The answer. Raises a PenstockError if a run cannot be loaded or planned, or nothing fits that must."""
    is_whole = request.options.layout in (None, OWN)  # its rules can be asked
    runs = [load_run_or_model(name, request.overrides, is_whole=is_whole) for name in request.names]
    assumptions, layout = _assumptions(request), request.layout
    fixed = {} if layout is not None or len(runs) > 1 else fixed_by(runs[0], request.overrides, request.only)
    planner = partial(project, assumptions=assumptions)
    question = _Question(request=request, run=runs[0], fixed=fixed, assumptions=assumptions, planner=planner)
    if len(runs) > 1:
        return _compare(question, runs)
    if layout is not None:
        check_said_once(runs[0], request.overrides, layout)
    if request.swept is not None:
        swept_runs(runs[0], request.cluster, *request.swept)
    if request.phases:
        return question.answer(_campaign(question))
    if request.options.worlds is not None or (request.swept is not None and layout is None):
        return _series_of_searches(question)
    plan = question.plan(runs[0], request.options.global_batch_tokens)
    return _what_if(plan, question) if request.scale or request.swept is not None else question.answer(plan, plan)


def _assumptions(request: PlanRequest) -> Assumptions:
    options = request.options
    in_turn = options.routing == "in-turn"
    is_recorded = options.routing not in (None, "router", "in-turn")
    return Assumptions(
        imbalance=options.imbalance or (EVEN if in_turn else USUAL), saving=options.saving, in_turn=in_turn,
        software=request.software, loads=read_loads(Path(f"{options.routing}")) if is_recorded else None,
    )  # fmt: skip


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
    fitting = filter(None, (there, faster))
    helps = [f"--layout own {shlex.join(overrides)}, {conclusion(projection)}" for overrides, projection in fitting]
    return replace(answer, helps=(*helps, *answer.helps))


def _asked(run: Run, cluster: Cluster, planner: Planner) -> Plan:
    """The plan of one layout, also if it does not fit."""
    with _working():
        answer = answer_to(run, cluster, planner)
    refused = (answer,) if isinstance(answer, Refusal) else ()
    candidates = () if isinstance(answer, Refusal) else (answer,)
    advice = advice_for(run, cluster) if candidates else ()
    return Plan(model=run.name, cluster=cluster, candidates=candidates, refused=refused, considered=1, advice=advice)


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


def _compare(question: _Question, runs: list[Run]) -> PlanAnswer:
    """Both runs as they are."""
    cluster = question.request.cluster
    with _working():
        left, right = (question.planner(run, cluster) for run in runs)
    model = " and ".join(dict.fromkeys(run.name for run in runs))
    plan = Plan(model=model, cluster=cluster, candidates=(left, right), refused=(), considered=len(runs))
    return question.answer(compare(left, right), plan)


def _campaign(question: _Question) -> Campaign:
    request, options = question.request, question.request.options
    failures = None if options.mtbf is None else Failures(mtbf_seconds=options.mtbf * HOUR)
    phases = plan_campaign(question.run, request.phases, question.plan, failures, options.global_batch_tokens)
    power = request.cluster.hardware.peaks.power_watts if options.watts is None else options.watts
    return Campaign(cluster=request.cluster, phases=phases, price=options.price, watts=power)


def _what_if(plan: Plan, question: _Question) -> PlanAnswer:
    """The first candidate on other numbers of devices, or with other values."""
    base, request, planner = _first(plan), question.request, question.planner
    with _working():
        if request.swept is not None:
            points = sweep(base.run, base.cluster, *request.swept, planner)
            series = Series(points={"points": points}, base=base, swept=request.swept[0])
            return question.answer(series, plan, sweep_pictures(points, base))
        kinds = {f"{kind}": scale(base.run, base.cluster, request.scale, planner, kind) for kind in KINDS}
        return question.answer(Series(points=kinds, base=base), plan, scaling_pictures(kinds, base))


def _series_of_searches(question: _Question) -> PlanAnswer:
    """The fastest layout of each number of devices, or of each value that is swept."""
    request, run, tokens = question.request, question.run, question.request.options.global_batch_tokens
    if request.swept is None:
        counts = usable_worlds(request.cluster) if request.worlds is None else request.worlds
        searches = world_searches(run, request.cluster, counts, tokens, question.fixed)
    else:
        searches = swept_searches(run, request.cluster, *request.swept, question.fixed, tokens)
    plans = [question.plan(search.run, search.tokens, search.cluster, search.fixed) for search in searches]
    points = [
        SweepPoint(asked=search.asked, answer=_best_or_refusal(plan), gap=plan.gap)
        for search, plan in zip(searches, plans, strict=True)
    ]
    if request.swept is None:
        return question.answer(Series(points={"worlds": points}))
    fitting = [plan for plan in plans if plan.candidates] or plans[:1]
    fastest = max(fitting, key=lambda plan: [best.time.tokens_per_second_per_device for best in plan.candidates])
    figures = sweep_pictures(points, fastest.candidates[0], is_search=True) if fastest.candidates else []
    return question.answer(Series(points={"points": points}, swept=request.swept[0]), fastest, figures)


def _best_or_refusal(plan: Plan) -> Projection | Refusal:
    near = plan.nearest
    reasons = [] if near is None else [f"the nearest lacks {bytes_text(near.over_bytes)}: {near.layout}"]
    reasons += [f"{refusal.rule}: {refusal.reason}" for refusal in plan.refused]
    nothing = Refusal(layout={}, rule=NOTHING_FITS, reason="; ".join(["nothing fits", *reasons[:1]]))
    return next(iter(plan.candidates), nothing)


def _first(plan: Plan) -> Projection:
    """The candidate that what-ifs start from."""
    best = _best_or_refusal(plan)
    if isinstance(best, Refusal):
        raise PenstockError(f"no layout of {plan.model}: {best.reason}", fix="name one: --layout pp=8,ep=8")
    return best


def _write(request: PlanRequest, answer: PlanAnswer) -> None:
    """Write the files that are asked for: a run whole or not at all, a page, an image of each picture."""
    plan = answer.plan
    for option, path in request.files.items():
        assert plan is not None, "files are of one plan"
        written = [path]
        if option == "--write":
            _write_run(path, plan)
        elif option == "--html":
            write_page(plan, path, more=answer.figures, grounds=grounds(answer.cluster, answer.assumed))
        else:
            written = write_image(plan, path, more=answer.figures)
        # Standard output may be JSON that a program reads.
        print(f"written to {', '.join(str(file) for file in written)}", file=sys.stderr)


def _write_run(path: Path, plan: Plan) -> None:
    if not plan.candidates:
        raise PenstockError(f"no layout of {plan.model} fits, so {path} is not written", fix="see --explain refused")
    best = plan.candidates[0]
    head = (f"planned by penstock for {cluster_text(best.cluster)}", conclusion(best))
    write_file(path, "".join(f"# {line}\n" for line in head) + f"\n{dump_toml(best.run)}")


def _print_next(request: PlanRequest, answer: PlanAnswer) -> None:
    """Propose to train the run that was written, or the command that also writes it."""
    given = request.options.given()
    if "--write" in given:
        print_next("train", given["--write"], to_stderr=True)
        return
    has_run = answer.plan is not None and bool(answer.plan.candidates)
    if has_run and not {"--json", "--compare", "--saving", "--software"} & given.keys():
        kept = {name: value for name, value in given.items() if name not in _DROPPED}
        options = [text for name, value in kept.items() for text in (name, f"{value}")]
        print_next("plan", *request.names, *request.overrides, *options, "--write", "best.toml")


_DROPPED = ("TARGET", RECORDED, "--top", "--explain", "--scale", "--sweep", "--html", "--png", "--svg")
"""Options of a plan that do not change its first candidate."""
