"""Scripts that start a run on many machines: for Slurm, and a manifest for Kubernetes. Nothing is submitted.

Both start one torchrun on each machine, which starts a rank for each GPU. The launch has a name that outlives restarts,
so ranks go on from the newest checkpoint after a restart by torchrun (a crash), Slurm (a lost machine) or Kubernetes
(an eviction). All machines must see the same folder of runs.

Slurm requeues a job that lost a machine. A job that it preempts is first asked to stop; the run saves and ends, which
for Slurm is a job that failed. So the script requeues itself.
"""

import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.base.errors import ConfigError
from penstock.parallel.launch.environment import FIRST_PORT, PORTS, LaunchFacts, Vendor, settings

STOP_SECONDS = 120  # time for the current step and its checkpoint before the end of a Slurm job, or of a pod
EARLY_SECONDS = 60  # by which Slurm may send the signal too early

_SLURM_TIME = re.compile(
    r"\d+(:[0-5]?\d(:[0-5]?\d)?)?|\d+-([01]?\d|2[0-3])(:[0-5]?\d){0,2}|UNLIMITED|INFINITE", re.ASCII | re.IGNORECASE
)
_SLURM_NAME = re.compile(r"\w[\w.,@:+-]*", re.ASCII)
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_PART = r"[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?(:\d+)?/)?{_PART}(/{_PART})*(:\w[\w.-]{{0,127}})?(@[\w+.-]+:[0-9a-f]{{32,}})?",
    re.ASCII,
)
_LABEL_LENGTH, _SUBDOMAIN_LENGTH, _IMAGE_LENGTH = 63, 253, 400

_RESOURCE: dict[Vendor, str] = {"nvidia": "nvidia.com/gpu", "amd": "amd.com/gpu"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run on many machines."""

    name: str
    words: tuple[str, ...]  # behind `penstock`
    nodes: int
    gpus: int  # of each machine, and ranks on it
    cpus: int | None  # of each machine; None leaves it to the cluster
    restarts: int  # how often torchrun starts all ranks again after one has died
    facts: LaunchFacts

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every rank, and torchrun's timeout for ranks that were asked to stop."""
        return settings(self.facts) | {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(STOP_SECONDS)}

    @property
    def pod_restarts(self) -> int:
        """Of all pods, after which the job has failed: each failure may end the torchrun of every pod."""
        return self.restarts * self.nodes


def slurm_script(job: Job, options: dict[str, str], container: str | None = None, *, until_done: bool = False) -> str:
    """A script for sbatch, with options such as {"time": "24:00:00"} and a container for the pyxis plugin.

    With `until_done` the job requeues itself at its time limit too. Raises a ConfigError if Slurm would refuse an
    option, or would stop the run at its begin.
    """
    for option, value in {"name": job.name, **options}.items():
        if option == "time":
            _check(value, "--time", _SLURM_TIME, "24:00:00, 90 (minutes), 2-12 (days-hours), 2-12:30:00, UNLIMITED")
            _check_limit(value)
        else:
            _check(value, f"--{option}", _SLURM_NAME, "letters, digits and . , @ : + _ -, not first")
    if container is not None:
        _check(container, "--container", re.compile(r"[^\s-][^\s]*"), "an image or a file, without spaces")
    directives: dict[str, object] = {
        "job-name": job.name,
        "nodes": job.nodes,
        "ntasks-per-node": 1,
        "gpus-per-node": job.gpus,
        **({"cpus-per-task": job.cpus} if job.cpus else {}),
        "signal": f"TERM@{STOP_SECONDS}",
        "open-mode": "append",
        **options,
    }
    step = ["srun --kill-on-bad-exit=1" + (f" --cpus-per-task={job.cpus}" if job.cpus else "")]
    if container is not None:
        step += [f"--container-image={shlex.quote(container)}"]
        step += ['--container-mounts="$PWD:$PWD" --container-workdir="$PWD"']
    is_preempted = '[[ $facts =~ " PreemptTime="[0-9] ]]'
    ends = '[[ $facts =~ " EndTime="([0-9][^ ]*) ]]'
    seconds = '$(date --date "${BASH_REMATCH[1]}" +%s) - $(date +%s)'
    is_ending = f"{{ {ends} && (({seconds} < {STOP_SECONDS + EARLY_SECONDS})); }}"
    return _SLURM_SCRIPT.format(
        job=job,
        options="\n".join(f"#SBATCH --{name}={value}" for name, value in directives.items()),
        exports="\n".join(f'export {name}="${{{name}:-{value}}}"' for name, value in job.variables.items()),
        first_port=FIRST_PORT,
        ports=PORTS,
        step=" \\\n    ".join(step),
        words=shlex.join(job.words),
        reasons="a preemption or at its time limit" if until_done else "a preemption",
        wants_requeue=f"{is_preempted} ||\n        {is_ending}" if until_done else is_preempted,
    )


_SLURM_SCRIPT = """\
#!/bin/bash
# {job.nodes} machines x {job.gpus} GPUs = {job.facts.world} ranks. Submit it in a folder that all see.
# Words behind the script go to the run, with the number of a job array for %a: sbatch job.sh --resume
{options}
#SBATCH --requeue

set -euo pipefail

# What the rules of docs/environment.md ask for here; what is set already stays.
{exports}
export SLURM_JOB_START_TIME="${{SLURM_JOB_START_TIME:-$(date +%s)}}"  # old versions of Slurm do not set it

# The ranks meet on the first machine, at a port of this job. A job that is requeued keeps its number, so its
# run goes on from the newest checkpoint, and a search from its newest trial.
machines=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
first=${{machines%%$'\\n'*}}
port=$(({first_port} + SLURM_JOB_ID % {ports}))

code=0
{step} \\
    torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus} --max-restarts={job.restarts} \\
    --rdzv-id="slurm-$SLURM_JOB_ID" --rdzv-backend=c10d --rdzv-endpoint="$first:$port" \\
    -m penstock {words} "${{@//%a/${{SLURM_ARRAY_TASK_ID:-}}}}" || code=$?

# A run that was asked to stop has saved. After {reasons} its job requeues itself.
if ((code)); then
    job=${{SLURM_ARRAY_TASK_ID+${{SLURM_ARRAY_JOB_ID}}_}}${{SLURM_ARRAY_TASK_ID-$SLURM_JOB_ID}}
    facts=$(scontrol show job --oneliner "$job")
    if {wants_requeue}; then
        scontrol requeue "$job"
    fi
fi
exit "$code"
"""


def _check_limit(limit: str) -> None:
    """Refuse a time limit before which Slurm's signal comes with the begin of the job."""
    days, dash, rest = limit.rpartition("-")
    parts = [int(part) for part in rest.split(":")] if rest.isdigit() or ":" in rest else [0]  # UNLIMITED
    units = (3600, 60, 1) if dash or len(parts) == 3 else (60, 1)
    seconds = int(days or 0) * 86400 + sum(part * unit for part, unit in zip(parts, units, strict=False))
    if 0 < seconds <= (margin := STOP_SECONDS + EARLY_SECONDS):
        allowed = f"more than {margin // 60} minutes"
        raise ConfigError(
            "Slurm would ask the run to stop at its begin: --time is too short", got=limit, allowed=allowed
        )


Kind = Literal["pytorchjob", "trainjob"]
"""Of a job: PyTorchJob of the training operator (Trainer version 1), or TrainJob of Kubeflow Trainer (version 2)."""


def kubernetes_manifest(
    job: Job, image: str, claim: str, namespace: str | None = None, kind: Kind = "pytorchjob"
) -> str:
    """A PyTorchJob, or a TrainJob with its runtime, in YAML. Raises a ConfigError if Kubernetes would refuse a name.

    `claim` is the PersistentVolumeClaim of all pods, which holds the runs.
    """
    assert job.facts.vendor != "cpu", "a cluster without GPUs is not planned for"
    rule = "letters a to z, digits and -, which is neither first nor last"
    pod_suffix = f"-worker-{job.nodes - 1}" if kind == "pytorchjob" else f"-node-0-{job.nodes - 1}-abcde"
    _check(job.name, "--name", _LABEL, rule, _LABEL_LENGTH - len(pod_suffix))
    _check(claim, "--claim", _SUBDOMAIN, rule.replace("and -", "- and ."), _SUBDOMAIN_LENGTH)
    _check(image, "--image", _IMAGE, "registry/name:tag or name@sha256:...", _IMAGE_LENGTH)
    if namespace is not None:
        _check(namespace, "--namespace", _LABEL, rule, _LABEL_LENGTH)
    metadata = {"name": job.name} | ({"namespace": namespace} if namespace else {})
    make = _pytorch_job if kind == "pytorchjob" else _train_job
    return "---\n".join("\n".join(yaml_lines(document)) + "\n" for document in make(job, metadata, image, claim))


def _pytorch_job(job: Job, metadata: dict[str, str], image: str, claim: str) -> list[dict[str, Any]]:
    # The operator looks for a container of this name and tells it where to meet (PET_RDZV_ENDPOINT).
    pod = _pod({"name": "pytorch", "image": image, **_program(job), "resources": _resources(job)}, claim)
    elastic = {"rdzvBackend": "c10d", "rdzvId": job.name, "minReplicas": job.nodes, "maxReplicas": job.nodes}
    worker = {"replicas": job.nodes, "restartPolicy": "OnFailure", "template": {"spec": pod}}
    spec = {
        "elasticPolicy": elastic | {"maxRestarts": job.restarts},
        "runPolicy": {"backoffLimit": job.pod_restarts, "cleanPodPolicy": "Running"},
        "pytorchReplicaSpecs": {"Worker": worker},
    }
    return [{"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "metadata": metadata, "spec": spec}]


def _train_job(job: Job, metadata: dict[str, str], image: str, claim: str) -> list[dict[str, Any]]:
    # Trainer looks for `node`. It sets PET_MASTER_ADDR and _PORT, which Kubernetes replaces in arguments.
    pod = _pod({"name": "node", "image": image}, claim) | {"restartPolicy": "OnFailure"}
    node = {
        "metadata": {"labels": {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}},
        "spec": {"backoffLimit": job.pod_restarts, "template": {"spec": pod}},
    }
    job_set = {"replicatedJobs": [{"name": "node", "template": node}]}
    runtime = {"mlPolicy": {"numNodes": job.nodes, "torch": {}}, "template": {"spec": job_set}}
    endpoint = ["--rdzv-backend=c10d", "--rdzv-endpoint=$(PET_MASTER_ADDR):$(PET_MASTER_PORT)"]
    trainer = {
        "numNodes": job.nodes,
        "numProcPerNode": job.gpus,
        **_program(job, *endpoint),
        "resourcesPerNode": _resources(job),
    }
    spec = {"runtimeRef": {"kind": "TrainingRuntime", "name": job.name}, "trainer": trainer}
    version = "trainer.kubeflow.org/v1alpha1"
    return [
        {"apiVersion": version, "kind": "TrainingRuntime", "metadata": metadata, "spec": runtime},
        {"apiVersion": version, "kind": "TrainJob", "metadata": metadata, "spec": spec},
    ]


def _program(job: Job, *rendezvous: str) -> dict[str, Any]:
    torchrun = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.gpus}", f"--max-restarts={job.restarts}"]
    arguments = [word.replace("$", "$$") for word in job.words]  # Kubernetes replaces $(NAME), and $$ by $
    return {
        "command": ["torchrun"],
        "args": [*torchrun, f"--rdzv-id={job.name}", *rendezvous, "-m", "penstock", *arguments],
        "env": [{"name": name, "value": value} for name, value in job.variables.items()],
    }


def _resources(job: Job) -> dict[str, Any]:
    return {"limits": {_RESOURCE[job.facts.vendor]: job.gpus} | ({"cpu": job.cpus} if job.cpus else {})}


def _pod(container: dict[str, Any], claim: str) -> dict[str, Any]:
    """A pod with the volume of the runs, which is its working folder, and shared memory between its ranks."""
    mounts = [{"name": "workspace", "mountPath": "/workspace"}, {"name": "shared-memory", "mountPath": "/dev/shm"}]
    volumes = [
        {"name": "workspace", "persistentVolumeClaim": {"claimName": claim}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "terminationGracePeriodSeconds": STOP_SECONDS,
        "containers": [container | {"workingDir": "/workspace", "volumeMounts": mounts}],
        "volumes": volumes,
    }


def kubernetes_name(name: str) -> str:
    return re.sub(r"[^a-z0-9-]+", "-", name.lower())[:40].strip("-") or "penstock"


def _check(value: str, option: str, pattern: re.Pattern[str], allowed: str, limit: int = 255) -> None:
    if not pattern.fullmatch(value) or len(value) > limit:
        text = f"{allowed}; up to {limit} characters"
        raise ConfigError(f"{option} would be refused where the job runs", got=repr(value), allowed=text)


def yaml_lines(value: dict[str, Any] | Sequence[Any]) -> list[str]:
    """Lines of YAML: maps and lists in blocks, everything else and what is empty as JSON, which is YAML too."""
    lines: list[str] = []
    entries = (
        [(f"{key}:", inner) for key, inner in value.items()] if isinstance(value, dict) else [("-", v) for v in value]
    )
    for head, inner in entries:
        if not isinstance(inner, dict | list) or not inner:
            lines.append(f"{head} {json.dumps(inner)}")
            continue
        block = yaml_lines(inner)
        if head == "-":
            lines += [f"- {block[0]}", *(f"  {line}" for line in block[1:])]
        else:
            lines += [head, *(f"  {line}" for line in block)]
    return lines
