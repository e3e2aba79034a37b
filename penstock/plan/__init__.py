"""What a run will need and how fast it will be, before anything is started.

Reading order: `hardware` and `hardware_file` (chips, nodes and links as data), `rates` and `transfers` (seconds of an
operator or a collective), `calibrate`, `calibrate_transfers` and `calibrated` (the same measured here). A rank is
rehearsed without memory: `meta_rank`, `ledger` (its bytes), `tape` (its operators), `pieces` and `activations`,
`rehearsal`. From that come `memory`, and by `costs` and `streams` the `step_time`; `project` says both of a run on a
cluster, as values of `projection`.

The search: `candidates` and `rules` (what is legal and what is worth looking at, in whole numbers), `rule_filter`,
`bound`, `refusals`, `search`. It composes layouts from pieces that were rehearsed once: `proxy_model`, `held`,
`held_state`, `composed`, `composer`, `composed_update`, `composed_time`. Questions behind it: `asked_layout`,
`what_if`, `conventional`.
"""
