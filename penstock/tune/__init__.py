"""Measurements on the training machine, for `penstock kernels tune`, `ladder`, `preflight` and `doctor`.

Reading order: `kernels` (backends of every operator), `trial` (a short run in its own processes), `ladder_steps` and
`ladder` (one optimization after another), `result_file` (JSON output), `preflight/` (the node before a run), `doctor/`
(the bottleneck of a run).
"""
