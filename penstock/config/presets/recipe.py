"""Training of a preset; where its authors published nothing, values that are common for such a size."""

from penstock.config.model import Model
from penstock.config.run import LearningRateSchedule, Optimizer, Run, Training


def pretrain(
    name: str, model: Model, *, learning_rate: float, sequence_length: int = 4096, rows: int = 0, warmup: int = 2000
) -> Run:
    """A run from random weights, with `rows` (0: 4 Mi tokens) a step and `warmup` steps of linear warm-up."""
    rows = rows or 2**22 // sequence_length  # 4 Mi tokens
    return Run(
        name=name,
        model=model,
        training=Training(steps=10000, sequence_length=sequence_length, micro_batch=1, global_batch=rows),
        optimizer=Optimizer(learning_rate=learning_rate),
        schedule=LearningRateSchedule(warmup_steps=warmup),
    )
