"""Which sinks a run has, what is refused before it starts, and that a sink in trouble does not end it."""

import socket
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from penstock.base.errors import DeviceError
from penstock.cli.main import main
from penstock.config.load import dump_toml
from penstock.config.run import Run
from penstock.config.training import Record
from penstock.train.run_folder import RunFolder
from penstock.train.sinks import check_sinks, open_sinks
from tests.train.tiny_run import run_start, step_report, tiny_run


@pytest.fixture(autouse=True)
def threads_as_they_were() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """As if a package were not installed."""
    monkeypatch.setattr(
        "penstock.train.sinks.find_spec", lambda name: None if name == package else find_spec("json"), raising=True
    )


def with_record(folder: Path, **changes: object) -> Run:
    return tiny_run(folder, record=Record(folder=str(folder), **({"tensorboard": False} | changes)))


@pytest.mark.parametrize(
    ("package", "changes", "message"),
    [
        (
            "wandb",
            {"wandb": "offline"},
            "record.wandb=offline needs the package wandb, which is not installed; "
            "fix: pip install 'penstock[wandb]', or record.wandb=off",
        ),
        (
            "prometheus_client",
            {"prometheus_port": 9400},
            "record.prometheus_port=9400 needs the package prometheus_client, which is not installed; "
            "fix: pip install 'penstock[prometheus]', or record.prometheus_port=0",
        ),
    ],
)
def test_a_package_that_is_missing_is_refused_before_the_run(
    package: str, changes: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    check_sinks(with_record(tmp_path))
    with pytest.raises(DeviceError) as refusal:
        check_sinks(with_record(tmp_path, **changes))
    assert str(refusal.value) == message


@pytest.mark.parametrize("is_known", [True, False])
def test_online_needs_an_account(is_known: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("wandb")
    module.login = lambda *, prompt, verify: is_known and not prompt and not verify  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.setattr("penstock.train.sinks.find_spec", lambda name: object())
    if is_known:
        check_sinks(with_record(tmp_path, wandb="online"))
        return
    with pytest.raises(DeviceError, match="needs an account"):
        check_sinks(with_record(tmp_path, wandb="online"))


def test_a_run_that_asks_for_nothing_has_its_own_record_only(tmp_path: Path) -> None:
    told = list[str]()
    for sink in open_sinks(with_record(tmp_path), RunFolder(tmp_path), 0, told.append):
        sink.started(run_start(with_record(tmp_path)))
        sink.stepped(step_report(1))
        sink.closed()
    assert (sorted(path.name for path in tmp_path.iterdir()), told) == (["metrics.jsonl", "starts.jsonl"], [])


def test_a_run_trains_to_its_end_though_its_port_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("prometheus_client")
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(dump_toml(with_record(Path("runs"))), encoding="utf-8")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["train", "tiny.toml", f"record.prometheus_port={port}"]) == 0
    out = capsys.readouterr().out
    assert out.count(f"the endpoint at 127.0.0.1:{port} is off from here on, the run goes on without it (OSError") == 1
    assert "done: 4 steps" in out


def test_a_missing_package_is_one_line_and_leaves_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hide(monkeypatch, "wandb")
    monkeypatch.chdir(tmp_path)
    Path("tiny.toml").write_text(dump_toml(with_record(Path("runs"))), encoding="utf-8")
    assert main(["train", "tiny.toml", "record.wandb=offline"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert "pip install 'penstock[wandb]'" in captured.err
    assert not Path("runs").exists()
