"""What a model is on disk and in words: sources, config, tokenizer, detokeniser, chat template. No torch."""
