"""KV from one worker to another, and the typed channels between all processes."""
