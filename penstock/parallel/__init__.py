"""Everything that ranks do together: process groups, collectives, sharding, pipelines, memory of activations.

Reading order: `axes` (process groups), `collectives`, `layer_context` (arguments of every module), `shard` and
`buckets` (parameters and gradients), `matrix_exchange` (matrices of Muon), `recompute` and `offload` (activations),
`async_transfer` (overlap), `pipeline`, `context` (attention over shared rows), `symmetric`
(peer memory), `replicas` (of experts), `graphs` (CUDA graphs), `launch`.
"""
