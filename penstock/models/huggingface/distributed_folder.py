"""Folders of torch.distributed.checkpoint, as TorchTitan and Megatron-Core (`torch_dist`) write them.

    .metadata        every tensor, its chunks, and the place of each chunk in a file; a pickle
    __0_0.distcp     chunks, each as torch.save writes a tensor
    common.pt        other state of Megatron-Core, which is not read

A folder is read as a mapping with Hugging Face names, so that import treats it as any other. One table for each program
names the source of our weights. Megatron-Core fuses some (queries, keys and values by group; gate and up projection)
and stacks others along new dims: experts, and layers if all are alike. TorchTitan's Llama has the members of a rotary
pair side by side, as ours, where Hugging Face has halves. Sources: TorchTitan's state_dict_adapter files,
and `sharded_state_dict` of Megatron-Core 0.16.

No code of a folder runs: pickles are read as data, and what they would call is not called (`read_pickle`).
"""

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from pickletools import genops
from threading import Lock
from typing import Any
from zipfile import ZIP_STORED, BadZipFile, ZipFile

import torch
from torch import Tensor

from penstock.base.errors import CheckpointError
from penstock.base.files import MOST_JSON_BYTES, open_file, read_bounded
from penstock.config.model import GroupedQueryAttention, Model
from penstock.layout.sharding import Rectangle, not_the_whole
from penstock.models.huggingface.weight_folder import WeightFolder, WeightSource, is_finite
from penstock.models.huggingface.weight_names import Division
from penstock.models.huggingface.weights import WeightMapping, weight_mappings

METADATA = ".metadata"
_FIX = "give a folder of torch.distributed.checkpoint, as its program wrote it"

Sources = Mapping[str, tuple[str, ...]]
"""Our name, in its layer or of the model, to names of the source: alternatives, or gate and up projection by `+`."""

_QKV = ("attention.query", "attention.key", "attention.value")

TITAN: Sources = {
    "embed.weight": ("tok_embeddings.weight",),
    "norm.weight_D": ("norm.weight",),
    "head.weight": ("output.weight", "lm_head.weight"),
    "attention_norm.weight_D": ("attention_norm.weight",),
    "ffn_norm.weight_D": ("ffn_norm.weight",),
    **{
        f"{ours}.{kind}": (f"attention.{theirs}.{kind}", f"attention.qkv_linear.{theirs}.{kind}")
        for ours, theirs in zip((*_QKV, "attention.out"), ("wq", "wk", "wv", "wo"), strict=True)
        for kind in ("weight", "bias")
    },
    "attention.query_norm.weight_D": ("attention.q_norm.weight",),
    "attention.key_norm.weight_D": ("attention.k_norm.weight",),
    "attention.query.down.weight": ("attention.wq_a.weight",),
    "attention.query.norm.weight_D": ("attention.q_norm.weight",),
    "attention.query.up.weight": ("attention.wq_b.weight",),
    "attention.kv_down.weight": ("attention.wkv_a.weight",),
    "attention.kv_norm.weight_D": ("attention.kv_norm.weight",),
    "attention.kv_up.weight": ("attention.wkv_b.weight",),
    "ffn.gate_up.weight": ("feed_forward.w1.weight+feed_forward.w3.weight",),
    "ffn.down.weight": ("feed_forward.w2.weight",),
    "ffn.router.weight_ED": ("moe.router.gate.weight",),
    "ffn.router.expert_bias_E": ("moe.expert_bias",),
    "ffn.experts.gate_up_eFD": ("moe.experts.w1+moe.experts.w3",),
    "ffn.experts.down_eDF": ("moe.experts.w2",),
    "ffn.shared.gate_up.weight": ("moe.shared_experts.w1.weight+moe.shared_experts.w3.weight",),
    "ffn.shared.down.weight": ("moe.shared_experts.w2.weight",),
}

_ATTENTION, _EXPERTS = "self_attention", "mlp.experts.experts"

MEGATRON: Sources = {
    "embed.weight": ("embedding.word_embeddings.weight",),
    "norm.weight_D": ("decoder.final_layernorm.weight",),
    "head.weight": ("output_layer.weight",),
    "attention_norm.weight_D": ("input_layernorm.weight", f"{_ATTENTION}.linear_qkv.layer_norm_weight"),
    "ffn_norm.weight_D": ("pre_mlp_layernorm.weight", "mlp.linear_fc1.layer_norm_weight"),
    **{
        f"{ours}.{kind}": (f"{_ATTENTION}.linear_{theirs}.{kind}",)
        for ours, theirs in (*((part, "qkv") for part in _QKV), ("attention.out", "proj"))
        for kind in ("weight", "bias")
    },
    "attention.query.weight": (f"{_ATTENTION}.linear_qkv.weight", f"{_ATTENTION}.linear_q_proj.weight"),
    "attention.query_norm.weight_D": (f"{_ATTENTION}.q_layernorm.weight",),
    "attention.key_norm.weight_D": (f"{_ATTENTION}.k_layernorm.weight",),
    "attention.query.down.weight": (f"{_ATTENTION}.linear_q_down_proj.weight",),
    "attention.query.norm.weight_D": (
        f"{_ATTENTION}.linear_q_up_proj.layer_norm_weight",
        f"{_ATTENTION}.q_layernorm.weight",
    ),
    "attention.query.up.weight": (f"{_ATTENTION}.linear_q_up_proj.weight",),
    "attention.kv_down.weight": (f"{_ATTENTION}.linear_kv_down_proj.weight",),
    "attention.kv_norm.weight_D": (
        f"{_ATTENTION}.linear_kv_up_proj.layer_norm_weight",
        f"{_ATTENTION}.kv_layernorm.weight",
    ),
    "attention.kv_up.weight": (f"{_ATTENTION}.linear_kv_up_proj.weight",),
    "ffn.gate_up.weight": ("mlp.linear_fc1.weight", "mlp.linear_fc1.weight_w+mlp.linear_fc1.weight_v"),
    "ffn.down.weight": ("mlp.linear_fc2.weight",),
    "ffn.router.weight_ED": ("mlp.router.weight",),
    "ffn.router.expert_bias_E": ("mlp.router.expert_bias",),
    "ffn.experts.gate_up_eFD": (
        f"{_EXPERTS}.linear_fc1.weight",
        f"{_EXPERTS}.{{expert}}.linear_fc1.weight_w+{_EXPERTS}.{{expert}}.linear_fc1.weight_v",
    ),
    "ffn.experts.down_eDF": (f"{_EXPERTS}.linear_fc2.weight", f"{_EXPERTS}.{{expert}}.linear_fc2.weight"),
    "ffn.shared.gate_up.weight": (
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc1.weight_w+mlp.shared_experts.linear_fc1.weight_v",
    ),
    "ffn.shared.down.weight": ("mlp.shared_experts.linear_fc2.weight",),
    "ffn.shared.gate.weight": ("mlp.shared_experts.gate_weight",),
}

_IN_LAYER = re.compile(r"blocks\.(?P<layer>\d+)\.(?P<rest>.+)")
_NO_WEIGHT = re.compile(
    r"(optim\w*|chained_\d+|lr_scheduler|dataloader|train_state|rng_state|opt_param_scheduler|rerun_state\w*)\b.*"
    r"|.*(_extra_state|freqs_cis|rope\.cache|inv_freq|tokens_per_expert|local_tokens_per_expert).*"
)
"""Other state in such folders."""


@dataclass(frozen=True)
class _Chunk:
    """A rectangle of a tensor, and its place."""

    rectangle: Rectangle
    file: str
    offset: int
    length: int


@dataclass(frozen=True)
class _Stored:
    """A tensor of a folder."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[_Chunk, ...]


@dataclass(frozen=True)
class _View:
    """A tensor with a Hugging Face name: `take` of a tensor of the folder at an index of its first dims."""

    source: str
    index: tuple[int, ...] = ()
    take: Callable[[Tensor], Tensor] = torch.Tensor.detach


class DistributedFolder(WeightSource):
    """Weights of a model by Hugging Face names; tensors that no table names keep their names.

    Raises a CheckpointError if the folder cannot be read or is damaged, and a ConfigError if the family has no names.
    """

    def __init__(self, folder: Path, model: Model) -> None:
        self.folder = folder
        self._stored = _stored_of(folder)
        self._read_chunk = lru_cache(4)(self._chunk)
        self._lock = Lock()
        is_megatron = "embedding.word_embeddings.weight" in self._stored
        views = _megatron_views if is_megatron else _titan_views
        self._views = dict(views(model, self._stored))
        used = {view.source for view in self._views.values()}
        rest = (name for name in self._stored if name not in used and not _NO_WEIGHT.fullmatch(name))
        self._views |= {name: _View(name) for name in rest}

    def __getitem__(self, name: str) -> Tensor:
        view = self._views[name]
        stored = self._stored[view.source]
        begin = (*view.index, *(0 for _ in stored.shape[len(view.index) :]))
        sizes = (*(1 for _ in view.index), *stored.shape[len(view.index) :])
        wanted = Rectangle(begin, sizes)
        tensor = torch.empty(sizes, dtype=stored.dtype)
        for chunk in stored.chunks:
            if (common := wanted.overlap(chunk.rectangle)) is not None:
                with self._lock:
                    values = self._read_chunk(chunk, stored.dtype)
                tensor[common.within(begin)] = values[common.within(chunk.rectangle.begin)]
        tensor = view.take(tensor[(0,) * len(view.index)])
        if tensor.is_floating_point() and not is_finite(tensor):
            raise CheckpointError(f"{view.source} in {self.folder} has values that are NaN or infinite", fix=_FIX)
        return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, without reading it."""
        view = self._views[name]
        shape = self._stored[view.source].shape[len(view.index) :]
        return tuple(view.take(torch.empty(shape, device="meta")).shape)

    def dtype(self, name: str) -> torch.dtype:
        """Type of a tensor, without reading it."""
        return self._stored[self._views[name].source].dtype

    def has_rows(self, name: str) -> bool:
        """Never: tensors are read as a whole."""
        return False

    def rows(self, name: str, rows: tuple[int, int]) -> Tensor:
        return self[name][rows[0] : rows[1]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._views)

    def __len__(self) -> int:
        return len(self._views)

    def _chunk(self, chunk: _Chunk, dtype: torch.dtype) -> Tensor:
        path = self.folder / chunk.file
        try:
            with open_file(path) as file:
                file.seek(chunk.offset)
                tensor = _tensor_in(file.read(chunk.length), dtype)
        except (OSError, RuntimeError, ValueError, TypeError, KeyError, AttributeError, BadZipFile) as error:
            raise CheckpointError(f"cannot read {path}", got=str(error).partition("\n")[0], fix=_FIX) from error
        if tuple(tensor.shape) != chunk.rectangle.sizes:
            raise CheckpointError(f"{path} has another chunk at byte {chunk.offset}", got=list(tensor.shape), fix=_FIX)
        return tensor


def open_source(folder: Path, model: Model) -> WeightSource:
    """The weights of a model in a folder of safetensors or of torch.distributed.checkpoint; raises as their readers."""
    return DistributedFolder(folder, model) if (folder / METADATA).is_file() else WeightFolder(folder)


def _titan_views(model: Model, stored: Mapping[str, _Stored]) -> Iterator[tuple[str, _View]]:
    for line in weight_mappings(model):
        layer, rest = _layer_of(line)
        prefix = "" if layer is None else f"layers.{layer}."
        if source := _source_of(TITAN, prefix, line, rest, stored):
            # As ours; `write` gives the order of Hugging Face.
            is_paired = model.family == "llama" and bool(line.forms)
            index = () if line.expert is None else (line.expert,)
            yield line.hf_name, _View(source, index, line.write if is_paired else torch.Tensor.detach)


def _megatron_views(model: Model, stored: Mapping[str, _Stored]) -> Iterator[tuple[str, _View]]:
    stacked = any(re.match(r"decoder\.layers\.(?!\d)", name) for name in stored)
    for line in weight_mappings(model):
        layer, rest = _layer_of(line)
        prefix = "" if layer is None else "decoder.layers." if stacked else f"decoder.layers.{layer}."
        if not (source := _source_of(MEGATRON, prefix, line, rest, stored)):
            continue
        index = (layer,) if layer is not None and stacked else ()
        if line.expert is not None and len(stored[source].shape) > len(index) + 2:
            index = (*index, line.expert)
        yield line.hf_name, _View(source, index, _megatron_part(model, line, rest, source))


def _megatron_part(model: Model, line: WeightMapping, rest: str, source: str) -> Callable[[Tensor], Tensor]:
    attention, name = model.attention, rest.rpartition(".")[0]
    if ".linear_qkv." in source and name in _QKV and isinstance(attention, GroupedQueryAttention):
        size = attention.head_dim
        fused = Division(attention.kv_heads, (attention.heads // attention.kv_heads * size, size, size))
        return lambda tensor: fused.take(tensor, _QKV.index(name))
    index, count = line.part
    if count > 1 and source.endswith(".weight"):
        return lambda tensor: tensor.chunk(count)[index]
    if rest in ("embed.weight", "head.weight"):  # rows of a padded vocabulary
        return lambda tensor: tensor[: model.vocab_size]
    return torch.Tensor.detach


def _layer_of(line: WeightMapping) -> tuple[int | None, str]:
    match = _IN_LAYER.fullmatch(line.name)
    return (int(match["layer"]), match["rest"]) if match else (None, line.name)


def _source_of(
    table: Sources, prefix: str, line: WeightMapping, rest: str, stored: Mapping[str, _Stored]
) -> str | None:
    for names in table.get(rest, ()):
        parts = names.split("+")
        name = prefix + parts[line.part[0] % len(parts)].format(expert=line.expert)
        if name in stored:
            return name
    return None


# ------------------------------------------------------------------------------------------- what a pickle describes


@dataclass(eq=False)
class _Call:
    """What a pickle wants called, which is not done: a name, arguments, and the state for the result."""

    name: str
    arguments: Any = ()
    state: Any = None

    def field(self, name: str) -> Any:
        """A field of the result. Raises KeyError if the state has none."""
        return dict(self.state)[name]


class _Stack:
    """The values that a pickle's instructions have made so far."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self.marks: list[int] = []
        self.memory: dict[int, Any] = {}

    def take(self, count: int | None = None) -> list[Any]:
        """The last values, or those since the last mark, which leave the stack."""
        begin = self.marks.pop() if count is None else len(self.values) - count
        taken = self.values[begin:]
        del self.values[begin:]
        return taken

    def call(self) -> None:
        """Two values, what is called and its arguments, become a call."""
        function, arguments = self.take(2)
        self.values.append(_Call(function.name, arguments))

    def set_state(self) -> None:
        """The last value is the state of the call before it."""
        (state,) = self.take(1)
        self.values[-1].state = state

    def extend(self, items: Iterable[Any]) -> None:
        self.values[-1].extend(items)

    def remember(self, index: int) -> None:
        self.memory[index] = self.values[-1]


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    return list(zip(items[::2], items[1::2], strict=True))


_STEPS: Mapping[str, Callable[[_Stack, Any], None]] = {
    **dict.fromkeys(("PROTO", "FRAME", "BINPERSID"), lambda stack, value: None),  # an identity stands for its storage
    "MARK": lambda stack, value: stack.marks.append(len(stack.values)),
    "NONE": lambda stack, value: stack.values.append(None),
    "NEWTRUE": lambda stack, value: stack.values.append(True),
    "NEWFALSE": lambda stack, value: stack.values.append(False),
    "EMPTY_TUPLE": lambda stack, value: stack.values.append(()),
    **dict.fromkeys(("EMPTY_LIST", "EMPTY_DICT", "EMPTY_SET"), lambda stack, value: stack.values.append([])),
    "APPEND": lambda stack, value: stack.extend(stack.take(1)),
    "SETITEM": lambda stack, value: stack.extend(_pairs(stack.take(2))),
    **dict.fromkeys(("APPENDS", "ADDITEMS"), lambda stack, value: stack.extend(stack.take())),
    "SETITEMS": lambda stack, value: stack.extend(_pairs(stack.take())),
    "TUPLE": lambda stack, value: stack.values.append(tuple(stack.take())),
    "TUPLE1": lambda stack, value: stack.values.append(tuple(stack.take(1))),
    "TUPLE2": lambda stack, value: stack.values.append(tuple(stack.take(2))),
    "TUPLE3": lambda stack, value: stack.values.append(tuple(stack.take(3))),
    "GLOBAL": lambda stack, value: stack.values.append(_Call(value.replace(" ", "."))),
    "STACK_GLOBAL": lambda stack, value: stack.values.append(_Call(".".join(stack.take(2)))),
    **dict.fromkeys(("NEWOBJ", "REDUCE"), lambda stack, value: stack.call()),
    "BUILD": lambda stack, value: stack.set_state(),
    "MEMOIZE": lambda stack, value: stack.remember(len(stack.memory)),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT"), lambda stack, value: stack.remember(value)),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), lambda stack, value: stack.values.append(stack.memory[value])),
}


def read_pickle(content: bytes) -> Any:
    """What a pickle describes, as data: numbers, texts, tuples, lists, tables as lists of pairs, and `_Call`s.

    Raises ValueError if it is damaged, or has an instruction that such folders do not need.
    """
    stack = _Stack()
    try:
        for instruction, value, _ in genops(content):
            if instruction.name == "STOP":
                return stack.values.pop()
            if (step := _STEPS.get(instruction.name)) is not None:
                step(stack, value)
            elif instruction.arg is not None and not instruction.stack_before:
                stack.values.append(value)  # a number or a text
            else:
                raise ValueError(f"it has the instruction {instruction.name}")
    except (IndexError, KeyError, AttributeError, TypeError, UnicodeError) as error:
        raise ValueError(f"it is damaged: {error}") from error
    raise ValueError("it has no end")


def _stored_of(folder: Path) -> dict[str, _Stored]:
    """The tensors of a folder. Raises a CheckpointError if its description is not one."""
    path = folder / METADATA
    stored = {}
    try:
        description = read_pickle(read_bounded(path, MOST_JSON_BYTES))
        places = {}
        for storage, at in description.field("storage_data"):
            index = dict(storage.state)  # without an offset where something else than a tensor is
            places[index["fqn"], _sizes(index.get("offset"))] = at
        for name, entry in description.field("state_dict_metadata"):
            if not entry.name.endswith(".TensorStorageMetadata"):
                continue
            shape = _sizes(entry.field("size"))
            dtype = vars(torch)[entry.field("properties").state[0].name.removeprefix("torch.")]
            chunks = []
            for piece in entry.field("chunks"):
                rectangle = Rectangle(_sizes(piece.field("offsets")), _sizes(piece.field("sizes")))
                at = dict(places[name, rectangle.begin].state)
                file = at["relative_path"]
                if Path(file).name != file or at.get("transform_descriptors"):
                    raise ValueError(f"{file} is compressed, or outside of the folder")
                chunks.append(_Chunk(rectangle, file, at["offset"], at["length"]))
            fault = not_the_whole(shape, (chunk.rectangle for chunk in chunks if chunk.rectangle.elements))
            if fault is not None or not isinstance(dtype, torch.dtype):
                raise ValueError(f"{name} is not whole: {fault}")
            stored[name.removeprefix("model.")] = _Stored(dtype, shape, tuple(chunks))
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise CheckpointError(f"cannot read {path}", got=error, fix=_FIX) from error
    return stored


def _sizes(size: Any) -> tuple[int, ...]:
    """Numbers of a torch.Size; none for the offset of a tensor that is no part of another."""
    return () if size is None else tuple(map(int, size.arguments[0]))


def _tensor_in(content: bytes, dtype: torch.dtype) -> Tensor:
    """A tensor as torch.save writes it: a zip file with a description and the bytes of its storage, uncompressed."""
    with ZipFile(io.BytesIO(content)) as archive:
        (description,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
        (_, _, key, _, _), offset, sizes, strides, *_ = read_pickle(archive.read(description)).arguments
        record = archive.getinfo(f"{description.removesuffix('.pkl')}/{key}")
        if record.compress_type != ZIP_STORED or record.file_size > len(content):
            raise ValueError("a compressed tensor")
        values = torch.frombuffer(bytearray(archive.read(record)), dtype=dtype)
    return values.as_strided(sizes, strides, offset)
