"""Detokenizer: token ids in, text out as soon as it is certain; never half a character.

The joined pieces equal `Tokenizer.decode` of all ids, for any ids in any chunks. That is exact and cheap because
both ways of decoding work on bytes from left to right: no window of earlier tokens is decoded again.
"""

import codecs
from collections.abc import Iterable
from typing import Protocol

from .tokenizer import Decoding, Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Detokenizer:
    """The text of one growing sequence of token ids; the work per token does not depend on its length.

    Held back is only what a later token can still change: the first bytes of a character, and in a byte_fallback
    vocabulary a run of byte tokens, in which one invalid byte turns all into U+FFFD.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True):
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._reader: _Reader = (
            _ByteLevelReader(tokenizer) if tokenizer.decoding is Decoding.BYTE_LEVEL else _ByteFallbackReader(tokenizer)
        )

    def push(self, token_ids: Iterable[int]) -> str:
        """Add the next tokens; returns the text that is certain now and was not before."""
        if self._skip_special_tokens:
            token_ids = [i for i in token_ids if not self._tokenizer.is_special(i)]
        return self._reader.push(token_ids)

    def finish(self) -> str:
        """No more tokens come: returns the rest (U+FFFD for an unfinished character). Call it once, at the end."""
        return self._reader.finish()


class _Reader(Protocol):
    def push(self, token_ids: Iterable[int]) -> str: ...

    def finish(self) -> str: ...


class _ByteLevelReader:
    """UTF-8 over the bytes of all tokens; each invalid maximal subpart becomes one U+FFFD, as in Rust."""

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._is_between = True  # characters: the decoder holds no bytes back

    def push(self, token_ids: Iterable[int]) -> str:
        data = b"".join(map(self._token_bytes, token_ids))
        if self._is_between and data.isascii():  # most tokens are
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_between = not self._utf8.getstate()[0]
        return text

    def finish(self) -> str:
        return self._utf8.decode(b"", final=True)


class _ByteFallbackReader:
    """Text tokens as they are; a run of byte tokens as UTF-8 if it is valid as a whole, else U+FFFD per byte."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._run = bytearray()
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_ids: Iterable[int]) -> str:
        parts = []
        for token_id in token_ids:
            data = self._tokenizer.token_bytes(token_id)
            if self._tokenizer.is_byte_token(token_id):
                self._run += data
            elif data:
                parts.append(self._end_run())
                parts.append(data.decode())
        return self._without_leading_space("".join(parts))

    def finish(self) -> str:
        return self._without_leading_space(self._end_run())

    def _end_run(self) -> str:
        run, self._run = self._run, bytearray()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

    def _without_leading_space(self, text: str) -> str:
        if self._at_start and text:
            self._at_start = False
            return text.removeprefix(" ")
        return text
