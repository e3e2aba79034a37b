"""Layout strings, read and written, and the split that balances cost."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.base.errors import ConfigError
from penstock.layout.stages import Stage, StageCosts, balanced_stages, parse_stages, stages_text

FIX = "fix: write it like Et*3|(t*4|)*14t*2,mL, or leave pipeline.layout empty"
SIGNS = "E, t, m, L, ( or |"

MALFORMED = {
    "": "1: the layout is empty; got the end after ''; allowed: E",
    "|": "1: the layout is empty; got '|' after ''; allowed: E",
    "|Et*3L": "1: | stands before the embedding; got '|Et*3L' after ''; allowed: E",
    "Et*2|txL": f"7: 'x' means nothing; got 'xL' after 'Et*2|t'; allowed: {SIGNS}",
    "*3": f"1: there is nothing to repeat; got '*3' after ''; allowed: {SIGNS}",
    "Et*3*2L": f"5: there is nothing to repeat; got '*2L' after 'Et*3'; allowed: {SIGNS}",
    "Et*\u00b2L": "4: there is no number after *; got '\u00b2L' after 'Et*'; allowed: a whole number >= 1",
    "Et*": "4: there is no number after *; got the end after 'Et*'; allowed: a whole number >= 1",
    "Et*00L": "4: 0 times is nothing; got '00L' after 'Et*'; allowed: a whole number >= 1",
    "Et*1000000000000L": "4: the layout is too long; got '1000000000000L' after 'Et*'; allowed: up to 100000 parts",
    "E((t*999)*999)*2L": "11: the layout is too long; got '999)*2L' after 'E((t*999)*'; allowed: up to 100000 parts",
    "E()*2L": f"3: the group is empty; got ')*2L' after 'E('; allowed: {SIGNS}",
    "E(t|(t": "5: this ( is never closed; got '(t' after 'E(t|'; allowed: a ) behind its group",
    "Et)*2L": f"3: this ) closes no group; got ')*2L' after 'Et'; allowed: {SIGNS}",
    "Et||t*2L": "4: a stage is empty; got '|t*2L' after 'Et|'; allowed: t or m or L",
    "Et|E": "4: E after |; got 'E' after 'Et|'; allowed: t or m or L",
    "EtmtL": "4: t after m; got 'tL' after 'Etm'; allowed: m or L",
    "EtLt": "4: t after L; got 't' after 'EtL'; allowed: the end",
    "E(t|)*3": "8: the layout ends without its head; got the end after 'E(t|)*3'; allowed: L",
    "E" + "t" * 50 + "?" + "t" * 50: "52: '?' means nothing; "
    f"got '?{'t' * 39}...' after '...{'t' * 40}'; allowed: {SIGNS}",
    "E" + "(" * 21 + "t" + ")" * 21 + "L": "22: too many groups inside one another; "
    f"got '(t{')' * 21}L' after 'E{'(' * 20}'; allowed: up to 20",
}

MISCOUNTED = {
    "Et*2|tL": "decoder layers (t); got 3 in 'Et*2|tL'; allowed: 4 (model.layers); fix: add 1",
    "Et*2|t*4mL": "decoder layers (t); got 6 in 'Et*2|t*4mL'; allowed: 4 (model.layers); fix: take away 2",
    "Et*2|t*2L": "multi-token prediction layers (m); got 0 in 'Et*2|t*2L'; allowed: 1 (model.mtp_layers); fix: add 1",
    "Et*4mL": "stages; got 1 in 'Et*4mL'; allowed: 2 (parallel.pipeline x pipeline.stages_per_rank); fix: add 1",
}


def stages_of(*counts: int, mtp: int = 0) -> tuple[Stage, ...]:
    """Stages with so many layers each, the embedding in the first and the head in the last."""
    ends = [sum(counts[: number + 1]) for number in range(len(counts))]
    last = len(counts) - 1
    return tuple(
        Stage(
            embed=number == 0,
            layers=tuple(range(end - count, end)),
            mtp=tuple(range(mtp)) if number == last else (),
            norm_and_head=number == last,
        )
        for number, (count, end) in enumerate(zip(counts, ends, strict=True))
    )


@pytest.mark.parametrize(
    ("text", "counts", "mtp"),
    [
        ("Et*3|(t*4|)*14t*2,mL", (3, *[4] * 14, 2), 1),
        ("EttL", (2,), 0),
        ("E|t*3|L", (0, 3, 0), 0),
        ("E | t , t | t m*2 L", (0, 2, 1), 2),
        ("E((t|)*2t*2|)*2|L", (1, 1, 2, 1, 1, 2, 0), 0),
        ("Et|t|mL", (1, 1, 0), 1),
        ("Et*2,L", (2,), 0),
        ("E|(t|)*3m*2L", (0, 1, 1, 1, 0), 2),
    ],
)
def test_a_layout_is_read_and_written_the_shortest_way(text: str, counts: tuple[int, ...], mtp: int) -> None:
    read = parse_stages(text, layers=sum(counts), mtp_layers=mtp, stages=len(counts))
    assert read == stages_of(*counts, mtp=mtp)
    if text in ("Et*3|(t*4|)*14t*2,mL", "Et*2,L", "E|(t|)*3m*2L"):
        assert stages_text(read) == text


@given(
    first=st.integers(0, 4),
    middle=st.lists(st.integers(1, 4), max_size=20),
    last=st.integers(0, 4),
    mtp=st.integers(0, 3),
)
def test_what_is_written_is_read_as_the_same(first: int, middle: list[int], last: int, mtp: int) -> None:
    counts = (first, *middle, last)
    stages = stages_of(*counts, mtp=mtp)
    read = parse_stages(stages_text(stages), layers=sum(counts), mtp_layers=mtp, stages=len(counts))
    assert read == stages


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_layout_is_refused_at_its_place(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_stages(text, layers=3, mtp_layers=0, stages=2)
    assert str(raised.value) == f"pipeline.layout at character {MALFORMED[text]}; {FIX}"


@given(text=st.text("Etm|L(*2),", max_size=14))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        stages = parse_stages(text, layers=text.count("t"), mtp_layers=text.count("m"), stages=text.count("|") + 1)
    except ConfigError as error:
        stages, refusal = (), str(error)
    if stages:
        assert stages[0].embed
        assert stages[-1].norm_and_head
    else:
        assert refusal.startswith("pipeline.layout ")


@pytest.mark.parametrize("text", MISCOUNTED)
def test_wrong_totals_are_told(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse_stages(text, layers=4, mtp_layers=1, stages=2)
    assert str(raised.value) == f"pipeline.layout has the wrong number of {MISCOUNTED[text]}, or leave it empty"


COSTS = st.one_of(st.integers(0, 5), st.sampled_from([0.5, 1.25, 2.75]))


@given(
    embed=COSTS,
    layers=st.lists(COSTS, min_size=1, max_size=7),
    mtp=st.lists(COSTS, max_size=2),
    head=COSTS,
    data=st.data(),
)
def test_the_dearest_stage_is_as_cheap_as_it_can_be_and_the_rest_as_even(
    embed: float, layers: list[float], mtp: list[float], head: float, data: st.DataObject
) -> None:
    count = data.draw(st.integers(1, len(layers) + 2))
    costs = StageCosts(embed=embed, layers=tuple(layers), mtp=tuple(mtp), head=head)
    stages = balanced_stages(layers=len(layers), mtp_layers=len(mtp), stages=count, costs=costs)
    text = stages_text(stages)
    assert parse_stages(text, layers=len(layers), mtp_layers=len(mtp), stages=count) == stages
    found = [costs.of(stage) for stage in stages]
    parts = [embed, *layers, head + sum(mtp)]
    splits = [
        [sum(parts[start:end]) for start, end in pairwise((0, *cuts, len(parts)))]
        for cuts in combinations(range(1, len(parts)), count - 1)
    ]
    assert max(found) == min(map(max, splits))
    even = min(sum(cost**2 for cost in split) for split in splits if max(split) == max(found))
    assert sum(cost**2 for cost in found) == even


@pytest.mark.parametrize(
    ("costs", "stages", "text"),
    [
        (StageCosts(embed=0, layers=(1.0,) * 6, mtp=(2.0,), head=1), 3, "Et*3|t*3|mL"),
        (StageCosts(embed=0, layers=(1.0,) * 5, head=0), 2, "Et*2|t*3,L"),
    ],
    ids=["cost decides, not the number of layers", "of equal splits later stages hold more"],
)
def test_balanced_stages_by_example(costs: StageCosts, stages: int, text: str) -> None:
    layers, mtp = len(costs.layers), len(costs.mtp)
    assert stages_text(balanced_stages(layers=layers, mtp_layers=mtp, stages=stages, costs=costs)) == text


def test_more_stages_than_parts_are_refused() -> None:
    costs = StageCosts(embed=0, layers=(1.0,) * 2, head=1)
    with pytest.raises(ConfigError, match=r"a model of 2 layers is too short for .* stages; got 5; allowed: up to 4"):
        balanced_stages(layers=2, mtp_layers=0, stages=5, costs=costs)
