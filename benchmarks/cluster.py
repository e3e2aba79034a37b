"""How long a run on two machines needs to go on, or to end, after a fault of the cluster.

    python -m benchmarks.cluster --output benchmarks/results/cluster.json

The cluster is that of `make test-cluster`: three nodes of a Slurm of its own, in network namespaces of this machine
(tests/cluster/slurm.py), and two hosts whose link is cut. Four ranks train the debug preset on the CPU. Slurm notices a
fault after its own times, which are in the file; the rest is the start of four processes on the cores of this machine.
"""

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

SAID = {
    "left": "error: rank 2 on right, rank 3 on right: ended, or does not answer",
    "right": "error: rank 0 at left",
}
"""By the hosts of a link that was cut."""

Seconds = dict[str, float]


def disturbed(slurm: Slurm, folder: Path, fault: Callable[[int], object]) -> Seconds:
    """Seconds from a fault of a running job until Slurm has requeued it, starts it again, and it trains."""
    folder.mkdir()
    run, seconds = folder / "runs/debug", Seconds()
    job = slurm.submit(print_script(folder / "job.sh", "--time=60", "--until-done", run=ENDLESS), folder=folder)
    slurm.until(lambda: len(losses_of(run)) >= BEGUN, f"{BEGUN} steps")
    fault(job)
    begin = time.monotonic()
    for what, happens in (
        ("requeued", lambda: slurm.facts(job)["Restarts"] == "1"),
        ("started_again", lambda: slurm.state(job) == "RUNNING"),
        ("trains_again", lambda: len(begins_of(run)) == 2),
    ):
        slurm.until(happens, what)
        seconds[what] = round(time.monotonic() - begin, 1)
    slurm.run("scancel", str(job))
    slurm.wait_for(job, "CANCELLED", "FAILED")
    return seconds


def slurm_faults(folder: Path) -> dict[str, Seconds]:
    """Seconds after each fault under Slurm."""
    urgent = ("--partition=urgent", "--nodes=3", "--exclusive", "--wrap=true")
    with slurm_of(3, folder) as slurm:
        faults: dict[str, Callable[[int], object]] = {
            "preempted": lambda job: slurm.submit(*urgent, folder=folder),
            "machine_lost": lambda job: slurm.hosts[slurm.nodes_of(job)[1]].power_off(),
        }
        return {name: disturbed(slurm, folder / name, fault) for name, fault in faults.items()}


def cut_link(folder: Path) -> Seconds:
    """Seconds from a cut of the link until each side has said so; `host.timeout_minutes` is 1."""
    with cluster_of(list(SAID), folder) as hosts:
        start(hosts, folder, *ENDLESS, "parallel.expert=4", HIERARCHICAL, "host.timeout_minutes=1")
        until(lambda: len(losses_of(folder / "runs/two")) >= BEGUN, f"{BEGUN} steps", lambda: output(folder, "left"))
        hosts["right"].unplug()
        begin, seconds = time.monotonic(), Seconds()

        def look() -> bool:
            for name, line in SAID.items():
                if name not in seconds and line in output(folder, name):
                    seconds[name] = round(time.monotonic() - begin, 1)
            return len(seconds) == len(SAID)

        until(look, "both sides say so", lambda: output(folder, "left") + output(folder, "right"))
    return seconds


def main() -> None:
    options = record.parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as slurm, tempfile.TemporaryDirectory() as hosts:
        numbers = {"slurm_seconds": slurm_faults(Path(slurm)), "cut_link_seconds": cut_link(Path(hosts))}
    print(numbers)
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    record.write(
        options,
        numbers,
        cores=os.cpu_count(),
        load=round(os.getloadavg()[1], 1),  # of everything on this machine, over the last five minutes
        slurm=version,
        slurmd_timeout_seconds=NODE_LOST_SECONDS,
        credential_seconds=CREDENTIAL_SECONDS,
    )


if __name__ == "__main__":
    main()
