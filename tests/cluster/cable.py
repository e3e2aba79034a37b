"""A cable that delays and loses packets: `python cable.py NAME PROCESS INTERFACE DELAY LOSS`.

It has an end NAME here, and one in the network namespace of PROCESS, where it is called INTERFACE. Both are TAP
devices, whose frames this process carries from one to the other. Each frame arrives DELAY seconds later, or with the
probability LOSS never; the draws are the same every time. It prints `ready` when both ends are there.
"""

import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections import deque

TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
MOST_BYTES = 65_536


def tap(name: str) -> int:
    """A new TAP device, which lasts as long as its descriptor."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", name.encode(), IFF_TAP | IFF_NO_PI))
    return device


def carry(ends: tuple[int, int], delay_seconds: float, loss: float) -> None:
    """Carry frames for ever."""
    draw = random.Random(0)
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: deque[tuple[float, int, bytes]] = deque()  # the delay is the same for all, so they stay in order
    while True:
        timeout = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for end in select.select(ends, (), (), timeout)[0]:
            frame = os.read(end, MOST_BYTES)
            if draw.random() >= loss:
                waiting.append((time.monotonic() + delay_seconds, other[end], frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, end, frame = waiting.popleft()
            try:
                os.write(end, frame)
            except OSError:  # an end that is not up yet
                continue


def main() -> None:
    """See the top of the file."""
    name, process, interface, delay_seconds, loss = sys.argv[1:]
    ends = tap(name), tap("far")
    subprocess.run(["ip", "link", "set", "far", "netns", process, "name", interface], check=True)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    carry(ends, float(delay_seconds), float(loss))


if __name__ == "__main__":
    main()
