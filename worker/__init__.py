"""What both kinds of worker process share: one engine, one KV pool, one radix cache, one set of channels, one loop."""
