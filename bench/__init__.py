"""Load and measurement of any OpenAI-compatible server over HTTP. No torch, no other room but core."""
