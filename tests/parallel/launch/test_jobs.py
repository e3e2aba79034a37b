"""Job scripts and manifests: what they say, and that a shell and a YAML parser understand them."""

import json
import os
import subprocess
import time
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator, ValidationError

from penstock.base.errors import ConfigError
from penstock.parallel.launch.environment import LaunchFacts, settings
from penstock.parallel.launch.jobs import Job, Kind, kubernetes_manifest, kubernetes_name, slurm_script, yaml_lines

JOB = Job(
    name="deep-seek-v2",
    words=("train", "deepseek-v2-lite", "parallel.expert=8", "data.files=['a b.txt']"),
    nodes=2,
    gpus=8,
    cpus=96,
    restarts=3,
    facts=LaunchFacts(vendor="nvidia", world=16, local_world=8, cores=96),
)

SCHEMAS = json.loads((Path(__file__).parent / "kubeflow" / "schemas.json").read_text())
DEFINITIONS = {
    "PyTorchJob": "KubeflowOrgV1PyTorchJob",
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
}

FAKE_SRUN = """#!/bin/bash
shift  # its own options
printf '%s\\n' "$@"
echo "NVLS=$NCCL_NVLS_ENABLE OMP=$OMP_NUM_THREADS"
exit "${CODE:-0}"
"""

FAKE_SCONTROL = """#!/bin/bash
case "$1 $2" in
    "show hostnames") printf 'gpu03\\ngpu04\\n' ;;
    "show job") echo "JobId=$4 PreemptEligibleTime=2026-11-27T03:50:39 $FACTS SuspendTime=None" ;;
    *) echo "$@" ;;
esac
"""


def run_script(script: str, folder: Path, *words: str, code: int = 0, **variables: str) -> list[str]:
    """Run a script with commands that stand in for Slurm's; what srun was asked to start, word by word.

    srun ends with the code, and `FACTS` are facts of the job. A call that requeues it is a line more.
    """
    for name, text in {"srun": FAKE_SRUN, "scontrol": FAKE_SCONTROL}.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    environment = {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "SLURM_JOB_ID": "20077", "SLURM_JOB_NODELIST": "gpu[03-04]",
    }  # fmt: skip
    call, told = ["bash", "-c", script, "job.sh", *words], {**environment, "CODE": str(code), **variables}
    done = subprocess.run(call, env=told, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def manifest(job: Job = JOB, **options: str) -> Any:
    return yaml.safe_load(kubernetes_manifest(job, image="registry/penstock:1", claim="shared", **options))


def documents(kind: Kind, job: Job = JOB, **options: str) -> list[Any]:
    return [*yaml.safe_load_all(kubernetes_manifest(job, "registry/penstock:1", "shared", kind=kind, **options))]


def check(document: Any) -> None:
    schema = SCHEMAS | {"$ref": f"#/$defs/{DEFINITIONS[document['kind']]}"}
    Draft202012Validator(schema).validate(document)


def container_of(job: Any) -> Any:
    return job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]


def test_the_script_starts_torchrun_on_each_machine(tmp_path: Path) -> None:
    words = run_script(slurm_script(JOB, {}), tmp_path)
    assert words[:2] == ["--cpus-per-task=96", "torchrun"]
    assert words[2:8] == [
        "--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-id=slurm-20077", "--rdzv-backend=c10d",
        "--rdzv-endpoint=gpu03:28077",
    ]  # fmt: skip
    assert words[8:] == ["-m", "penstock", *JOB.words, "NVLS=0 OMP=12"]
    assert run_script(slurm_script(JOB, {}), tmp_path, NCCL_NVLS_ENABLE="1")[-1] == "NVLS=1 OMP=12"
    in_container = slurm_script(JOB, {"time": "24:00:00"}, "registry/penstock:1")
    subprocess.run(["bash", "-n", "-c", in_container], check=True)


def test_words_behind_the_script_go_to_the_run(tmp_path: Path) -> None:
    script, words = slurm_script(JOB, {}), ["--resume", "data.files=['a %a.txt']", "seed=%a"]
    assert run_script(script, tmp_path, *words)[-4:-1] == ["--resume", "data.files=['a .txt']", "seed="]
    array = {"SLURM_ARRAY_JOB_ID": "20070", "SLURM_ARRAY_TASK_ID": "3"}
    assert run_script(script, tmp_path, *words, **array)[-4:-1] == ["--resume", "data.files=['a 3.txt']", "seed=3"]


def at(seconds: float) -> str:
    """A time from now as Slurm prints it."""
    return (datetime.now() + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%S")


@pytest.mark.parametrize(
    ("code", "seconds", "preempted", "until_done", "is_requeued"),
    [
        (143, 60, "2026-11-27T03:52:53", False, True),
        (143, 60, "None", False, False),  # the time limit, or a signal of the user
        (143, 60, "None", True, True),
        (143, 600, "None", True, False),  # a signal of the user
        (143, 600, "2026-11-27T03:52:53", True, True),
        (0, 60, "2026-11-27T03:52:53", True, False),  # all steps are done
    ],
)
def test_a_job_that_slurm_asked_to_stop_requeues_itself(
    code: int, seconds: float, preempted: str, until_done: bool, is_requeued: bool, tmp_path: Path
) -> None:
    script = slurm_script(JOB, {}, until_done=until_done)
    facts = f"EndTime={at(seconds)} PreemptTime={preempted}"
    array = {"SLURM_ARRAY_JOB_ID": "20070", "SLURM_ARRAY_TASK_ID": "3"}
    for variables, name in (({}, "20077"), (array, "20070_3")):
        last = run_script(script, tmp_path, code=code, FACTS=facts, **variables)[-1]
        assert (last == f"requeue {name}") == is_requeued


def test_a_job_without_a_time_limit_is_not_at_its_end(tmp_path: Path) -> None:
    script = slurm_script(JOB, {}, until_done=True)
    assert run_script(script, tmp_path, code=1, FACTS="EndTime=Unknown PreemptTime=None")[-1].startswith("NVLS=")


def test_the_start_of_the_job_is_told_where_slurm_does_not(tmp_path: Path) -> None:
    script = slurm_script(JOB, {}).replace("srun --kill", "echo $SLURM_JOB_START_TIME; srun --kill")
    assert abs(int(run_script(script, tmp_path)[0]) - time.time()) < 60
    assert run_script(script, tmp_path, SLURM_JOB_START_TIME="1764201600")[0] == "1764201600"


@pytest.mark.parametrize("limit", ["3", "2:59", "0:03:00", "0-0:3"])
def test_a_time_limit_that_slurm_signals_at_the_begin_is_refused(limit: str) -> None:
    with pytest.raises(ConfigError, match="at its begin: --time is too short; got .*; allowed: more than 3 minutes"):
        slurm_script(JOB, {"time": limit})


@pytest.mark.parametrize("limit", ["0", "4", "3:01", "0:03:01", "0-1", "1-00", "UNLIMITED", "INFINITE"])
def test_longer_limits_are_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}" in slurm_script(JOB, {"time": limit})


def test_the_options_of_sbatch_come_before_the_first_command() -> None:
    lines = slurm_script(JOB, {"time": "24:00:00", "partition": "gpu"}).splitlines()
    options = [line for line in lines if line.startswith("#SBATCH")]
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    assert lines.index(options[-1]) < first_command
    for option in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=24:00:00", "--requeue"):
        assert f"#SBATCH {option}" in options
    assert not [line for line in lines if "mem=" in line]  # the cluster's default: all memory of a node


def test_both_write_out_every_rule_that_applies() -> None:
    wanted = settings(JOB.facts)
    assert {"OMP_NUM_THREADS", "PYTORCH_ALLOC_CONF"} <= set(wanted)
    script = slurm_script(JOB, {})
    assert all(f'export {name}="${{{name}:-{value}}}"' in script for name, value in wanted.items())
    assert wanted.items() <= {entry["name"]: entry["value"] for entry in container_of(manifest())["env"]}.items()


def test_the_manifest_is_a_pytorchjob_of_as_many_workers_as_machines() -> None:
    job = manifest(namespace="training")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert job["metadata"] == {"name": "deep-seek-v2", "namespace": "training"}
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    assert (worker["replicas"], worker["restartPolicy"]) == (2, "OnFailure")
    assert job["spec"]["elasticPolicy"] == {
        "rdzvBackend": "c10d", "rdzvId": "deep-seek-v2", "minReplicas": 2, "maxReplicas": 2, "maxRestarts": 3,
    }  # fmt: skip
    container = container_of(job)
    assert container["name"] == "pytorch"
    assert container["command"] + container["args"] == [
        "torchrun", "--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-id=deep-seek-v2",
        "-m", "penstock", *JOB.words,
    ]  # fmt: skip
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "cpu": 96}


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
@pytest.mark.parametrize("nodes", [1, 4])
@pytest.mark.parametrize("namespace", [None, "training"])
def test_kubeflows_schemas_accept_the_manifest(kind: Kind, nodes: int, namespace: str | None) -> None:
    options = {} if namespace is None else {"namespace": namespace}
    for document in documents(kind, replace(JOB, nodes=nodes, cpus=None if nodes == 1 else 96), **options):
        check(document)


def test_kubeflows_schemas_refuse_a_field_that_does_not_exist() -> None:
    (job,) = documents("pytorchjob")
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    runtime, train = documents("trainjob")
    node = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    for place, document, key, value in (
        (job["spec"]["runPolicy"], job, "backOffLimit", 3),
        (worker["template"]["spec"], job, "terminationGracePeriod", 120),
        (worker["template"]["spec"]["volumes"][0], job, "name", None),
        (node["template"]["spec"], runtime, "restartPolicy", 1),
        (train["spec"]["trainer"], train, "numProcPerNode", "8"),
    ):
        before = place.get(key)
        place[key] = value
        with pytest.raises(ValidationError):
            check(document)
        place |= {key: before}
        if before is None:
            del place[key]
        check(document)


def test_a_trainjob_names_its_runtime_whose_pods_meet_at_the_address_that_trainer_gives() -> None:
    runtime, train = documents("trainjob")
    assert train["spec"]["runtimeRef"] == {"kind": "TrainingRuntime", "name": runtime["metadata"]["name"]}
    trainer, policy = train["spec"]["trainer"], runtime["spec"]["mlPolicy"]
    assert (trainer["numNodes"], trainer["numProcPerNode"], policy) == (2, 8, {"numNodes": 2, "torch": {}})
    assert trainer["args"][:6] == [
        "--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-id=deep-seek-v2", "--rdzv-backend=c10d",
        "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)",
    ]  # fmt: skip
    (node,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert node["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["containers"][0]["name"], pod["restartPolicy"]) == ("node", "node", "OnFailure")


@pytest.mark.parametrize("kind", ["pytorchjob", "trainjob"])
def test_pods_get_time_to_save_and_a_limit_of_restarts_and_dollars_stay_dollars(kind: Kind) -> None:
    words = ("train", "data.files=['$(HOME)/a']")
    text = json.dumps(documents(kind, replace(JOB, words=words)))
    assert '"terminationGracePeriodSeconds": 120' in text
    assert '"backoffLimit": 6' in text  # 3 restarts on each of 2 machines
    assert "data.files=['$$(HOME)/a']" in text  # Kubernetes makes one dollar of two, and replaces no $$(NAME)


def test_amd_gpus_have_a_name_of_their_own() -> None:
    job = Job(name="x", words=("train", "x"), nodes=1, gpus=8, cpus=None, restarts=0, facts=LaunchFacts(vendor="amd"))
    assert container_of(manifest(job))["resources"]["limits"] == {"amd.com/gpu": 8}
    assert "namespace" not in manifest(job)["metadata"]


TEXT = st.text(st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"]))  # as JSON writes these, YAML reads them
SCALARS = TEXT | st.integers(-(2**40), 2**40) | st.booleans() | st.none()
MAPS = partial(st.dictionaries, st.from_regex(r"[a-z][a-zA-Z./]{2,8}x", fullmatch=True), min_size=1, max_size=3)
FILLED = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3) | MAPS(inner) | st.just({}), max_leaves=8)


@given(MAPS(FILLED))
def test_a_parser_reads_what_was_written(value: dict[str, Any]) -> None:
    assert yaml.safe_load("\n".join(yaml_lines(value))) == value


@pytest.mark.parametrize("name", ["--x", "UPPER_case.name", "a b"])
def test_names_become_names_of_kubernetes(name: str) -> None:
    made = kubernetes_name(name)
    assert made.replace("-", "a").isalnum() and made == made.lower().strip("-")
