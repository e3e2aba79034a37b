"""What the doctor says of runs that were recorded under known conditions.

    python -m benchmarks.doctor_recorded FOLDER... --output benchmarks/results/doctor-recorded-h200.json

Each folder is that of a run with traces of all its ranks, named after what was done to it (`DONE`). The numbers are
those that `penstock doctor FOLDER` prints, with the plan, and the part of the kernels' time that has no name. Needs no
GPU. Small versions of the same recordings are data of tests/tune/test_doctor_trace.py.
"""

import argparse
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
            {
                "rank": one.rank,
                "cause": one.cause,
                "times_last": one.times_last,
                "share": verdict.times.share(one.caused_wait_us / others),
                "detail": one.detail,
            }
            for one in evidence.late
        ],
        "remedies": [
            {"change": one.change, "rule": one.rule, "share": verdict.times.share(one.gain_us)}
            for one in verdict.remedies
        ],
        "unmatched": evidence.unmatched,
        "other_share": max(one.phases.other_share for one in answer.ranks),
    }


def main() -> None:
    """Judge and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", metavar="FOLDER", help="of runs with traces")
    record.add_arguments(parser)
    options = parser.parse_args()
    order = list(DONE)
    conditions = [judged(one) for one in sorted(options.folders, key=lambda one: order.index(one.name))]
    for one in conditions:
        print(f"{one['condition']}: {one['verdict']}")
    record.write(options, {"conditions": conditions})


if __name__ == "__main__":
    main()
