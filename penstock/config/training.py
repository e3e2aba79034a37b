"""Training: batch, precision, optimizer, schedule, evaluation, checkpoints, records."""

from functools import partial
from typing import Literal

from penstock.config.schema import Section, knob

_steps = partial(knob, unit="steps", low=0)


class Training(Section):
    """Batch, length, precision."""

    steps: int = _steps(doc="Optimizer steps.", low=1)
    sequence_length: int = knob(doc="Positions of a row.", unit="positions", low=2, high=2**30)
    micro_batch: int = knob(1, doc="Rows of one forward pass on one rank.", unit="rows", low=1, high=2**20)
    global_batch: int = knob(1, doc="Rows of one optimizer step over all ranks.", unit="rows", low=1, high=2**30)
    precision: Literal["bf16", "fp32"] = knob(
        "bf16", doc="bf16: parameters and compute in bfloat16, master weights, moments and gradients in float32."
    )
    initial_weights: str = knob(
        "", doc="Folder of `penstock import`, or of a run, whose weights a new run starts with; empty draws them."
    )
    mtp_weight: float = knob(0.3, doc="Factor of the multi-token prediction loss.", low=0.0)
    z_loss_coef: float = knob(0.0, doc="Factor of the z-loss on the output logits.", low=0.0)
    clip_norm: float = knob(1.0, doc="Largest global gradient norm; 0 does not clip.", low=0.0)
    deterministic: bool = knob(False, doc="Use deterministic algorithms only; slower on GPUs.")
    collect_garbage_every: int = _steps(
        50, doc="Python garbage is collected every so many steps and never inside a step; 0 leaves it to Python."
    )


class Muon(Section):
    """Muon for the matrices of hidden layers (arXiv 2502.16982); read with `optimizer.method` muon."""

    momentum: float = knob(0.95, doc="Decay of the momentum.", low=0.0, high=1.0)
    nesterov: bool = knob(True, doc="Orthogonalize the mean of gradient and momentum instead of the momentum.")
    iterations: int = knob(5, doc="Newton-Schulz iterations.", low=1, high=20)
    precision: Literal["bf16", "fp32"] = knob(
        "bf16", doc="Type of Newton-Schulz products, and of the matrices that ranks exchange for them."
    )
    update_rms: float = knob(
        0.2,
        doc="Root mean square of an update of an A x B matrix over the learning rate, about: the orthogonal factor is "
        "multiplied by this and the root of max(A, B). 0.2 is that of AdamW, so its learning rates can stay.",
        low=0.0,
    )
    qk_clip: float = knob(
        0.0,
        doc="Largest attention logit that a step may have without its head's queries and keys being scaled down "
        "after the update (Kimi-K2: 100); 0 switches it off. Costs a product of queries and keys in each pass.",
        low=0.0,
    )


class Optimizer(Section):
    """AdamW (arXiv 1711.05101), or Muon with AdamW for embeddings, head, norms, routers and vectors."""

    method: Literal["adamw", "muon"] = knob(
        "adamw", doc="adamw: for all parameters. muon: orthogonalizes updates of matrices. See docs/optimizer.md."
    )
    muon: Muon = knob(Muon(), doc="Muon.")
    learning_rate: float = knob(doc="Peak learning rate.", low=0.0)
    beta1: float = knob(0.9, doc="Decay of the first moment.", low=0.0, high=1.0)
    beta2: float = knob(0.95, doc="Decay of the second moment.", low=0.0, high=1.0)
    epsilon: float = knob(1e-8, doc="Added to the root of the second moment.", low=0.0)
    weight_decay: float = knob(0.1, doc="Decoupled decay of matrices; norms and biases are never decayed.", low=0.0)
    moment_dtype: Literal["fp32", "bf16", "int8"] = knob(
        "fp32",
        doc="Type in which both moments are stored: 8, 4 or 2 bytes of the two. int8 has a float32 scale for each 128 "
        "values of a row, and leaves vectors in float32. See docs/optimizer.md.",
    )
    store_param_remainders: bool = knob(
        False,
        doc="Masters of bfloat16 weights are the weight and the 16 bits that are missing to float32, in 2 bytes "
        "instead of 4; the same numbers. Weights held in float32, such as FSDP2's shards, are their own masters.",
    )


class LearningRateSchedule(Section):
    """Learning rate over the steps: linear warm-up, then a decay."""

    warmup_steps: int = _steps(0, doc="Steps of linear warm-up from 0.")
    decay: Literal["constant", "cosine", "linear", "wsd"] = knob(
        "cosine",
        doc="After warm-up: constant, cosine, linear, or warm-up-stable-decay (constant, then linear at the end).",
    )
    decay_steps: int = _steps(0, doc="Steps of the final decay of `wsd`; 0 means a tenth of all steps.")
    final_ratio: float = knob(0.1, doc="Learning rate at the last step over the peak.", low=0.0, high=1.0)


class Evaluation(Section):
    """Loss on held-out text."""

    every: int = _steps(0, doc="Steps between evaluations; 0 evaluates only at the end.")
    rows: int = knob(64, doc="Rows of held-out text; 0 switches evaluation off.", unit="rows", low=0, high=2**30)


class Checkpoint(Section):
    """Saved states."""

    enabled: bool = knob(True, doc="Save at all; a run without checkpoints cannot be resumed.")
    every: int = _steps(1000, doc="Steps between checkpoints; 0 saves only at the end.")
    keep: int = knob(
        3,
        doc="Checkpoints that are kept, the newest first; 0 keeps all. On a full disk fewer, to make room.",
        unit="checkpoints",
        low=0,
    )
    keep_every: int = _steps(0, doc="Checkpoints of multiples of so many steps are kept beyond `keep`; 0 keeps none.")
    asynchronous: bool = knob(True, doc="Write in the background while training goes on.")
    fall_back: bool = knob(True, doc="Resume from the checkpoint before a damaged one; false ends the run instead.")


class Record(Section):
    """Output of a run besides checkpoints."""

    folder: str = knob("runs", doc="Folder that holds one folder for each run.")
    every: int = _steps(1, doc="Steps between lines of metrics.jsonl.", low=1)
    tensorboard: bool = knob(True, doc="Write TensorBoard events.")
    wandb: Literal["off", "offline", "online"] = knob(
        "off", doc="Tell Weights & Biases: in files for `wandb sync`, or over the network; needs penstock[wandb]."
    )
    wandb_project: str = knob("penstock", doc="Project there.")
    prometheus_port: int = knob(
        0,
        doc="Port of an endpoint for Prometheus on the first rank's machine; 0 has none; needs penstock[prometheus].",
        low=0,
        high=65535,
    )
    prometheus_address: str = knob(
        "127.0.0.1", doc="Address of the endpoint: the loopback is for this machine only, 0.0.0.0 is for all machines."
    )


class Profile(Section):
    """Recording of a few steps by torch's profiler; see docs/trace.md."""

    start: int = _steps(0, doc="First step that is recorded; 0 records none.")
    steps: int = _steps(2, doc="Steps that are recorded.", low=1)
    ranks: tuple[int, ...] = knob(
        (0, 1, 2, 3, 4, 5, 6, 7), doc="Ranks that record, as far as the run has them; empty means all."
    )
    memory: bool = knob(True, doc="On a GPU, record every block that the allocator hands out or takes back.")
