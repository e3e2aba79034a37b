"""Layouts put on devices, and what models are given to run on them.

Reading order: `axes` (groups of ranks), `param_shard` (what a rank holds of a parameter); `collectives`, `context`
(what models call, with gradients); `weight_grad_store`, `pipeline` (schedules on real stages); `buckets`, `shard` (sums
of gradients, and weights that are divided); `launch` (how ranks begin), `activations` (what waits for backward);
`copies`, `messages` (beside training); `spans`, `stopwatch` (what is seen of a step); `layer_context` (what a module is
built with).
"""
