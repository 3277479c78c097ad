"""Errors about a chat request, in the names of the fields of the API that it was translated from."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from ..core.errors import RequestError


class FieldNames:
    """`names`: name in a chat request (a regular expression) |-> name in the other API (its replacement)."""

    def __init__(self, names: Mapping[str, str]):
        self._names = [(re.compile(rf"(?<![\w.]){name}(?!\w)"), other) for name, other in names.items()]

    @contextmanager
    def told(self) -> Iterator[None]:
        """What is raised inside about a field, names it as its client knows it."""
        try:
            yield
        except RequestError as error:
            if error.param is None:
                raise
            raise RequestError(self.of(str(error)), self.of(error.param), error.code, error.status) from None

    def of(self, text: str) -> str:
        for pattern, other in self._names:
            text = pattern.sub(other, text)
        return text
