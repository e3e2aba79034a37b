"""Arguments and options of `penstock plan`, in the order of `penstock plan --help`."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str | None, typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")]
On = Annotated[str, typer.Option("--on", metavar="NxCHIP", help="Where: 768xMI300X, or 8xmine.toml.")]
Layout = Annotated[
    str | None, typer.Option("--layout", metavar="A=B,...", help="Only this one: pp=24,ep=8,cp=2; own: as it is.")
]
Only = Annotated[str, typer.Option("--only", metavar="A=B,...", help="Search layouts that have this.")]
Tokens = Annotated[
    int | None, typer.Option("--global-batch-tokens", metavar="N", min=1, help="Tokens of a step, about.")
]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Candidates to show.")]
Topic = Annotated[
    str | None,
    typer.Option("--explain", metavar="TOPIC", help="memory, memory.activations, time, refused, hardware."),
]
Compared = Annotated[
    tuple[str, str] | None, typer.Option("--compare", metavar="A B", help="Two runs: which term differs.")
]
Scales = Annotated[str | None, typer.Option("--scale", metavar="N,N,...", help="The layout on so many devices.")]
Swept = Annotated[
    str | None, typer.Option("--sweep", metavar="A=B,C,...", help="sequence_length, micro_batch, ep, or a field.")
]
Imbalance = Annotated[
    float,
    typer.Option(
        "--imbalance", metavar="X", min=1.0, help="Rows of the fullest rank over the even share; at most all."
    ),
]
Saving = Annotated[str, typer.Option("--saving", metavar="HOW", help="run, or conventional: as unfused kernels keep.")]
Write = Annotated[Path | None, typer.Option("--write", metavar="F.toml", help="The first candidate, to be trained.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="F.html", help="A page with pictures.")]
Png = Annotated[Path | None, typer.Option("--png", metavar="F.png", help="The pictures as an image.")]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="F.svg", help="The same.")]
