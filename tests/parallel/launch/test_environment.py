"""What the shell and the launchers say, and what libraries are told."""

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import DeviceError
from penstock.parallel.launch.environment import (
    READ,
    RULES,
    SPIN_COUNT,
    Environment,
    LaunchFacts,
    environment_line,
    facts_of_machine,
    prepare_environment,
    read_environment,
    settings,
    variables_of_rank,
    variables_of_trial,
)
from tools.pages import environment_page

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SRUN = {
    "SLURM_PROCID": "9", "SLURM_STEP_NUM_TASKS": "12", "SLURM_LOCALID": "1", "SLURM_NODEID": "2",
    "SLURM_STEP_TASKS_PER_NODE": "4(x3)", "SLURM_STEP_NODELIST": "gpu[03-05],spare7", "SLURM_JOB_ID": "20077",
    "SLURM_STEP_ID": "0", "SLURM_CPUS_PER_TASK": "6", "SLURM_RESTART_COUNT": "1", "SLURM_JOB_START_TIME": "1764201600",
}  # fmt: skip
NVIDIA = LaunchFacts(vendor="nvidia", world=16, local_world=8, cores=96)


@pytest.fixture(autouse=True)
def environment_as_it_was() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


# What is read


def test_what_the_shell_says_is_read() -> None:
    plain = Environment(color=True, threads=None, world_size=1)
    assert read_environment({}) == read_environment({"NO_COLOR": "", "OMP_NUM_THREADS": ""}) == plain
    told = read_environment({"NO_COLOR": "1", "OMP_NUM_THREADS": "4"})
    assert told == Environment(color=False, threads=4, world_size=1)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, (8, 5, 1, 4, "torchrun", "job", 2, "10.0.0.1:29500", False, None, None)),
        (
            TORCHRUN | {"TORCHELASTIC_USE_AGENT_STORE": ""},  # variables that are set by hand
            (8, 5, 1, 4, "torchrun", "job", 2, "10.0.0.1:29500", True, None, None),
        ),
        (SRUN, (12, 9, 1, 4, "srun", "slurm-20077.0", 1, "gpu03:28077", True, 6, 1_764_201_600)),
        (
            SRUN | TORCHRUN,
            (8, 5, 1, 4, "torchrun", "job", 2, "10.0.0.1:29500", False, None, 1_764_201_600),
        ),  # torchrun inside a step of srun
    ],
)
def test_the_launcher_says_which_rank_this_is(variables: dict[str, str], expected: tuple[object, ...]) -> None:
    found = vars(read_environment(variables))
    assert tuple(value for name, value in found.items() if name not in ("color", "threads")) == expected


def test_a_rank_of_a_trial_has_the_place_of_the_process_beside_it_and_a_launch_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for launcher in (SRUN, TORCHRUN):
        with monkeypatch.context() as shell:
            for name, value in launcher.items():
                shell.setenv(name, value)
            beside, trial = read_environment(), read_environment(variables_of_trial("trial-3"))
        assert trial.launch == "trial-3"
        assert not trial.holds_store, "the process beside it holds it, or torchrun"
        assert replace(trial, launch=beside.launch, holds_store=beside.holds_store, restarts=beside.restarts) == beside


def test_a_batch_script_is_no_rank_and_a_launch_may_have_no_name() -> None:
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "16", "SLURM_JOB_ID": "1"}
    assert read_environment(batch) == read_environment({})
    assert read_environment({**SRUN, "SLURM_STEP_NUM_TASKS": "1"}).started_by == ""
    assert read_environment({**TORCHRUN, "TORCHELASTIC_RUN_ID": "none"}).launch == ""


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node7", "node7"), ("a1,a2", "a1"), ("n[012-014,20]", "n012"), ("x[3,9]-ib", "x3-ib"), ("", "localhost")],
)
def test_ranks_of_srun_meet_on_the_first_machine(nodes: str, first: str) -> None:
    assert read_environment({**SRUN, "SLURM_STEP_NODELIST": nodes}).meeting_point == f"{first}:28077"
    by_hand = {**SRUN, "MASTER_ADDR": "fe80::1", "MASTER_PORT": "5"}
    assert read_environment(by_hand).meeting_point == "[fe80::1]:5"


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({**TORCHRUN, "RANK": "8"}, "RANK contradicts the number of processes; got 8; allowed: 0 to 7"),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, "LOCAL_RANK contradicts"),
        ({"WORLD_SIZE": "8"}, "need MASTER_ADDR and MASTER_PORT.*torchrun"),
        ({**TORCHRUN, "WORLD_SIZE": "all"}, "WORLD_SIZE must be a whole number"),
        ({**SRUN, "SLURM_PROCID": "12"}, "SLURM_PROCID contradicts"),
        ({**SRUN, "SLURM_LOCALID": "4"}, "SLURM_LOCALID contradicts"),
    ],
)
def test_contradictions_are_refused(wrong: dict[str, str], message: str) -> None:
    with pytest.raises(DeviceError, match=message):
        read_environment(wrong)


@pytest.mark.parametrize("text", ["many", "0", "-1", "2.5", "\N{SUPERSCRIPT TWO}"])  # isdigit accepts the last
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DeviceError, match="OMP_NUM_THREADS must be a whole number"):
        read_environment({"OMP_NUM_THREADS": text})


# What is set


def test_waiting_threads_sleep_soon_unless_the_shell_says_otherwise() -> None:
    for shell, spins in (({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None), ({}, SPIN_COUNT)):
        for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
            os.environ.pop(name, None)
        os.environ.update(shell)
        prepare_environment()
        assert os.environ.get("GOMP_SPINCOUNT") == spins


@pytest.mark.parametrize(
    ("facts", "there", "not_there"),
    [
        (LaunchFacts(), f"GOMP_SPINCOUNT={SPIN_COUNT}", "OMP_NUM_THREADS PYTORCH_ALLOC_CONF GLOO_SOCKET_IFNAME"),
        (
            LaunchFacts(world=4, local_world=4, cores=10),
            "OMP_NUM_THREADS=2 GLOO_SOCKET_IFNAME=lo",
            "NCCL_NVLS_ENABLE HSA_KERNARG_POOL_SIZE",
        ),
        (LaunchFacts(world=8, local_world=4), "", "OMP_NUM_THREADS GLOO_SOCKET_IFNAME"),
        (
            NVIDIA,
            "PYTORCH_ALLOC_CONF=expandable_segments:True NCCL_NVLS_ENABLE=0 OMP_NUM_THREADS=12",
            "HSA_KERNARG_POOL_SIZE GPU_MAX_HW_QUEUES NCCL_ALGO",
        ),
        (LaunchFacts(vendor="nvidia"), "", "NCCL_NVLS_ENABLE TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING=0"),
        (LaunchFacts(vendor="amd"), "HSA_KERNARG_POOL_SIZE=12582912", "GPU_MAX_HW_QUEUES NCCL_NVLS_ENABLE"),
        (LaunchFacts(vendor="amd", world=8), "GPU_MAX_HW_QUEUES=2 TORCH_NCCL_HIGH_PRIORITY=1", ""),
        (LaunchFacts(deterministic=True), "CUBLAS_WORKSPACE_CONFIG=:4096:8", "NCCL_ALGO"),
        (LaunchFacts(vendor="amd", world=2, deterministic=True), "NCCL_ALGO=Ring", ""),
    ],
)
def test_the_facts_decide_what_is_set(facts: LaunchFacts, there: str, not_there: str) -> None:
    wanted = settings(facts)
    assert {*there.split()} <= {f"{name}={value}" for name, value in wanted.items()}
    assert not {*not_there.split()} & set(wanted)


def test_every_rule_can_be_overridden_by_every_name_of_its_variable() -> None:
    facts = LaunchFacts(vendor="nvidia", world=4, local_world=4, cores=8, deterministic=True)
    for rule in RULES:
        for name in (rule.name, *rule.also):
            os.environ.clear()
            os.environ[name] = "mine"  # the shell's
            prepare_environment(facts)
            assert os.environ[name] == "mine"
            assert name == rule.name or rule.name not in os.environ


def test_a_launcher_sets_it_for_its_ranks_only() -> None:
    os.environ.clear()
    os.environ["NCCL_NVLS_ENABLE"] = "1"
    variables = variables_of_rank(NVIDIA, 3, "job", 1, "127.0.0.1", 29500)
    assert (settings(NVIDIA) | {"NCCL_NVLS_ENABLE": "1"}).items() <= variables.items()
    assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_WORLD_SIZE"]) == ("3", "16", "8")
    assert dict(os.environ) == {"NCCL_NVLS_ENABLE": "1"}


@given(st.integers(1, 64), st.integers(1, 64))
def test_processes_of_a_machine_never_start_more_threads_than_it_has_cores(cores: int, processes: int) -> None:
    facts = LaunchFacts(world=processes + 1, local_world=processes, cores=cores)
    threads = int(settings(facts).get("OMP_NUM_THREADS", "1"))
    assert threads >= 1 and threads * processes <= max(cores, processes)
    assert facts_of_machine(read_environment(SRUN)).cores_each == 6  # Slurm's word, not the machine's cores


def test_one_line_says_what_is_in_force() -> None:
    variables = {"GOMP_SPINCOUNT": SPIN_COUNT, "OMP_NUM_THREADS": "3", "PATH": "/bin"}
    line = f"GOMP_SPINCOUNT={SPIN_COUNT}; from the shell: OMP_NUM_THREADS=3"
    assert environment_line(LaunchFacts(), variables) == line
    assert environment_line(LaunchFacts(), {"OMP_WAIT_POLICY": "PASSIVE"}) == "from the shell: OMP_WAIT_POLICY=PASSIVE"


def test_the_page_names_every_variable_that_is_set_or_read() -> None:
    page = environment_page()
    assert all(f"| `{rule.name}` |" in page for rule in RULES)
    assert all(f"`{name}`" in page for names in READ for name in names.split(", "))


def test_the_command_line_sets_it_before_torch_is_loaded() -> None:
    code = "import sys, penstock.cli.main; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
