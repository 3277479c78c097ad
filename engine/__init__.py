"""One forward pass: the KV pool, batches of chunks, the runner that computes them, and the sampler."""
