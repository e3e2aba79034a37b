"""Training of a model whose authors published its sizes but not its training.

Learning rate and batch are common for such a size, with 4 million tokens a step; a preset says so where its authors
published better values.
"""

from penstock.config.model import Model
from penstock.config.run import Run
from penstock.config.training import LearningRateSchedule, Optimizer, Training


def pretrain(name: str, model: Model, *, learning_rate: float, sequence_length: int = 4096, warmup: int = 2000) -> Run:
    """A run that trains a model from random weights, with 4 Mi tokens a step and `warmup` steps of linear warm-up."""
    rows = 2**22 // sequence_length
    return Run(
        name=name,
        model=model,
        training=Training(steps=10000, sequence_length=sequence_length, micro_batch=1, global_batch=rows),
        optimizer=Optimizer(learning_rate=learning_rate),
        schedule=LearningRateSchedule(warmup_steps=warmup),
    )
