"""Prompt scores and API keys on real servers."""

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
