"""Named regions in traces, for nothing where nobody records.

    with span(Span.ATTENTION):
    with span(LAYER, 3):           the name is put together only if somebody records

While the profiler runs, on this thread or on the one whose backward pass this thread does, a region is an event of its
trace, and operators that are called inside lie inside. Backward has no regions of its own: autograd's nodes carry the
number of the operator that made them, and so lead to the region where that was called. Else a region is one check and
no object.

A region may stand inside captured work, a recomputed one, a transfer or a hook: it gives the device nothing to do. It
must not last over a stop of work in pieces (`penstock.parallel.interleave.within`).
"""

from contextlib import AbstractContextManager, nullcontext

from torch._C._autograd import _profiler_enabled
from torch.profiler import record_function

_NOTHING = nullcontext()


def span(name: str, *numbers: int | str) -> AbstractContextManager[object]:
    """A region of the current thread, from its beginning to its end.

    Args:
        name: of `penstock.base.spans`.
        numbers: for the places of the name.
    """
    return record_function(name.format(*numbers)) if _profiler_enabled() else _NOTHING
