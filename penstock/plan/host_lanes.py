"""When copies between a device and its host's memory run, and for how long what is computed waits for them.

It is what `penstock.parallel.offload` does, in time. There is a lane for each direction, which takes one
storage after another and disturbs neither the other lane nor the compute. Compute waits in two places only:

    out     for room, where more bytes would be on their way than may be
    back    for a storage that backward opens before it has come

What backward asks for while it is still on its way out is still on the device, and does not travel.
"""

from penstock.parallel.offload import IN_FLIGHT_BYTES


class HostLanes:
    """Both lanes of one device. Times are seconds on its clock; storages have a number.

    Args:
        room: bytes that may be on their way out.
    """

    def __init__(self, room: int = IN_FLIGHT_BYTES) -> None:
        self._room = room
        self._out = self._back = 0.0
        self._leaving: dict[str, tuple[float, int]] = {}
        self._came: dict[str, float] = {}

    def leave(self, number: str, size: int, seconds: float, *, launched: float, done: float) -> float:
        """A storage begins its way out.

        Args:
            number: of the storage; one that had the same before is gone.
            size: its bytes.
            seconds: that the copy takes.
            launched: when the host starts it.
            done: when compute has done all so far.

        Returns:
            Until when compute waits for room.
        """
        self._leaving.pop(number, None)
        while self._leaving:
            oldest, (end, _) = next(iter(self._leaving.items()))
            has_room = sum(other for _, other in self._leaving.values()) + size <= self._room
            if has_room and end > launched:
                break
            del self._leaving[oldest]
            done = max(done, end)
        self._out = max(self._out, done, launched) + seconds
        self._leaving[number] = self._out, size
        return done

    def come_back(self, number: str, seconds: float, *, launched: float, done: float) -> None:
        """A storage begins its way back; arguments as of `leave`."""
        if self._leaving.pop(number, None) is not None:
            self._came[number] = done
            return
        self._back = self._came[number] = max(self._back, done, launched) + seconds

    def arrival(self, number: str) -> float:
        """When a storage is on the device that has begun its way back."""
        return self._came[number]
