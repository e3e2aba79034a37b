"""Ways are timed by replayed graphs where there is a GPU, and what no graph holds is named."""

import pytest
import torch
from torch import Tensor

from benchmarks.kernels.replays import replay_in_turns


def test_on_a_cpu_each_way_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    ran: list[str] = []

    def way(name: str) -> Tensor:
        ran.append(name)
        return torch.zeros(1)

    times, not_captured = replay_in_turns({"one": lambda: way("one"), "other": lambda: way("other")}, rounds=3)
    assert ran == ["one", "other"] and set(times) == set(ran) and min(times.values()) >= 0 and not not_captured


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_runs_as_many_calls_as_are_captured_and_what_waits_is_launched() -> None:
    total, rounds, calls = torch.zeros(1, device="cuda"), 2, 3

    def waits() -> Tensor:
        return torch.zeros(1, device="cuda") + total.item()

    before = torch.cuda.current_stream()
    times, not_captured = replay_in_turns({"waits": waits, "adds": lambda: total.add_(1)}, rounds, calls)
    assert list(not_captured) == ["waits"] and min(times.values()) > 0
    assert torch.cuda.current_stream() == before, "a failed capture leaves its stream"
    # once to compile, and in each turn one replay that is not counted and two that are
    assert total.item() == 1 + rounds * 3 * calls
