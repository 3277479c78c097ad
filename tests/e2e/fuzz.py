"""Random requests made from a server's own /openapi.json, and what is wrong with the answers.

Half of the requests fit the document, half break it somewhere. Each answer's status, content type, headers and body are
checked, and of a streamed one every event. Used by test_fuzz_api.py and scripts/fuzz_api.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.strategies import integers, lists
from schemathesis import Case, GenerationMode
from schemathesis.checks import content_type_conformance, not_a_server_error
from schemathesis.core.failures import Failure, FailureGroup
from schemathesis.specs.openapi.checks import (
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]
LONG_FIELDS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "min_tokens")
MOST_TOKENS, MOST_CHOICES, MOST_FIELDS = 6, 4, 3
LENGTH_FIELD = {
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}
# Path |-> what each event of a stream is, and how the data of the last one begins (an error may come instead).
STREAMS = {
    "/v1/completions": ("Completion", "[DONE]"),
    "/v1/chat/completions": ("ChatCompletionChunk", "[DONE]"),
    "/v1/responses": ("ResponseEvent", '{"type":"response.'),
    "/v1/messages": ("StreamEvent", '{"type":"message_stop"'),
}

# What most of the requests that fit have here: random messages are seldom of a kind that a model can be given.
SOUND: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Who carries the baton?"}],
    "prompt": "A runner",
    "input": "Who carries the baton?",
    "tokens": [5, 6, 7],
}


class Fuzz:
    """Requests to one server, the statuses they got, and what was wrong with the answers."""

    def __init__(self, url: str):
        self._url = url
        self._document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self._model = self._document["/v1/models"]["GET"].Case().call(base_url=url).json()["data"][0]["id"]
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.faults: list[str] = []

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())

    def run(self, num_requests: int, first_seed: int) -> None:
        """At least `num_requests`: paths that take no body have few different ones, the others share the rest."""
        operations = [found.ok() for found in self._document.get_all_operations()]
        with_body = [operation for operation in operations if operation.body]
        for operation in operations:
            if operation not in with_body:
                self._run_one(operation, 8, first_seed)
        while self.num_requests < num_requests:
            share = -(-(num_requests - self.num_requests) // (2 * len(with_body)))
            for operation in with_body:
                self._run_one(operation, share, first_seed)
            first_seed += 1

    def _run_one(self, operation: Any, num_each: int, first_seed: int) -> None:
        self._run_mode(operation, GenerationMode.POSITIVE, num_each, first_seed)
        if operation.body:
            self._run_mode(operation, GenerationMode.NEGATIVE, num_each, first_seed)

    def _run_mode(self, operation: Any, mode: GenerationMode, num_each: int, first_seed: int) -> None:
        fits = mode is GenerationMode.POSITIVE

        @seed(first_seed)
        @settings(
            max_examples=num_each,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode), kept=lists(integers(0, 99), max_size=MOST_FIELDS))
        def ask(case: Case, kept: list[int]) -> None:
            self._ask(case, kept if fits else None)

        ask()

    def _ask(self, case: Case, kept: list[int] | None) -> None:
        """`kept`: which of the optional fields remain, of a body that fits; None leaves all."""
        if kept is not None:
            self._thin_out(case, kept)
        _shorten(case)
        response = case.call(base_url=self._url, timeout=60)
        self.statuses[case.operation.label, response.status_code] += 1
        streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        try:
            case.validate_response(response, checks=CHECKS)
            if streamed:
                self._check_events(response.text, *STREAMS[case.path])
        except (Failure, FailureGroup, AssertionError, jsonschema.ValidationError) as fault:
            causes = fault.exceptions if isinstance(fault, FailureGroup) else [fault]
            told = "; ".join(f"{type(cause).__name__}: {str(cause)[:400]}" for cause in causes)
            self.faults.append(f"{told}\n    {case.as_curl_command()[:1500]}\n    {response.text[:500]}")

    def _thin_out(self, case: Case, kept: list[int]) -> None:
        """Of sixty optional fields at once, two exclude each other nearly always, and no request would get through."""
        path, method = case.operation.path, case.operation.method.lower()
        described = self._document.raw_schema["paths"][path][method].get("requestBody", {}).get("content", {})
        name = described.get("application/json", {}).get("schema", {}).get("$ref", "").rpartition("/")[2]
        body = case.body
        if not isinstance(body, dict) or not name:
            return
        needed = self._document.raw_schema["components"]["schemas"][name].get("required", [])
        optional = sorted(name for name in body if name not in needed)
        chosen = {optional[index % len(optional)] for index in kept if optional}
        for name in optional:
            if name not in chosen:
                del body[name]
        if "model" in body:
            body["model"] = self._model
        if len(kept) < MOST_FIELDS:
            body.update((name, value) for name, value in SOUND.items() if name in body)

    def _check_events(self, text: str, kind: str, end: str) -> None:
        """Every event is of its kind, and the last one says that it is the last."""
        events = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
        assert events, f"a stream without events: {text[:200]!r}"
        if events[-1] != "[DONE]" and json.loads(events[-1]).get("error") is not None:
            del events[-1]
        else:
            assert events[-1].startswith(end), f"the stream ends with {events[-1][:200]}"
        components = self._document.raw_schema["components"]
        validator = jsonschema.Draft202012Validator({"$ref": f"#/components/schemas/{kind}", "components": components})
        for event in events:
            if event != "[DONE]":
                validator.validate(json.loads(event))


def _shorten(case: Case) -> None:
    """Answers of a few tokens, so that thousands of requests take minutes."""
    body = case.body
    if not isinstance(body, dict):
        return
    for name in (*LONG_FIELDS, "n", "best_of"):
        most = MOST_CHOICES if name in ("n", "best_of") else MOST_TOKENS
        if isinstance(body.get(name), int) and body[name] > most:
            body[name] = body[name] % most + 1
    length = LENGTH_FIELD.get(case.path)
    if length is not None and body.get(length) is None:
        body[length] = MOST_TOKENS


def report(fuzz: Fuzz) -> Iterator[str]:
    """One line for each operation, then the faults."""
    labels = sorted({label for label, _ in fuzz.statuses})
    for label in labels:
        counts = {status: count for (name, status), count in sorted(fuzz.statuses.items()) if name == label}
        yield f"{label:42} " + ", ".join(f"{count} x {status}" for status, count in counts.items())
    yield f"{fuzz.num_requests} requests, {len(fuzz.faults)} faults"
    yield from fuzz.faults
