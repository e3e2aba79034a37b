"""A run of which a step takes milliseconds, its data, reports and saved folder, for tests of training."""

import os
import signal
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.config.model import Balance, LatentAttention, Model, Moe, Router
from penstock.config.run import Checkpoint, Data, Evaluation, LearningRateSchedule, Optimizer, Record, Run, Training
from penstock.data.evaluation import EvaluationRows as HeldOut
from penstock.data.loader import Batch
from penstock.kernels.reference import IGNORED_LABEL
from penstock.models.build import build_model
from penstock.models.decoder import Decoder
from penstock.models.rank_model import RankModel
from penstock.parallel.launch.environment import Environment
from penstock.parallel.shard import whole
from penstock.train import loop
from penstock.train.checkpoint import CheckpointStore
from penstock.train.observer import HeldOutLoss, LayerReport, Observer, RunStart, StepReport
from penstock.train.passes import CutRule
from penstock.train.run_folder import RunFolder
from penstock.train.setup import open_texts
from penstock.train.state import identity_of
from penstock.train.step import StopRequest

ENVIRONMENT = Environment(color=False, threads=1, world_size=1)
CPU = torch.device("cpu")
TRAINING = Training(
    steps=4, sequence_length=12, micro_batch=2, global_batch=4, precision="fp32", collect_garbage_every=0
)
"""Python collects garbage by itself: to do it before the first step takes as long as the steps."""


def tiny_model(**changes: Any) -> Model:
    """One dense layer, one of experts with bias and sequence loss, one depth of multi-token prediction."""
    fields: dict[str, Any] = {
        "family": "deepseek-v3",
        "vocab_size": 17,
        "hidden_size": 16,
        "layers": 2,  # and one of multi-token prediction
        "dense_layers": 1,
        "intermediate_size": 24,
        "attention": LatentAttention(heads=2, kv_lora_rank=8, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=6),
        "moe": Moe(
            experts=4,
            top_k=2,
            moe_intermediate_size=8,
            shared_expert_intermediate_size=8,
            router=Router(scoring_func="sigmoid", norm_topk_prob=True, expert_bias=True, expert_bias_rate=1e-2),
            balance=Balance(aux_loss="sequence", aux_loss_coef=1e-2),
        ),
        "mtp_layers": 1,
        "initializer_range": 0.2,
    }
    return Model.model_validate(fields | changes)


def tiny_moe(**changes: Any) -> Model:
    """The tiny model with other fields of its experts."""
    moe = tiny_model().moe
    assert moe is not None
    return tiny_model(moe=moe.model_copy(update=changes))


def tiny_run(folder: Path, **changes: Any) -> Run:
    """Learnable synthetic data, four steps, everything on; `changes` replace sections of Run."""
    fields: dict[str, Any] = {
        "name": "tiny",
        "device": "cpu",
        "model": tiny_model(),
        "training": TRAINING,
        "optimizer": Optimizer(learning_rate=1e-2),
        "schedule": LearningRateSchedule(warmup_steps=2),
        "data": Data(source="synthetic-learnable"),
        "evaluation": Evaluation(every=2, rows=3),
        "checkpoint": Checkpoint(every=2, keep=0, asynchronous=False),
        "record": Record(folder=str(folder), tensorboard=False),
    }
    return Run.model_validate(fields | changes)


@cache
def held_out_rows() -> HeldOut:
    """Held-out rows of tiny runs: to choose them, 512 documents are read, which takes longer than a step."""
    rows = open_texts(tiny_run(Path())).held_out
    assert rows is not None
    return rows


def one_rank(run: Run) -> RankModel:
    model = RankModel(decoders={0: build_model(run, CPU)})
    model.train()
    return model


def cut_rule(rows: int, depths: int = 1) -> CutRule:
    return CutRule(micro_batch=rows, depths=depths, device=CPU)


def random_batch(rows: int, length: int, *, vocabulary: int = 17, seed: int = 0, documents: bool = False) -> Batch:
    """Random tokens; labels are the next ones, with uneven gaps: row r leaves out its first r labels."""
    generator = torch.Generator().manual_seed(seed)
    stream_BS = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    labels_BS = stream_BS[:, 1:].clone()
    for row in range(rows):
        labels_BS[row, : min(row, length - 1)] = IGNORED_LABEL
    documents_BS: Tensor | None = None
    if documents:
        documents_BS = (torch.arange(length) >= length // 2).long().expand(rows, length).contiguous()  # two a row
    positions_BS = torch.arange(length).expand(rows, length).contiguous()
    return Batch(
        tokens_BS=stream_BS[:, :-1].contiguous(),
        labels_BS=labels_BS,
        positions_BS=positions_BS,
        documents_BS=documents_BS,
    )


def step_report(step: int, **changes: Any) -> StepReport:
    fields: dict[str, Any] = {
        "step": step,
        "loss": 5.0 / step,
        "mtp_losses": (6.0 / step,),
        "gradient_norm": 0.5,
        "learning_rate": 1e-3,
        "tokens_seen": 48 * step,  # 4 rows of 12 tokens
        "tokens_per_second_per_device": 1234.5,
        "step_seconds": 0.25,
        "elapsed_seconds": 0.3 * step,
        "model_flops_utilization": None,
        "peak_memory_bytes": 1_240_000_000,
        "forced_balance": False,
        "layers": (
            LayerReport(layer=1, slots=(10, 20, 30, 40), dropped=3, auxiliary_loss=0.01),
            LayerReport(layer=2, slots=(25, 25, 25, 25), dropped=0, auxiliary_loss=0.02),
        ),
        "left_out": 0,
        "evaluation": None,
    }
    return StepReport(**(fields | changes))


HELD_OUT = HeldOutLoss(loss=2.0, bits_per_byte=2.885, tokens=36, seconds=0.1)


def run_start(run: Run, *, steps_done: int = 0) -> RunStart:
    return RunStart(
        run=run,
        folder=Path(run.record.folder) / run.name,
        device_name="a laptop",
        kernels="torch: norm, loss",
        parameters=1_240_000,
        active_parameters=730_000,
        steps_done=steps_done,
    )


class Recorder(Observer):
    """Observer that remembers what it was told."""

    def __init__(self) -> None:
        self.starts: list[RunStart] = []
        self.reports: list[StepReport] = []
        self.saves: list[int] = []
        self.is_closed = False

    def started(self, start: RunStart) -> None:
        self.starts.append(start)

    def stepped(self, report: StepReport) -> None:
        self.reports.append(report)

    def saved(self, step: int) -> None:
        self.saves.append(step)

    def closed(self) -> None:
        self.is_closed = True


def act_in_step(
    number: int, act: Callable[[StopRequest], object], *, rank: int = 0, restarts: int | None = None
) -> None:
    """Lets this process act when it begins its step of this number, if it is this rank.

    With `restarts` only after so many restarts of its launcher.
    """
    if os.environ.get("RANK", "0") != str(rank):
        return
    if restarts is not None and os.environ["TORCHELASTIC_RESTART_COUNT"] != str(restarts):
        return
    train_step, numbers = loop.train_step, count(1)

    def step(*arguments: Any) -> Any:
        if next(numbers) == number:
            (stop,) = (argument for argument in arguments if isinstance(argument, StopRequest))
            act(stop)
        return train_step(*arguments)

    vars(loop)["train_step"] = step


def signal_itself(number: signal.Signals, stop: StopRequest) -> None:
    """What a rank may do in a step."""
    os.kill(os.getpid(), number)


def signal_launcher(launcher: int, number: signal.Signals, stop: StopRequest) -> None:
    """Send a signal to the launcher, and wait until it has asked this rank to stop."""
    os.kill(launcher, number)
    while stop.signal is None:
        time.sleep(0.001)


def byte_run(folder: Path, **changes: Any) -> Run:
    """A tiny run over bytes of text, with a context of 32."""
    fields: dict[str, Any] = {
        "model": tiny_model(vocab_size=257),
        "training": TRAINING.model_copy(update={"sequence_length": 32}),
        "data": Data(),
    }
    return tiny_run(folder, **(fields | changes))


def random_model(run: Run, held_by: torch.dtype = torch.float32) -> Decoder:
    """The whole model of a run in float32, every tensor and buffer with values of its own that a dtype holds."""
    training = run.training.model_copy(update={"precision": "fp32"})
    model = build_model(run.model_copy(update={"training": training}), CPU)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator).to(held_by))
    return model


def save_run(run: Run, model: Decoder, step: int = 1) -> Path:
    folder = RunFolder(Path(run.record.folder) / run.name)
    folder.path.mkdir(parents=True, exist_ok=True)
    folder.write_config(run)
    store = CheckpointStore(folder.checkpoints, keep=0, asynchronous=False)
    parts = {f"model.{name}": whole(tensor) for name, tensor in model.state_dict().items()}
    store.save(step, parts, {"model": identity_of(run)})
    return folder.path
