"""Options of `penstock plan`, and which of them do not go together.

Options that exclude each other, or of which one would change nothing of the answer, are refused before anything is
computed.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from penstock.base.errors import PenstockError
from penstock.cli.output import check_output
from penstock.cli.plan_print import check_topic
from penstock.plan.software import SOFTWARE
from penstock.report.frame import find_browser, plotly_script

Target = Annotated[
    str | None, typer.Argument(metavar="TARGET", help="A preset, TOML file, run folder, or config.json.")
]
On = Annotated[str, typer.Option("--on", metavar="NxCHIP", help="Where: 768xMI300X, or 8xmine.toml.")]
Network = Annotated[
    str | None, typer.Option("--network", metavar="A=B,...", help="Network: pod_nodes=4,oversubscription=8,rails=true.")
]
HostMemory = Annotated[
    float | None, typer.Option("--host-memory", metavar="GB", min=1, max=1e6, help="Of the host, each device.")
]
Layout = Annotated[
    str | None, typer.Option("--layout", metavar="A=B,...", help="Only this one: pp=24,ep=8,cp=2; own: as it is.")
]
Only = Annotated[str, typer.Option("--only", metavar="A=B,...", help="Search layouts that have this.")]
Tokens = Annotated[
    int | None, typer.Option("--global-batch-tokens", metavar="N", min=1, help="Tokens of a step, about.")
]
Top = Annotated[int | None, typer.Option("--top", metavar="N", min=1, help="Candidates to show; else 10.")]
Topic = Annotated[
    str | None, typer.Option("--explain", metavar="TOPIC", help="memory, memory.activations, time, refused, hardware.")
]
Compared = Annotated[
    tuple[str, str] | None, typer.Option("--compare", metavar="A B", help="Two runs: which term differs.")
]
Scales = Annotated[str | None, typer.Option("--scale", metavar="N,N,...", help="The layout on so many devices.")]
Worlds = Annotated[
    str | None, typer.Option("--worlds", metavar="N,N,...|auto", help="The fastest layout of each number of devices.")
]
Swept = Annotated[
    str | None, typer.Option("--sweep", metavar="A=B,C,...", help="sequence_length, micro_batch, ep, or a field.")
]
Imbalance = Annotated[
    float | None,
    typer.Option(
        "--imbalance",
        metavar="X",
        min=1.0,
        help="Rows of the fullest rank over the even share, at most all. 1.2; 1 where balance is forced.",
    ),
]
Routing = Annotated[
    str | None,
    typer.Option(
        "--routing",
        metavar="HOW",
        help="in-turn: experts one after the other; a metrics.jsonl: by its loads, of one --layout; else router.",
    ),
]
Trainer = Annotated[
    str, typer.Option("--software", metavar="NAME[,A=B]", help=f"Trainer that runs the layout: {', '.join(SOFTWARE)}.")
]
Saving = Annotated[str, typer.Option("--saving", metavar="HOW", help="run, or conventional: unfused.")]
TrainTokens = Annotated[
    str | None, typer.Option("--tokens", metavar="N", help="Train on so many: days, GPU-hours, ...")
]
Ramp = Annotated[str | None, typer.Option("--ramp", metavar="B:N,...", help="First steps of B tokens, for N tokens.")]
Stages = Annotated[
    str | None, typer.Option("--stages", metavar="S:N,...", help="Then rows of S, for N tokens: 32k:500B.")
]
Price = Annotated[float | None, typer.Option("--price", metavar="X", min=0, help="Of a device for an hour.")]
Watts = Annotated[float | None, typer.Option("--watts", metavar="W", min=0, help="Of a device; else its data sheet's.")]
Mtbf = Annotated[
    float | None, typer.Option("--mtbf", metavar="HOURS", min=1, help="Mean time between failures of a device.")
]
Write = Annotated[Path | None, typer.Option("--write", metavar="F.toml", help="The first candidate, to be trained.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="F.html", help="A page with pictures.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="F.png", help="The pictures as an image.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="F.svg", help="The same.")]

UNREAD: Mapping[str, tuple[str, ...]] = {
    "--global-batch-tokens": ("--tokens", "--compare"),
    "--top": ("--tokens", "--compare", "--worlds", "--layout", "--scale", "--sweep", "--explain"),
    "--json": ("--explain",),
}
"""Options, and the questions whose answers would not change by them."""

_SUFFIXES: Mapping[str, str] = {"--write": ".toml", "--html": ".html", "--png": ".png", "--svg": ".svg"}


def check_questions(questions: Mapping[str, object], files: Mapping[str, Path | None], *, force: bool) -> None:
    """Refuse options that could only fail later."""
    asked = [option for option, value in questions.items() if value is not None]
    if len(asked) > 1:
        raise PenstockError(f"{' and '.join(asked)} are different questions", fix="ask one at a time")
    topic = questions["--explain"]
    if isinstance(topic, str):
        check_topic(topic)
    several = next((option for option in ("--tokens", "--worlds") if questions[option] is not None), None)
    for option, path in files.items():
        if path is not None:
            if several is not None:
                raise PenstockError(f"{option} writes one plan, and {several} makes several", fix="leave it out")
            if option == "--write" and questions["--compare"] is not None:
                raise PenstockError(
                    "--write writes a candidate, and --compare has two runs of yours", fix="leave it out"
                )
            check_file(path, option, force=force)


def check_used(said: Mapping[str, object], costs: Mapping[str, object]) -> None:
    """Refuse options that would say nothing: layouts chosen twice, what an answer has no use for, costs of no run."""
    asked = [option for option in ("--only", "--layout", "--compare") if said[option] is not None]
    if len(asked) > 1:
        message = "--only is of a search, --layout names one layout, and --compare names two runs"
        raise PenstockError(message, got=" and ".join(asked), fix="leave out all but one")
    for option, questions in UNREAD.items():
        question = next((name for name in questions if said[name] is not None), None)
        if said[option] is not None and question is not None:
            raise PenstockError(f"{option} changes nothing of the answer to {question}", fix="leave one of them out")
    if said["--force"] is not None and said["--write"] is None:
        raise PenstockError("--force overwrites what --write names", fix="leave it out, or add --write F.toml")
    if unused := [option for option, value in costs.items() if value is not None]:
        raise PenstockError(
            f"{', '.join(unused)}: costs are of a whole training run", fix="say its tokens: --tokens 2T"
        )


def check_file(path: Path, option: str, *, force: bool = False) -> None:
    """Refuse a file that cannot be written, or pictures that cannot be drawn here, before anything is computed.

    Raises a PenstockError or PicturesError; `force` overwrites a run.
    """
    if path.suffix != _SUFFIXES[option]:
        raise PenstockError(f"{option} writes a file that ends in {_SUFFIXES[option]}", got=path)
    check_output(path, option, force=force or option != "--write")
    if option != "--write":
        plotly_script()
    if option in ("--png", "--svg"):
        find_browser()
