"""What happened on the devices: traces of torch.profiler read, timed and explained. Nothing here imports PyTorch.

Reading order: `events` (a trace as columns), `load` (files), `decode` and `columns` (text into columns), `kinds` (which
kernel communicates), `intervals` (unions of times), `timeline` (busy, compute, communication, exposed, idle).

What the time was for: `tree` (operators above kernels), `replayed` and `repeats` (kernels of captured graphs),
`kernel_names` and `phases` (names), `hierarchy` (down to kernels), `operators`, `work` and `roofline` (how fast),
`launches` (whether the host kept up), `memory` (what the allocator held).

Across ranks: `calls` (who talked), `matching` (what was one collective), `clocks` (on one clock), `collectives` (how
long, who waited for whom), `expert_rows` and `experts` (how evenly they are loaded). `answer` puts all of it together.

Two traces: `named_work` and `compare`. One call again: `replay` and the files beside it.
"""
