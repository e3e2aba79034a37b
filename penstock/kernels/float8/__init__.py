"""Matrix products of 8-bit numbers: formats, recipes, quantization, products, and what they are fused with.

Read in this order: `formats`, `recipes`, `quantized`, `reference` (all definitions, in eager PyTorch), `operators`.
"""
