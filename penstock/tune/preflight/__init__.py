"""Checks of a node before a run. Each file reads facts, then judges them: found, expected, fix.

check       one result                                            versions    Python, packages, driver, variables
host        cores, NUMA, memory, limits, clock, disk              gpus        GPUs, links, speeds, correct sums
"""
