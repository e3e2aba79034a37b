"""How long a run on two machines needs to go on, or to end, after a fault of the cluster.

    python -m benchmarks.cluster --output benchmarks/results/cluster.json

The cluster is that of `make test-cluster`: three nodes of a Slurm of its own, in network namespaces of this machine
(tests/cluster/slurm.py), and two hosts whose link is cut. Four ranks train the debug preset on the CPU. Slurm notices a
fault after its own times, which are in the file; the rest is the start of four processes on the cores of this machine.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks import record
from tests.cluster.hosts import cluster_of
from tests.cluster.runs import ENDLESS, begins_of, losses_of, print_script, until
from tests.cluster.slurm import CREDENTIAL_SECONDS, NODE_LOST_SECONDS, Slurm, slurm_of
from tests.cluster.test_two_hosts import HIERARCHICAL, output, start

BEGUN = 8  # steps before a fault

Seconds = dict[str, float]


def disturbed(slurm: Slurm, folder: Path, fault: Callable[[int], object]) -> Seconds:
    """Seconds from a fault of a running job until Slurm has requeued it, starts it again, and it trains."""
    folder.mkdir()
    run = folder / "runs/debug"
    job = slurm.submit(print_script(folder / "job.sh", "--time=60", "--until-done", run=ENDLESS), folder=folder)
    slurm.until(lambda: len(losses_of(run)) >= BEGUN, f"{BEGUN} steps")
    fault(job)
    begin = time.monotonic()
    found: Seconds = {}
    for what, happens in (
        ("requeued", lambda: slurm.facts(job)["Restarts"] == "1"),
        ("started_again", lambda: slurm.state(job) == "RUNNING"),
        ("trains_again", lambda: len(begins_of(run)) == 2),
    ):
        slurm.until(happens, what)
        found[what] = round(time.monotonic() - begin, 1)
    slurm.run("scancel", str(job))
    slurm.wait_for(job, "CANCELLED", "FAILED")
    return found


def slurm_faults(folder: Path) -> dict[str, Seconds]:
    """Seconds after each fault under Slurm."""
    found = {}
    with slurm_of(3, folder) as slurm:

        def preempt(job: int) -> None:
            slurm.submit("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true", folder=folder)

        def lose_machine(job: int) -> None:
            slurm.hosts[slurm.nodes_of(job)[1]].power_off()

        found["preempted"] = disturbed(slurm, folder / "preempted", preempt)
        found["machine_lost"] = disturbed(slurm, folder / "lost", lose_machine)
    return found


def cut_link(folder: Path) -> Seconds:
    """Seconds from a cut of the link until each side has said so; `host.timeout_minutes` is 1."""
    told = {
        "left": "error: rank 2 on right, rank 3 on right: ended, or does not answer",
        "right": "error: rank 0 at left",
    }
    with cluster_of(list(told), folder) as hosts:
        start(hosts, folder, *ENDLESS, "parallel.expert=4", HIERARCHICAL, "host.timeout_minutes=1")
        until(lambda: len(losses_of(folder / "runs/two")) >= BEGUN, f"{BEGUN} steps", lambda: output(folder, "left"))
        hosts["right"].unplug()
        begin = time.monotonic()
        found: Seconds = {}

        def look() -> bool:
            for name, line in told.items():
                if name not in found and line in output(folder, name):
                    found[name] = round(time.monotonic() - begin, 1)
            return len(found) == len(told)

        until(look, "both sides say so", lambda: output(folder, "left") + output(folder, "right"))
    return found


def main() -> None:
    """Measure, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    record.add_arguments(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as one, tempfile.TemporaryDirectory() as other:
        numbers = {"slurm_seconds": slurm_faults(Path(one)), "cut_link_seconds": cut_link(Path(other))}
    print(numbers)
    record.write(
        options,
        numbers,
        cores=os.cpu_count(),
        load=round(os.getloadavg()[1], 1),  # of everything on this machine, over the last five minutes
        slurm=subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1],
        slurmd_timeout_seconds=NODE_LOST_SECONDS,
        credential_seconds=CREDENTIAL_SECONDS,
    )


if __name__ == "__main__":
    main()
