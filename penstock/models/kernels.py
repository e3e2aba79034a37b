"""Kernels of a run: translates its configuration into the arguments of `penstock.kernels.choose`."""

from collections.abc import Sequence
from pathlib import Path

import torch

from penstock.base.errors import KernelError
from penstock.config.dispatcher import COUNTS_STAY, STAGES
from penstock.config.model import GroupedQueryAttention, LatentAttention
from penstock.config.run import Kernels, RecipeKnob, Run
from penstock.kernels.backends import FLOAT8, Shapes
from penstock.kernels.choose import AUTO, Choice, Measurements, choose, find, operators
from penstock.kernels.float8.operators import NO_FLOAT8, Float8Rule
from penstock.kernels.float8.quantized import RECIPES, Recipe, default_recipe, format_on, refuse
from penstock.kernels.float8.torch_products import obstacle as torch_obstacle
from penstock.kernels.operators import Operators
from penstock.kernels.tuning import DeviceFacts, device_facts


def choose_operators(run: Run, device: torch.device) -> Operators:
    """The operators of a run's model.

    Raises a KernelError if the run asks for a kernel that cannot run, or if a file of measurements is damaged.
    """
    return operators(kernel_choices(run, device_facts(device, run.training.precision)))


def kernel_choices(run: Run, device: DeviceFacts) -> tuple[Choice, ...]:
    """The kernel of each operator on a device, maybe another machine's, with the reason. Raises as `choose_operators`.

    A kernel that waits for the device at a stage of `dispatch.sync_free` that forbids it is refused.
    """
    wanted = run.kernels.model_dump(exclude={"float8", "loss_chunk", "measured"})
    if run.training.deterministic and wanted["sparse"] == "triton":
        fix = "set kernels.sparse=auto, or training.deterministic=false"
        raise KernelError("kernels.sparse=triton sums gradients of keys in any order", allowed="reference", fix=fix)
    if run.training.deterministic and wanted["attention"] == "cudnn" and device.kind == "cuda":
        fix = "set kernels.attention=auto, or training.deterministic=false"
        raise KernelError("kernels.attention=cudnn sums gradients in any order", got="training.deterministic", fix=fix)
    choices = choose(wanted, device, shapes_of(run), measurements(run.kernels, device))
    if run.training.deterministic:
        why = "training.deterministic, and Triton's sums are in any order"
        in_order = Choice("sparse", "both", "reference", why)
        choices = tuple(
            in_order if (choice.op, choice.backend) == ("sparse", "triton") else choice for choice in choices
        )
    stage = run.dispatch.sync_free_stage
    if device.kind != "cpu" and run.model.moe is not None:
        for op, first in _host_counters(choices):
            if stage >= first:
                at_auto = f"leave kernels.{op} and kernels.all at auto where Triton is installed"
                raise _waits(op, stage, first, f"{at_auto}, or set dispatch.sync_free={first - 1}")
    return choices


def most_sync_free(run: Run, device: DeviceFacts) -> int:
    """The highest `dispatch.sync_free` at which no kernel waits for the device. Raises as `choose_operators`."""
    free = run.model_copy(update={"dispatch": run.dispatch.model_copy(update={"sync_free": 0})})
    if device.kind == "cpu" or run.model.moe is None:
        return STAGES - 1
    if run.float8.experts != "none" and _float8_backend(run, device, []) == "reference":
        return COUNTS_STAY - 1
    return min((first - 1 for _, first in _host_counters(kernel_choices(free, device))), default=STAGES - 1)


def _host_counters(choices: Sequence[Choice]) -> list[tuple[str, int]]:
    """Chosen operators that count rows on the host (the reference forms), with the first stage that forbids it."""
    return [
        (op, first)
        for op, first in (("permute", 1), ("experts", COUNTS_STAY))
        if any(choice.op == op and choice.backend == "reference" for choice in choices)
    ]


def _waits(op: str, stage: int, first: int, fix: str) -> KernelError:
    """The error for a reference kernel that waits for the device, which stages from `first` on forbid."""
    return KernelError(
        f"dispatch.sync_free={stage} cannot be had: the reference form of {op} waits for the device",
        allowed=", ".join(map(str, range(first))),
        fix=fix,
    )


def choose_float8(run: Run, device: torch.device) -> Float8Rule:
    """The float8 rule of a run on a local device. Raises as `float8_rule`."""
    return float8_rule(run, device_facts(device, run.training.precision))


def float8_rule(run: Run, device: DeviceFacts) -> Float8Rule:
    """The float8 rule of a run on any device; `first_layers` and `last_layers` do not use it.

    Raises a KernelError if the device does not support a recipe of the run, or if Triton is missing.
    """
    wanted = run.float8
    if not wanted.is_used:
        return NO_FLOAT8
    target = "cpu" if device.kind == "cpu" else device.target
    parts = wanted.dense, wanted.experts, wanted.head, wanted.dispatch
    dense, experts, head, dispatch = (_recipe_on(part, target) for part in parts)
    backend = _float8_backend(run, device, [dense, head])
    waits = backend == "reference" and device.kind != "cpu" and experts is not None
    if waits and run.dispatch.sync_free_stage >= COUNTS_STAY:
        fix = f"set dispatch.sync_free={COUNTS_STAY - 1}, or kernels.float8=auto"
        raise _waits("float8 experts", run.dispatch.sync_free_stage, COUNTS_STAY, fix)
    return Float8Rule(
        dense=dense,
        experts=experts,
        head=head,
        dispatch=dispatch,
        forward=format_on("e4m3", target),
        gradient=format_on(wanted.gradients, target),
        operators=FLOAT8[backend],
    )


def _recipe_on(knob: RecipeKnob, target: str) -> Recipe | None:
    if knob == "none":
        return None
    if knob == "auto":
        return default_recipe(target)
    refuse(RECIPES[knob], target)
    return RECIPES[knob]


def _float8_backend(run: Run, device: DeviceFacts, dense: Sequence[Recipe | None]) -> str:
    wanted: str = run.kernels.float8
    obstacles = [torch_obstacle(recipe, device.target, torch.version.cuda) for recipe in dense if recipe is not None]
    if wanted == AUTO:
        # cuBLAS where it supports a dense recipe: on an H200 it was well ahead of our Triton products.
        has_torch = None in obstacles
        is_reference = device.kind == "cpu" or run.kernels.all == "reference"
        wanted = "reference" if is_reference else "torch" if has_torch else "triton"
    if wanted == "reference":
        return "reference"
    problem = None
    if device.kind == "cpu":
        problem = "no GPU"
    elif not device.has_triton:
        problem = "Triton is not installed"
    elif wanted == "torch" and None not in obstacles:
        problem = next(iter(obstacles), None)
    if problem is not None:
        raise KernelError(
            f"kernels.float8={wanted} cannot be had", got=problem, allowed="auto, reference", fix="kernels.float8=auto"
        )
    return wanted


def measurements(kernels: Kernels, device: DeviceFacts) -> Measurements | None:
    """Kernel measurements for a device; None for CPUs, which have none."""
    if device.kind == "cpu":
        return None
    return find(device.name, Path(kernels.measured) if kernels.measured else None)


def shapes_of(run: Run) -> Shapes:
    """Sizes of one micro-batch of a run."""
    model, moe, attention = run.model, run.model.moe, run.model.attention
    shared_width = 0 if moe is None else moe.shared_expert_intermediate_size
    more: dict[str, int] = {}
    if (linear := model.linear_attention) is not None:
        more = {
            "linear_key_heads": linear.key_heads,
            "linear_value_heads": linear.value_heads,
            "linear_key_dim": linear.key_head_dim,
            "linear_value_dim": linear.value_head_dim,
            "linear_decays": linear.key_head_dim if linear.kind == "kda" else 1,
        }
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        more |= {"index_heads": attention.indexer.index_n_heads, "latent_dim": attention.kv_lora_rank}
    return Shapes(
        tokens=run.training.micro_batch * run.training.sequence_length,
        hidden=model.hidden_size,
        experts=0 if moe is None else moe.experts,
        expert_groups=1 if moe is None else moe.router.n_group,
        top_k=0 if moe is None else moe.top_k,
        ffn=0 if moe is None else moe.moe_intermediate_size,
        dense_ffn=shared_width or model.intermediate_size,  # most layers of a mixture have the shared expert only
        attention=attention.kind,
        heads=attention.heads,
        head_dim=attention.head_dim,
        rotary_dim=attention.rotary_dim,
        value_dim=attention.v_head_dim if isinstance(attention, LatentAttention) else attention.head_dim,
        has_window=isinstance(attention, GroupedQueryAttention) and attention.local is not None,
        **more,
    )
