"""Every rule of batch, schedule and devices, by the line that the user reads."""

import pytest

from penstock.config import run_rules as rules
from penstock.config.rules import Rule
from tests.config.small import unchecked_run

WSD = ("schedule.decay=wsd",)
GQA = ("model.attention.kind=gqa", "model.attention.kv_heads=2", "model.attention.head_dim=32")
ON_FLASH = ("kernels.attention=flash", "device=cuda")
NAME_ALLOWED = "up to 100 letters, digits, '.', '_' and '-', the first a letter or digit"

BROKEN: list[tuple[Rule, tuple[str, ...], str]] = [
    (
        rules.name_is_a_folder_name,
        ("name=../up",),
        f"name must be a plain folder name; got '../up'; allowed: {NAME_ALLOWED}",
    ),
    (
        rules.micro_batches_fill_the_global_batch,
        ("training.micro_batch=3",),
        "training.global_batch must be a multiple of training.micro_batch (3); got 8; "
        "fix: set training.global_batch to 6 or 9",
    ),
    (
        rules.micro_batches_fill_the_global_batch,
        ("training.micro_batch=9",),
        "training.global_batch must be a multiple of training.micro_batch (9); got 8; "
        "fix: set training.global_batch to 9",
    ),
    (
        rules.rows_hold_every_prediction_depth,
        ("model.mtp_layers=2", "training.sequence_length=2"),
        "model.mtp_layers must be less than training.sequence_length (2); got 2",
    ),
    (
        rules.warmup_ends,
        ("training.steps=10",),
        "schedule.warmup_steps is more than training.steps (10); got 20; allowed: 0 to 10; "
        "fix: shorten the warm-up too: schedule.warmup_steps=1",
    ),
    (
        rules.decay_comes_after_warmup,
        (*WSD, "schedule.decay_steps=190"),
        "schedule.decay_steps is more than the 180 steps after the warm-up; got 190; allowed: 0 to 180",
    ),
    (
        rules.decay_steps_belong_to_wsd,
        ("schedule.decay_steps=5",),
        "schedule.decay_steps has no meaning for schedule.decay cosine; got 5; "
        "fix: set schedule.decay to wsd, or schedule.decay_steps to 0",
    ),
    (
        rules.moments_forget,
        ("optimizer.beta2=1.0",),
        "optimizer.beta2 must be below 1; got 1; fix: 0.9 and 0.95 are the usual values",
    ),
    (
        rules.cpu_has_no_triton,
        ("device=cpu", "kernels.experts_forward=triton"),
        "kernels.experts_forward names a backend that device cpu does not have; got triton; "
        "fix: set kernels.experts_forward to auto",
    ),
    (
        rules.cpu_has_the_attention_backend,
        ("device=cpu", "kernels.attention=cudnn"),
        "kernels.attention names a backend that device cpu does not have; got cudnn; "
        "allowed: auto, default, math, flash",
    ),
    (
        rules.flash_heads_are_equally_wide,
        ("kernels.attention=flash",),
        "kernels.attention flash needs model.attention.v_head_dim = qk_nope_head_dim + qk_rope_head_dim; "
        "got 32 and 48; fix: set kernels.attention to auto",
    ),
    (
        rules.flash_on_a_gpu_has_no_mask,
        ("kernels.attention=flash", "device=cuda", "data.document_mask=true"),
        "kernels.attention flash takes no mask on a GPU, and data.document_mask needs one; "
        "fix: set kernels.attention to auto",
    ),
    (
        rules.flash_on_a_gpu_has_no_mask,
        (*ON_FLASH, "parallel.context=2", "parallel.context_method=all-gather"),
        "kernels.attention flash takes no mask on a GPU, and parallel.context_method all-gather needs one; "
        "fix: set kernels.attention to auto",
    ),
    (
        rules.flash_on_a_gpu_has_no_mask,
        (*ON_FLASH, *GQA, "model.attention.local.size=127"),
        "kernels.attention flash takes no mask on a GPU, and model.attention.local, a window, needs one; "
        "fix: set kernels.attention to auto",
    ),
    (
        rules.recorded_steps_are_made,
        ("profile.start=9", "profile.steps=3", "training.steps=10"),
        "profile.start leaves fewer than profile.steps (3) of training.steps (10); got 9; allowed: 0 to 8",
    ),
    (
        rules.recorded_steps_are_made,
        ("profile.start=1", "profile.steps=11", "training.steps=10"),
        "profile.steps is more than training.steps (10); got 11",
    ),
    (
        rules.recording_ranks_are_ranks,
        ("profile.ranks=[0, 2, 0]",),
        "profile.ranks must be numbers of ranks, each once; got [0, 2, 0]; allowed: 0, 1, 2, ...",
    ),
    (
        rules.recording_ranks_are_ranks,
        ("profile.ranks=[-1]",),
        "profile.ranks must be numbers of ranks, each once; got [-1]; allowed: 0, 1, 2, ...",
    ),
]

FINE = {
    "a name with everything": ("name=V2-lite_8l.a",),
    "one row at a time": ("training.micro_batch=1",),
    "warm-up all the way": ("schedule.warmup_steps=200",),
    "decay right after warm-up": (*WSD, "schedule.decay_steps=180"),
    "a tenth of the steps by default": WSD,
    "bf16 on a CPU, slow as it is": ("device=cpu", "training.precision=bf16"),
    "flash with equal heads": ("kernels.attention=flash", "model.attention.v_head_dim=48", "device=cuda"),
    "flash and a window as long as the row": (*ON_FLASH, *GQA, "model.attention.local.size=128"),
    "flash and chunks": (*ON_FLASH, *GQA, "model.attention.local={kind='chunk', size=32}"),
    "Triton where the device is not known yet": ("kernels.all=triton",),
    "cuDNN where the device is not known yet": ("kernels.attention=cudnn",),
    "the last steps recorded, on all ranks": ("profile.start=199", "profile.ranks=[]"),
    "many steps that are not recorded": ("profile.steps=1000",),
}


@pytest.mark.parametrize("name", ["", ".hidden", "-x", "a/b", "a b", "caf\u00e9", "a\nb", "x" * 101, ".."])
def test_a_name_that_is_no_folder_is_refused(name: str) -> None:
    run = unchecked_run(()).model_copy(update={"name": name})
    assert rules.name_is_a_folder_name(run) is not None


def test_decay_waits_for_the_warmup_to_be_mended() -> None:
    assert rules.decay_comes_after_warmup(unchecked_run((*WSD, "schedule.decay_steps=5", "training.steps=10"))) is None
