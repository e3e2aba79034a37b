"""`penstock launch`: job scripts and manifests from the command line."""

import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.cli.main import main
from tests.cli import answers

LITE = ["deepseek-v2-lite", "parallel.expert=8", "--gpus-per-node", "8"]
POD = ["--image", "image", "--claim", "claim"]


def job(words: str, *more: str) -> str:
    """What a verb of `launch` prints; it may warn of the vocabulary on standard error."""
    code, out, _ = answers.outcome("launch", *words.split(), *more)
    assert code == 0
    return out


def test_slurm_prints_a_script_that_a_shell_understands() -> None:
    script = job("slurm", *LITE, *["--nodes", "2", "--account", "moe", "--name", "night"])
    subprocess.run(["bash", "-n", "-c", script], check=True)  # -n parses and runs nothing
    assert "#SBATCH --account=moe\n" in script
    assert "#SBATCH --job-name=night\n" in script
    assert '-m penstock train deepseek-v2-lite parallel.expert=8 "${@' in script
    assert "HSA_KERNARG_POOL_SIZE" not in script


def test_a_search_runs_in_a_job_of_its_own_name() -> None:
    words = [*LITE, "--nodes", "2", "--tune", "--budget", "2h"]
    script = job("slurm", *words)
    assert "#SBATCH --job-name=tune-deepseek-v2-lite\n" in script
    assert '-m penstock tune deepseek-v2-lite parallel.expert=8 --budget 2h "${@' in script
    manifest = yaml.safe_load(job("kubernetes", *words, *POD))
    assert manifest["metadata"]["name"] == "tune-deepseek-v2-lite"
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert container["args"][-4:] == ["deepseek-v2-lite", "parallel.expert=8", "--budget", "2h"]


def test_a_search_is_not_refused_for_a_layout_that_does_not_fit_the_ranks() -> None:
    words = ["launch", "slurm", "deepseek-v2-lite", "parallel.pipeline=3", "--nodes", "1", "--gpus-per-node", "8"]
    assert main(words) == 2
    assert main([*words, "--tune"]) == 0


@pytest.mark.parametrize(
    ("words", "told"), [(("--budget", "2h"), "add --tune"), (("--tune", "--budget", "long"), "--budget is no time")]
)
def test_a_wrong_budget_of_a_search_is_refused(words: tuple[str, ...], told: str) -> None:
    assert told in answers.refused("launch slurm --nodes 2", *LITE, *words)


def test_kubernetes_prints_a_manifest_for_the_vendors_gpus() -> None:
    manifest = yaml.safe_load(job("kubernetes --nodes 2 --vendor amd", *LITE, *POD))
    container = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0]
    assert container["resources"]["limits"] == {"amd.com/gpu": 8}
    assert {"name": "HSA_KERNARG_POOL_SIZE", "value": "12582912"} in container["env"]


def test_what_is_written_is_what_would_be_printed_and_force_writes_over_it() -> None:
    printed = job("slurm --nodes 2", *LITE)
    for options in ((), ("--force",)):
        assert job("slurm --nodes 2 --output job.sh", *LITE, *options) == "wrote job.sh\n"
        assert Path("job.sh").read_text() == printed
        Path("job.sh").write_text("# edited by hand")


@pytest.mark.parametrize("limit", ["90", "90:30", "48:00:00", "2-12", "2-12:30", "2-12:30:00", "UNLIMITED", "0"])
def test_every_form_of_a_time_of_slurm_is_taken(limit: str) -> None:
    assert f"#SBATCH --time={limit}\n" in job("slurm --nodes 2 --time", limit, *LITE)


@pytest.mark.parametrize(
    "image",
    ["penstock", "nvcr.io/nvidia/pytorch:25.01-py3", "localhost:5000/a/b_c:v1", f"ghcr.io/a/b@sha256:{'a1' * 32}"],
)
def test_names_of_images_are_taken(image: str) -> None:
    assert main(["launch", "kubernetes", *LITE, "--nodes", "2", "--claim", "claim", "--image", image]) == 0
