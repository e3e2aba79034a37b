"""Matrix products of 8-bit numbers: formats, recipes, quantization, products, and what they are fused with.

Read in this order: `formats`, `recipes`, `quantized`, `reference` (all definitions, in eager PyTorch), `operators`
(the set that a model is built on). Then the experts' network (`expert_ffn`), and our kernels: `scaling` (how a number
is cast), `quantize`, `products` (the same for Hopper: `penstock.kernels.gluon`), `swiglu`,
`norm`, `pack` (rows that travel), `gathered` and `transpose` (weights that FSDP gathers).
"""
