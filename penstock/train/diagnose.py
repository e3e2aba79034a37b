"""Finds the origin of a NaN or infinity.

The failed step was not applied, so its micro-batches can run forward again on the same model under observation. All
ranks look together, in this order:

1. Parameters. One that is not finite spoils everything behind it.
2. Outputs, with a hook on every module. Children return before parents, so the first output that is not finite belongs
   to the innermost module of the origin.
3. Loss. Hidden states are finite, the cross entropy is not.
4. Gradients of the step. A NaN travels from the output to the input, so it began at the deepest layer whose parameters'
   gradients are not finite: the last ones in the order of forward.
5. None of these: the sum of gradients or its norm left the range of float32, or the fault did not repeat (then suspect
   the machine).

`report_figure` writes the figure first and searches last: neither a failed save nor a failed search hides the figure.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, LostRankError, NonFiniteError
from penstock.base.files import write_whole
from penstock.data.evaluation import EvaluationRows
from penstock.data.loader import Batch
from penstock.models.rank_model import RankModel
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather_json, lost_ranks
from penstock.parallel.shard import own_rows
from penstock.train.checkpoint import CheckpointStore
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import MicroBatch, cut, held_out_nats, read
from penstock.train.step import StepRule

Position = tuple[int, int, int, str]
"""Sorts in the order of forward: part of the model, layer, order inside, name."""

NO_ORIGIN = "where it began is not known, as a GPU had no memory left to look or a rank has ended"


@dataclass(frozen=True, kw_only=True)
class NonFiniteOrigin:
    """Origin of a value that is not finite."""

    place: Literal["parameter", "output", "loss", "gradient", "sum of gradients"]
    name: str  # path of the module or parameter; empty if nothing was found
    layer: int | None = None  # decoder layer of `name`
    parameters: tuple[str, ...] = ()  # that are not finite, or whose gradients are not, in the order of forward

    def __str__(self) -> str:
        if not self.name:
            return "everything is finite when it is run again: the sum overflowed, or the fault is the machine's"
        return f"it began in the {self.place} of {self.name}" + ("" if self.layer is None else f" (layer {self.layer})")


@dataclass(frozen=True, kw_only=True)
class NonFiniteFinding:
    """A figure that is not finite; content of nonfinite.json."""

    figure: Literal["loss", "gradient norm", "held-out loss"]
    value: str  # `nan`, `inf` or `-inf`; JSON has no such numbers
    step: int
    origin: NonFiniteOrigin | None = None  # None before the search, and if it could not finish
    checkpoint: str | None = None  # the newest one; None if there is none, or before the lookup
    unsaved: str | None = None  # reason why no checkpoint could be written after the figure was found

    def write(self, path: Path) -> str | None:
        """Write nonfinite.json; returns the reason if that fails."""
        try:
            write_whole(path, json.dumps(asdict(self), indent=1) + "\n")
        except OSError as error:
            return f"cannot write {path}: {error.strerror or error}"
        return None

    def error(self, path: Path, unwritten: str | None = None) -> NonFiniteError:
        """The error that ends the run; `unwritten` is the reason if nonfinite.json could not be written."""
        where = NO_ORIGIN if self.origin is None else str(self.origin)
        problems = (self.unsaved and f"nothing was saved: {self.unsaved}", unwritten)
        return NonFiniteError(
            "; ".join(filter(None, (f"the {self.figure} of step {self.step} is {self.value}: {where}", *problems))),
            fix=("" if unwritten else f"read {path}; ") + f"newest checkpoint: {self.checkpoint or 'none'}",
        )


def report_figure(
    finding: NonFiniteFinding,
    path: Path,
    store: CheckpointStore,
    world: Axis,
    *,
    save: Callable[[], None],
    look: Callable[[], NonFiniteOrigin | None],
) -> NonFiniteError:
    """Report a figure that is not finite; returns the error that ends the run. All ranks call it together.

    The first rank writes the finding at once, and again with later results. `save` saves the state and waits for the
    disk; it may raise a CheckpointError, on all ranks. `look` searches, as `find_origin` does.
    """
    is_first = world.rank == 0
    if is_first:
        finding.write(path)
    try:
        save()
    except CheckpointError as error:
        finding = replace(finding, unsaved=str(error))
    if is_first and (newest := store.latest()) is not None:
        finding = replace(finding, checkpoint=str(store.path(newest)))
    unwritten = finding.write(path) if is_first else None
    # The last point at which all ranks certainly take part.
    checkpoint, unwritten = all_gather_json([finding.checkpoint, unwritten], world)[0]
    finding = replace(finding, checkpoint=checkpoint, origin=look())
    if is_first and finding.origin is not None:
        finding.write(path)
    return finding.error(path, unwritten)


def find_origin(model: RankModel, optimizer: MasterAdamW, batch: Batch, rule: StepRule) -> NonFiniteOrigin | None:
    """Find the origin of a non-finite value in a step, with the model as before it. All ranks call it together.

    Returns None if the search could not finish on some rank (out of memory, or a lost rank). Other ranks may then still
    be searching, so no collective may follow.
    """

    def gradients() -> dict[str, Tensor]:
        offload = optimizer.gradient_offload
        return dict(optimizer.gradients()) | ({} if offload is None else offload.host)

    return _search(model, rule, lambda: cut(batch, rule.cut).micro_batches, gradients)


def find_held_out_origin(model: RankModel, rows: EvaluationRows, rule: StepRule) -> NonFiniteOrigin | None:
    """Find the origin of a held-out loss that is not finite; see `find_origin`."""
    return _search(model, rule, lambda: [read(batch, rule.cut) for batch in rows.batches], dict)


def _search(
    model: RankModel,
    rule: StepRule,
    load: Callable[[], Sequence[MicroBatch]],
    gradients: Callable[[], dict[str, Tensor]],
) -> NonFiniteOrigin | None:
    try:
        with lost_ranks():
            return (
                _first_broken(model, dict(model.named_parameters()), "parameter")
                or _first_output(model, load(), rule)
                or _first_broken(model, gradients(), "gradient")
                or NonFiniteOrigin(place="sum of gradients", name="")
            )
    except (torch.OutOfMemoryError, LostRankError):
        # A rank without memory cannot tell the others, which wait in the passes. It leaves, and they lose it.
        return None


def _first_broken(
    model: RankModel, tensors: Mapping[str, Tensor], kind: Literal["parameter", "gradient"]
) -> NonFiniteOrigin | None:
    """Over all ranks. A NaN travels from a layer's gradient to those of all layers before it, so the last counts."""
    broken: list[Position] | None
    numbers = {name: number for number, (name, _) in enumerate(model.named_parameters())}
    try:
        broken = [
            _position(name, numbers[name]) for name, tensor in tensors.items() if not is_finite(own_rows(tensor)[0])
        ]
    except torch.OutOfMemoryError:
        broken = None  # no pass is running, so all ranks can end the search together
    broken_of_ranks = all_gather_json(broken, model.axes.world)
    if None in broken_of_ranks:
        raise torch.OutOfMemoryError("a rank has no memory left to look")
    names = list(dict.fromkeys(name for *_, name in sorted(chain.from_iterable(broken_of_ranks))))
    if not names:
        return None
    name = names[0] if kind == "parameter" else names[-1]
    return NonFiniteOrigin(place=kind, name=name, layer=layer_of(name), parameters=tuple(names))


def _first_output(model: RankModel, batches: Sequence[MicroBatch], rule: StepRule) -> NonFiniteOrigin | None:
    """Over all ranks: the first module in the order of forward whose output is not finite, or else the loss."""
    paths = (name for decoder in model.modules for name in _inner_first(decoder))
    order = {name: number for number, name in enumerate(paths)}
    broken: list[Position] = []

    def look(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not all(is_finite(tensor) for tensor in _tensors(output)):
            broken.append(_position(name, order[name]))

    modules = [(name, module) for decoder in model.modules for name, module in decoder.named_modules() if name]
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in modules]
    try:
        model.train(False)  # routers count no load
        nats = held_out_nats(model, batches, rule.loss)
    finally:
        model.train()
        for hook in hooks:
            hook.remove()
    results = all_gather_json([min(broken, default=None), is_finite(nats)], model.axes.world)
    if outputs := [output for output, _ in results if output is not None]:
        name = min(outputs)[-1]
        return NonFiniteOrigin(place="output", name=name, layer=layer_of(name))
    if all(is_good for _, is_good in results):
        return None
    return NonFiniteOrigin(place="loss", name="the output projection")


def _inner_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of modules in the order in which they return: children before parents."""
    for name, child in module.named_children():
        yield from _inner_first(child, f"{path}.{name}" if path else name)
    yield path


def _position(name: str, number: int) -> Position:
    layer = layer_of(name)
    part = 0 if name.startswith("embed") else 2 if layer is None else 1  # embedding, layers, all else
    return part, layer or 0, number, name


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def layer_of(name: str) -> int | None:
    """Decoder layer in a path, or None: 3 for `blocks.3.ffn.router`."""
    match = re.search(r"blocks\.([0-9]+)", name)
    return int(match[1]) if match else None


def _tensors(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(tuple(vars(value).values()))
