"""From a run to its kernels: what the configuration says, put as `penstock.kernels.choose` asks it."""

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.base.errors import KernelError
from penstock.config.dispatch_rules import COUNTS_STAY, STAGES
from penstock.config.float8 import RecipeKnob
from penstock.config.model import LatentAttention
from penstock.config.run import Kernels, Run
from penstock.kernels.backends import Shapes, float8_operators_of
from penstock.kernels.choose import AUTO, Choice, choose, operators
from penstock.kernels.device_facts import DeviceFacts, device_facts
from penstock.kernels.float8.formats import format_on
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.float8.recipes import RECIPES, Recipe, default_recipe, refuse
from penstock.kernels.float8.torch_products import obstacle as torch_obstacle
from penstock.kernels.measured import Measurements, find
from penstock.kernels.operators import Operators


def choose_operators(run: Run, device: torch.device) -> Operators:
    """The operators that a run's model is built on.

    Raises:
        KernelError: the run asks for something that cannot run, or a file of measurements is damaged.
    """
    return operators(kernel_choices(run, device_facts(device, run.training.precision)))


def kernel_choices(run: Run, device: DeviceFacts) -> tuple[Choice, ...]:
    """What runs on a device, which need not be here, and why. `penstock.kernels.choose.summary` puts it in one line.

    Raises:
        KernelError: as above.
    """
    wanted = run.kernels.model_dump(exclude={"float8", "loss_chunk", "measured"})
    choices = choose(wanted, device, shapes_of(run), measurements(run.kernels, device))
    if device.kind != "cpu" and run.model.moe is not None:
        _refuse_waiting(run.dispatch.sync_free, choices)
    return choices


def most_sync_free(run: Run, device: DeviceFacts) -> int:
    """The highest `dispatch.sync_free` at which the kernels of a run never wait for the device.

    Raises:
        KernelError: as above, whatever the stage.
    """
    free = run.model_copy(update={"dispatch": run.dispatch.model_copy(update={"sync_free": 0})})
    if device.kind == "cpu" or run.model.moe is None:
        return STAGES - 1
    return min((first - 1 for _, first in _waiting(kernel_choices(free, device))), default=STAGES - 1)


def _waiting(choices: Sequence[Choice]) -> list[tuple[str, int]]:
    """Operators whose form counts rows on the host, and the first stage that forbids it: the reference's do."""
    return [
        (op, first)
        for op, first in (("permute", 1), ("experts", COUNTS_STAY))
        if any(choice.op == op and choice.backend == "reference" for choice in choices)
    ]


def choose_float8(run: Run, device: torch.device) -> Float8Rule:
    """What a run computes and sends in 8 bits on a device that is here.

    Raises:
        KernelError: as `float8_rule`.
    """
    return float8_rule(run, device_facts(device, run.training.precision))


def float8_rule(run: Run, device: DeviceFacts) -> Float8Rule:
    """The same on a device that need not be here. The rule of a run's layers, but for those that stay in 16 bits.

    Raises:
        KernelError: the device cannot compute by a recipe that the run asks for, or Triton is missing.
    """
    wanted = run.float8
    if not wanted.is_used:
        return NO_FLOAT8
    target = "cpu" if device.kind == "cpu" else device.target
    dense, experts, dispatch = (_recipe_on(part, target) for part in (wanted.dense, wanted.experts, wanted.dispatch))
    backend = _float8_backend(run, device, dense)
    if backend == "reference" and device.kind != "cpu" and experts is not None:
        _refuse_reading(run.dispatch.sync_free)
    return Float8Rule(
        dense=dense,
        experts=experts,
        dispatch=dispatch,
        forward=format_on("e4m3", target),
        gradient=format_on(wanted.gradients, target),
        operators=float8_operators_of(backend),
    )


def _recipe_on(knob: RecipeKnob, target: str) -> Recipe | None:
    if knob == "none":
        return None
    if knob == "auto":
        return default_recipe(target)
    refuse(RECIPES[knob], target)
    return RECIPES[knob]


def _float8_backend(run: Run, device: DeviceFacts, dense: Recipe | None) -> str:
    wanted: str = run.kernels.float8
    if wanted == AUTO:
        wanted = "reference" if device.kind == "cpu" or run.kernels.all == "reference" else _fastest(dense, device)
    if wanted == "reference":
        return "reference"
    problem = None
    if device.kind == "cpu":
        problem = "no GPU"
    elif not device.has_triton:
        problem = "Triton is not installed"
    elif wanted == "torch" and dense is not None:
        problem = torch_obstacle(dense, device.target, torch.version.cuda)
    if problem is not None:
        raise KernelError(
            f"kernels.float8={wanted} cannot be had", got=problem, allowed="auto, reference", fix="kernels.float8=auto"
        )
    return wanted


def _fastest(dense: Recipe | None, device: DeviceFacts) -> str:
    """Dense products of cuBLAS where it has them: at a first look at an H200 they were well ahead of ours."""
    has_torch = dense is not None and torch_obstacle(dense, device.target, torch.version.cuda) is None
    return "torch" if has_torch else "triton"


def _refuse_reading(stage: int) -> None:
    """The reference's experts in 8 bits count rows on the host."""
    if stage >= COUNTS_STAY:
        raise KernelError(
            f"dispatch.sync_free={stage} cannot be had: experts in 8 bits by their definition wait for the device",
            allowed=", ".join(f"{one}" for one in range(COUNTS_STAY)),
            fix=f"set dispatch.sync_free={COUNTS_STAY - 1}, or kernels.float8=auto",
        )


def _refuse_waiting(stage: int, choices: Sequence[Choice]) -> None:
    for op, first in _waiting(choices):
        if stage >= first:
            raise KernelError(
                f"dispatch.sync_free={stage} cannot be had: the reference form of {op} waits for the device",
                allowed=", ".join(f"{one}" for one in range(first)),
                fix=f"leave kernels.{op} and kernels.all at auto where Triton is installed, or set "
                f"dispatch.sync_free={first - 1}",
            )


def measurements(kernels: Kernels, device: DeviceFacts) -> Measurements | None:
    """What is known about a device; nothing is measured on CPUs."""
    if device.kind == "cpu":
        return None
    return find(device.name, Path(kernels.measured) if kernels.measured else None)


def shapes_of(run: Run) -> Shapes:
    """The sizes of one micro-batch of a run."""
    model, moe = run.model, run.model.moe
    attention = model.attention
    dense_ffn = (
        model.intermediate_size if moe is None else moe.shared_expert_intermediate_size or model.intermediate_size
    )
    return Shapes(
        tokens=run.training.micro_batch * run.training.sequence_length,
        hidden=model.hidden_size,
        experts=0 if moe is None else moe.experts,
        expert_groups=1 if moe is None else moe.router.n_group,
        top_k=0 if moe is None else moe.top_k,
        ffn=0 if moe is None else moe.moe_intermediate_size,
        dense_ffn=dense_ffn,
        attention=attention.kind,
        heads=attention.heads,
        head_dim=attention.head_dim,
        rotary_dim=attention.rotary_dim,
        value_dim=attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim,
    )
