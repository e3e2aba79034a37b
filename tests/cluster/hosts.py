"""Hosts of a cluster on this machine: each has its own name, network address and processes; they share the disk.

    with cluster_of(["login", "node1", "node2"], folder) as hosts:
        hosts["node1"].run(["hostname"])            node1
        hosts["node2"].limit("8mbit")               a slow link
        hosts["node2"].unplug()                     a cut link: packets vanish, no connection is closed
        hosts["node2"].power_off()                  a lost machine: unplugged first, so its peers are told nothing

A host is a network, UTS, mount and PID namespace, held by one process. Its interface is one end of a veth pair, whose
other end is in a bridge. All hosts of a cluster have one file as /etc/hosts. Nothing of the system outside is changed:
the bridge is in a namespace of its own, and everything ends with the processes that hold the namespaces.

A kernel without netem cannot delay or lose packets, so a process does: `power_on` with a delay or a loss connects the
host by a cable of its own (tests/cluster/cable.py).
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

NETWORK = "10.77.0"
INTERFACE = "eth0"
BRIDGE = "bridge"
NAMESPACES = ("--net", "--uts", "--mount", "--pid")
CABLE = Path(__file__).with_name("cable.py")


class Host:
    """One host; `switch` is the process that holds the namespace of the bridge."""

    def __init__(self, name: str, address: str, names_file: Path, switch: int) -> None:
        self.name = name
        self.address = address
        self._names_file = names_file
        self._switch = switch
        self._hardware_address = f"02:00:00:00:00:{int(address.rpartition('.')[2]):02x}"
        self._running = ExitStack()
        self._holder = 0  # process that holds the namespaces

    def power_on(self, *, delay_seconds: float = 0.0, loss: float = 0.0) -> None:
        """Start the host. A delay and a loss (the share of packets) are those of its link, in each direction."""
        self._holder = self._running.enter_context(_namespaces(self.name, self._names_file))
        if delay_seconds or loss:
            words = [sys.executable, str(CABLE), self.name, str(self._holder), INTERFACE, str(delay_seconds), str(loss)]
            self._running.enter_context(_ready([*_on_switch(self._switch), *words]))
        else:
            peer = ["peer", "name", INTERFACE, "netns", str(self._holder)]
            self._on_switch("ip", "link", "add", self.name, "type", "veth", *peer)
        self._on_switch("ip", "link", "set", self.name, "master", BRIDGE, "up")
        for words in (
            ["link", "set", INTERFACE, "address", self._hardware_address],  # the same after a restart
            ["addr", "add", f"{self.address}/24", "dev", INTERFACE],
            ["link", "set", "lo", "up"],
            ["link", "set", INTERFACE, "up"],
        ):
            _do([*self._enter(), "ip", *words])

    def power_off(self) -> None:
        """End every process of the host at once; its link is cut before, so no connection is closed."""
        if self._holder:
            self.unplug()
            self._running.close()
            self._holder = 0
            # The kernel deletes a veth pair some time after its namespace has ended; the end of a cable has gone.
            delete = [*_on_switch(self._switch), "ip", "link", "delete", self.name]
            subprocess.run(delete, capture_output=True, check=False)

    def start(
        self, words: Sequence[str | Path], output: Path | None = None, variables: Mapping[str, str] | None = None
    ) -> "subprocess.Popen[str]":
        """Start a program on this host; `output` gets what it prints."""
        command, environment = [*self._enter(), *map(str, words)], {**os.environ, **(variables or {})}
        if output is None:
            pipe = subprocess.PIPE
            return subprocess.Popen(command, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT)
        with output.open("a") as file:
            return subprocess.Popen(command, env=environment, text=True, stdout=file, stderr=subprocess.STDOUT)

    def run(
        self, words: Sequence[str | Path], seconds: float = 60.0, variables: Mapping[str, str] | None = None
    ) -> str:
        """Run a program on this host, which must end well; returns what it prints."""
        process = self.start(words, variables=variables)
        try:
            printed, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
        assert process.returncode == 0, f"{self.name}: {words} ended with {process.returncode}: {printed}"
        return printed

    def limit(self, rate: str) -> None:
        """Limit the link to a rate such as `8mbit`, in each direction."""
        bucket = ["root", "tbf", "rate", rate, "burst", "32kb", "latency", "400ms"]
        _do([*self._enter(), "tc", "qdisc", "replace", "dev", INTERFACE, *bucket])
        self._on_switch("tc", "qdisc", "replace", "dev", self.name, *bucket)

    def unplug(self) -> None:
        """Cut the link at the bridge: packets vanish in both directions, and the interface stays up."""
        self._on_switch("ip", "link", "set", self.name, "nomaster")

    def plug(self) -> None:
        """Mend the link."""
        self._on_switch("ip", "link", "set", self.name, "master", BRIDGE)

    def _enter(self) -> list[str]:
        return ["nsenter", "--target", str(self._holder), *NAMESPACES, "--"]

    def _on_switch(self, *words: str) -> None:
        _do([*_on_switch(self._switch), *words])


def missing_rights() -> str:
    """Why this machine cannot hold hosts; empty if it can."""
    programs = [name for name in ("ip", "tc", "unshare", "nsenter") if shutil.which(name) is None]
    if programs:
        return f"{', '.join(programs)} is missing (Debian: iproute2, util-linux)"
    return "" if _may_make_namespaces() else "network namespaces need root"


@cache
def _may_make_namespaces() -> bool:
    make = "ip link add one type veth peer name two && ip link add three type bridge"
    tried = subprocess.run(["unshare", *NAMESPACES, "--fork", "sh", "-c", make], capture_output=True, check=False)
    return tried.returncode == 0


@contextmanager
def cluster_of(names: Sequence[str], folder: Path) -> Iterator[dict[str, Host]]:
    """Hosts with these names, which run and are connected; a folder takes the file that is their /etc/hosts."""
    addresses = {name: f"{NETWORK}.{number}" for number, name in enumerate(names, start=1)}
    names_file = folder / "hosts"
    lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in addresses.items())]
    names_file.write_text("".join(f"{line}\n" for line in lines))
    with ExitStack() as stack:
        switch = stack.enter_context(_namespaces("switch", names_file))
        _do([*_on_switch(switch), "ip", "link", "add", BRIDGE, "type", "bridge"])
        _do([*_on_switch(switch), "ip", "link", "set", BRIDGE, "up"])
        hosts = {name: Host(name, addresses[name], names_file, switch) for name in names}
        for host in hosts.values():
            stack.callback(host.power_off)
            host.power_on()
        yield hosts


@contextmanager
def _namespaces(name: str, names_file: Path) -> Iterator[int]:
    """New namespaces; yields the process that holds them, whose end ends every process inside."""
    begin = 'hostname "$0" && mount --bind "$1" /etc/hosts && echo ready && exec sleep infinity'
    options = [*NAMESPACES, "--fork", "--mount-proc", "--kill-child"]
    with _ready(["unshare", *options, "sh", "-c", begin, name, str(names_file)]) as outer:
        yield int(Path(f"/proc/{outer}/task/{outer}/children").read_text())


@contextmanager
def _ready(words: Sequence[str]) -> Iterator[int]:
    """A process that has printed `ready`, and is killed at the end; yields its number."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n", f"{words} does not start"
        yield process.pid
    finally:
        process.kill()
        process.communicate()


def _on_switch(holder: int) -> list[str]:
    return ["nsenter", "--target", str(holder), "--net", "--"]  # with the processes and files of the system outside


def _do(words: Sequence[str]) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr}"
