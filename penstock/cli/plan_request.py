"""What `penstock plan` is asked: its options, which of them go together, and the request that they make.

A request is made without PyTorch, so that a wrong argument is refused before PyTorch is imported. `USES` is the table
of options: an option that is not refused beside another one changes the answer to it, which a test checks for each two.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from typer import Argument, Option

from penstock.base.errors import PenstockError, did_you_mean
from penstock.cli.output import check_output
from penstock.cli.verbs import Force, Json, Overrides
from penstock.plan.hardware import Cluster, cluster_of
from penstock.plan.hardware_file import parse_cluster
from penstock.plan.layout_names import check_fixed, parse_layout
from penstock.plan.phases import TrainingPhase, phases_of
from penstock.plan.software import SOFTWARE, Software, parse_software
from penstock.report.frame import find_browser, plotly_script

OWN = "own"  # asks for the layout of the run itself
AUTO = "auto"  # asks for the numbers of devices that are worth a search

Text, Whole, Number = str | None, int | None, float | None
Saving = Literal["run", "conventional"]
Topic = Literal["memory", "memory.activations", "time", "refused", "hardware"]

_FILES: Mapping[str, str] = {"--write": ".toml", "--html": ".html", "--png": ".png", "--svg": ".svg"}
_ROUTINGS = ("router", "in-turn")
_NETWORK = "pod_nodes=4,oversubscription=8,rails=true"
_IMBALANCE = "Rows of the fullest rank over the even share, at most all. 1.2; 1 where balance is forced."
_ROUTING = "in-turn: experts one after the other; a metrics.jsonl: by its loads, of one --layout; else router."


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """The command line. An option has the name of its field."""

    on: Annotated[str, Option(metavar="NxCHIP", help="Where: 768xMI300X, or 8xmine.toml.")]
    target: Annotated[Text, Argument(metavar="TARGET", help="A preset, TOML file, run folder, or config.json.")] = None
    overrides: Overrides = None
    layout: Annotated[Text, Option(metavar="A=B,...", help="Only this one: pp=24,ep=8,cp=2; own: as it is.")] = None
    only: Annotated[Text, Option(metavar="A=B,...", help="Search layouts that have this.")] = None
    global_batch_tokens: Annotated[Whole, Option(metavar="N", min=1, help="Tokens of a step, about.")] = None
    top: Annotated[Whole, Option(metavar="N", min=1, help="Candidates to show; else 10.")] = None
    network: Annotated[Text, Option(metavar="A=B,...", help=f"Network: {_NETWORK}.")] = None
    host_memory: Annotated[Number, Option(metavar="GB", min=1, max=1e6, help="Of the host, each device.")] = None
    explain: Annotated[Topic | None, Option(metavar="TOPIC", help=f"{', '.join(get_args(Topic))}.")] = None
    compare: Annotated[tuple[str, str] | None, Option(metavar="A B", help="Two runs: which term differs.")] = None
    scale: Annotated[Text, Option(metavar="N,N,...", help="The layout on so many devices.")] = None
    worlds: Annotated[Text, Option(metavar="N,N,...|auto", help="The fastest layout of each number of devices.")] = None
    sweep: Annotated[Text, Option(metavar="A=B,C,...", help="sequence_length, micro_batch, ep, or a field.")] = None
    imbalance: Annotated[Number, Option(metavar="X", min=1.0, help=_IMBALANCE)] = None
    routing: Annotated[Text, Option(metavar="HOW", help=_ROUTING)] = None
    saving: Annotated[Saving, Option(metavar="HOW", help="run, or conventional: unfused.")] = "run"
    software: Annotated[str, Option(metavar="NAME[,A=B]", help=f"Trainer of the layout: {', '.join(SOFTWARE)}.")] = (
        "own"
    )
    tokens: Annotated[Text, Option(metavar="N", help="Train on so many: days, GPU-hours, ...")] = None
    ramp: Annotated[Text, Option(metavar="B:N,...", help="First steps of B tokens, for N tokens.")] = None
    stages: Annotated[Text, Option(metavar="S:N,...", help="Then rows of S, for N tokens: 32k:500B.")] = None
    price: Annotated[Number, Option(metavar="X", min=0, help="Of a device for an hour.")] = None
    watts: Annotated[Number, Option(metavar="W", min=0, help="Of a device; else its data sheet's.")] = None
    mtbf: Annotated[Number, Option(metavar="HOURS", min=1, help="Mean time between failures of a device.")] = None
    json: Json = False
    write: Annotated[Path | None, Option(metavar="F.toml", help="The first candidate, to be trained.")] = None
    force: Force = False
    html: Annotated[Path | None, Option(metavar="F.html", help="A page with pictures.")] = None
    png: Annotated[Path | None, Option(metavar="F.png", help="The pictures as an image.")] = None
    svg: Annotated[Path | None, Option(metavar="F.svg", help="The same.")] = None

    def given(self) -> dict[str, object]:
        """Options that are not at their default, by name; also `RECORDED` if --routing names a file."""
        names = {field.name: f"--{field.name.replace('_', '-')}" for field in fields(self)} | {"target": "TARGET"}
        changed = [field.name for field in fields(self) if vars(self)[field.name] not in (field.default, None)]
        given = {names[name]: vars(self)[name] for name in changed if name != "overrides"}
        return given | ({RECORDED: self.routing} if self.routing not in (None, *_ROUTINGS) else {})


RECORDED = "--routing FILE"
_TRAINING = ("--tokens", "--ramp", "--stages")
_SERIES = ("--worlds", *_TRAINING)  # several plans


@dataclass(frozen=True, kw_only=True)
class Use:
    """What an option does, the options whose answers have no use for that, and those of which it needs one."""

    does: str
    never: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


USES: Mapping[str, Use] = {
    "--layout": Use(does="names one layout", never=("--only", "--compare")),
    "--only": Use(does="is of a search", never=("--compare",)),
    "--global-batch-tokens": Use(does="sets the batch of one run", never=("--compare",)),
    "--top": Use(
        does="shows more candidates of a search",
        never=("--layout", "--explain", "--compare", "--scale", "--sweep", *_SERIES),
    ),
    "--software": Use(does="runs layouts that are named", needs=("--layout", "--compare")),
    RECORDED: Use(does="has the loads of one layout", needs=("--layout", "--compare"), never=("--imbalance",)),
    **dict.fromkeys(("--price", "--watts", "--mtbf"), Use(does="is a cost of a training run", needs=_TRAINING)),
    "--json": Use(does="prints one object", never=("--explain",)),
    "--write": Use(does="writes one run of ours", never=("--compare", "--saving", "--software", *_SERIES)),
    "--force": Use(does="overwrites what --write names", needs=("--write",)),
    **dict.fromkeys(("--html", "--png", "--svg"), Use(does="draws one plan", never=_SERIES)),
}
"""Options that do not go with every other one. All others are read by every answer."""

_QUESTIONS = (*((name,) for name in ("--explain", "--compare", "--scale", "--worlds", "--sweep")), _TRAINING)
"""Options that ask for another answer than a plan: at most one of these groups is given."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is asked, read and judged as far as it can be without the run."""

    options: PlanOptions
    names: tuple[str, ...]  # of the run, or of both of --compare
    overrides: tuple[str, ...]
    cluster: Cluster
    layout: Mapping[str, str] | None  # parts that --layout names; None for a search
    only: Mapping[str, str]  # parts of all layouts of a search
    software: Software
    phases: tuple[TrainingPhase, ...]
    scale: tuple[int, ...]  # numbers of devices
    worlds: tuple[int, ...] | None  # numbers of devices; None for `AUTO`
    swept: tuple[str, tuple[str, ...]] | None  # a name and its values
    files: Mapping[str, Path]  # by option


def request_of(values: Mapping[str, Any]) -> PlanRequest:
    """The request of a command line, by the names of `PlanOptions`.

    Raises a PenstockError for an option that is wrong or would change nothing.
    """
    options = PlanOptions(**values)
    given = options.given()
    _check_values(options)
    _check_uses(given)
    names, overrides = _runs_of(options)
    cluster = parse_cluster(options.on, options.network, options.host_memory)
    layout, only = options.layout, parse_layout(options.only) if options.only else {}
    named = None if layout is None else {} if layout == OWN else parse_layout(layout)
    check_fixed(only)
    check_fixed({name: text for name, text in (named or {}).items() if text != "auto"})
    counts = {name: _counts(name, vars(options)[name]) for name in ("scale", "worlds")}
    for count in counts["scale"]:
        cluster_of(count, cluster.hardware)
    if max(counts["worlds"], default=1) > cluster.devices:
        got, allowed = max(counts["worlds"]), f"up to {cluster.devices}"
        raise PenstockError("--worlds are devices of the cluster", got=got, allowed=allowed)
    phases = phases_of(options.tokens, options.ramp, options.stages)
    swept = None if options.sweep is None else _swept(options.sweep)
    if options.global_batch_tokens is not None:
        _check_batch(overrides, phases, swept)
    files = {name: Path(f"{path}") for name, path in given.items() if name in _FILES}
    for name, path in files.items():
        check_file(path, name, force=options.force)
    return PlanRequest(
        options=options, names=names, overrides=overrides, cluster=cluster, layout=named, only=only,
        software=parse_software(options.software), phases=phases,
        scale=counts["scale"], worlds=None if options.worlds == AUTO else counts["worlds"],
        swept=swept, files=files,
    )  # fmt: skip


def _check_uses(given: Mapping[str, object]) -> None:
    """Refuse two options of which one would change nothing, and one that lacks another."""
    asked = [name for group in _QUESTIONS for name in [next(filter(given.__contains__, group), None)] if name]
    if len(asked) > 1:
        raise PenstockError(f"{' and '.join(asked)} are different questions", fix="ask one at a time")
    for name, use in USES.items():
        if name not in given:
            continue
        if other := next(filter(given.__contains__, use.never), None):
            raise PenstockError(f"{name} {use.does}: {other} has no use for it", fix="leave one of them out")
        if use.needs and not any(map(given.__contains__, use.needs)):
            raise PenstockError(f"{name} {use.does}", fix=f"leave it out, or add {' or '.join(use.needs)}")


def _check_values(options: PlanOptions) -> None:
    if options.imbalance is not None and not isfinite(options.imbalance):
        raise PenstockError("--imbalance is no number", got=options.imbalance, allowed="1 or more, such as 1.2")
    routing = options.routing
    if routing is not None and routing not in _ROUTINGS and not Path(routing).exists():
        allowed = ", ".join((*_ROUTINGS, "a metrics.jsonl"))
        raise PenstockError("--routing is unknown", got=routing, allowed=allowed, fix=did_you_mean(routing, _ROUTINGS))


def _runs_of(options: PlanOptions) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of the runs, and overrides."""
    overrides = tuple(options.overrides or ())
    if options.compare is None:
        if options.target is None:
            raise PenstockError("there is nothing to plan", fix="name it: penstock plan deepseek-v3 --on 512xMI325X")
        return (options.target,), overrides
    # The first override may stand in the place of a target.
    overrides = overrides if options.target is None else (options.target, *overrides)
    if wrong := [override for override in overrides if "=" not in override]:
        raise PenstockError("--compare names both runs, and TARGET no third", got=wrong[0], allowed="overrides a.b=c")
    return options.compare, overrides


def _check_batch(overrides: Sequence[str], phases: Sequence[TrainingPhase], swept: tuple[str, object] | None) -> None:
    """Refuse --global-batch-tokens beside another batch."""
    batches = ("global_batch", "training.global_batch")
    names = [override.partition("=")[0].strip() for override in overrides] + ([] if swept is None else [swept[0]])
    others = [name for name in names if name in batches]
    others += ["--ramp, without --tokens,"] if phases and all(phase.batch_tokens for phase in phases) else []
    if others:
        raise PenstockError(f"--global-batch-tokens and {others[0]} say the same batch", fix="leave one of them out")


def _counts(name: str, text: str | None) -> tuple[int, ...]:
    """Numbers of devices of --scale or --worlds."""
    parts = text.split(",") if text is not None and (name, text) != ("worlds", AUTO) else ()
    for part in parts:
        if not part.strip().isdecimal() or int(part) < 1:
            raise PenstockError(f"--{name} is a list of numbers of devices", got=repr(part), allowed="128,256,512")
    return tuple(map(int, parts))


def _swept(text: str) -> tuple[str, tuple[str, ...]]:
    name, equals, values = text.partition("=")
    if not equals or not all(values.split(",")):
        raise PenstockError("--sweep is no name with values", got=text, allowed="micro_batch=1,2,4")
    return name.strip(), tuple(value.strip() for value in values.split(","))


def check_file(path: Path, option: str, *, force: bool = False) -> None:
    """Refuse a file that cannot be written, or pictures that cannot be drawn here, before anything is computed.

    Raises a PenstockError or PicturesError; `force` overwrites a run.
    """
    if path.suffix != _FILES[option]:
        raise PenstockError(f"{option} writes a file that ends in {_FILES[option]}", got=path)
    check_output(path, option, force=force or option != "--write")
    if option != "--write":
        plotly_script()
    if option in ("--png", "--svg"):
        find_browser()
