"""What the doctor says of runs that were recorded under known conditions.

    python -m benchmarks.doctor_recorded FOLDER... --output benchmarks/results/doctor-recorded-h200.json

Each folder is that of a run with traces of all its ranks, named after what was done to it (`DONE`). The numbers are
those that `penstock doctor FOLDER` prints, with the plan, and the part of the kernels' time that has no name. Needs no
GPU. Small versions of the same recordings are data of tests/tune/test_doctor_trace.py.
"""

from pathlib import Path
from typing import Any

from benchmarks import record
from penstock.cli.doctor import examine
from penstock.trace.analysis import analyse_files
from penstock.tune.doctor.diagnosis import diagnose
from penstock.tune.doctor.run_facts import facts_of

DONE = {
    "all-to-all": "tokens travel by all-to-all; three steps, and nothing was done to them",
    "symmetric": "tokens are written into the other ranks' memory, and the host reads no count",
    "hot-experts": "all-to-all, trained on one repeated letter: all tokens want the same six experts of a layer",
    "slow-rank": "all-to-all, while another process keeps GPU 2 half busy",
    "host-stalls": "all-to-all, micro-batches of one row of 512 tokens: too little for the device",
}
"""Conditions, in the order of the table."""


def judged(folder: Path) -> dict[str, Any]:
    """What is said of one recording."""
    evidence = examine([folder])
    verdict = diagnose(evidence)
    answer = analyse_files([folder])
    run = facts_of(folder)[0].run
    assert run is not None, "the folder of a run has its configuration"
    others = max(1, len(evidence.ranks) - 1)
    return {
        "condition": folder.name,
        "done": DONE[folder.name],
        "device": evidence.facts.device,
        "ranks": len(evidence.ranks),
        "layers": run.model.layers,
        "steps": evidence.steps,
        "step_ms": verdict.times.total_us / 1e3,
        "wall": verdict.bottleneck,
        "then": list(verdict.others),
        "verdict": verdict.sentence,
        "recording_share": verdict.times.share(verdict.times.recording_us),
        "shares": {name: verdict.times.share(loss) for name, loss in verdict.times.losses.items()},
        "late": [
            {name: vars(late)[name] for name in ("rank", "cause", "times_last", "detail")}
            | {"share": verdict.times.share(late.caused_wait_us / others)}
            for late in evidence.late
        ],
        "remedies": [
            {"change": remedy.change, "rule": remedy.rule, "share": verdict.times.share(remedy.gain_us)}
            for remedy in verdict.remedies
        ],
        "unmatched": evidence.unmatched,
        "other_share": max(rank.phases.other_share for rank in answer.ranks),
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of runs with traces")
    options, order = parser.parse_args(), list(DONE)
    conditions = [judged(folder) for folder in sorted(options.folders, key=lambda folder: order.index(folder.name))]
    for row in conditions:
        print(f"{row['condition']}: {row['verdict']}")
    record.write(options, {"conditions": conditions})


if __name__ == "__main__":
    main()
