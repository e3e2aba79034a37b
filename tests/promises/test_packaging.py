"""A fresh machine needs two commands, and `pip install .` never touches the PyTorch that a user chose."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

import penstock
from tools import style, torch_build

PROJECT = tomllib.loads((style.ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
CONSTRAINTS = (style.ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
FAKE_PYTHON = """
echo "$*" >> calls
case "$*" in
  *+cpu*) test -e has_cpu_build ;;
  *"import triton"*) exit 1 ;;
esac
"""
"""Stands in for .venv/bin/python: writes down what it was asked, and has a CPU build only if the test says so."""


def name_of(requirement: str) -> str:
    """Name of a requirement, in the one spelling that package indexes compare by."""
    return re.sub(r"[-_.]+", "-", re.match(r"[\w.-]+", requirement)[0]).lower()  # type: ignore[index]


def run_make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make in a folder as a user would, free of what an outer make left in the environment.

    Programs in the folder's `programs` come first on PATH. Those that ask for GPUs find none unless they are there.
    """
    programs, command = folder / "programs", ["make", *arguments]
    for name in ("nvidia-smi", "rocminfo"):
        if not (programs / name).exists():
            make_program(programs / name, "exit 9")  # as without a driver
    environment = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def make_program(path: Path, script: str) -> None:
    """A program of a few lines of shell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with what the Makefile reads, and no environment."""
    for name in ("Makefile", "constraints.txt", "pyproject.toml"):
        shutil.copy(style.ROOT / name, tmp_path)
    (tmp_path / "tools").mkdir()
    shutil.copy(style.ROOT / "tools/torch_build.py", tmp_path / "tools")
    return tmp_path


@pytest.fixture
def fake_environment(checkout: Path) -> Path:
    """The same with an environment whose Python only writes down what it is asked."""
    make_program(checkout / ".venv/bin/python", FAKE_PYTHON)
    (checkout / ".venv/stamps").mkdir()
    (checkout / ".venv/stamps/made").touch()  # make believes that the environment was made
    return checkout


def test_every_dependency_is_pinned_to_one_exact_version() -> None:
    requirements = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    lines = [line for line in CONSTRAINTS if line and not line.startswith("#")]
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
    # Triton's version belongs to PyTorch's build; the Makefile has it.
    assert {name_of(requirement) for requirement in requirements} - set(map(name_of, lines)) == {"triton"}


def test_dependencies_have_lower_bounds_only() -> None:
    assert [line for line in PROJECT["dependencies"] if not re.fullmatch(r"[\w-]+>=[\d.]+", line)] == []
    assert "torch>=2.11" in PROJECT["dependencies"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install .` installs."""
    folder = tmp_path_factory.mktemp("wheel")
    tree, out = folder / "tree", folder / "out"
    tree.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(style.ROOT / name, tree)
    for name in ("penstock", "tools", "tests"):  # only the first may be in the wheel
        shutil.copytree(style.ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", out, "."]
    subprocess.run(command, cwd=tree, check=True)
    return next(out.glob("penstock-*.whl"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry_points = archive.read(next(name for name in names if name.endswith("entry_points.txt"))).decode()
    package = {
        path.relative_to(style.ROOT).as_posix()
        for path in (style.ROOT / "penstock").rglob("*.*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert {name for name in names if ".dist-info/" not in name} == package
    assert wheel.name.startswith(f"penstock-{penstock.__version__}-")
    assert "penstock = penstock.__main__:main" in entry_points


@pytest.mark.slow
def test_the_wheel_is_fit_for_an_index(wheel: Path) -> None:
    pytest.importorskip("twine")  # `make wheel` and `make test-all` install it
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)


@pytest.mark.slow
def test_the_wheel_works_in_an_empty_environment(wheel: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment; data, such as that of hardware, comes from the wheel."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    venv.create(tmp_path / "new", with_pip=True)
    programs = tmp_path / "new/bin"

    def answer(*command: str | Path) -> str:
        result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        return result.stdout

    answer(programs / "pip", "install", "--no-index", "--no-deps", wheel)
    installed = Path(
        answer(programs / "python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    )
    # Of a folder that a .pth names no other .pth is read: the editable Penstock there stays out.
    (installed / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    origin = answer(programs / "python", "-c", "import penstock; print(penstock.__file__)")
    assert Path(origin.strip()).is_relative_to(installed)
    for line in (
        "plan debug-2l --on 2xH200 --layout ep=2 training.global_batch=8 --html plan.html",
        "train debug training.steps=3 --name first",
        "evaluate runs/first --rows 8",
        "kernels list deepseek-v2-lite --device H200",
    ):
        answer(programs / "penstock", *line.split())
    start = json.loads((tmp_path / "runs/first/starts.jsonl").read_text(encoding="utf-8"))
    assert start["penstock"] == penstock.__version__


def test_make_alone_says_what_it_can_do(checkout: Path) -> None:
    result = run_make(checkout)
    assert result.returncode == 0, result.stderr
    for target in ("train", "test", "docs", "lint", "wheel", "clean"):
        assert f"  {target}\t" in result.stdout


def test_an_old_python_is_refused_with_its_version(checkout: Path) -> None:
    make_program(checkout / "old", '[ "$1" = --version ] && echo Python 3.9.2 && exit 0\nexit 1')
    result = run_make(checkout, "train", "PYTHON=./old")
    assert result.returncode != 0
    assert "needs Python 3.11 or newer; ./old is: Python 3.9.2" in result.stderr
    assert "make train PYTHON=" in result.stderr
    assert not (checkout / ".venv").exists()


def set_up(environment: Path, *arguments: str) -> tuple[str, str]:
    """`make setup`: its output, and what Python was asked; empty if it was not."""
    result, calls = run_make(environment, "setup", *arguments), environment / "calls"
    assert result.returncode == 0, result.stderr
    return result.stdout, calls.read_text() if calls.exists() else ""


def test_a_cpu_build_among_pips_own_sources_is_taken(fake_environment: Path) -> None:
    (fake_environment / "has_cpu_build").touch()
    _, calls = set_up(fake_environment)
    assert re.search(r"torch==[\d.]+\+cpu$", calls, re.MULTILINE)
    assert "--extra-index-url" not in calls


def test_without_a_cpu_build_pytorchs_own_index_is_asked(fake_environment: Path) -> None:
    _, calls = set_up(fake_environment, "TORCH_INDEX=file:///elsewhere")
    assert re.search(r"--extra-index-url file:///elsewhere torch==[\d.]+$", calls, re.MULTILINE)


H200 = "580.65.06, 9.0, NVIDIA H200"
GPUS = [
    ("nvidia-smi", f"{H200}\n{H200}", "cu130", "NVIDIA H200, driver 580.65.06"),
    ("nvidia-smi", "550.54.15, 9.0, NVIDIA H100 80GB HBM3", "cu126", "CUDA 13 needs driver 580"),
    ("nvidia-smi", "580.65.06, 7.0, Tesla V100-SXM2-16GB", "cu126", "a GPU of 2018 or newer"),
    ("nvidia-smi", "570.86.15, 10.0, NVIDIA B200", "cpu", "driver 570.86.15: too old for this GPU"),
    ("nvidia-smi", "470.256.02, 8.0, NVIDIA A100-SXM4-40GB", "cpu", "a driver 580 or newer"),
    ("nvidia-smi", "Failed to initialize NVML: Driver/library version mismatch", "cpu", "no GPU found"),
    ("rocminfo", "  Name:                    gfx942\n  Marketing Name:   AMD Instinct MI300X", "rocm7.2", "AMD gfx942"),
    ("rocminfo", "  Name:                    gfx90c", "cpu", "AMD gfx90c"),
    ("rocminfo", "ROCk module is NOT loaded, possibly no GPU devices", "cpu", "no GPU found"),
]
"""What asks the driver, what it prints, and which build of PyTorch is taken for that."""


@pytest.mark.parametrize(("program", "answer", "build", "why"), GPUS)
def test_the_build_of_pytorch_is_that_of_the_gpu_and_its_driver(
    program: str, answer: str, build: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_program(tmp_path / program, f"cat <<'END'\n{answer}\nEND")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    choice = torch_build.choose()
    assert choice.build == build and why in choice.why


def test_a_driver_that_fails_or_hangs_leaves_the_build_for_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(torch_build, "PATIENCE_SECONDS", 0.2)
    for script in (f"echo {H200}; exit 9", "exec sleep 20", "printf '\\377'"):
        make_program(tmp_path / "nvidia-smi", script)
        assert torch_build.choose() == torch_build.Choice("cpu", "no GPU found")


def test_make_says_which_build_it_takes_and_how_to_take_another(fake_environment: Path) -> None:
    make_program(fake_environment / "programs/nvidia-smi", f"echo '{H200}'")
    said, calls = set_up(fake_environment)
    assert "PyTorch build cu130: NVIDIA H200, driver 580.65.06. Another one: make setup TORCH_BUILD=cpu" in said
    assert re.search(r"torch==[\d.]+\+cu130$", calls, re.MULTILINE)


def test_a_build_that_was_taken_stays(fake_environment: Path) -> None:
    """Also if the driver does not answer the next time, and after a choice of the user."""
    (fake_environment / "has_cpu_build").touch()
    make_program(fake_environment / "programs/nvidia-smi", f"echo '{H200}'")
    assert "PyTorch build cpu: asked for" in set_up(fake_environment, "TORCH_BUILD=cpu")[0]
    (fake_environment / "calls").unlink()
    assert set_up(fake_environment)[1] == ""


def test_setting_up_again_does_nothing_until_a_constraint_changes(fake_environment: Path) -> None:
    set_up(fake_environment)
    (fake_environment / "calls").unlink()
    assert set_up(fake_environment)[1] == ""
    with (fake_environment / "constraints.txt").open("a") as file:
        file.write("another==1.0\n")
    assert "--editable" in set_up(fake_environment)[1]


def test_continuous_integration_runs_make_test() -> None:
    script = style.ROOT / ".ci/run"
    assert os.access(script, os.X_OK), ".ci/run is not executable"
    assert script.read_text(encoding="utf-8").splitlines()[-1] == "make test"
