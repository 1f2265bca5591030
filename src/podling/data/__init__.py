"""Text in, batches out: corpus, tokenizer, prepared shards, batches and the n-gram baseline."""
