"""Tokens to their experts and back, behind one contract.

Reading order: `contract` (the promise), `local` (kept on one rank), `all_to_all` and `all_gather` (kept by several),
`gathers`, `symmetric` (by kernels of our own), `hierarchical` (over nodes), `choose`.
"""
