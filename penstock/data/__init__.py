"""Documents in, batches out.

Reading order: `batch`, `sources`, `documents`, `text` (then `files`, `index`, `decompress`), `rows`, `lanes`, `stream`,
`packing`, `loader`, `evaluation`, `open`. Other sources: `tables`, `hub`, `packed`, `synthetic`; text without random
access: `shards`. Several texts at once: `mixture`. What encodes: `tokenizer`. On the way: `corrupt`, `fill_in_middle`.
"""
