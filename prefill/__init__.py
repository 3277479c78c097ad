"""The prefill side: computes the KV of prompts in chunks and hands it on. Knows nothing of sampling."""
