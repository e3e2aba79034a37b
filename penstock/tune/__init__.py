"""Measurements on the training machine, for `penstock kernels tune`, `ladder`, `tune`, `preflight` and `doctor`.

Reading order: `kernels` (backends of every operator), `trial` (a short run in its own processes), `ladder` (one
optimization after another), `search_loop`, `belief`, `tune_candidates` and `tune_files` (`penstock tune`), `preflight/`
(the node before a run), `doctor/` (the bottleneck of a run).
"""
