"""The picture of a plan in the README: what `penstock plan` prints, as it prints it.

python -m tools.plan_picture
"""

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMAND = ("plan", "deepseek-v3", "--on", "1024xMI325X", "--top", "5")
PICTURE = Path("docs/pictures/plan.svg")
WIDTH = 150
"""Letters of a line; longer ones are cut."""


def main() -> None:
    """Run it and draw what it says."""
    command = [sys.executable, "-m", "penstock", *COMMAND]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    console = Console(record=True, width=WIDTH, file=io.StringIO())
    for line in told.splitlines():
        shown = line if len(line) <= WIDTH else f"{line[: WIDTH - 3]}..."
        console.print(Text(shown, style="bold" if line.startswith("best:") else ""), no_wrap=True)
    PICTURE.write_text(console.export_svg(title=f"penstock {' '.join(COMMAND)}"), encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
