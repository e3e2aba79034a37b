"""Arguments and options of several verbs. Only typer is imported, because `penstock trace` starts fast."""

from pathlib import Path
from typing import Annotated

import typer

Target = Annotated[str, typer.Argument(metavar="TARGET", help="A preset, a TOML file, or a run folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Overrides.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Write over a file that is there.")]
On = Annotated[str | None, typer.Option("--on", metavar="NxCHIP", help="What the run is on: 8xH200, or 8xmine.toml.")]
Names = Annotated[
    Path | None, typer.Option("--names", metavar="FILE", help="Phases of kernels by name (docs/trace.md).")
]
Processes = Annotated[
    int | None, typer.Option("--processes", min=1, help="Ranks to start here; without it, one for each GPU.")
]
Checkpoint = Annotated[int | None, typer.Option("--step", help="Which checkpoint; the newest if left out.")]
