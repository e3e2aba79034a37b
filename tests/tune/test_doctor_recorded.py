"""The verdict on steps of DeepSeek-V2-Lite, cut to five layers, that were recorded on H200s under known conditions."""

import lzma
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from penstock.config.fit import grid_of, micro_batches
from penstock.trace.analysis import TraceAnalysis, analyse_files
from penstock.trace.calls import SyncKind
from penstock.trace.events import NONE
from penstock.tune.doctor.diagnosis import Diagnosis, diagnose
from penstock.tune.doctor.evidence import Evidence
from penstock.tune.doctor.from_trace import evidence_of
from penstock.tune.doctor.run_facts import facts_of
from tools.small_recording import contents, unpack

DATA = Path(__file__).parent / "data" / "recorded"
COSTS = 0.05
"""Share of the step that each other rank waits for one, from which it is named here."""

WALLS = {
    "all-to-all": "communication",
    "symmetric": "compute",
    "hot-experts": "communication",
    "slow-rank": "communication",
    "host-stalls": "host",
}
LATE = {
    "all-to-all": [(2, "host"), (1, "experts")],
    "symmetric": [(2, "experts")],
    "hot-experts": [(0, "experts"), (3, "experts"), (2, "experts")],
    "slow-rank": [(2, "compute")],
    "host-stalls": [(2, "host")],
}
FIRST_REMEDIES = {
    "all-to-all": "even-experts",
    "symmetric": "even-experts",
    "hot-experts": "even-experts",
    "slow-rank": "no-rank-is-late",
    "host-stalls": "no-host-is-late",
}
UNMATCHED = {"hot-experts": 1}
"""An all-to-all in which one rank had nothing for another, and left before that came."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A recording and what was found in it."""

    name: str
    answer: TraceAnalysis
    evidence: Evidence
    verdict: Diagnosis

    @property
    def counts(self) -> int:
        """Waits of a rank's host in a step for how many rows come: one for each layer with experts and micro-batch."""
        run, world = self.evidence.facts.run, self.evidence.facts.world
        assert run is not None and world is not None
        return 0 if run.dispatch.sync_free else run.model.moe_layers * micro_batches(run, grid_of(run, world))

    @property
    def late(self) -> list[tuple[int, str]]:
        others, total_us = len(self.evidence.ranks) - 1, self.verdict.times.total_us
        return [(one.rank, one.cause) for one in self.evidence.late if one.caused_wait_us / others >= COSTS * total_us]


@pytest.fixture(scope="module", params=WALLS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = unpack(DATA / f"{request.param}.tar.xz", tmp_path_factory.mktemp("recorded"))
    answer = analyse_files([folder])
    evidence = evidence_of(answer, *facts_of(folder))
    return Case(name=request.param, answer=answer, evidence=evidence, verdict=diagnose(evidence))


def test_the_wall_is_that_of_the_condition(case: Case) -> None:
    assert case.verdict.bottleneck == WALLS[case.name]
    assert case.verdict.sentence.startswith(f"{WALLS[case.name]}: ")


def test_ranks_that_cost_much_are_named_and_why(case: Case) -> None:
    assert case.late == LATE[case.name]


def test_the_remedy_that_wins_most_is_that_of_the_condition(case: Case) -> None:
    assert case.verdict.remedies[0].rule == FIRST_REMEDIES[case.name]


def test_nearly_all_time_on_the_devices_has_a_name(case: Case) -> None:
    assert max(one.phases.other_share for one in case.answer.ranks) < COSTS


def test_the_host_waits_for_counts_and_figures_and_for_nothing_else(case: Case) -> None:
    launches, evidence = case.evidence.launches, case.evidence
    assert launches is not None
    assert launches.synchronizations == (case.counts + 1) * evidence.steps * len(evidence.ranks)


def test_hosts_that_read_no_counts_are_not_late_by_that(case: Case) -> None:
    behind = [one.counts_idle_us for one in case.evidence.ranks]
    assert all(us is not None and (us > 0) == (case.counts > 0) for us in behind)
    offered = {one.rule for one in case.verdict.remedies}
    assert ("host-never-waits" in offered) == (case.counts > 0)


def test_recording_costs_less_than_a_tenth_where_the_device_is_busy_and_only_what_the_host_costs(case: Case) -> None:
    walls = case.verdict.times
    # A step that launches decide is slowed by each launch that is written down.
    assert 0 <= walls.share(walls.recording_us) < (0.3 if case.name == "host-stalls" else 0.1)
    assert walls.host_us + walls.communication_us + walls.memory_us + walls.compute_us + walls.recording_us == (
        pytest.approx(walls.total_us)
    )


def test_all_collectives_are_matched_but_those_that_did_not_wait(case: Case) -> None:
    assert case.evidence.unmatched == UNMATCHED.get(case.name, 0)
    assert all("no number" not in one.why for one in case.answer.collectives.unmatched)


def test_ranks_that_are_late_by_their_experts_have_the_most_rows_in_a_layer(case: Case) -> None:
    blamed = {rank for rank, cause in case.late if cause == "experts"}
    loads = case.answer.experts.loads
    if case.name != "symmetric":  # whose rows are padded to a bound
        assert blamed <= {case.answer.experts.ranks[one] for one in loads.argmax(axis=1)}


def test_every_reason_is_a_number_that_is_worth_telling(case: Case) -> None:
    for one in case.evidence.late:
        assert "0.00 ms" not in one.detail
        assert " 0% longer" not in one.detail


def test_who_is_named_waited_for_adds_up_to_what_ranks_waited(case: Case) -> None:
    steps = max(1, case.evidence.steps)
    waited_us = np.nansum(case.answer.collectives.wait_us) / steps
    named_us = defaultdict(float)
    for one in case.evidence.late:
        named_us[one.rank] += one.caused_wait_us
    for one in case.answer.collectives.stragglers():
        assert named_us[one.rank] <= one.caused_wait_us / steps + 1.0
    assert sum(named_us.values()) == pytest.approx(waited_us, rel=0.1)


def test_a_rank_is_last_only_in_collectives_that_wait(case: Case) -> None:
    collectives = case.answer.collectives
    late = collectives.meetings.met[collectives.last != NONE]
    assert (collectives.calls.sync[late.max(axis=1)] < SyncKind.ALONE).all()


def test_a_small_recording_made_smaller_again_is_the_same_to_the_byte(tmp_path: Path) -> None:
    archive = DATA / "symmetric.tar.xz"
    assert contents(unpack(archive, tmp_path)) == lzma.decompress(archive.read_bytes())
