"""Variables of the shell that hurt."""

import pytest

from penstock.parallel.launch.environment import LaunchFacts, settings
from penstock.tune.preflight.versions import HARMFUL, check_environment


def test_a_clean_shell_passes() -> None:
    (check,) = check_environment({}, has_gpu=True)
    assert (check.status, check.got) == ("ok", f"none of {len(HARMFUL)} that hurt is set")


@pytest.mark.parametrize(
    ("name", "value", "hurts"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NCCL_P2P_DISABLE", "1", True),
        ("NCCL_P2P_DISABLE", "0", False),
        ("NCCL_DEBUG", "info", True),
        ("NCCL_DEBUG", "WARN", False),
        ("NCCL_ALGO", "Tree", True),
        ("GPU_MAX_HW_QUEUES", "2", False),
        ("PYTHONMALLOC", "malloc_debug", True),
    ],
)
def test_a_variable_hurts_by_its_value(name: str, value: str, hurts: bool) -> None:
    (check,) = check_environment({name: value}, has_gpu=True)
    assert (check.status == "warning") is hurts
    assert (check.fix == f"unset {name}") is hurts


def test_the_interpreter_of_triton_spoils_a_run_on_gpus_only() -> None:
    assert [one.status for one in check_environment({"TRITON_INTERPRET": "1"}, has_gpu=True)] == ["failed"]
    assert [one.status for one in check_environment({"TRITON_INTERPRET": "1"}, has_gpu=False)] == ["warning"]


def test_every_variable_that_hurts_is_told() -> None:
    found = check_environment({"NCCL_IB_DISABLE": "1", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, has_gpu=True)
    assert [one.name for one in found] == ["NCCL_IB_DISABLE", "TORCH_DISTRIBUTED_DEBUG"]


@pytest.mark.parametrize("vendor", ["nvidia", "amd", "cpu"])
def test_what_penstock_sets_itself_hurts_nowhere(vendor: str) -> None:
    set_here = settings(LaunchFacts(vendor=vendor, world=16, local_world=8, cores=64))  # type: ignore[arg-type]
    assert [one.name for one in check_environment(set_here, has_gpu=True) if one.status != "ok"] == []
