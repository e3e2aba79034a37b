"""Products of 8-bit numbers: formats, recipes, quantization, products, and operators fused with quantization.

Read in this order: `quantized` (formats, blocks, values with scales), `reference` (all definitions, in
eager PyTorch), `operators` (the set that a model is built on), `expert_ffn` (the experts' network). Then the Triton
kernels: `quantize`, `products`, `swiglu`, `norm`, `logits_gradient`.
Kernels for Hopper are in `penstock.kernels.gluon`.
"""
