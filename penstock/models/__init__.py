"""Model code, the same for one device and for a rank of many, and the page that puts a model together.

Reading order: `frame` (what a pass reads), `decoder`, `block`, `attention`, `mla`, `ffn`, `mtp`; below them `linear`,
`norm`, `rope`; `build` and `rank_model` (from a configuration to what a rank trains), `kernels`; `init`, `holdings`,
`count`, `huggingface` (what is in it).
"""
