"""A Slurm cluster on this machine: munged, slurmctld and a slurmd for each node, all below one folder.

    with slurm_of(3, folder) as slurm:              hosts login, node1, node2, node3
        job = slurm.submit("job.sh", folder=folder)
        slurm.wait_for(job, "COMPLETED")

Each node is a host of its own (tests/cluster/hosts.py), so slurmd finds its name and address as on a real machine. The
nodes claim four cores and two GPUs each, so that a script for GPUs is accepted as it is; the GPUs are files that are
none. Times that are minutes on a real cluster are seconds here: SlurmdTimeout, after which a silent node is down, and
cred_expire, which a requeued job waits for.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.cluster.hosts import WITH_PARENT, Host, cluster_of, missing_rights
from tests.cluster.runs import VARIABLES, until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "scontrol", "squeue")
SETUP = "apt-get install --yes --no-install-recommends slurm-wlm munge iproute2"

NODE_LOST_SECONDS = 10
CREDENTIAL_SECONDS = 10

CONFIGURATION = """
ClusterName=penstock
SlurmctldHost=login
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={credential_seconds}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdDebug=verbose
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout={node_lost_seconds}
SlurmctldTimeout=10
KillWait=30
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SchedulerParameters=bf_interval=1,sched_interval=2,sched_min_interval=100000,batch_sched_delay=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
GresTypes=gpu
NodeName={nodes} CPUs=4 Boards=1 SocketsPerBoard=1 CoresPerSocket=4 ThreadsPerCore=1 Gres=gpu:2
PartitionName=main Nodes=ALL Default=YES PriorityTier=1 GraceTime=60 MaxTime=INFINITE State=UP
PartitionName=urgent Nodes=ALL PriorityTier=9 MaxTime=INFINITE State=UP
"""


class Slurm:
    """A running cluster. Commands run on the host `login`."""

    def __init__(self, hosts: Mapping[str, Host], folder: Path) -> None:
        self.hosts = hosts
        self.folder = folder
        self._variables = {**VARIABLES, "SLURM_CONF": str(folder / "slurm.conf")}

    def run(self, *words: str | Path, folder: Path | None = None, seconds: float = 60.0) -> str:
        """What a command prints, in a folder."""
        inside = ["env", "--chdir", str(folder or self.folder), *words]
        return self.hosts["login"].run(inside, seconds, self._variables).strip()

    def start_controller(self) -> None:
        """Start slurmctld."""
        self._start("login", "slurmctld", "-D")

    def start_node(self, name: str) -> None:
        """Start the slurmd of a node."""
        (self.folder / f"spool-{name}").mkdir(exist_ok=True)
        self._start(name, "slurmd", "-D")

    def _start(self, host: str, *words: str) -> None:
        self.hosts[host].start(words, self.folder / f"{host}.out", self._variables)

    def kill_daemon(self, name: str) -> None:
        """Kill the slurmd of a node; what it has started goes on."""
        self.hosts[name].run(["pkill", "-KILL", "-x", "slurmd"])

    def repair(self, name: str) -> None:
        """Start a node again, with an empty disk, and wait until it is idle."""
        self.hosts[name].power_off()
        shutil.rmtree(self.folder / f"spool-{name}")
        self.hosts[name].power_on()
        self.start_node(name)
        self.until(lambda: self.states()[name] == "idle", f"{name} is idle")

    def submit(self, *words: str | Path, folder: Path) -> int:
        """Submit a job in a folder; returns its number."""
        return int(self.run("sbatch", "--parsable", *words, folder=folder).split(";")[0])

    def state(self, job: int | str) -> str:
        """State of a job, such as RUNNING; the job stays known for MinJobAge (300 s) after its end."""
        return self.facts(job)["JobState"]

    def facts(self, job: int | str) -> dict[str, str]:
        """What `scontrol show job` knows."""
        words = self.run("scontrol", "show", "job", str(job), "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def states(self) -> dict[str, str]:
        """State of each node, such as idle; none while there is no controller."""
        shown = self.run("sh", "-c", "sinfo --noheader --Node --partition main --format '%N %t' || true")
        return dict(line.split() for line in shown.splitlines() if line.startswith("node"))

    def nodes_of(self, job: int) -> list[str]:
        """Nodes on which a job runs or has run."""
        return self.run("scontrol", "show", "hostnames", self.facts(job)["NodeList"]).split()

    def wait_for(self, job: int | str, *states: str) -> str:
        """Wait until a job is in one of some states; returns it."""
        self.until(lambda: self.state(job) in states, f"job {job} is {' or '.join(states)}")
        return self.state(job)

    def until(self, happens: Callable[[], bool], what: str) -> float:
        """Wait for something; returns the seconds that it took."""
        return until(happens, what, self.report)

    def report(self) -> str:
        """Queue, nodes and the end of the controller's log, for the message of a failed test."""
        shown = [self.run("squeue", "--all"), self.run("sinfo", "--Node", "--long")]
        log = (self.folder / "slurmctld.log").read_text().splitlines()[-15:]
        return "\n".join([*shown, *log])


@contextmanager
def slurm_of(nodes: int, folder: Path) -> Iterator[Slurm]:
    """A cluster of some nodes, whose files are all below a folder; every process ends with the context."""
    names = [f"node{number}" for number in range(1, nodes + 1)]
    (folder / "state").mkdir()
    text = CONFIGURATION.format(
        folder=folder, nodes=",".join(names), node_lost_seconds=NODE_LOST_SECONDS, credential_seconds=CREDENTIAL_SECONDS
    )
    (folder / "slurm.conf").write_text(text)
    (folder / "gres.conf").write_text("Name=gpu File=/dev/tty[0-1]\n")
    with ExitStack() as stack:
        hosts = stack.enter_context(cluster_of(["login", *names], folder))
        stack.enter_context(_munge(folder))
        slurm = Slurm(hosts, folder)
        slurm.start_controller()
        for name in names:
            slurm.start_node(name)
        slurm.until(lambda: slurm.states() == dict.fromkeys(names, "idle"), "every node is idle")
        yield slurm


@contextmanager
def _munge(folder: Path) -> Iterator[None]:
    """One munged for all hosts, which share its socket as they share the disk."""
    key = folder / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(128))
    socket = folder / "munge.socket"
    own = [f"--{name}={folder}/munge.{name}" for name in ("pid-file", "log-file", "seed-file")]
    words = ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={socket}", *own]
    with (folder / "munged.out").open("w") as output:
        process = subprocess.Popen([*WITH_PARENT, *words], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + 20.0
        while not socket.exists():
            assert process.poll() is None and time.monotonic() < deadline, (folder / "munged.out").read_text()
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait()


def missing() -> str:
    """What this machine lacks, in a line; empty if it can hold a cluster."""
    if any(shutil.which(name) is None for name in PROGRAMS):
        return f"Slurm is missing: {SETUP}"
    return missing_rights()
