"""What a run will need and how fast it will be, before anything is started.

Reading order: `hardware` and `hardware_file` (chips, nodes and links as data), `rates` and `transfers` (seconds of an
operator or a collective), `calibrate`, `calibrate_transfers` and `calibrated` (the same measured here); `ledger`,
`stand_in`, `activations` and `memory` (the bytes of every rank, counted while its own model runs on the meta device).
"""
