"""The OpenAI surface on real servers, by the official client: the same answers colocated and disaggregated."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import openai
import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

KEY = "e2e-key"
Serve = Callable[..., AbstractContextManager[Any]]
TOPOLOGIES = {"colocated": ("0", "1"), "1P1D": ("1", "1")}
COMPLETIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 7},
    {"seed": 7, "n": 3},
    {"temperature": 0, "n": 2, "logprobs": 3},
    {"seed": 7, "n": 2, "best_of": 4},
    {"temperature": 0, "echo": True, "logprobs": 1},
    {"temperature": 0, "echo": True, "logprobs": 2, "max_tokens": 0},
    {"temperature": 0, "echo": True, "n": 2},
    {"temperature": 0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 0},
    {"temperature": 0, "logit_bias": {"65": 100}},
    {"temperature": 0, "extra_body": {"repetition_penalty": 1.3, "min_tokens": 3}},
    {"seed": 3, "extra_body": {"top_k": 5, "min_p": 0.05, "ignore_eos": True}},
    {"temperature": 0, "extra_body": {"cache_salt": "mine"}},
]
PROMPTS: list[Any] = ["A runner hands over", ["one", "two"], [5, 6, 7, 8] * 10, [[9, 10] * 8, [11] * 20]]
CHATS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"seed": 5, "n": 2, "logprobs": True, "top_logprobs": 4},
    {"temperature": 0, "stop": ["e"], "extra_body": {"include_stop_str_in_output": True}},
]


def answers_of(url: str) -> list[Any]:
    """All answers, whole and as joined streams; what differs by nature (ids, times, cached tokens) left out."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)
    model = client.models.list().data[0].id
    assert client.models.retrieve(model).id == model
    told: list[Any] = []
    for options in COMPLETIONS:
        for prompt in PROMPTS:
            asked = {"model": model, "prompt": prompt, "max_tokens": 12} | options
            whole = [choice.model_dump() for choice in client.completions.create(**asked).choices]
            told.append(whole)
            if "best_of" in options:
                continue
            texts = [""] * len(whole)
            for chunk in client.completions.create(**asked, stream=True):
                for choice in chunk.choices:
                    texts[choice.index] += choice.text
            assert texts == [choice["text"] for choice in whole]
    messages = [{"role": "user", "content": "Who carries the baton?"}]
    for options in CHATS:
        answer = client.chat.completions.create(model=model, messages=messages, max_tokens=12, **options)
        told.append([choice.model_dump() for choice in answer.choices])
    return told


def rounded(value: Any) -> Any:
    """Log-probabilities of two topologies agree up to the order of float32 sums."""
    if isinstance(value, float):
        return round(value, 3)
    if isinstance(value, list):
        return [rounded(entry) for entry in value]
    return {key: rounded(entry) for key, entry in value.items()} if isinstance(value, dict) else value


def test_the_same_answers_colocated_and_disaggregated(tiny_model: Path, serve: Serve) -> None:
    told = {}
    for name, (prefill, decode) in TOPOLOGIES.items():
        with serve(tiny_model, "--prefill", prefill, "--decode", decode, "--dtype", "float32") as server:
            cold = answers_of(server.url)
            assert rounded(answers_of(server.url)) == rounded(cold), f"{name}: warm differs from cold"
            told[name] = rounded(cold)
            server.wait_idle()
    assert told["colocated"] == told["1P1D"]


def test_echo_scores_every_prompt_token(tiny_model: Path, serve: Serve) -> None:
    """AP31 on a real worker: the scores of a prompt are those it had when it was generated."""
    with serve(tiny_model, "--prefill", "1", "--decode", "1", "--dtype", "float32") as server:
        prompt = [5, 6, 7, 8]
        fields = {"return_token_ids": True, "ignore_eos": True, "logprobs": 1}
        generated = server.complete(prompt, 20, **fields)["choices"][0]
        scored = server.complete(prompt + generated["token_ids"], 0, echo=True, logprobs=1)["choices"][0]["logprobs"]
        assert scored["token_logprobs"][0] is None
        assert scored["token_logprobs"][4:] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-4)
        assert [max(top.values()) for top in scored["top_logprobs"][4:]] == scored["token_logprobs"][4:]  # greedy
        server.wait_idle()


def test_keys_of_a_server_and_of_its_clients(tiny_model: Path, serve: Serve, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of this test\n{KEY}\n")
    with serve(tiny_model, "--prefill", "0", "--api-key", f"@{path}", "--api-key", "other", api_key=KEY) as server:
        assert server.request("GET", "/health", key="")[0] == server.request("GET", "/ready", key="")[0] == 200
        for where in ("/v1/models", "/metrics", "/ledger", "/workers"):
            assert server.request("GET", where, key="")[0] == server.request("GET", where, key="wrong")[0] == 401
            assert server.request("GET", where, key=KEY)[0] == server.request("GET", where, key="other")[0] == 200
        with pytest.raises(openai.AuthenticationError):
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0).models.list()
        command = [str(Path(sys.executable).with_name("baton")), "roles", "--url", server.url]
        environment = {name: value for name, value in os.environ.items() if not name.endswith("_API_KEY")}
        refused = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert refused.returncode == 1
        assert "API key" in refused.stderr
        environment["BATON_API_KEY"] = KEY
        subprocess.run(command, env=environment, capture_output=True, check=True, timeout=60)
        assert KEY not in server.log
        assert KEY not in json.dumps(server.request("GET", "/workers", key=KEY)[1])
