"""Tokens to their experts and back, behind one contract.

Reading order: `contract` (the promise), `local` (kept on one rank), `all_to_all` (kept by several), `gathers`.
"""
