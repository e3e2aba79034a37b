"""Token dispatchers: tokens to their experts and back, behind one contract.

Reading order: `contract` (the protocol, and the case of one rank), `collective` (all-to-all and all-gather), `payload`
(rows in 8 bits, and gathers of rows), `row_capacity` (row counts), `symmetric` (peer-to-peer kernels), `hierarchical`
(several nodes), `balanced` (replicas of experts), `build`.
"""
