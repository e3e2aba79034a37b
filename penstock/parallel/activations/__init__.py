"""What becomes of the tensors that backward needs: freed and computed again, or moved to the host.

Reading order: `keeping` (the chain that both hang on), `region` (how a part runs again), `recompute` (which parts do),
`offload` (what moves, and when). Models meet them as a part of `penstock.parallel.layer_context`.
"""
