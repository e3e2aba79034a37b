"""Documents in, batches out.

Reading order: `batch`, `sources`, `tokenizer`, `documents`, `text`, `rows`, `lanes`, `stream`, `packing`, `loader`,
`evaluation`, `open`. Beside them: tables (`tables`, `hub`, `shards`), several texts (`mixture`, `texts`), tokens that
were encoded before (`packed_files`, `packed`, `pack_files`), and what a batch holds (`contents`).
"""
