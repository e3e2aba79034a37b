"""`penstock launch`: print what starts a run on many machines.

    penstock launch slurm deepseek-v2-lite --nodes 4 --gpus-per-node 8 --time 24:00:00 > job.sh
    penstock launch kubernetes deepseek-v2-lite --nodes 4 --gpus-per-node 8 --image IMAGE --claim CLAIM
    penstock launch slurm deepseek-v2-lite --nodes 4 --gpus-per-node 8 --tune --budget 2h > tune.sh    a search there

The run is checked against its ranks first, so a layout that does not fit is refused here and not after an hour in the
queue. On one machine nothing of this is needed: `penstock train` starts a rank for each GPU.
"""

from pathlib import Path
from typing import Annotated, Literal

import typer

from penstock.base.errors import ConfigError
from penstock.cli.config import warn_of_unfilled
from penstock.cli.output import budget_seconds, check_output, print_or_write
from penstock.cli.verbs import Force, Overrides, group_app
from penstock.config.fit import grid_of
from penstock.config.load import load_run
from penstock.config.run import Run
from penstock.parallel.launch.environment import LaunchFacts
from penstock.parallel.launch.jobs import Job, Kind, kubernetes_manifest, kubernetes_name, slurm_script
from penstock.parallel.launch.local import facts_of_run

Target = Annotated[str, typer.Argument(metavar="TARGET", help="A preset or a TOML file, as the machines see it.")]
Nodes = Annotated[int, typer.Option("--nodes", min=1, help="Machines.")]
Gpus = Annotated[int, typer.Option("--gpus-per-node", min=1, help="GPUs of each machine, and so its ranks.")]
Cpus = Annotated[int | None, typer.Option("--cpus-per-node", min=1, max=65_536, help="CPU cores of each machine.")]
Restarts = Annotated[int, typer.Option("--restarts", min=0, help="Start all ranks again after one died.")]
Vendor = Annotated[Literal["nvidia", "amd"], typer.Option("--vendor", help="Whose GPUs they are.")]
Output = Annotated[Path | None, typer.Option("--output", help="Write to this file instead of printing.")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the job, instead of the run's.")]
Tune = Annotated[bool, typer.Option("--tune", help="Search for the fastest configuration instead: penstock tune.")]
Budget = Annotated[str | None, typer.Option("--budget", metavar="TIME", help="Time of such a search: 90s, 20m, 2h.")]

app = group_app("Print a job script for Slurm, or a manifest for Kubernetes.")


@app.command()
def slurm(  # noqa: PLR0913 (a parameter is an option)
    target: Target,
    nodes: Nodes,
    gpus: Gpus,
    overrides: Overrides = None,
    cpus: Cpus = None,
    restarts: Restarts = 3,
    vendor: Vendor = "nvidia",
    name: Name = None,
    time: Annotated[str | None, typer.Option("--time", help="Time limit, such as 24:00:00.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", help="Partition.")] = None,
    account: Annotated[str | None, typer.Option("--account", help="Account.")] = None,
    container: Annotated[str | None, typer.Option("--container", help="Image for the pyxis plugin.")] = None,
    until_done: Annotated[bool, typer.Option("--until-done", help="Requeue the job at its time limit.")] = False,
    tune: Tune = False,
    budget: Budget = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Print a script for sbatch."""
    check_output(output, "--output", force=force)
    run = load_run(target, overrides or ())
    call = _words(target, overrides, budget, tune=tune)
    job = _job(run, call, f"{'tune-' * tune}{run.name}" if name is None else name, nodes, gpus, cpus, restarts, vendor)
    wanted = {"time": time, "partition": partition, "account": account}
    options = {option: value for option, value in wanted.items() if value is not None}
    print_or_write(slurm_script(job, options, container, until_done=until_done), output)
    warn_of_unfilled(run)


@app.command()
def kubernetes(  # noqa: PLR0913 (a parameter is an option)
    target: Target,
    nodes: Nodes,
    gpus: Gpus,
    image: Annotated[str, typer.Option("--image", help="Container image with PyTorch and Penstock.")],
    claim: Annotated[str, typer.Option("--claim", help="PersistentVolumeClaim that all pods share.")],
    overrides: Overrides = None,
    cpus: Cpus = None,
    restarts: Restarts = 3,
    vendor: Vendor = "nvidia",
    name: Name = None,
    namespace: Annotated[str | None, typer.Option("--namespace", help="Namespace of the job.")] = None,
    kind: Annotated[Kind, typer.Option("--kind", help="PyTorchJob, or TrainJob of Kubeflow Trainer.")] = "pytorchjob",
    tune: Tune = False,
    budget: Budget = None,
    output: Output = None,
    force: Force = False,
) -> None:
    """Print a PyTorchJob (kubeflow.org/v1) or a TrainJob (trainer.kubeflow.org/v1alpha1)."""
    check_output(output, "--output", force=force)
    run = load_run(target, overrides or ())
    call = _words(target, overrides, budget, tune=tune)
    usual = kubernetes_name(f"{'tune-' * tune}{run.name}")
    job = _job(run, call, usual if name is None else name, nodes, gpus, cpus, restarts, vendor)
    print_or_write(kubernetes_manifest(job, image, claim, namespace, kind), output)
    warn_of_unfilled(run)


def _words(target: str, overrides: list[str] | None, budget: str | None, *, tune: bool) -> tuple[str, ...]:
    if budget is not None and not tune:
        raise ConfigError("--budget is the time of a search", got=f"--budget {budget}", fix="add --tune")
    if budget is not None:
        budget_seconds(budget)
    search = () if budget is None else ("--budget", budget)
    return ("tune" if tune else "train", target, *(overrides or ()), *search)


def _job(
    run: Run, call: tuple[str, ...], name: str, nodes: int, gpus: int, cpus: int | None, restarts: int, vendor: Vendor
) -> Job:
    """The run on its machines, checked against its ranks."""
    if call[0] == "train":  # a search takes a planned layout where this one does not fit
        grid_of(run, nodes * gpus)  # refuses a layout that does not fit
    facts = facts_of_run(run, LaunchFacts(vendor=vendor, world=nodes * gpus, local_world=gpus, cores=cpus or 0))
    return Job(name=name, words=call, nodes=nodes, gpus=gpus, cpus=cpus, restarts=restarts, facts=facts)
