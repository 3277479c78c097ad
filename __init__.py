"""Baton: a language-model server with prefill and decode in separate processes."""

__version__ = "0.1.0"
