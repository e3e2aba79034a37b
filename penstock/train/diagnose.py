"""Finds the origin of a NaN or infinity.

The failed step was not applied, so the same micro-batches can run again on the same model under observation. In order:

1. Parameters. One that is not finite spoils everything behind it.
2. Forward, with a hook on every module. Children return before parents, so the first output that is not finite belongs
   to the innermost module of the origin.
3. Loss. Hidden states are finite, the cross entropy is not.
4. Gradients. A NaN travels from the output to the input, so it began at the deepest layer whose parameters' gradients
   are not finite: the last ones in the order of forward.
5. None of these: each micro-batch is finite alone, so their sum or its norm left the range of float32, or the fault did
   not repeat (then suspect the machine).

Gradients are computed with autograd.grad, so those of the optimizer are unchanged. `report_figure` writes the figure
first and searches last: neither a failed save nor a failed search hides the figure.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from penstock.base.errors import CheckpointError, LostRankError, NonFiniteError
from penstock.base.files import write_whole
from penstock.data.batch import Batch
from penstock.data.evaluation import EvaluationRows
from penstock.models.decoder import Decoder
from penstock.models.parameters import gradients_by_autograd
from penstock.models.rank_model import RankModel
from penstock.moe.router import reset_loads
from penstock.parallel.axes import Axis
from penstock.parallel.collectives import all_gather_json, lost_ranks
from penstock.parallel.shard import own_rows
from penstock.train.global_batch import GlobalBatch, MicroBatch, cut, read
from penstock.train.loss import LossRule, model_loss
from penstock.train.optimizer import MasterAdamW
from penstock.train.passes import held_out_nats
from penstock.train.step import StepRule

Look = Callable[[str, nn.Module, object, object], None]
"""Receives a module's path, the module, its inputs and its output."""

NO_ORIGIN = "where it began is not known, as a GPU had no memory left to look or a rank has ended"


@dataclass(frozen=True, kw_only=True)
class NonFiniteOrigin:
    """Origin of a value that is not finite."""

    place: Literal["parameter", "output", "loss", "gradient", "sum of gradients"]
    name: str  # path of the module or parameter; empty if nothing was found
    layer: int | None = None  # decoder layer of `name`
    micro_batch: int | None = None  # of the step, from 0
    parameters: tuple[str, ...] = ()  # that are not finite, or whose gradients are not, in the order of forward

    def __str__(self) -> str:
        """One phrase, for messages."""
        if not self.name:
            return "every micro-batch is finite when it is run alone: the sum overflowed, or the fault is the machine's"
        layer = "" if self.layer is None else f" (layer {self.layer})"
        micro_batch = "" if self.micro_batch is None else f", micro-batch {self.micro_batch}"
        return f"it began in the {self.place} of {self.name}{layer}{micro_batch}"


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
        """Write nonfinite.json; returns the reason if that fails, otherwise None."""
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
    world: Axis,
    *,
    save: Callable[[], None],
    newest: Callable[[], Path | None],
    look: Callable[[], NonFiniteOrigin | None],
) -> NonFiniteError:
    """Report a figure that is not finite; returns the error that ends the run. All ranks call it together.

    The first rank writes the finding at once, and again with later results. `save` saves the state and waits for the
    disk; it may raise a CheckpointError, on all ranks. `newest` returns the newest checkpoint, on the first rank.
    `look` searches, as `find_origin` does.
    """
    is_first = world.rank == 0
    if is_first:
        finding.write(path)
    try:
        save()
    except CheckpointError as error:
        finding = replace(finding, unsaved=str(error))
    if is_first:
        finding = replace(finding, checkpoint=None if (saved := newest()) is None else str(saved))
    unwritten = finding.write(path) if is_first else None
    # The last point at which all ranks certainly take part.
    checkpoint, unwritten = all_gather_json([finding.checkpoint, unwritten], world)[0]
    finding = replace(finding, checkpoint=checkpoint, origin=look())
    if is_first and finding.origin is not None:
        finding.write(path)
    return finding.error(path, unwritten)


def find_origin(model: RankModel, optimizer: MasterAdamW, batch: Batch, rule: StepRule) -> NonFiniteOrigin | None:
    """Find the origin of a non-finite value in a step, with the model as before it. Expert loads are reset.

    One device runs its micro-batches again under observation, until something breaks. Several ranks run only forward
    again, all of them to the end so that none waits for a rank that stopped, and look at the gradients of the step.

    Returns None if the search could not finish on some rank (out of memory, or a lost rank). Other ranks may then still
    be searching, so no collective may follow.
    """
    return _search(model, rule, lambda: cut(batch, rule.cut), lambda: dict(optimizer.gradients()))


def find_held_out_origin(model: RankModel, rows: EvaluationRows, rule: StepRule) -> NonFiniteOrigin | None:
    """Find the origin of a held-out loss that is not finite; see `find_origin`."""

    def load() -> GlobalBatch:
        counted = torch.full((1 + rule.loss.depths,), rows.tokens, dtype=torch.float64, device=rule.cut.device)
        return GlobalBatch(micro_batches=tuple(read(batch, rule.cut) for batch in rows.batches), counted=counted)

    return _search(model, rule, load, dict)


def _search(
    model: RankModel, rule: StepRule, load: Callable[[], GlobalBatch], gradients: Callable[[], dict[str, Tensor]]
) -> NonFiniteOrigin | None:
    """Search for the origin in a batch, and in the reduced gradients of several ranks; see `find_origin`."""
    try:
        with lost_ranks():
            whole = load()
            if model.axes.world.size == 1:
                return _watch_all(model.whole, whole, rule.loss)
            return (
                _first_broken(model, dict(model.named_parameters()), "parameter")
                or _first_output(model, whole.micro_batches, rule)
                or _first_broken(model, gradients(), "gradient")
                or NonFiniteOrigin(place="sum of gradients", name="")
            )
    except (torch.OutOfMemoryError, LostRankError):
        # A rank without memory cannot tell the others, which wait in the passes. It leaves, and they lose it.
        return None


def _first_broken(
    model: RankModel, tensors: Mapping[str, Tensor], place: Literal["parameter", "gradient"]
) -> NonFiniteOrigin | None:
    """Over all ranks. A NaN travels from a layer's gradient to those of all layers before it, so the last counts."""
    own: list[str] | None
    try:
        own = [name for name, tensor in tensors.items() if not is_finite(own_rows(tensor)[0])]
    except torch.OutOfMemoryError:
        own = None  # no pass is running, so all ranks can end the search together
    found = all_gather_json(own, model.axes.world)
    if None in found:
        raise torch.OutOfMemoryError("a rank has no memory left to look")
    names = sorted({name for names in found for name in names}, key=_depth)
    if not names:
        return None
    name = names[0] if place == "parameter" else names[-1]
    return NonFiniteOrigin(place=place, name=name, layer=layer_of(name), parameters=tuple(names))


def _first_output(model: RankModel, batches: Sequence[MicroBatch], rule: StepRule) -> NonFiniteOrigin | None:
    """Over all ranks: the first module in the order of forward whose output is not finite, or else the loss."""
    order = {name: number for number, name in enumerate(name for one in model.modules for name in _inner_first(one))}
    broken: list[tuple[int, int, int, str]] = []  # (part of the model, layer, order inside, name), see `_depth`

    def look(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not all(is_finite(tensor) for tensor in _tensors(output)):
            broken.append((*_depth(name)[:2], order[name], name))

    modules = [(name, module) for one in model.modules for name, module in one.named_modules() if name]
    with _watched(modules, look):
        model.train(False)  # routers count no load
        nats = held_out_nats(model, batches, rule.loss)
        model.train()
    found = all_gather_json([min(broken, default=None), is_finite(nats)], model.axes.world)
    if outputs := [output for output, _ in found if output is not None]:
        name = min(outputs)[-1]
        return NonFiniteOrigin(place="output", name=name, layer=layer_of(name))
    return None if all(is_good for _, is_good in found) else NonFiniteOrigin(place="loss", name="the output projection")


@contextmanager
def _watched(modules: Iterable[tuple[str, nn.Module]], look: Look) -> Iterator[None]:
    """Call `look` whenever a module returns."""
    hooks = [module.register_forward_hook(partial(look, name)) for name, module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _inner_first(module: nn.Module, path: str = "") -> Iterator[str]:
    """Paths of modules in the order in which they return: children before parents."""
    for name, child in module.named_children():
        yield from _inner_first(child, f"{path}.{name}" if path else name)
    yield path


def _depth(name: str) -> tuple[int, int, str]:
    """Order of forward: embedding, layers, all else."""
    layer = layer_of(name)
    return (0, 0, name) if name.startswith("embed") else (2, 0, name) if layer is None else (1, layer, name)


def _watch_all(model: Decoder, whole: GlobalBatch, rule: LossRule) -> NonFiniteOrigin:
    broken = tuple(name for name, parameter in model.named_parameters() if not is_finite(parameter))
    if broken:
        return NonFiniteOrigin(place="parameter", name=broken[0], layer=layer_of(broken[0]), parameters=broken)
    reset_loads([model])
    origins = (_watch(model, batch, whole.counted, rule) for batch in whole.micro_batches)
    with gradients_by_autograd(model):
        found = next(((index, origin) for index, origin in enumerate(origins) if origin is not None), None)
    reset_loads([model])
    if found is None:
        return NonFiniteOrigin(place="sum of gradients", name="")
    return replace(found[1], micro_batch=found[0])


def _watch(model: Decoder, batch: MicroBatch, counted: Tensor, rule: LossRule) -> NonFiniteOrigin | None:
    """Forward and backward of one micro-batch; None if everything is finite."""
    broken: list[str] = []

    def look(name: str, module: nn.Module, inputs: object, output: object) -> None:
        if not all(is_finite(tensor) for tensor in _tensors(output)):
            broken.append(name or "the model")

    with _watched(model.named_modules(), look):
        total = model_loss(model, batch, counted, rule).total
    if broken:
        return NonFiniteOrigin(place="output", name=broken[0], layer=layer_of(broken[0]))
    if not is_finite(total):
        return NonFiniteOrigin(place="loss", name="the output projection")
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    broken = [
        name
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is not None and not is_finite(gradient)
    ]
    if broken:
        return NonFiniteOrigin(place="gradient", name=broken[-1], layer=layer_of(broken[-1]), parameters=tuple(broken))
    return None


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite. Waits for the device."""
    return not tensor.is_floating_point() or bool(torch.isfinite(tensor).all())


def layer_of(name: str) -> int | None:
    """Decoder layer in a path, or None: 3 for `blocks.3.ffn.router`."""
    match = re.search(r"blocks\.([0-9]+)", name)
    return int(match[1]) if match else None


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in a module's output."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
    elif is_dataclass(value) and not isinstance(value, type):
        yield from _tensors(tuple(vars(value).values()))
