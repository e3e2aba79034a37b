"""What a node must be before a run starts on it, and whether this one is. Reading order: check, then one file an area.

    versions    Python, packages, PyTorch's build, driver       environment   variables of the shell that hurt
    host        cores, NUMA, memory, limits, clock              disk          room and speed where runs are kept
    devices     GPUs, their memory, who reaches whom            transfers     speed of devices and links, right sums

Every file first reads facts, which a test can make by hand, and then judges them: a fact, what was expected, and how to
mend it. Thresholds are constants with their reason.
"""
