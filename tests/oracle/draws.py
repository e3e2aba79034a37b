"""Random runs of every family: Penstock's steps beside those of plain PyTorch and `transformers`, in float64.

A draw is a variant of a family, rows of a step, and a recipe. Both sides begin with the same weights, which travel
through our files. After each of a few steps losses, the norm of the gradients, dropped slots and all weights must be
equal, and at the end the held-out loss.
"""

import random
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers.modeling_layers import MtpModel

from penstock.config.model import LatentAttention, Model
from penstock.config.run import Run
from penstock.data.evaluation import EvaluationRows
from penstock.data.loader import Batch, pack
from penstock.data.stream import Rows
from penstock.parallel.launch.environment import Environment
from penstock.train import optimizer
from penstock.train.setup import Session, prepare
from penstock.train.step import evaluate, train_step
from tests.float64 import EXACT, in_float64
from tests.models.families import in_transformers, to_huggingface
from tests.models.huggingface.family_models import VARIANTS
from tests.models.huggingface.parity import unsettled
from tests.oracle.reference import IGNORED, PADDING, Facts, PackedRows, Recipe, Step, Trainer, labels_of

STEPS = 5
PREDICTING = ("deepseek-v3", "glm4-moe")
"""Families whose multi-token prediction `transformers` computes."""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """A model and how it trains."""

    name: str  # of the variant
    model: Model
    recipe: Recipe
    micro_batches: int
    positions: int
    seed: int  # of weights and rows


def drawn(seed: int) -> Draw:
    """The draw of a seed."""
    draw = random.Random(f"oracle {seed}")
    predicting = [name for name, model in VARIANTS.items() if model.family in PREDICTING]
    name = draw.choice(sorted([*VARIANTS, *predicting]))
    model = VARIANTS[name]
    if model.family in PREDICTING:
        model = model.model_copy(update={"mtp_layers": draw.choice((0, 1, 1, 2, 2))})
    has_mask = draw.random() < 0.6
    balance = draw.choice(("none", "micro-batch", "sequence", "global-batch"))
    steps = draw.choice((STEPS, STEPS + 1, 2 * STEPS))
    recipe = Recipe(
        micro_rows=draw.choice((1, 2, 3)),
        document_mask=has_mask,
        z_loss=draw.choice((0.0, 0.01)),
        mtp_weight=draw.choice((0.1, 0.3, 1.0)),
        clip_norm=draw.choice((0.0, 0.05, 0.5, 100.0)),
        balance=balance,
        balance_coef=0.0 if balance == "none" else draw.choice((0.01, 0.3)),
        router_z=draw.choice((0.0, 0.01)),
        # A document at a time, the library sees only the tokens of one.
        capacity=0.0 if model.linear_attention and has_mask else draw.choice((0.0, 0.0, 0.5, 1.0, 1.25)),
        bias_rate=draw.choice((0.0, 1e-3, 0.05)),
        method=draw.choice(("adamw", "adamw", "muon")),
        betas=draw.choice(((0.9, 0.95), (0.8, 0.999), (0.0, 0.9))),
        epsilon=draw.choice((1e-8, 1e-5)),
        weight_decay=draw.choice((0.0, 0.1, 1.0)),
        momentum=draw.choice((0.95, 0.8)),
        nesterov=draw.random() < 0.7,
        iterations=draw.choice((3, 5)),
        update_rms=draw.choice((0.2, 0.5)),
        peak_rate=draw.choice((1e-3, 1e-2)),
        warmup=draw.choice((0, 0, 1, 3)),
        decay=draw.choice(("constant", "cosine", "linear", "wsd")),
        decay_steps=draw.choice((0, 3)),
        final_ratio=draw.choice((0.0, 0.1)),
        steps=steps,
    )
    return Draw(
        name=name,
        model=model,
        recipe=recipe,
        micro_batches=draw.choice((1, 2)),
        positions=draw.choice((9, 16)),
        seed=seed,
    )


def run_of(draw: Draw) -> Run:
    """The run of a draw, as Penstock is configured."""
    recipe, model = draw.recipe, draw.model
    if model.moe is not None:
        balance = {
            "aux_loss": recipe.balance,
            "aux_loss_coef": recipe.balance_coef,
            "z_loss_coef": recipe.router_z,
            "capacity_factor": recipe.capacity,
        }
        router = model.moe.router.model_copy(update={"expert_bias_rate": recipe.bias_rate})
        moe = model.moe.model_copy(update={"balance": model.moe.balance.model_copy(update=balance), "router": router})
        model = model.model_copy(update={"moe": moe})
    if isinstance(model.attention, LatentAttention) and model.attention.indexer is not None:
        indexer = model.attention.indexer.model_copy(update={"loss_coef": 0.0})  # the library has no such loss
        model = model.model_copy(update={"attention": model.attention.model_copy(update={"indexer": indexer})})
    fields = {
        "name": "oracle",
        "seed": draw.seed,
        "model": model.model_dump(),
        "device": "cpu",
        "kernels": {"all": "reference"},  # fused operators on a CPU have no float64
        "data": {"source": "synthetic-learnable", "document_mask": recipe.document_mask, "shuffle": False},
        "training": {
            "steps": recipe.steps,
            "sequence_length": draw.positions,
            "micro_batch": recipe.micro_rows,
            "global_batch": recipe.micro_rows * draw.micro_batches,
            "precision": "fp32",
            "mtp_weight": recipe.mtp_weight,
            "z_loss_coef": recipe.z_loss,
            "clip_norm": recipe.clip_norm,
        },
        "optimizer": {
            "method": recipe.method,
            "learning_rate": recipe.peak_rate,
            "beta1": recipe.betas[0],
            "beta2": recipe.betas[1],
            "epsilon": recipe.epsilon,
            "weight_decay": recipe.weight_decay,
            "muon": {
                "momentum": recipe.momentum,
                "nesterov": recipe.nesterov,
                "iterations": recipe.iterations,
                "update_rms": recipe.update_rms,
                "precision": "fp32",
            },
        },
        "schedule": {
            "warmup_steps": recipe.warmup,
            "decay": recipe.decay,
            "decay_steps": recipe.decay_steps,
            "final_ratio": recipe.final_ratio,
        },
        "evaluation": {"rows": 0},
        "checkpoint": {"enabled": False},
    }
    return Run.model_validate(fields)


def rows_of(draw: Draw, number: int) -> PackedRows:
    """The rows of a step: documents of any length, and padding behind the last of some rows."""
    generator = random.Random(f"{draw.seed} {number}")
    length, vocabulary = draw.positions + 1, draw.model.vocab_size
    tokens, documents = [], []
    for _ in range(draw.recipe.micro_rows * draw.micro_batches):
        owners: list[int] = []
        while len(owners) < length:
            owners += [len(set(owners))] * generator.randint(1, length)
        owners = owners[:length]
        if generator.random() < 0.3:
            padding = generator.randint(1, length - 2)
            owners[length - padding :] = [PADDING] * padding
        documents.append(owners)
        tokens.append([generator.randrange(vocabulary) for _ in range(length)])
    return PackedRows(torch.tensor(tokens), torch.tensor(documents))


class Ours:
    """The run in Penstock, on one process."""

    def __init__(self, draw: Draw, jolt: float = 0.0) -> None:
        """`jolt` is a relative change of every weight, by chance."""
        self.run = run_of(draw)
        self.session: Session = prepare(self.run, Environment(color=False, threads=1, world_size=1))
        self.session.state.batches.close()  # the rows are ours
        self.decoder = unsettled(self.session.model.whole)
        generator = torch.Generator().manual_seed(draw.seed)
        with torch.no_grad():
            for name, buffer in self.decoder.named_buffers():
                if name.endswith("expert_bias_E"):
                    buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
            for weight in self.decoder.parameters() if jolt else ():
                weight.mul_(1 + jolt * torch.randn(weight.shape, generator=generator))
        self.places = self._places()
        self.taken = 0

    def _places(self) -> dict[str, Tensor]:
        """Where the numbers of each published tensor stand among all of ours."""
        state, start = self.decoder.state_dict(), 0
        before = {name: tensor.clone() for name, tensor in state.items()}
        for tensor in state.values():
            tensor.copy_(torch.arange(start, start + tensor.numel()).view_as(tensor))
            start += tensor.numel()
        places = {name: tensor.long() for name, tensor in to_huggingface(self.decoder).items()}
        self.decoder.load_state_dict(before)
        return places

    def _batch(self, rows: PackedRows) -> Batch:
        return pack(Rows(rows.tokens.numpy(), rows.documents.numpy()), document_mask=self.run.data.document_mask)

    def step(self, rows: PackedRows) -> Step:
        """Train on the rows of a step."""
        session, run = self.session, self.run
        rate = optimizer.learning_rate(self.taken, run.training.steps, run.optimizer.learning_rate, run.schedule)
        result = train_step(session.model, session.state.optimizer, self._batch(rows), session.rule, rate)
        self.taken += 1
        dropped = sum(layer.dropped for layer in result.layers)
        return Step([result.loss, *result.mtp_losses], result.gradient_norm, dropped, self.weights())

    def weights(self) -> dict[str, Tensor]:
        """The weights under their published names."""
        flat = torch.cat([tensor.flatten() for tensor in self.decoder.state_dict().values()])
        return {name: flat[places] for name, places in self.places.items()}

    def held_out(self, rows: PackedRows) -> float:
        """Mean loss of the next token."""
        batch = self._batch(rows)
        parts = tuple(batch.micro_batches(self.run.training.micro_batch))
        counted = int((batch.labels_BS != IGNORED).sum())
        held_out = EvaluationRows(batches=parts, tokens=counted, text_bytes=1)
        return evaluate(self.session.model, held_out, self.session.rule.cut, self.session.rule.loss).loss


def theirs_of(draw: Draw, ours: Ours, folder: Path) -> Trainer:
    """The same run in plain PyTorch, with the weights of ours."""
    model = in_transformers(ours.decoder, folder / "weights")
    ahead, config = None, draw.model
    if config.mtp_layers:  # where the library looks for these layers
        last = range(config.layers, config.layers + config.mtp_layers)
        model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*" for layer in last]
        ahead = MtpModel.from_pretrained(model, dtype=torch.float64)
        ahead.config._attn_implementation = "eager"
        ahead.config._experts_implementation = "eager"
    moe = config.moe
    facts = Facts(
        top_k=1 if moe is None else moe.top_k,
        is_sigmoid=moe is not None and moe.router.scoring_func == "sigmoid",
        is_linear=config.linear_attention is not None,
    )
    return Trainer(model, ahead, draw.recipe, facts, folder / "names")


@dataclass(frozen=True)
class Difference:
    """The largest of a figure, relative to its size, of weights to what the step changed."""

    step: int
    figure: str
    value: float
    of: str = ""  # the tensor, or the depth


BOUNDS = {
    "first loss": EXACT,
    "first norm": EXACT,
    "dropped": 0.0,
    "weights": 1e-7,
    "loss": 1e-8,
    "norm": 1e-8,
    "held out": 1e-8,
}
"""Largest differences that pass. AdamW divides by its epsilon, 1e-8 at least: rounding of gradients, 1e-16, grows to
1e-8 of a step, and later steps add theirs. A step is at most a tenth of the weights."""


ROUNDING, LIKE_ROUNDING = 1e-15, 2.0
"""Relative change of weights in `sensitivity`, and how many times that a difference over its bound may be."""


def worst(draw: Draw) -> dict[str, float]:
    """The largest difference of each figure over all steps."""
    return _largest(differences(draw))


def _largest(differences: Iterable[Difference]) -> dict[str, float]:
    figures = dict.fromkeys(BOUNDS, 0.0)
    for difference in differences:
        figures[difference.figure] = max(figures[difference.figure], difference.value)
    return figures


@in_float64()
def differences(draw: Draw) -> list[Difference]:
    """Of every figure of every step."""
    return list(_differences(draw))


@in_float64()
def sensitivity(draw: Draw) -> dict[str, float]:
    """What `worst` gives for two runs of ours whose weights differ by the rounding of a few operations."""
    ours = Ours(draw)
    return _largest(_between(draw, Ours(draw, ROUNDING), ours, ours.weights()))


def _differences(draw: Draw) -> Iterator[Difference]:
    ours = Ours(draw)
    with tempfile.TemporaryDirectory() as name:
        theirs = theirs_of(draw, ours, Path(name))
        start = theirs.ledger.weights()
        yield _of_weights(-1, ours.weights(), start, {name: torch.zeros_like(weight) for name, weight in start.items()})
        yield from _between(draw, ours, theirs, start)


def _between(draw: Draw, ours: Ours, theirs: Trainer | Ours, start: dict[str, Tensor]) -> Iterator[Difference]:
    before = start
    for number in range(STEPS):
        rows = rows_of(draw, number)
        if not _is_trainable(rows, draw.recipe):
            continue
        mine, expected = ours.step(rows), theirs.step(rows)
        first = "" if number else "first "
        for depth, (loss, wanted) in enumerate(zip(mine.losses, expected.losses, strict=True)):
            yield Difference(number, f"{first}loss", abs(loss - wanted) / max(abs(wanted), 1.0), f"depth {depth}")
        yield Difference(number, f"{first}norm", abs(mine.norm - expected.norm) / expected.norm)
        yield Difference(number, "dropped", float(abs(mine.dropped - expected.dropped)))
        yield _of_weights(number, mine.weights, expected.weights, before)
        before = expected.weights
    rows = rows_of(draw, STEPS)
    if _is_trainable(rows, draw.recipe):
        wanted = theirs.held_out(rows)
        yield Difference(STEPS, "held out", abs(ours.held_out(rows) - wanted) / wanted)


def _is_trainable(rows: PackedRows, recipe: Recipe) -> bool:
    return bool((labels_of(rows, 0, document_mask=recipe.document_mask) != IGNORED).any())


def _of_weights(
    number: int, mine: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]
) -> Difference:
    """Of the tensor with the largest."""
    assert mine.keys() == expected.keys(), f"names differ: {sorted(mine.keys() ^ expected.keys())}"
    changes = {name: float((tensor - before[name]).norm()) for name, tensor in expected.items()}
    least = 1e-3 * max(changes.values()) or 1.0  # a rate of 0 changes nothing
    apart = {name: float((mine[name] - tensor).norm()) / max(changes[name], least) for name, tensor in expected.items()}
    worst = max(apart, key=lambda name: apart[name])
    return Difference(number, "weights", apart[worst], worst)
