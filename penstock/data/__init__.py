"""Documents in, batches out.

Reading order: `batch`, `sources`, `tokenizer`, `text`, `stream`, `packing`, `loader`, `evaluation`, `open`.
"""
