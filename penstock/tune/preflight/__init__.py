"""Checks of a node before a run. Each file reads facts, then judges them: found, expected, fix.

host        cores, NUMA, memory, limits, clock, disk, Python, packages, driver, variables; the form of a check
gpus        GPUs, links, speeds, correct sums
"""
