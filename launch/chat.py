"""`baton chat`: a conversation in the terminal with any OpenAI-compatible server, streamed."""

import sys
from collections.abc import Iterator
from typing import TextIO

import msgspec

from ..core.errors import BatonError
from .server_client import JsonObject, ServerClient, ServerError, decode_answer

_LAST_EVENT = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta = msgspec.field(default_factory=_Delta)


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    error: ServerError | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model] = []


class ChatClient:
    """One conversation. Raises BatonError with the server's own words when an answer cannot be had."""

    def __init__(self, url: str, max_tokens: int):
        self._server = ServerClient(url)
        self._max_tokens = max_tokens
        self._messages: list[JsonObject] = []
        self.model = self._first_model()

    def reset(self) -> None:
        self._messages = []

    def ask(self, text: str) -> Iterator[str]:
        """Pieces of the answer as they come. The turn is remembered only when the answer ended well."""
        turn: JsonObject = {"role": "user", "content": text}
        body: JsonObject = {
            "model": self.model,
            "messages": [*self._messages, turn],
            "max_completion_tokens": self._max_tokens,
            "stream": True,
            "temperature": 0,  # a small model at 1 talks nonsense; who wants to sample uses the API
        }
        answer = ""
        for event in self._events(body):
            if event.error is not None:
                raise BatonError(event.error.message)
            for choice in event.choices:
                if choice.delta.content:
                    answer += choice.delta.content
                    yield choice.delta.content
        self._messages += [turn, {"role": "assistant", "content": answer}]

    def _first_model(self) -> str:
        with self._server.request("GET", "/v1/models") as response:
            models = decode_answer(response.read(), _Models)
        if not models.data:
            raise BatonError(f"{self._server.name} serves no model. Look at its /ready.")
        return models.data[0].id

    def _events(self, body: JsonObject) -> Iterator[_Event]:
        with self._server.request("POST", "/v1/chat/completions", body) as response:
            for line in response:
                field, _, value = line.partition(b":")
                value = value.strip()
                if field != b"data":
                    continue  # a comment or an empty line
                if value == _LAST_EVENT:
                    return
                yield decode_answer(value, _Event)
        raise BatonError("the server ended the answer early. Ask again.")


def chat(url: str, max_tokens: int, source: TextIO = sys.stdin, out: TextIO = sys.stdout) -> int:
    """Read a line, stream the answer, until the end of input. `/new` forgets the conversation."""
    client = ChatClient(url, max_tokens)
    out.write(f"{client.model} (a line to ask, /new to start over, Ctrl-D to leave)\n")
    while True:
        out.write("> ")
        out.flush()
        line = source.readline()
        if not line:
            out.write("\n")
            return 0
        if line.strip() == "/new":
            client.reset()
        elif line.strip():
            _answer(client, line.strip(), out)


def _answer(client: ChatClient, text: str, out: TextIO) -> None:
    try:
        for piece in client.ask(text):
            out.write(piece)
            out.flush()
        out.write("\n")
    except BatonError as error:
        out.write(f"\nerror: {error}\n")
    except KeyboardInterrupt:
        out.write("\n(stopped)\n")  # leaving the stream closes the connection, which aborts the request
