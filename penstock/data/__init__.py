"""Documents in, batches out. Read batch, sources, tokenizer, text, stream, packing, loader, evaluation, open."""
