"""The decode side: receives the KV of prompts, owns everything about sampling, streams the tokens."""
