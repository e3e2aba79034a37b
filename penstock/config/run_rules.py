"""Rules between fields of batch, schedule, data and devices. Each docstring is the rule as users read it."""

import re

from penstock.config.model import LatentAttention
from penstock.config.problem import Problem
from penstock.config.run import Run

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_FILE_SOURCES = ("text", "jsonl")
_SYNTHETIC_SOURCES = ("synthetic-random", "synthetic-learnable")
_GPU_BACKENDS = ("efficient", "cudnn")

_BYTES_VOCABULARY = 257
"""256 values of a byte and the end of a document."""

_LEARNABLE_VOCABULARY = 5
"""The synthetic language continues in one of 4 ways, and needs an end of document."""


def name_is_a_folder_name(run: Run) -> Problem | None:
    """`name` is a plain folder name: letters, digits, dots, dashes and underscores, the first a letter or digit."""
    if _NAME.fullmatch(run.name):
        return None
    return Problem(
        "name",
        "must be a plain folder name",
        got=f"{run.name[:110]!r}",
        allowed="up to 100 letters, digits, '.', '_' and '-', the first a letter or digit",
    )


def micro_batches_fill_the_global_batch(run: Run) -> Problem | None:
    """`training.micro_batch` divides `training.global_batch`."""
    training = run.training
    if training.global_batch % training.micro_batch == 0:
        return None
    below = training.global_batch - training.global_batch % training.micro_batch
    near = [f"{batch}" for batch in (below, below + training.micro_batch) if batch > 0]
    return Problem(
        "training.global_batch",
        f"must be a multiple of training.micro_batch ({training.micro_batch})",
        got=f"{training.global_batch}",
        fix=f"set training.global_batch to {' or '.join(near)}",
    )


def rows_hold_every_prediction_depth(run: Run) -> Problem | None:
    """`model.mtp_layers` is less than `training.sequence_length`: each depth looks one position further."""
    if run.model.mtp_layers < run.training.sequence_length:
        return None
    return Problem(
        "model.mtp_layers",
        f"must be less than training.sequence_length ({run.training.sequence_length})",
        got=f"{run.model.mtp_layers}",
    )


def warmup_ends(run: Run) -> Problem | None:
    """`schedule.warmup_steps` is at most `training.steps`."""
    if run.schedule.warmup_steps <= run.training.steps:
        return None
    return Problem(
        "schedule.warmup_steps",
        f"is more than training.steps ({run.training.steps})",
        got=f"{run.schedule.warmup_steps}",
        allowed=f"0 to {run.training.steps}",
        fix=f"shorten the warm-up too: schedule.warmup_steps={run.training.steps // 10}",
    )


def decay_comes_after_warmup(run: Run) -> Problem | None:
    """`schedule.decay_steps` fits into the steps after `schedule.warmup_steps`."""
    room = run.training.steps - run.schedule.warmup_steps
    if run.schedule.decay_steps <= room or room < 0:
        return None
    return Problem(
        "schedule.decay_steps",
        f"is more than the {room} steps after the warm-up",
        got=f"{run.schedule.decay_steps}",
        allowed=f"0 to {room}",
    )


def decay_steps_belong_to_wsd(run: Run) -> Problem | None:
    """`schedule.decay_steps` is for `schedule.decay` wsd only: the others decay over all steps after the warm-up."""
    if run.schedule.decay_steps == 0 or run.schedule.decay == "wsd":
        return None
    return Problem(
        "schedule.decay_steps",
        f"has no meaning for schedule.decay {run.schedule.decay}",
        got=f"{run.schedule.decay_steps}",
        fix="set schedule.decay to wsd, or schedule.decay_steps to 0",
    )


def moments_forget(run: Run) -> Problem | None:
    """`optimizer.beta1` and `optimizer.beta2` are below 1: a moment that never forgets never starts."""
    for name, beta in (("beta1", run.optimizer.beta1), ("beta2", run.optimizer.beta2)):
        if beta == 1:
            return Problem(f"optimizer.{name}", "must be below 1", got="1", fix="0.9 and 0.95 are the usual values")
    return None


def file_sources_have_files(run: Run) -> Problem | None:
    """`data.source` text and jsonl need `data.files`."""
    data = run.data
    if data.source not in _FILE_SOURCES or data.files:
        return None
    return Problem(
        "data.files",
        f"is empty, but data.source {data.source} reads files",
        fix="set data.files to the files to train on",
    )


def other_sources_have_no_files(run: Run) -> Problem | None:
    """`data.files` and `data.validation_files` are for `data.source` text and jsonl only."""
    data = run.data
    if data.source in _FILE_SOURCES or not (data.files or data.validation_files):
        return None
    name, files = ("files", data.files) if data.files else ("validation_files", data.validation_files)
    return Problem(
        f"data.{name}",
        f"is given, but data.source {data.source} reads no files",
        got=", ".join(files[:3]),
        fix="set data.source to text or jsonl",
    )


def held_out_files_are_not_trained_on(run: Run) -> Problem | None:
    """No file is in both `data.files` and `data.validation_files`."""
    shared = [name for name in run.data.files if name in run.data.validation_files]
    if not shared:
        return None
    return Problem(
        "data.validation_files",
        "has files of data.files: the model would be judged on what it learned",
        got=", ".join(shared[:3]),
        fix="take them out of one of the two",
    )


def evaluation_has_text(run: Run) -> Problem | None:
    """`evaluation.rows` above 0 need held-out text: `data.validation_files`, or `data.validation_share` above 0."""
    data = run.data
    is_held_out = bool(data.validation_files) or data.validation_share > 0 or data.source in _SYNTHETIC_SOURCES
    if run.evaluation.rows == 0 or is_held_out:
        return None
    return Problem(
        "data.validation_share",
        "holds out no text for evaluation.rows",
        got="0",
        fix="raise it, give data.validation_files, or set evaluation.rows to 0",
    )


def vocabulary_holds_every_byte(run: Run) -> Problem | None:
    """With `data.tokenizer` bytes, `model.vocabulary` is at least 257: 256 bytes and the end of a document."""
    is_read = run.data.source not in _SYNTHETIC_SOURCES and run.data.tokenizer == "bytes"
    if not is_read or run.model.vocabulary >= _BYTES_VOCABULARY:
        return None
    return Problem(
        "model.vocabulary",
        "is too small for data.tokenizer bytes",
        got=f"{run.model.vocabulary}",
        allowed=f">= {_BYTES_VOCABULARY} (256 bytes and the end of a document)",
    )


def vocabulary_holds_the_synthetic_language(run: Run) -> Problem | None:
    """With `data.source` synthetic-learnable, `model.vocabulary` is at least 5."""
    if run.data.source != "synthetic-learnable" or run.model.vocabulary >= _LEARNABLE_VOCABULARY:
        return None
    return Problem(
        "model.vocabulary",
        "is too small for data.source synthetic-learnable",
        got=f"{run.model.vocabulary}",
        allowed=f">= {_LEARNABLE_VOCABULARY}",
    )


def bytes_have_one_end(run: Run) -> Problem | None:
    """`data.end_of_document` names a token of a tokenizer file: with `data.tokenizer` bytes it stays empty."""
    if not run.data.end_of_document or run.data.tokenizer != "bytes":
        return None
    return Problem(
        "data.end_of_document",
        "names a token, but data.tokenizer bytes has its own end of a document",
        got=f"{run.data.end_of_document!r}",
        fix="leave it out, or set data.tokenizer to a tokenizer.json",
    )


def cpu_has_no_triton(run: Run) -> Problem | None:
    """With `device` cpu, no field of `kernels` (`kernels.all`, `kernels.experts`, ...) is triton: it needs a GPU."""
    asking = [name for name, value in run.kernels if value == "triton"]
    if run.device != "cpu" or not asking:
        return None
    return Problem(
        f"kernels.{asking[0]}",
        "names a backend that device cpu does not have",
        got="triton",
        fix=f"set kernels.{asking[0]} to auto",
    )


def cpu_has_the_attention_backend(run: Run) -> Problem | None:
    """With `device` cpu, `kernels.attention` is not efficient or cudnn: only GPUs have these."""
    if run.device != "cpu" or run.kernels.attention not in _GPU_BACKENDS:
        return None
    return Problem(
        "kernels.attention",
        "names a backend that device cpu does not have",
        got=run.kernels.attention,
        allowed="auto, default, math, flash",
    )


def flash_heads_are_equally_wide(run: Run) -> Problem | None:
    """`kernels.attention` flash needs latent attention's query/key and value heads equally wide."""
    attention = run.model.attention
    is_flash = run.kernels.attention == "flash"
    if not is_flash or not isinstance(attention, LatentAttention) or attention.head_dim == attention.value_head_dim:
        return None
    return Problem(
        "kernels.attention",
        "flash needs model.attention.value_head_dim = plain_head_dim + rotary_head_dim",
        got=f"{attention.value_head_dim} and {attention.head_dim}",
        fix="set kernels.attention to auto",
    )


def flash_on_a_gpu_has_no_mask(run: Run) -> Problem | None:
    """`data.document_mask` does not go with `kernels.attention` flash, which takes no mask on a GPU (`device` cuda)."""
    if run.kernels.attention != "flash" or run.device != "cuda" or not run.data.document_mask:
        return None
    return Problem(
        "kernels.attention",
        "flash takes no mask on a GPU, and data.document_mask needs one",
        fix="set kernels.attention to auto",
    )


def recorded_steps_are_made(run: Run) -> Problem | None:
    """With `profile.start` above 0, all `profile.steps` from there on are among `training.steps`."""
    profile, steps = run.profile, run.training.steps
    if profile.start == 0 or profile.start + profile.steps - 1 <= steps:
        return None
    if profile.steps > steps:
        return Problem("profile.steps", f"is more than training.steps ({steps})", got=f"{profile.steps}")
    return Problem(
        "profile.start",
        f"leaves fewer than profile.steps ({profile.steps}) of training.steps ({steps})",
        got=f"{profile.start}",
        allowed=f"0 to {steps - profile.steps + 1}",
    )


def recording_ranks_are_ranks(run: Run) -> Problem | None:
    """`profile.ranks` holds numbers from 0, each once."""
    ranks = run.profile.ranks
    if len({*ranks}) == len(ranks) and min(ranks, default=0) >= 0:
        return None
    return Problem("profile.ranks", "must be numbers of ranks, each once", got=f"{list(ranks)}", allowed="0, 1, 2, ...")


RUN_RULES = (
    name_is_a_folder_name,
    micro_batches_fill_the_global_batch,
    rows_hold_every_prediction_depth,
    warmup_ends,
    decay_comes_after_warmup,
    decay_steps_belong_to_wsd,
    moments_forget,
    file_sources_have_files,
    other_sources_have_no_files,
    held_out_files_are_not_trained_on,
    evaluation_has_text,
    vocabulary_holds_every_byte,
    vocabulary_holds_the_synthetic_language,
    bytes_have_one_end,
    cpu_has_no_triton,
    cpu_has_the_attention_backend,
    flash_heads_are_equally_wide,
    flash_on_a_gpu_has_no_mask,
    recorded_steps_are_made,
    recording_ranks_are_ranks,
)
