"""The parameters of a rank: shards, gradient buffers and float8 copies, read off the modules."""

from collections.abc import Callable, Iterable

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.kernels.float8.quantized import WeightCopies
from penstock.layout.sharding import Cut, Matrices, global_shape
from penstock.models.decoder import Decoder
from penstock.models.linear import Embedding, Linear
from penstock.moe.experts import GroupedExperts
from penstock.parallel.axes import Axes, Axis
from penstock.parallel.shard import Float8Shard, ParamShard, refresh


def param_shards(decoders: Iterable[Decoder], axes: Axes) -> list[ParamShard]:
    """Every trained parameter of a rank, once each."""
    shards: dict[str, ParamShard] = {}
    for decoder in decoders:
        for path, module in decoder.named_modules():
            for local_name, parameter in module.named_parameters(recurse=False):
                name = f"{path}.{local_name}"
                if name not in shards:  # stages of a rank share the embedding
                    shape = local_shape_of(module, local_name)
                    shards[name] = _shard(name, module, cuts_of(module, local_name), shape, parameter, axes)
    return list(shards.values())


def cuts_of(module: nn.Module, name: str) -> tuple[Cut, ...]:
    """The cuts of a parameter, from the module that owns it."""
    cuts: dict[str, tuple[Cut, ...]] | None = vars(module).get("cuts")
    return () if cuts is None else cuts[name]


def local_shape_of(module: nn.Module, name: str) -> tuple[int, ...]:
    """Shape of the rank's part of a parameter, before data-parallel ranks divide it."""
    return module.shapes[name] if isinstance(module, GroupedExperts) else tuple(module.get_parameter(name).shape)


def matrices_of(module: nn.Module, name: str, shape: tuple[int, ...]) -> Matrices | None:
    """The matrices of hidden layers in a parameter, as published checkpoints divide them; None for other parameters."""
    if len(shape) < 2 or min(shape[-2:]) == 1:
        return None
    *path, last = name.split(".")
    if isinstance(module, GroupedExperts) and "bias" not in last:
        return Matrices(shape, blocks=module.rule.projections if last == "gate_up_eFD" else 1)
    if isinstance(module, Linear) and path != ["head"]:
        return Matrices(shape, blocks=module.blocks)
    return None


def fuse_wgrad_accumulation(decoders: Iterable[Decoder], buffer_of: Callable[[str], Tensor]) -> None:
    """Let products add weight gradients to float32 buffers: this saves a bfloat16 copy, its rounding, and one pass."""
    for decoder in decoders:
        for path, module in decoder.named_modules():
            # FSDP2 reduces the gradients of autograd, and frozen parameters have no buffer.
            if any(
                isinstance(parameter, DTensor) or not parameter.requires_grad
                for parameter in module.parameters(recurse=False)
            ):
                continue
            if isinstance(module, GroupedExperts):
                module.sums = tuple(buffer_of(f"{path}.{name}") for name, _ in module.named_parameters(recurse=False))
            elif isinstance(module, (Linear, Embedding)):
                module.main_grad = buffer_of(f"{path}.weight")


def refresh_float8(stages: Iterable[nn.Module]) -> None:
    """Quantize all float8 weights, after each change of them. All ranks call it if FSDP2 gathers in float8."""
    gathered: list[Float8Shard] = []
    for stage in stages:
        for module in stage.modules():
            if isinstance(module, (Linear, GroupedExperts)):
                module.refresh_float8()
                gathered += module.gathered
    if gathered:
        refresh(gathered)


def copy_bytes(module: nn.Module) -> dict[str, int]:
    """Bytes of a module's float8 copies, scales included, by the name of the parameter."""
    copies: dict[str, WeightCopies] = {}
    if isinstance(module, Linear) and module.copies is not None:
        copies = {"weight": module.copies}
    elif isinstance(module, GroupedExperts) and module.float8_copies is not None:
        copies = {"gate_up_eFD": module.float8_copies.gate_up, "down_eDF": module.float8_copies.down}
    return {  # of storages, which may be padded
        name: sum(copy.values.untyped_storage().nbytes() + copy.scales.untyped_storage().nbytes() for copy in layouts)
        for name, layouts in copies.items()
    }


def _shard(
    name: str,
    module: nn.Module,
    cuts: tuple[Cut, ...],
    local_shape: tuple[int, ...],
    parameter: nn.Parameter,
    axes: Axes,
) -> ParamShard:
    is_expert = isinstance(module, GroupedExperts)
    # Tensor-parallel ranks apply a replicated parameter to different positions: their gradients are partial sums.
    partial: tuple[Axis, ...] = () if is_expert or cuts else (axes.tensor,)
    if isinstance(module, Embedding):
        partial += (axes.embedding,)  # pipeline ranks that hold it too
    shape = global_shape(local_shape, cuts)
    return ParamShard(
        name=name,
        parameter=parameter,
        shape=shape,
        matrices=matrices_of(module, name, shape),
        cuts=cuts,
        data=axes.expert_data if is_expert else axes.dense_data,
        partial=tuple(axis for axis in partial if axis.size > 1),
    )
