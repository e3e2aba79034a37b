"""Strange values in arguments and in the configuration: what reads them leaves them out, or refuses in a line."""

import copy
import json
import random
from typing import Any

import pytest

from penstock.base.errors import TraceError
from penstock.cli.trace_print import print_answer
from penstock.trace.analysis import analyse_traces, analysis_json
from penstock.trace.load import decode_trace
from penstock.trace.replay import replay_script
from tests.trace.synthetic_graph import Recording
from tests.trace.test_experts import grouped_events, recording
from tests.trace.test_memory import a_step
from tests.trace.test_replay import split
from tests.trace.tiny import STRANGE, kernel, places, text_of, trace_of

MORE = (*STRANGE, 3, 12, "[3, 4]", [7, 8], [[1]])


BASES = {
    "memory": trace_of(kernel("a", 0, 10, correlation=1), *a_step()),
    "graphs": Recording(layers=3).replay().content(),
    "counts": trace_of(split(80, [7, 0, 5]), *grouped_events()) | {"penstock": recording()},
}


def damaged(content: dict[str, Any], seed: int) -> bytes:
    changed, chance = copy.deepcopy(content), random.Random(seed)
    found = [place for event in changed["traceEvents"] for place in places(event.get("args", {}))]
    found += places(changed.get("penstock", {}))
    for holder, key in chance.sample(found, chance.randint(1, 3)):
        holder[key] = chance.choice(MORE)
    return text_of(changed)


@pytest.mark.parametrize("name", BASES)
def test_damaged_arguments_never_end_in_a_traceback(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    readable = 0
    for seed in range(60):
        refusal = ""
        try:
            trace = decode_trace(damaged(BASES[name], seed))
            answer = analyse_traces({0: trace})
            json.dumps(analysis_json(answer), allow_nan=False)
            print_answer(answer, by_layer=True)
            readable += 1
            if name == "counts":
                replay_script(trace, "aten::_grouped_mm")
        except TraceError as error:
            refusal = str(error)
        assert "\n" not in refusal, seed
    assert readable > 10
    assert "time on the device" in capsys.readouterr().out
