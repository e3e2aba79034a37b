"""Token dispatchers: tokens to their experts and back, behind one contract.

Reading order: `contract` (the protocol, the format of rows, and the case of one rank), `collective` (all-to-all,
all-gather, several nodes), `row_capacity` (row counts), `symmetric` (peer-to-peer kernels), `balanced` (replicas of
experts), `build`.
"""
