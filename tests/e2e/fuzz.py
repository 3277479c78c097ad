"""Random requests made from a server's own /openapi.json, and what is wrong with the answers.

Half of the requests fit the document: one of its examples with some fields as they came out, and mostly ids of what is
there. Half break it somewhere. Each answer's status, content type, headers and body are checked, and of a streamed one
every event. Used by test_fuzz_api.py and scripts/fuzz_api.py.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema
import requests
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


class Fuzz:
    """Requests to one server, the statuses they got, and what was wrong with the answers."""

    def __init__(self, url: str):
        self._url = url
        self._document = schemathesis.openapi.from_url(f"{url}/openapi.json")
        self._model = self._document["/v1/models"]["GET"].Case().call(base_url=url).json()["data"][0]["id"]
        self._real = Real(url, self._model)
        self.statuses: Counter[tuple[str, bool, int]] = Counter()  # by operation and whether the request fits
        self.refusals: Counter[str] = Counter()  # of requests that fit
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
                self._run_one(operation, 24 if operation.path_parameters or operation.query else 4, first_seed)
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
        """`kept`: which fields of a body that fits stay as they came out; None: the case breaks the document."""
        if kept is not None:
            self._make_real(case, kept)
        _shorten(case)
        response = case.call(base_url=self._url, timeout=60)
        self.statuses[case.operation.label, kept is not None, response.status_code] += 1
        if kept is not None and response.status_code != 200:
            self.refusals[f"{case.operation.label}: {response.text[:160]}"] += 1
        streamed = response.headers.get("content-type", [""])[0].startswith("text/event-stream")
        try:
            case.validate_response(response, checks=CHECKS)
            if streamed:
                self._check_events(response.text, *STREAMS[case.path])
        except (Failure, FailureGroup, AssertionError, jsonschema.ValidationError) as fault:
            causes = fault.exceptions if isinstance(fault, FailureGroup) else [fault]
            told = "; ".join(f"{type(cause).__name__}: {str(cause)[:400]}" for cause in causes)
            self.faults.append(f"{told}\n    {case.as_curl_command()[:1500]}\n    {response.text[:500]}")

    def _make_real(self, case: Case, kept: list[int]) -> None:
        """Of sixty random fields at once two exclude each other nearly always, and random ids are nobody's."""
        number = sum(kept)
        if number % 4:
            for name in case.path_parameters or {}:
                case.path_parameters[name] = self._real.id_of(name)
            if "after" in (case.query or {}):
                del case.query["after"]
        if case.path == "/v1/files" or not isinstance(case.body, dict):
            return
        examples = list(self._examples(case))
        body = dict(examples[number % len(examples)])
        names = sorted(case.body)
        body |= {name: case.body[name] for name in (names[index % len(names)] for index in kept if names)}
        if "model" in body:
            body["model"] = self._model
        case.body = body

    def _examples(self, case: Case) -> Iterator[dict[str, Any]]:
        if case.path == "/roles":
            yield self._real.roles()
        elif case.path == "/v1/batches":
            yield self._real.batch()
        else:
            operation = self._document.raw_schema["paths"][case.path]["post"]
            for example in operation["requestBody"]["content"]["application/json"]["examples"].values():
                yield example["value"]

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


class Real:
    """Makes what random requests can name: files, batches, stored answers."""

    def __init__(self, url: str, model: str):
        self._url = url
        self._model = model

    def id_of(self, parameter: str) -> str:
        """For a parameter of a path; a new one at each call, for it may be deleted."""
        match parameter:
            case "model":
                return self._model
            case "response_id":
                return self._made("/v1/responses", json={"input": "Who?", "max_output_tokens": 1})
            case "file_id":
                return self._file()
            case "batch_id":
                return self._made("/v1/batches", json=self.batch())
        raise ValueError(f"what is {parameter}?")

    def batch(self) -> dict[str, Any]:
        """The body of a batch."""
        return {"input_file_id": self._file(), "endpoint": "/v1/completions", "completion_window": "24h"}

    def roles(self) -> dict[str, Any]:
        """The body of a change of roles that changes none: the requests after it need both kinds of workers."""
        workers = requests.get(f"{self._url}/roles", timeout=60).json()["workers"]
        name = min(workers)
        return {"worker": name, "roles": workers[name]}

    def _file(self) -> str:
        line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x", "max_tokens": 1}}
        return self._made("/v1/files", data={"purpose": "batch"}, files={"file": json.dumps(line)})

    def _made(self, path: str, **sent: Any) -> str:
        answer = requests.post(self._url + path, timeout=60, **sent)
        assert answer.status_code == 200, answer.text
        made: str = answer.json()["id"]
        return made


def report(fuzz: Fuzz) -> Iterator[str]:
    """One line for each operation, why most of what fits was refused, then the faults."""
    for label in sorted({label for label, _, _ in fuzz.statuses}):
        yield f"{label:44} " + "; ".join(_counted(fuzz, label, fits) for fits in (True, False)).removesuffix("; ")
    for fits, word in ((True, "fit"), (False, "do not")):
        total = sum(n for (_, own, _), n in fuzz.statuses.items() if own is fits)
        good = sum(n for (_, own, status), n in fuzz.statuses.items() if own is fits and status == 200)
        yield f"{total} requests that {word}, {good} x 200"
    yield f"{fuzz.num_requests} requests, {len(fuzz.faults)} faults"
    yield from (f"refused {n} times: {reason}" for reason, n in fuzz.refusals.most_common(12))
    yield from fuzz.faults


def _counted(fuzz: Fuzz, label: str, fits: bool) -> str:
    counts = {status: n for (name, own, status), n in sorted(fuzz.statuses.items()) if (name, own) == (label, fits)}
    told = ", ".join(f"{n} x {status}" for status, n in counts.items())
    return f"{sum(counts.values())} {'fit' if fits else 'do not'}: {told}" if counts else ""
