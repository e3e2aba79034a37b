"""Single-device model code and the one page that puts a model together.

Reading order: `decoder`, `mla` and `attention`, `ffn`, `mtp`, `rope`, then `build`, `init`, `count`, `huggingface`.
"""
