"""Whole training steps in plain PyTorch around a model of `transformers`: losses, balance, optimizers, written out.

Nothing here is Penstock's. What a model computes is `transformers`' own; everything around it follows the papers:

    loss        cross entropy and z-loss over the counted labels of the whole step; depths of prediction further on
    balance     Switch Transformers (arXiv 2101.03961) over a micro-batch, a row (DeepSeek-V3) or the step so far
    capacity    of each expert the slots of largest weight stay, of equal ones the earlier
    bias        a fixed step against each expert's excess (arXiv 2408.15664)
    AdamW       arXiv 1711.05101; Muon as Moonlight has it (arXiv 2502.16982)

Optimizers work on the tensors of published files: `Ledger` knows where each of their numbers lies in the parameters.
"""

import math
import re
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_layers import MtpModel
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from tests.models.huggingface.parity import packed_masks, save

IGNORED = -100
PADDING = -1
"""The document of tokens that are no label."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a run trains."""

    micro_rows: int
    document_mask: bool
    z_loss: float = 0.0
    mtp_weight: float = 0.3
    clip_norm: float = 0.0
    balance: Literal["none", "micro-batch", "sequence", "global-batch"] = "none"
    balance_coef: float = 0.0
    router_z: float = 0.0
    capacity: float = 0.0
    bias_rate: float = 0.0
    method: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    epsilon: float = 1e-8
    weight_decay: float = 0.1
    momentum: float = 0.95
    nesterov: bool = True
    iterations: int = 5
    update_rms: float = 0.2
    peak_rate: float = 1e-2
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    decay_steps: int = 0
    final_ratio: float = 0.1
    steps: int = 5  # of the whole run


class Facts(NamedTuple):
    """Of a model, which its classes do not say in one way."""

    top_k: int
    is_sigmoid: bool  # of the router's scores; else softmax
    is_linear: bool  # some attention is linear: it takes no mask of documents


class Step(NamedTuple):
    """Figures of a step, and the weights after it under their published names."""

    losses: list[float]  # of the next token, then of each further depth
    norm: float
    dropped: int
    weights: dict[str, Tensor]


class PackedRows(NamedTuple):
    """B rows of S + 1 tokens with the number of the document of each, `PADDING` behind the last."""

    tokens: Tensor
    documents: Tensor


def learning_rate(step: int, recipe: Recipe) -> float:
    """Of a step, counted from 0: linear warm-up to the peak, then down to its final ratio at the last step."""
    if step < recipe.warmup:
        return recipe.peak_rate * (step + 1) / recipe.warmup
    first, last = max(recipe.warmup - 1, 0), recipe.steps - 1
    if recipe.decay == "wsd":
        first = max(first, last - (recipe.decay_steps or max(1, recipe.steps // 10)))
    way = 0.0 if last <= first else min(max((step - first) / (last - first), 0.0), 1.0)
    shape = {"constant": 0.0, "cosine": (1 - math.cos(math.pi * way)) / 2}.get(recipe.decay, way)
    return recipe.peak_rate * (1 - shape + shape * recipe.final_ratio)


# ----------------------------------------------------------------------------------------------------------------- rows


def labels_of(rows: PackedRows, depth: int, *, document_mask: bool) -> Tensor:
    """B x S: the token `depth` further on than the next one; nothing behind the row, in padding or another document."""
    tokens, documents = rows.tokens.tolist(), rows.documents.tolist()
    length = len(tokens[0]) - 1
    labels = torch.full((len(tokens), length), IGNORED)
    for row, (ids, owners) in enumerate(zip(tokens, documents, strict=True)):
        for position in range(length - depth):
            target = position + depth + 1
            same = owners[target] == owners[position] or not document_mask
            if owners[target] != PADDING and same:
                labels[row, position] = ids[target]
    return labels


def positions_of(rows: PackedRows, *, document_mask: bool) -> Tensor:
    """B x S: places in the row, or in the part of a document that the row has."""
    documents = rows.documents[:, :-1].tolist()
    positions = []
    for owners in documents:
        start, row = 0, []
        for position, owner in enumerate(owners):
            if document_mask and position and owner != owners[position - 1]:
                start = position
            row.append(position - start)
        positions.append(row)
    return torch.tensor(positions)


# ------------------------------------------------------------------------------------------------------------ published


_DENSE = re.compile(r"block_sparse_moe\.((gate|up|down)_proj)")


class Ledger:
    """Tensors under their published names, as places in the parameters of a model: read, and written back."""

    def __init__(self, model: PreTrainedModel, ahead: MtpModel | None, folder: Path) -> None:
        named = dict(model.state_dict(keep_vars=True))
        tensors = {id(tensor): tensor for tensor in named.values()}
        further = {} if ahead is None else dict(ahead.state_dict(keep_vars=True))
        tensors |= {id(tensor): tensor for tensor in further.values()}
        self.tensors = list(tensors.values())
        before = [tensor.detach().clone() for tensor in self.tensors]
        start = 0
        with torch.no_grad():  # each number becomes its place, and travels through the library's own export
            for tensor in self.tensors:
                tensor.copy_(torch.arange(start, start + tensor.numel()).view_as(tensor))
                start += tensor.numel()
            save(model, folder)
            places = load_file(folder / "model.safetensors").items()
            # The library renames dense networks of Kimi Linear as if they had experts.
            self.places = {_DENSE.sub(r"mlp.\1", name): tensor.long() for name, tensor in places}
            layers = model.config.get_text_config().num_hidden_layers
            for name, tensor in further.items():
                if name.startswith("layers."):
                    self.places |= {key: value.long() for key, value in _published(name, tensor.detach(), layers)}
            for tensor, values in zip(self.tensors, before, strict=True):
                tensor.copy_(values)
        is_trained = torch.cat([torch.full((tensor.numel(),), tensor.requires_grad) for tensor in self.tensors])
        self.trained = {name for name, places in self.places.items() if is_trained[places.flatten()[0]]}

    def weights(self) -> dict[str, Tensor]:
        """All values by their published names."""
        flat = torch.cat([tensor.detach().flatten() for tensor in self.tensors])
        return {name: flat[places] for name, places in self.places.items()}

    def gradients(self) -> dict[str, Tensor]:
        """Of the trained ones; zero where none flowed."""
        parts = [
            torch.zeros_like(tensor).flatten() if tensor.grad is None else tensor.grad.flatten()
            for tensor in self.tensors
        ]
        flat = torch.cat([part.detach() for part in parts])
        return {name: flat[places] for name, places in self.places.items() if name in self.trained}

    def write(self, weights: Mapping[str, Tensor]) -> None:
        """The opposite of `weights`; gradients end."""
        flat = torch.cat([tensor.detach().flatten() for tensor in self.tensors])
        for name, values in weights.items():
            flat[self.places[name]] = values
        with torch.no_grad():
            for tensor, values in zip(self.tensors, flat.split([one.numel() for one in self.tensors]), strict=True):
                tensor.copy_(values.view_as(tensor))
                tensor.grad = None


def _published(name: str, tensor: Tensor, layers: int) -> Iterator[tuple[str, Tensor]]:
    """A tensor of a layer of multi-token prediction, as DeepSeek-V3's files have it."""
    _, number, rest = name.split(".", 2)
    rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
    prefix = f"model.layers.{layers + int(number)}."
    if not rest.endswith(("experts.gate_up_proj", "experts.down_proj")):
        yield prefix + rest, tensor
        return
    path, _, kind = rest.rpartition(".")
    for expert, matrix in enumerate(tensor):
        halves = (
            zip(("gate_proj", "up_proj"), matrix.chunk(2), strict=True) if kind == "gate_up_proj" else [(kind, matrix)]
        )
        for half, part in halves:
            yield f"{prefix}{path}.{expert}.{half}.weight", part


# -------------------------------------------------------------------------------------------------------------- routers


class _Router:
    """Sees what a router of the library chose, and takes away what is over capacity."""

    def __init__(self, module: nn.Module, block: nn.Module, recipe: Recipe, top_k: int) -> None:
        self.recipe, self.top_k = recipe, top_k
        self.is_limited = False
        self.logits: list[Tensor] = []
        self.chosen: list[Tensor] = []
        self.loads: Tensor | None = None  # of the step so far
        self.dropped = 0
        places = (module, block, getattr(module, "moe_statics", None))
        biases = (getattr(place, "e_score_correction_bias", None) for place in places)
        self.bias = next((bias for bias in biases if bias is not None), None)
        module.register_forward_hook(self._see)

    def _see(self, _: nn.Module, __: object, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if len(output) == 2:  # Llama 4: scores of all experts, zero where not chosen
            scores, logits = output
            chosen = scores.topk(self.top_k, dim=1).indices
            kept = self._kept(scores.gather(1, chosen), chosen, logits.shape[1])
            self._record(logits, chosen)
            return scores * torch.zeros_like(scores).scatter(1, chosen, kept), logits
        logits, weights, chosen = output
        self._record(logits, chosen)
        return logits, weights * self._kept(weights, chosen, logits.shape[1]), chosen

    def _record(self, logits: Tensor, chosen: Tensor) -> None:
        self.logits.append(logits)
        self.chosen.append(chosen)

    def _kept(self, weights: Tensor, chosen: Tensor, experts: int) -> Tensor:
        kept = torch.ones_like(weights)
        if not (self.is_limited and self.recipe.capacity):
            return kept
        limit = max(1, math.ceil(chosen.numel() * self.recipe.capacity / experts))
        slots: dict[int, list[tuple[float, int, int]]] = defaultdict(list)
        # Runs compute weights in float32: those that are equal in it are equal.
        for token, (row, experts_of) in enumerate(zip(weights.detach().tolist(), chosen.tolist(), strict=True)):
            for slot, (weight, expert) in enumerate(zip(row, experts_of, strict=True)):
                slots[expert].append((-_in_float32(weight), token, slot))
        for wanted in slots.values():
            for _, token, slot in sorted(wanted)[limit:]:
                kept[token, slot] = 0.0
                self.dropped += 1
        return kept

    def losses(self, rows: int, *, is_sigmoid: bool) -> Tensor:
        """Balance and z-loss of a micro-batch, which is forgotten; loads of the step are counted on."""
        logits, chosen, top_k = torch.cat(self.logits), torch.cat(self.chosen), self.top_k
        self.logits, self.chosen = [], []
        experts = logits.shape[1]
        picked = F.one_hot(chosen, experts).sum(1).double()  # T x E
        self.loads = picked.sum(0) if self.loads is None else self.loads + picked.sum(0)
        scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
        shares = scores / scores.sum(-1, keepdim=True)
        z = logits.logsumexp(-1).square().mean()
        match self.recipe.balance:
            case "none":
                balance = torch.zeros(())
            case "micro-batch" if not is_sigmoid and self.bias is None and self._is_greedy(logits, chosen):
                # The library's own; it counts slots, not shares of them.
                balance = load_balancing_loss_func((logits,), experts, top_k) / top_k
            case "micro-batch":
                balance = experts * (picked.mean(0) / top_k * shares.mean(0)).sum()
            case "sequence":
                by_row = zip(picked.chunk(rows), shares.chunk(rows), strict=True)
                balance = torch.stack([experts * (p.mean(0) / top_k * s.mean(0)).sum() for p, s in by_row]).mean()
            case "global-batch":
                balance = experts * (self.loads / self.loads.sum() * shares.mean(0)).sum()
        return self.recipe.balance_coef * balance + self.recipe.router_z * z

    def _is_greedy(self, logits: Tensor, chosen: Tensor) -> bool:
        best = logits.topk(chosen.shape[1], dim=-1).indices
        return torch.equal(best.sort(-1).values, chosen.sort(-1).values)

    def end_step(self) -> int:
        """Move the bias by the loads of the step; returns the slots that were dropped in it."""
        if self.bias is not None and self.loads is not None:
            with torch.no_grad():
                self.bias += self.recipe.bias_rate * torch.sign(self.loads.mean() - self.loads).view_as(self.bias)
        dropped, self.dropped, self.loads = self.dropped, 0, None
        return dropped


def _in_float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def _routers_of(model: nn.Module, recipe: Recipe, top_k: int) -> list[_Router]:
    return [
        _Router(module, model.get_submodule(name.rpartition(".")[0]), recipe, top_k)
        for name, module in model.named_modules()
        if type(module).__name__.endswith("Router")
    ]


# ------------------------------------------------------------------------------------------------------------ optimizer


def _is_decayed(name: str, tensor: Tensor) -> bool:
    # Kimi Linear's files have a number for each head in four dimensions; its authors' code marks it as not decayed.
    return tensor.ndim >= 2 and not re.search("bias|norm|A_log", name)


def matrices_of(name: str, tensor: Tensor, config: PreTrainedConfig) -> list[Tensor]:
    """Views of the matrices of hidden layers in a published tensor; none of others.

    What a file joins are several matrices: gate and up of experts, and the projections of a gated delta rule, whose
    views have the rows of a key head in their second dimension.
    """
    is_hidden = not re.search(r"embed_tokens|lm_head|norm|bias|\.(gate|router|router\.layer)\.weight$", name)
    if not is_hidden or tensor.ndim < 2 or min(tensor.shape[-2:]) == 1:
        return []
    joined = re.search(r"in_proj_(qkvz|ba|qkv)\.weight$", name)
    if joined is not None:
        heads, key_dim = config.linear_num_key_heads, config.linear_key_head_dim
        values = config.linear_num_value_heads // heads
        value_dim = values * config.linear_value_head_dim
        if joined[1] == "qkv":  # all heads of one projection, then of the next
            return list(tensor.split((heads * key_dim, heads * key_dim, heads * value_dim)))
        parts = (values, values) if joined[1] == "ba" else (key_dim, key_dim, value_dim, value_dim)
        return list(tensor.unflatten(0, (heads, -1)).split(parts, 1))
    if "qkv_proj" in name:
        heads = [config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads]
        return list(tensor.split([len(tensor) // sum(heads) * count for count in heads]))
    if tensor.ndim == 2:
        return list(tensor.chunk(2)) if re.search("gate_up_proj|input_linear", name) else [tensor]
    if not re.search("gate_up_proj|input_linear", name):
        return list(tensor)
    if config.model_type == "gpt_oss":
        return [part for matrix in tensor for part in (matrix[:, ::2], matrix[:, 1::2])]
    return [part for matrix in tensor for part in matrix.chunk(2, 1 if config.model_type == "llama4_text" else 0)]


def orthogonal(matrix: Tensor, iterations: int) -> Tensor:
    """Newton-Schulz, as in `torch.optim.Muon`."""
    if matrix.shape[0] > matrix.shape[1]:
        return orthogonal(matrix.T, iterations).T
    x = matrix / max(float(matrix.norm()), 1e-7)
    for _ in range(iterations):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x


class _Optimizer:
    def __init__(self, recipe: Recipe, config: PreTrainedConfig) -> None:
        self.recipe, self.config, self.step = recipe, config, 0
        self.first: dict[str, Tensor] = {}
        self.second: dict[str, Tensor] = {}

    def updated(self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: float) -> dict[str, Tensor]:
        """New values of the tensors that have a gradient."""
        with torch._C.DisableTorchFunction():  # nothing here casts, and the modes of tests cost half of the time
            return self._updated(weights, gradients, rate)

    def _updated(
        self, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor], rate: float
    ) -> dict[str, Tensor]:
        recipe, new = self.recipe, {}
        self.step += 1
        for name, gradient in gradients.items():
            weight = weights[name]
            decay = recipe.weight_decay if _is_decayed(name, weight) else 0.0
            first = self.first.setdefault(name, torch.zeros_like(weight))
            direction = torch.zeros_like(weight)
            parts = matrices_of(name, direction, self.config) if recipe.method == "muon" else []
            if parts:
                first.lerp_(gradient, 1 - recipe.momentum)
                moved = gradient.lerp(first, recipe.momentum) if recipe.nesterov else first
                for part, matrix in zip(parts, matrices_of(name, moved, self.config), strict=True):
                    rows = matrix.reshape(-1, matrix.shape[-1])
                    scale = recipe.update_rms * math.sqrt(max(rows.shape))
                    part.copy_(scale * orthogonal(rows, recipe.iterations).view(matrix.shape))
            else:
                beta1, beta2 = recipe.betas
                second = self.second.setdefault(name, torch.zeros_like(weight))
                first.mul_(beta1).add_((1 - beta1) * gradient)
                second.mul_(beta2).add_((1 - beta2) * gradient**2)
                corrected = first / (1 - beta1**self.step), second / (1 - beta2**self.step)
                direction = corrected[0] / (corrected[1].sqrt() + recipe.epsilon)
            new[name] = weight - rate * (decay * weight + direction)
        return new


# ---------------------------------------------------------------------------------------------------------------- steps


class Trainer:
    """Trains a model of `transformers`, and layers of multi-token prediction behind it if there are any."""

    def __init__(
        self, model: PreTrainedModel, ahead: MtpModel | None, recipe: Recipe, facts: Facts, folder: Path
    ) -> None:
        self.model, self.ahead, self.recipe, self.facts = model, ahead, recipe, facts
        self.ledger = Ledger(model, ahead, folder)
        parts = [model, *([] if ahead is None else [ahead.layers])]
        self.routers = [router for part in parts for router in _routers_of(part, recipe, facts.top_k)]
        self.optimizer = _Optimizer(recipe, model.config)
        self.taken = 0

    def step(self, rows: PackedRows) -> Step:
        """Train on the rows of a step."""
        recipe, depths = self.recipe, 0 if self.ahead is None else len(self.ahead.layers)
        labels = [labels_of(rows, depth, document_mask=recipe.document_mask) for depth in range(depths + 1)]
        counted = [max(int((one != IGNORED).sum()), 1) for one in labels]
        count = len(rows.tokens) // recipe.micro_rows
        sums = [0.0] * (depths + 1)
        for router in self.routers:
            router.is_limited = True
        for number in range(count):
            part = slice(number * recipe.micro_rows, (number + 1) * recipe.micro_rows)
            hidden = self._forward(PackedRows(rows.tokens[part], rows.documents[part]))
            total = torch.zeros(())
            for depth, (states, targets) in enumerate(zip(hidden, labels, strict=True)):
                logits = self._logits(states).flatten(0, 1)
                is_counted = targets[part].flatten() != IGNORED
                logits, wanted = logits[is_counted], targets[part].flatten()[is_counted]
                peaks = logits.logsumexp(-1)
                nats = (peaks - logits.gather(1, wanted[:, None])[:, 0]).sum() / counted[depth]
                loss = nats + recipe.z_loss * peaks.square().sum() / counted[depth]
                sums[depth] += float(loss.detach())
                total = total + (loss if depth == 0 else recipe.mtp_weight / depths * loss)
            for router in self.routers:
                total = total + router.losses(recipe.micro_rows, is_sigmoid=self.facts.is_sigmoid) / count
            total.backward()
        gradients = self.ledger.gradients()
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients.values()))
        if recipe.clip_norm:
            factor = min(1.0, recipe.clip_norm / (norm + 1e-6))  # as torch.nn.utils.clip_grad_norm_
            gradients = {name: gradient * factor for name, gradient in gradients.items()}
        rate = learning_rate(self.taken, recipe)
        self.ledger.write(self.optimizer.updated(self.ledger.weights(), gradients, rate))
        dropped = sum(router.end_step() for router in self.routers)
        self.taken += 1
        return Step(sums, norm, dropped, self.ledger.weights())

    @torch.no_grad()
    def held_out(self, rows: PackedRows) -> float:
        """Mean loss of the next token, without limits of experts and without other losses."""
        for router in self.routers:
            router.is_limited = False
        logits = self._logits(self._forward(rows)[0])
        for router in self.routers:
            router.logits, router.chosen = [], []
        labels = labels_of(rows, 0, document_mask=self.recipe.document_mask)
        return float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED))

    def _logits(self, states: Tensor) -> Tensor:
        return self.model.lm_head(states) / getattr(self.model.config, "logits_scaling", 1.0)  # Granite's

    def _forward(self, rows: PackedRows) -> list[Tensor]:
        """Hidden states behind the last norm, and those of each further depth."""
        tokens = rows.tokens[:, :-1]
        positions = positions_of(rows, document_mask=self.recipe.document_mask)
        if not self.recipe.document_mask:
            main = self.model.model(tokens, use_cache=False).last_hidden_state
        elif self.facts.is_linear:
            main = torch.stack([self._by_document(*row) for row in zip(tokens, positions, strict=True)])
        else:
            masks = packed_masks(self.model, tokens, positions)
            output = self.model.model(tokens, attention_mask=masks, position_ids=positions, use_cache=False)
            main = output.last_hidden_state
        hidden = [main]
        for depth in range(0 if self.ahead is None else len(self.ahead.layers)):
            ahead = tokens.roll(-depth - 1, dims=1)
            hidden.append(self.ahead.forward_layer(depth, hidden[-1], positions, None, input_ids=ahead))
        return hidden

    def _by_document(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """A row whose documents pass one after the other: linear attention takes no mask there."""
        starts = [*(positions == 0).nonzero().flatten().tolist(), len(tokens)]
        pieces = [tokens[None, start:end] for start, end in pairwise(starts)]
        return torch.cat([self.model.model(piece, use_cache=False).last_hidden_state[0] for piece in pieces])
