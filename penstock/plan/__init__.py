"""Memory and step time of a run on a cluster, computed without the cluster.

Reading order. Hardware: `hardware` and `hardware_file` (chips, nodes and links as data), `rates` (seconds of
an operator or a collective), `calibrate` (the same figures measured on this machine).

One run: `meta_rank` builds a rank on the meta device, `meta_run` runs its passes and its update there, and
`op_recorder` records their operators and bytes. From the result follow `memory`, and with `costs` and `streams` the
`step_time`. `project` returns both as the values of `projection`.

The search: `candidates` and `rules` (legal layouts, in whole numbers), `bounds` and `space_bounds` (times
and memory that they cannot go below), `search`, `ways` (rows that differ). It runs one stage of each kind
(`composer`) and adds up the others from its layers: `liveness`, `param_state`, `composed_run`. `projection` says how
much memory it leaves free. `asked_layout` and `what_if` answer questions about one run.
"""
