"""Loss curves of docs/float8.md and docs/optimizer.md: fewer bits beside more, and how far apart they are.

    python -m tools.float8_picture

Reads benchmarks/results/float8-curves-*.json and optimizer-formats.json (`benchmarks.float8_curves`). Needs the extra
`pictures`.
"""

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot

RESULTS = Path("benchmarks/results")
FOLDER = Path("docs/pictures")


def main() -> None:
    """Draw one picture for each result."""
    pyplot.rcParams["svg.hashsalt"] = "penstock"
    for path in sorted([*RESULTS.glob("float8-curves-*.json"), RESULTS / "optimizer-formats.json"]):
        numbers = json.loads(path.read_text(encoding="utf-8"))["numbers"]
        target = FOLDER / f"{path.stem}.svg"
        draw(numbers["cases"], target)
        print(f"wrote {target}")


def draw(cases: list[dict[str, Any]], path: Path) -> None:
    """Curves above, differences from the first case below."""
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(7, 5), sharex=True, height_ratios=(2, 1))
    first = dict(cases[0]["curve"])
    for case in cases:
        steps, losses = zip(*case["curve"], strict=True)
        label = "none in 8 bits" if case["case"] == "none" else case["case"]
        above.plot(steps, losses, label=label, linewidth=1)
        below.plot(steps, [100 * (loss / first[step] - 1) for step, loss in case["curve"]], linewidth=1)
    above.set_ylabel("training loss")
    above.legend(frameon=False, fontsize="small")
    below.set_ylabel("difference, %")
    below.set_ylim(-4, 4)
    below.axhspan(-0.25, 0.25, alpha=0.15, color="gray")
    below.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
