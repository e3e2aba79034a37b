"""Sums of gradients and gathers of weights beside passes change no bit, on any layout."""

from collections.abc import Callable

import pytest

from penstock.parallel import buckets
from penstock.parallel.data_overlap import BEFORE_LAYERS, OverlappedSums
from penstock.prove.play import Saved, StepFigures, follow, put_together, saved_by
from tests.closeness import assert_equal
from tests.distributed.case import MUON, WARM_UP, layout, pipeline
from tests.distributed.one_loss import start_session
from tests.distributed.pool import Pool

SMALL = ("model.layers=4", "training.micro_batch=1")
LAYOUTS = {
    "DP 2": (2, ()),
    "DP 2 in bf16, sums in bf16": (2, ("training.precision=bf16", "parallel.reduce=bf16")),
    "DP 2, optimizer whole": (2, layout("shard=none")),
    "DP 4": (4, ()),
    "DP 4, hybrid": (4, layout("shard_size=2")),
    "DP 2 x TP 2": (4, layout("tensor=2")),
    "EP 2, experts whole": (2, layout("expert=2")),
    "EP 2 x EDP 2": (4, layout("expert=2")),
    "CP 2": (2, layout("context=2")),
    "DP 2 x PP 2": (4, pipeline("1f1b", 2)),
    "DP 2 x PP 2, interleaved": (4, pipeline("interleaved", 2)),
    "DP 2 x PP 2, zb-1f1b": (4, pipeline("zb-1f1b", 2)),
    "DP 2 x PP 2, zb-v": (4, pipeline("zb-v", 2)),
    "DP 2 x PP 2 x EP 2, passes": (4, (*pipeline("dualpipe-v", 2, "expert=2"), "dispatch.overlap=passes")),
    "Muon": (2, MUON),
    "recomputed": (2, ('recompute.modules=["layer"]',)),
    "warm-up of the indexer": (2, WARM_UP),
    "tied embedding": (2, ("model.tie_word_embeddings=true",)),
}
OFTEN = ("DP 4", "EP 2 x EDP 2", "DP 2 x PP 2, zb-v")


Played = tuple[StepFigures, Saved, list[frozenset[int]]]
"""What a rank sees and would save; of each step, the places whose gradients are summed behind its passes."""


def _play(overrides: tuple[str, ...]) -> Played:
    behind: list[frozenset[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buckets, "BUCKET_VALUES", 4000)
        patch.setattr(buckets, "ROW_VALUES", 1000)
        session = start_session((*SMALL, *overrides))
        finish = OverlappedSums.finish

        def noted(sums: OverlappedSums, meanwhile: Callable[[frozenset[int]], None]) -> None:
            finish(sums, lambda places: [behind.append(places), meanwhile(places)][0])

        patch.setattr(OverlappedSums, "finish", noted)
        seen = follow(session, 3, 1e-2)
        session.state.batches.close()
        return seen, saved_by(session), behind


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=case, marks=() if case in OFTEN else pytest.mark.slow) for case in LAYOUTS]
)
def test_exchanges_beside_passes_change_no_bit(case: str, ranks: Pool) -> None:
    count, overrides = LAYOUTS[case]
    results = {value: ranks.run(count, _play, (*overrides, f"parallel.overlap={value}")) for value in ("false", "true")}
    off, on = (put_together([(seen, saved) for seen, saved, _ in results[value]]) for value in results)
    assert (on.losses, on.norms, on.held_out) == (off.losses, off.norms, off.held_out)
    assert_equal(on.tensors, off.tensors)
    behind = [places for _, _, steps in results["true"] for places in steps]
    assert len(behind) == 3 * count  # steps
    # One layer has values in the bucket of the embedding; indexers that warm up send no gradient to the layer before.
    assert overrides == WARM_UP or all(len(places - {BEFORE_LAYERS}) <= 1 for places in behind)
