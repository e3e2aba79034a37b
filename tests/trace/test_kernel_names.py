"""Phases of kernels by their names, which are those of other programs as profilers wrote them."""

import csv
from pathlib import Path

from penstock.trace.analysis import analyse_traces
from penstock.trace.kernel_names import Category, generic_category, library_of, specific_category
from penstock.trace.recognize import COMMUNICATION
from penstock.tune.doctor.evidence import RunFacts
from penstock.tune.doctor.from_trace import evidence_of
from tests.trace.tiny import decoded, operator, ran, span

with (Path(__file__).parent / "data/kernel_phases.tsv").open(newline="") as table:
    KERNELS = {row["kernel"]: row["phase"] for row in csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE)}
"""Names as profilers wrote them, cut after 220 characters; the phase of each is a judgement of what it computes."""


def test_kernels_of_other_programs_have_the_phase_of_what_they_do() -> None:
    found = {name: specific_category(name) or generic_category(name) or Category.OTHER for name in KERNELS}
    assert found == KERNELS
    assert len(KERNELS) >= 400


def test_kernels_communicate_if_their_phase_does() -> None:
    for name, phase in KERNELS.items():
        is_local = phase == Category.COMBINE and library_of(name) is None  # adds up rows that are on this device
        assert (library_of(name) is not None) == (phase in COMMUNICATION and not is_local), name


def test_the_annotation_around_a_collective_decides_before_the_name_of_its_kernel() -> None:
    """Old versions of NCCL have one kernel for all collectives; trace and doctor call its time by one name."""
    kernel = "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)"
    calls = {
        "nccl:all_reduce": "all-reduce",
        "nccl:_reduce_scatter_base": "reduce-scatter",
        "nccl:all_to_all": "all-to-all",
    }
    events = [
        one
        for place, name in enumerate(calls)
        for one in (
            span(name, 100 * place, 60),
            operator("record_param_comms", 100 * place + 5, 50),
            *ran(kernel, 100 * place + 10, 1000 + 100 * place, 90),
        )
    ]
    answer = analyse_traces({0: decoded(*events)})
    assert {row.name for row in answer.ranks[0].phases.rows()} == set(calls.values())
    assert set(evidence_of(answer, RunFacts()).kinds) == set(calls.values())
