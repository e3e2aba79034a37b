"""A run with moments in 8 bits that goes on in another layout."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from penstock.kernels.adamw import ROOT_DECADES, SIGNED_DECADES, dequantize, quantize
from penstock.prove.composition import composition_of
from penstock.prove.play import StepFigures
from penstock.prove.proof import Prover
from penstock.prove.ranks import Assignment, Played


@dataclass
class ReadRanks:
    """Ranks whose second half of a run begins with another tensor than the first half has saved."""

    name: str
    saved: torch.Tensor
    read: torch.Tensor

    def play(self, ranks: int, part: Assignment) -> list[Played]:
        names = ("model.a", "moment1.a", "moment2.a")
        first = dict.fromkeys(names, self.saved if part.first else torch.zeros_like(self.saved))
        if part.first:
            first[self.name] = self.read
        start, end = (
            [(name, tuple(tensor.shape), [((0, 0), tensor)]) for name, tensor in tensors.items()]
            for tensors in (first, dict.fromkeys(names, self.saved))
        )
        trace = StepFigures([4.0] * part.steps, [1.0] * part.steps, [0.0] * part.steps, 0.0, [0], {})
        return [Played(trace, start, end, {}), *[Played(trace, [], [], {})] * (ranks - 1)]


@pytest.mark.parametrize(("kind", "decades"), [("moment1", SIGNED_DECADES), ("moment2", ROOT_DECADES)])
def test_moments_in_8_bits_whose_blocks_are_cut_elsewhere_are_rounded_once_and_not_more(
    kind: str, decades: int, tmp_path: Path
) -> None:
    values = torch.randn(20_000, 48, generator=torch.Generator().manual_seed(3))

    def stored(values: torch.Tensor, cuts: int) -> torch.Tensor:
        parts = (dequantize(*quantize(part, decades), decades) for part in values.chunk(cuts, 1))
        return torch.cat([*parts], 1)

    cut = stored(values if kind == "moment1" else values.abs(), 2)
    whole = stored(cut, 1)
    saved, read, wrong = (
        moment if kind == "moment1" else moment**2 for moment in (cut, whole, whole + 0.02 * cut.amax())
    )
    assert not torch.equal(saved, read)
    for got, ends in ((read, "equal"), (wrong, "fault")):
        words = ("training.steps=4", "optimizer.moment_dtype=int8", "prove.then=2 parallel.expert=2")
        verdict = Prover(ReadRanks(f"{kind}.a", saved, got), tmp_path).judge(composition_of(2, words))
        assert verdict.kind == ends, verdict.text
