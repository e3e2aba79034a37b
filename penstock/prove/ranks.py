"""Processes that stay, and play one composition after another as ranks of it, on the CPU or each on a GPU of its own.

    the caller                                        each of R children (penstock/base/child.py)
    {"part": ..., "rank": r, "ranks": R, "port"} ->   makes a group, trains, ends the group
    what the steps gave, and tensors             <-   or the line of an error, or a traceback

After a failure that is no line all children are replaced. They meet at a store that the caller holds; it listens on the
loopback only.
"""

import gc
import traceback
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import torch
import torch.distributed as dist
from safetensors.torch import load, save
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.base.child import Answer, Child, ChildEndedError, serve, use_all_memory
from penstock.base.errors import PenstockError
from penstock.config.load import load_run
from penstock.models.huggingface.weight_folder import WeightFolder
from penstock.parallel.launch.environment import Environment, LaunchFacts, gpu_vendor, prepare_environment
from penstock.prove.choices import ChoiceRecorder, Choices, Place
from penstock.prove.composition import LABELS, PRESET, Device, of_run
from penstock.prove.play import Saved, StepFigures, follow, saved_by
from penstock.train.checkpoint import CheckpointStore
from penstock.train.run_folder import RunFolder
from penstock.train.setup import prepare
from penstock.train.state import restore_state, save_state
from penstock.train.weight_exchange import export_huggingface, import_weights

LOCALHOST = "127.0.0.1"
MOST_RANKS = 8
LONGEST_SECONDS = 300.0  # of a composition, whose steps take less than one on an idle machine


class PlayError(Exception):
    """A rank did not end its steps; the argument says why."""

    def __init__(self, text: str, *, is_line: bool = False) -> None:
        super().__init__(text)
        self.is_line = is_line  # of a PenstockError: what a user would read


@dataclass(frozen=True)
class Assignment:
    """What each rank does."""

    overrides: tuple[str, ...]  # of PRESET, and settings of `prove`
    steps: int
    rate: float | None = None  # None for that of the run's schedule
    first: int = 0  # number of the first step; above 0 the run goes on from a checkpoint in `folder`
    folder: str = ""  # of a run: what the steps end with is saved there; empty saves nothing
    exports: bool = False  # the weights too, for other programs, and what import makes of them
    two_nodes: bool = False  # the ranks are on two nodes of equal size; else CPU ranks are each alone on their own
    given: str = ""  # file with choices of routers
    device: Device = "cpu"
    has_choices: bool = True  # record those of routers, which captured routers do not let see


@dataclass(frozen=True)
class Played:
    """What the steps of one rank gave."""

    trace: StepFigures  # without tensors
    start: Saved  # before the first step
    end: Saved
    choices: dict[Place, Choices] = field(repr=False)


class Ranks(Protocol):
    """What plays compositions."""

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        """What each rank gave. Raises a PlayError."""


def play(part: Assignment) -> Played:
    """Train on this rank of the process group."""
    world, rank = dist.get_world_size(), dist.get_rank()
    here = max(1, world // 2) if part.two_nodes else world if part.device == "cuda" else 1
    environment = Environment(
        color=False, threads=1, world_size=world, rank=rank, local_rank=rank, local_world_size=here
    )
    run = load_run(PRESET, of_run(part.overrides))
    session = prepare(run, environment, is_new=not part.first)
    folder = RunFolder(Path(part.folder))
    store = CheckpointStore(folder.checkpoints, keep=0, asynchronous=False, world=session.axes.world)  # writes nothing
    try:
        if part.first:
            restore_state(store, part.first, session.state)
        start = saved_by(session)
        given = decode(Path(part.given).read_bytes(), dict[Place, Choices]) if part.given else None
        recorder = ChoiceRecorder(session.model.modules if part.has_choices else (), given)
        has_bare_rows = LABELS in part.overrides
        trace = follow(session, part.steps, part.rate, recorder.begin, first=part.first, has_bare_rows=has_bare_rows)
        if part.folder:
            save_state(store, part.first + part.steps, session.state, {})
            if rank == 0:
                folder.write_config(run)
        if part.exports:
            exported, last = folder.path / "exported", part.first + part.steps
            export_huggingface(run, store, last, exported, "fp32")
            import_weights(WeightFolder(exported), run.model, run, None, folder.path / "imported")
        return Played(trace, start, saved_by(session), recorder.choices())
    finally:
        store.close()
        session.state.batches.close()
        if session.graphs is not None:
            session.graphs.release()


class Children:
    """Ranks that are processes of their own."""

    def __init__(self, device: Device = "cpu") -> None:
        self._device = device
        self._store = TCPStore(LOCALHOST, 0, is_master=True, wait_for_workers=False)
        self._children: list[Child] = []
        self._calls = 0

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        self._start(ranks)
        self._calls += 1
        common = {"part": asdict(part), "ranks": ranks, "port": self._store.port, "call": str(self._calls)}

        def ask(rank: int) -> tuple[dict[str, Any], bytes]:
            try:
                return self._children[rank].ask(common | {"rank": rank}, LONGEST_SECONDS + 30)
            except ChildEndedError as error:
                return {"failure": f"rank {rank} {error}"}, b""

        with ThreadPoolExecutor(ranks) as threads:
            answers = list(threads.map(ask, range(ranks)))
        if failures := [facts["failure"] for facts, _ in answers if "failure" in facts]:
            self.close()
            raise PlayError("\n".join(failures))
        if lines := [facts["line"] for facts, _ in answers if "line" in facts]:
            if len(lines) < ranks:
                self.close()
                raise PlayError(f"only {len(lines)} of {ranks} ranks refused: {lines[0]}")
            raise PlayError(lines[0], is_line=True)
        return [decode(content, Played) for _, content in answers]

    def _start(self, ranks: int) -> None:
        """Let so many children import what they need; the first gloo group does not wait for that."""
        new = [Child(__name__) for _ in range(len(self._children), ranks)]
        if new:
            with ThreadPoolExecutor(len(new)) as threads:
                list(threads.map(lambda child: child.ask({"device": self._device}), new))
            self._children += new

    def close(self) -> None:
        """End the processes."""
        for child in self._children:
            child.close()
        self._children = []


Value = TypeVar("Value")


def encode(value: object) -> bytes:
    """Bytes of dataclasses with tensors, without pickles."""
    return msgspec.msgpack.encode(value, enc_hook=lambda tensor: save({"": tensor.contiguous()}))


def decode(content: bytes, kind: type[Value]) -> Value:
    """The inverse of `encode` for a value of this type."""
    return msgspec.msgpack.decode(content, type=kind, dec_hook=lambda _, tensor: load(tensor)[""])


def _answer(request: dict[str, Any]) -> Answer:
    if "part" not in request:  # it asks whether this process is ready
        if request["device"] == "cuda":
            use_all_memory()
        return {}, b""
    try:
        return {}, encode(in_group(request))
    except PenstockError as error:
        return {"line": str(error)}, b""
    except Exception:  # noqa: BLE001 - whatever it is, a user would read it
        return {"failure": f"rank {request['rank']}:\n{traceback.format_exc()}"}, b""


def in_group(request: Mapping[str, Any]) -> Played:
    """Play in a new process group."""
    part, rank, ranks = msgspec.convert(request["part"], Assignment), request["rank"], request["ranks"]
    store = PrefixStore(request["call"], TCPStore(LOCALHOST, request["port"]))
    kind, device = "gloo", None
    if part.device == "cuda":
        # Variables that libraries read once: a later composition may be deterministic.
        prepare_environment(LaunchFacts(vendor=gpu_vendor(), world=ranks, local_world=ranks, deterministic=True))
        torch.cuda.set_device(rank)
        if ranks > 1:
            kind, device = "nccl", torch.device("cuda", rank)
    seconds = timedelta(seconds=LONGEST_SECONDS)
    dist.init_process_group(kind, None, seconds, world_size=ranks, rank=rank, store=store, device_id=device)
    try:
        played = play(part)
        dist.barrier()  # a rank that is done early must not close connections that others still read
    finally:
        dist.destroy_process_group()
    if part.device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
    return played


def main() -> None:
    """Be a rank of `Children`."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    serve(_answer)


if __name__ == "__main__":
    main()
