"""A run: everything that decides what `penstock train` does."""

from typing import Literal

from penstock.config.model import Model
from penstock.config.section import Section, knob
from penstock.config.training import (
    Checkpoint,
    Data,
    Evaluation,
    Optimizer,
    Record,
    Schedule,
    Training,
)


class Kernels(Section):
    """Which implementation runs; `auto` takes the best that the device has."""

    experts: Literal["auto", "reference", "torch"] = knob(
        "auto", doc="Expert matrix products: a loop over experts (reference) or torch's grouped_mm."
    )
    attention: Literal["auto", "default", "math", "flash", "efficient", "cudnn"] = knob(
        "auto", doc="Backend of scaled_dot_product_attention; auto prefers cuDNN, default leaves it to torch."
    )
    loss_chunk: int = knob(0, doc="Tokens whose logits exist at once; 0 chooses by size.", unit="tokens", low=0)


class Run(Section):
    """One training run."""

    name: str = knob(doc="Name of the run and of its folder.")
    seed: int = knob(0, doc="Seed of weights, data order and everything random.", low=0, high=2**32 - 1)
    device: Literal["auto", "cpu", "cuda"] = knob("auto", doc="Where to train; auto takes a GPU if there is one.")
    model: Model = knob(doc="What is trained.")
    training: Training = knob(doc="Batch, length, precision.")
    optimizer: Optimizer = knob(doc="AdamW.")
    schedule: Schedule = knob(Schedule(), doc="Learning rate over the steps.")
    data: Data = knob(Data(), doc="Text.")
    evaluation: Evaluation = knob(Evaluation(), doc="Loss on held-out text.")
    checkpoint: Checkpoint = knob(Checkpoint(), doc="Saved states.")
    kernels: Kernels = knob(Kernels(), doc="Implementations.")
    record: Record = knob(Record(), doc="Metrics.")

    @property
    def micro_batches(self) -> int:
        """Forward passes per optimizer step on one rank."""
        return self.training.global_batch // self.training.micro_batch

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step over all ranks."""
        return self.training.global_batch * self.training.sequence_length
