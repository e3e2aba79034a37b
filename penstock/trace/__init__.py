"""What happened on the devices: traces of torch.profiler read, timed and explained. Nothing here imports PyTorch.

Reading order: `events` (a trace as columns), `load` (files), `decode` and `columns` (text into columns), `kinds` (which
kernel communicates), `intervals` (unions of times), `timeline` (busy, compute, communication, exposed, idle).

Across ranks: `calls` (who talked), `matching` (what was one collective), `clocks` (on one clock), `collectives` (how
long, who waited for whom) and `experts` (how evenly they are loaded).
"""
