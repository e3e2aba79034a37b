"""Traces of torch.profiler and Nsight Systems: loaded, timed and explained. Nothing here imports PyTorch.

Files: `load` (files, ranks, databases of Nsight Systems), `decode` (JSON to columns), `on_host` (a CPU in place of a
device), `events` (the columns).

Time: `intervals` (unions of times), `timeline` (busy, compute, communication, exposed, idle), `kernel_names`
(categories by name), `tree` (operators above kernels), `graph_replays` (kernels of CUDA graphs), `phases` (named time),
`tables` (calls and their kernels, streams, counters), `work` (speed), `launches` (whether the host kept up), `memory`
(allocator).

Across ranks: `calls` (communication kernels), `matching` (collectives and clocks), `collectives` (duration, waiting,
stragglers), `experts` (load). `analysis` combines everything.

Two traces: `compare`. One call: `replay`.
"""
