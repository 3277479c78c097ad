"""The HTTP side: OpenAI API, streams, membership, routing, admission, metrics. Never torch."""
