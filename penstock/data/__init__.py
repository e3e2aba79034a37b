"""Documents in, batches out.

Reading order: `sources` (the contract), `tokenizer`, `documents`, `text` with `files`, `stream`, `loader`,
`evaluation`, `open` (settings to data). Other sources: `tables` with its child `table_process`, `hub` with `shards`,
`packed` on `indexed_dataset`, `synthetic`; beside them `mixture`.
"""
