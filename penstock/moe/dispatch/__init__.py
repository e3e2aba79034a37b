"""Token dispatchers: tokens to their experts and back, behind one contract.

Reading order: `contract` (the protocol), `local` (one rank holds all experts), `all_to_all`, `all_gather`, `payload`
(rows in 8 bits), `row_capacity` (row counts), `gathers`, `symmetric` (peer-to-peer kernels), `hierarchical` (several
nodes), `build`.
"""
