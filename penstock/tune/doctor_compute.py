"""Remedies of computing: products in 8 bits, where the evidence says that they pay.

On Hopper most mixtures of experts that were published are slower in 8 bits than tuned ones in 16, because
quantization and launches of the host eat what the products win. So nothing is offered by a rule of thumb. The plan
makes the same step in 8 bits, with every pass that quantizes, and its saving is offered only where computing takes the
time: a device that waits for its host, or for others, wins nothing by faster products.
"""

from penstock.tune.doctor_evidence import Evidence
from penstock.tune.doctor_remedy import Remedy
from penstock.tune.doctor_walls import STANDS, Bottlenecks

FLOAT8 = "float8.dense=auto float8.experts=auto"
"""Products of every layer."""

FLOAT8_DISPATCH = f"{FLOAT8} float8.dispatch=auto"
"""Rows that travel too."""


def float8(evidence: Evidence, walls: Bottlenecks) -> Remedy | None:
    """Products in 8 bits, as many as the plan says pay."""
    planned, facts = evidence.facts.planned_step_seconds, evidence.facts
    computes = walls.share(walls.host_us) < STANDS and walls.share(walls.waiting_us) < STANDS
    in_8_bits = {change: saved for change, saved in facts.saved_seconds.items() if change.startswith("float8.")}
    if not in_8_bits or not planned or not computes:
        return None
    change, saved = max(in_8_bits.items(), key=lambda item: item[1])
    if saved <= 0:
        return None
    return Remedy(
        change=change,
        what="compute products in 8 bits; look at the loss beside one in 16 (docs/float8.md)",
        gain_us=min(saved / planned * walls.total_us, walls.compute_us),
        rule="eight-bits-where-they-pay",
        source="penstock plan of the same run in 8 bits; rules P3, P6",
    )
