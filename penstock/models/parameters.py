"""The parameters of a rank: shards, gradient buffers and float8 copies, read off the modules; and initial weights."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.kernels.float8.quantized import WeightCopies
from penstock.layout.sharding import Cut, LocalSlice, Matrices, Rectangle, global_shape, local_slices
from penstock.models.decoder import Decoder
from penstock.models.linear import Embedding, Linear
from penstock.models.norm import Norm
from penstock.models.residual import StreamMixer
from penstock.moe.experts import GroupedExperts
from penstock.moe.router import TopKRouter, hash_table
from penstock.parallel.axes import Axes, Axis
from penstock.parallel.shard import Float8Shard, ParamShard, ShardedTensor, is_dtensor, own_rows, refresh


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
                is_dtensor(parameter) or not parameter.requires_grad for parameter in module.parameters(recurse=False)
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


# Initial weights. Each tensor has its own random generator, seeded by the run's seed and the tensor's name.
#
# So a weight does not depend on the layers, stages or ranks before it: every layout starts from the same model. A rank
# that holds a part of a tensor draws the whole and keeps its part; experts are drawn one by one, only on their ranks.
#
# Values are drawn in float32. A bfloat16 parameter starts from the rounded value, its master from the exact one. A
# master that started from the rounded value would have to move by half a step of bfloat16 before the weight changes,
# and FSDP2 layouts, whose weights are their own masters, would train differently.


DECAY_RATES = (0.01, 16.0)
"""Of the states of linear attention, by head, as Qwen3-Next's; their logarithms are the parameters."""

DECAY_BIAS = 1.0


@dataclass(frozen=True, kw_only=True)
class ParamInit:
    """The initial values of one parameter of the whole model."""

    seed: int
    name: str
    std: float
    device: torch.device  # of the random generator; CPUs and GPUs give different numbers
    constant: float | None = None  # of all elements, for norms and biases; None draws them
    log_of: tuple[float, float] | None = None  # logarithms of numbers drawn evenly in this range; None is normal
    by_expert: bool = False  # dim 0 counts experts, which are drawn one by one

    def fill(self, part: ShardedTensor) -> None:
        if self.constant is not None:
            part.tensor.fill_(self.constant)
        elif self.by_expert:
            # Only experts on this rank are drawn, each from its own generator.
            for expert, pieces in _by_expert(part).items():
                values = self._values(f"{self.name}.{expert}", part.shape[1:])
                for piece, held in pieces:
                    held.copy_(values[Rectangle(piece.whole[1:], piece.sizes[1:]).within((0,) * values.ndim)])
        else:
            values = self._values(self.name, part.shape)
            for piece, held in part.views():
                held.copy_(values[Rectangle(piece.whole, piece.sizes).within((0,) * values.ndim)])

    def _values(self, name: str, shape: tuple[int, ...]) -> Tensor:
        generator = _generator(self.seed, name, self.device)
        values = torch.empty(shape, device=self.device)
        if self.log_of is not None:
            return values.uniform_(*self.log_of, generator=generator).log_()
        return values.normal_(0.0, self.std, generator=generator)


def _generator(seed: int, name: str, device: torch.device | str = "cpu") -> torch.Generator:
    # 56 bits: torch takes seeds below 2**63.
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=7).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest, "big"))


def _by_expert(part: ShardedTensor) -> dict[int, list[tuple[LocalSlice, Tensor]]]:
    """The values held of each expert of the whole parameter, with their slices: gate and up are two slices."""
    experts = defaultdict(list)
    for piece, values in part.views():
        for offset, held in enumerate(values):
            experts[piece.whole[0] + offset].append((piece, held))
    return experts


@torch.no_grad()
def initialize(model: nn.Module, seed: int, std: float) -> None:
    """Fill the parameters of a model on a real device: norms with 1, biases with 0, all else with normal values.

    Buffers become zero, but for tables of routers, which are drawn.
    """
    for module, name, parameter, init in _param_inits(model, seed, std):
        local, rows = own_rows(parameter)  # FSDP2 holds a range of rows
        cuts = cuts_of(module, name)
        shape = global_shape(local_shape_of(module, name), cuts)
        init.fill(ShardedTensor(tensor=local, shape=shape, pieces=local_slices(shape, cuts, rows)))
    for buffer in model.buffers():
        buffer.zero_()
    for path, module in model.named_modules():
        if isinstance(module, TopKRouter) and (table_VK := module.table_VK) is not None:
            table_VK.copy_(hash_table(len(table_VK), module.experts, module.top_k, _generator(seed, path)))


@torch.no_grad()
def initialize_masters(models: Iterable[nn.Module], parts: Mapping[str, ShardedTensor], seed: int, std: float) -> None:
    """Give masters the float32 values from which bfloat16 parameters were rounded.

    `parts` are float32 masters by `model.NAME`, or rows of them, on any device.
    """
    for model in models:
        for _, _, parameter, init in _param_inits(model, seed, std):
            if parameter.dtype != torch.float32:
                master = parts[f"model.{init.name}"]
                # Encoded on the parameter's device: on the host this would take longer than the rest of a start.
                room = master.room(parameter.device)
                init.fill(room)
                master.fill(room.tensor)


def _param_inits(model: nn.Module, seed: int, std: float) -> Iterator[tuple[nn.Module, str, nn.Parameter, ParamInit]]:
    """Yields (module, name in the module, parameter, its initial values)."""
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            # A router's bias is drawn: with equal biases all experts would start equal.
            is_zero = "bias" in name and not isinstance(module, TopKRouter)
            constant = 0.0 if is_zero else 1.0 - module.offset if isinstance(module, Norm) else None
            if isinstance(module, StreamMixer) and name == "scale":
                constant = 1.0
            init = ParamInit(
                seed=seed,
                name=f"{path}.{name}",
                std=std,
                device=parameter.device,
                constant=DECAY_BIAS if name == "decay_bias" else constant,
                log_of=DECAY_RATES if name == "decay_rate_H" else None,
                by_expert=isinstance(module, GroupedExperts),
            )
            yield module, name, parameter, init
