"""The state that a run continues from, saved to a checkpoint and restored from it.

    tensors    model.*           float32 weights, and persistent buffers (such as the expert bias)
               moment1.*, moment2.*, step    of the optimizer
    facts      step, model       number of steps, and the identity of the model
               loader            position in the data, of the global batch
               random            the first rank's generators of PyTorch (CPU and GPU), Python and NumPy
               notes             values of the caller

None of it depends on the layout: each rank saves and loads its parts of whole tensors. A weight is saved once, as the
float32 master; bfloat16 parameters are rounded from it. No layer draws random numbers, and all ranks continue with the
first rank's generators. After `restore_state` the next step on a CPU in the same layout is bit-identical to that of an
uninterrupted run.
"""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, DamagedError, PenstockError
from penstock.config.run import Run
from penstock.config.schema import every_field, leaves
from penstock.data.loader import Batches
from penstock.data.stream import DamagedPositionError
from penstock.models.parameters import refresh_float8
from penstock.parallel.axes import ALONE, Axis
from penstock.parallel.shard import ShardedTensor, whole
from penstock.train.checkpoint import CheckpointStore
from penstock.train.manifest import FACTS
from penstock.train.optimizer import MasterAdamW
from penstock.train.run_folder import is_bound


@dataclass(frozen=True, kw_only=True)
class TrainState:
    """The parts of a run that change during training."""

    identity: Mapping[str, Any]  # of the model, as JSON values; a checkpoint is bound to it
    modules: Sequence[nn.Module]  # this rank's stages of the model
    optimizer: MasterAdamW  # over the parameters of `modules`
    batches: Batches
    options: Mapping[str, Any] = field(default_factory=dict)  # of the run, by their paths; saved to tell what changed
    stage: Axis = ALONE.stage  # ranks that hold the same buffers; the first of them saves them

    def parts(self) -> dict[str, ShardedTensor]:
        """This rank's state by name in a checkpoint: the live tensors. A tied parameter comes once."""
        parts = self.optimizer.parts()
        for module in self.modules:
            for name, _ in module.named_parameters():
                assert f"model.{name}" in parts, f"{name} is not trained, and would not be saved"
            persistent = module.state_dict().keys()
            for name, buffer in module.named_buffers():
                if name in persistent:
                    parts[f"model.{name}"] = whole(buffer, writes=self.stage.rank == 0)
        return parts


def save_state(store: CheckpointStore, step: int, state: TrainState, notes: Mapping[str, int]) -> None:
    """Save everything that the next step depends on. All ranks call it together; errors as of `CheckpointStore.save`.

    `notes` are whole numbers, which `restore_state` returns.
    """
    facts = {
        "step": step,
        "model": state.identity,
        "options": dict(state.options),
        "loader": state.batches.state(),
        "random": random_state(),
        "notes": notes,
    }
    store.save(step, state.parts(), facts)


def restore_state(store: CheckpointStore, step: int, state: TrainState) -> dict[str, int]:
    """Restore a run, newly built, from a checkpoint of any layout; returns its notes. All ranks call it together.

    Raises a CheckpointError if the checkpoint is of another model, or as `CheckpointStore.load` does, and a DataError
    if it is of other data.
    """
    facts = store.facts_of_all(step)  # before gigabytes are read
    with _well_formed(store.path(step)):
        check_same_model(step, facts["model"], state.identity)
        parse_random_state(facts["random"])
        loader, notes = dict(facts["loader"]), {name: int(count) for name, count in facts["notes"].items()}
    store.load(step, state.parts())
    state.optimizer.loaded()  # parameters follow the float32 masters,
    refresh_float8(state.modules)  # and 8-bit copies the parameters
    with _well_formed(store.path(step)):
        state.batches.restore(loader)
    restore_random_state(facts["random"])
    return notes


@contextmanager
def _well_formed(folder: Path) -> Iterator[None]:
    """Turn the errors of facts that are not what a run writes into a DamagedError."""
    try:
        yield
    except PenstockError as error:
        if not isinstance(error, DamagedPositionError):
            raise
        raise DamagedError(f"{folder / FACTS} is damaged", got=error, fix=f"delete {folder}") from error
    except (LookupError, TypeError, ValueError, RuntimeError, AttributeError, OverflowError) as error:
        raise DamagedError(
            f"{folder / FACTS} is damaged", got=f"not what a run saves: {error!r:.200}", fix=f"delete {folder}"
        ) from error


def identity_of(run: Run) -> dict[str, Any]:
    return {field: value for field, value in leaves(run.model, "model.").items() if is_bound(field)}


def check_same_model(step: int, saved: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another model, by a CheckpointError that names all options that differ."""
    # Through JSON, as the saved ones went: tuples become lists.
    old, new = (dict(_leaves(json.loads(json.dumps(identity)))) for identity in (saved, wanted))
    # An option that is newer than the checkpoint has its default there.
    defaults = {field.path: field.default for field in every_field(Run) if not field.required}
    newer = {field for field in new.keys() - old.keys() if field in defaults and defaults[field] == new[field]}
    old |= {field: new[field] for field in newer}
    fields = [field for field in {**old, **new} if old.get(field) != new.get(field)]
    if fields:
        raise CheckpointError(
            f"the checkpoint of step {step} is of another model",
            got=", ".join(f"{field} = {new.get(field)}" for field in fields),
            allowed=", ".join(f"{field} = {old.get(field)}" for field in fields),
            fix="resume with the configuration that it was saved with, or start a new run",
        )


def random_state() -> dict[str, Any]:
    """The global random generators of this process, as JSON values; of GPUs the current one, if it is in use."""
    numpy_state = np.random.get_state(legacy=False)
    return {
        "torch": _to_text(torch.get_rng_state()),
        "cuda": _to_text(torch.cuda.get_rng_state()) if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": {**numpy_state, "state": {**numpy_state["state"], "key": numpy_state["state"]["key"].tolist()}},
    }


class Generators(NamedTuple):
    """States that fit the global random generators."""

    torch: Tensor
    cuda: Tensor | None
    python: tuple[Any, ...]
    numpy: dict[str, Any]


def parse_random_state(state: Mapping[str, Any]) -> Generators:
    """States from `random_state`. Raises errors of several kinds if they are not of these generators."""
    version, internal, next_gauss = state["python"]
    numpy_state = dict(state["numpy"])
    key = np.array(numpy_state["state"]["key"], dtype=np.uint32)
    generators = Generators(
        torch=_from_text(state["torch"]),
        cuda=None if state["cuda"] is None else _from_text(state["cuda"]),
        python=(version, tuple(internal), next_gauss),
        numpy={**numpy_state, "state": {**numpy_state["state"], "key": key}},
    )
    # Generators of their own refuse what does not fit, before the global ones change.
    torch.Generator().set_state(generators.torch)
    random.Random().setstate(generators.python)
    np.random.RandomState().set_state(generators.numpy)
    return generators


def restore_random_state(state: Mapping[str, Any]) -> None:
    """Set the global random generators from `random_state`; that of a GPU is skipped on a CPU."""
    generators = parse_random_state(state)
    torch.set_rng_state(generators.torch)
    if generators.cuda is not None and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(generators.cuda)
    random.setstate(generators.python)
    np.random.set_state(generators.numpy)


def _to_text(state: Tensor) -> str:
    return state.numpy().tobytes().hex()  # of a uint8 vector


def _from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value
