"""Memory of a trace as text: the fullest moment, what is held then, and what each phase does to it."""

from penstock.base.numbers import bytes_text
from penstock.cli.table import print_table
from penstock.trace.memory import Memory, MemoryRow

ROWS = 16


def print_memory(memory: Memory, of: str) -> None:
    """Print the tables of one device.

    Args:
        memory: of the device.
        of: whose it is, as it stands in titles.
    """
    peak = memory.peak
    phase = " ".join(filter(None, (peak.phase, peak.pass_)))
    where = f"{phase}: {' > '.join(peak.spans)}" if peak.spans else phase
    print(f"\nmemory{of}, device {memory.device}, at the time of the host")
    print(
        f"  {bytes_text(peak.allocated_bytes)} handed out at most ({bytes_text(peak.reserved_bytes)} reserved then, "
        f"{bytes_text(int(memory.reserved.max()))} at most), in {where}"
    )
    if peak.components:
        print_table(
            ("held then", "bytes", "share"),
            [
                (name, bytes_text(size), f"{size / max(peak.allocated_bytes, 1):.1%}")
                for name, size in peak.components.items()
            ],
        )
    rows = sorted(memory.rows(), key=lambda row: -max(row.at_peak_bytes or 0, abs(row.kept_bytes)))
    shown = [row for row in memory.rows() if row in rows[:ROWS]]
    table = [_row(row) for row in shown]
    if len(rows) > ROWS:
        table.append((f"{len(rows) - ROWS} smaller ones", *[""] * 5))
    print_table(("phase", "pass", "of it at the peak", "handed out", "more after than before", "most held"), table)


def _row(row: MemoryRow) -> tuple[str, ...]:
    sign = "-" if row.kept_bytes < 0 else ""
    return (
        row.name,
        row.pass_,
        "" if row.at_peak_bytes is None else bytes_text(row.at_peak_bytes),
        bytes_text(row.handed_out_bytes),
        f"{sign}{bytes_text(abs(row.kept_bytes))}",
        bytes_text(row.most_bytes),
    )
