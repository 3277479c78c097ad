"""API keys on every path but those of probes; tenants; series of metrics that clients cannot make (ME03)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from baton.core.messages import GenerateRequest
from baton.gateway import keys as keys_module
from baton.gateway.handlers import routes
from baton.gateway.keys import ApiKeys, digest_of, sent_key
from baton.gateway.tenants import Tenants
from baton.transfer.keys import ClusterKeys

KEYS = ("first-key", "second-key")
DIGESTS = tuple(map(digest_of, KEYS))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_every_path_but_those_of_probes_needs_a_key(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        paths = {(route.method, route.path) for route in routes(world.gateway)} | {("GET", "/nowhere")}
        assert len(paths) > 15
        for method, path in paths:
            path = path.replace("{model:.+}", "tiny-llama")
            async with world.http.request(method, world.url + path) as response:
                if path in ("/health", "/ready"):
                    assert response.status != 401
                    continue
                assert response.status == 401, path
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
                assert error["type"] == "authentication_error"
                assert path.startswith("/v1/messages") or error["code"] == "invalid_api_key"
                assert response.headers["X-Request-Id"]

    in_world(scenario, api_key_digests=DIGESTS)


@pytest.mark.parametrize(
    ("headers", "is_known"),
    [
        (bearer("first-key"), True),
        (bearer("second-key"), True),
        ({"Authorization": "bearer   second-key "}, True),
        ({"X-Api-Key": "first-key"}, True),
        ({"authorization": "Bearer first-key"}, True),
        (bearer("first-key2"), False),
        (bearer("first-ke"), False),
        (bearer("FIRST-KEY"), False),
        (bearer(""), False),
        ({"Authorization": "first-key"}, False),
        ({"Authorization": "Basic first-key"}, False),
        (bearer(DIGESTS[0]), False),
        (bearer("sch\u00fcssel"), False),
        (bearer("first-key second-key"), False),
    ],
)
def test_keys(in_world: Any, headers: dict[str, str], is_known: bool) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for stream in (False, True):
            body = {"prompt": "hi", "stream": stream}
            async with world.post("/v1/completions", body, headers=headers) as response:
                assert response.status == (200 if is_known else 401)
                await response.read()
        assert bool(decode.of(GenerateRequest)) is is_known

    in_world(scenario, api_key_digests=DIGESTS)


def test_all_digests_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[str, str]] = []
    expected = hashlib.sha256(b"first-key").hexdigest()
    monkeypatch.setattr(keys_module.hmac, "compare_digest", lambda a, b: compared.append((a, b)) or a == b)
    assert ApiKeys(DIGESTS).check(bearer("first-key")) == "first-key"
    assert compared == [(expected, digest) for digest in DIGESTS]
    assert ApiKeys(()).check({}) == ""
    assert sent_key({}) == ""


def test_without_keys_any_key_is_good(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        await world.pair()
        for headers in ({}, bearer("anything"), {"Authorization": "Bearer"}):
            async with world.post("/v1/completions", {"prompt": "hi"}, headers=headers) as response:
                assert response.status == 200

    in_world(scenario)


def test_who_shares_with_whom(in_world: Any) -> None:
    async def scenario(world: Any) -> None:
        _, decode = await world.pair()

        async def namespace(key: str, salt: str | None) -> str:
            for path, needed in (
                ("/v1/completions", {"prompt": "hi"}),
                ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ):
                body = needed | ({"cache_salt": salt} if salt is not None else {})
                async with world.post(path, body, headers=bearer(key)) as response:
                    assert response.status == 200
            one, other = (m.request.namespace for m in decode.of(GenerateRequest)[-2:])
            assert one == other
            return str(one)

        asked = [(key, salt) for key in KEYS for salt in (None, "a", "b", '","', "second-key")]
        namespaces = [await namespace(key, salt) for key, salt in asked]
        assert len(set(namespaces)) == len(asked)
        assert [await namespace(key, salt) for key, salt in asked] == namespaces
        assert not any(key in name for key in KEYS for name in namespaces)

    in_world(scenario, api_key_digests=DIGESTS)


def test_namespaces_without_keys(in_world: Any) -> None:
    """Nobody checks the key then: it divides nothing. A salt does."""

    async def scenario(world: Any) -> None:
        _, decode = await world.pair()
        for headers, salt in ((bearer("a"), None), (bearer("b"), None), ({}, None), ({}, "s"), (bearer("a"), "s")):
            body = {"prompt": "hi"} | ({"cache_salt": salt} if salt else {})
            async with world.post("/v1/completions", body, headers=headers) as response:
                assert response.status == 200
        one, two, three, four, five = (m.request.namespace for m in decode.of(GenerateRequest))
        assert one == two == three == "digest"
        assert four == five != "digest"
        assert four.startswith("digest.")

    in_world(scenario)


def test_gateways_of_a_cluster_agree(tmp_path: Path) -> None:
    for name in ("one", "two"):
        ClusterKeys.create(tmp_path / name)
    mine = Tenants("m", str(tmp_path / "one"))
    assert mine.namespace("k", "s") == Tenants("m", str(tmp_path / "one")).namespace("k", "s")
    others = [
        Tenants("m", str(tmp_path / "two")).namespace("k", "s"),
        Tenants("other", str(tmp_path / "one")).namespace("k", "s"),
        mine.namespace("ks", None),
        mine.namespace("", "ks"),
        mine.namespace("s", "k"),
        Tenants("m", "").namespace("k", "s"),
        Tenants("m", "").namespace("k", "s"),
    ]
    assert len({mine.namespace("k", "s"), *others}) == len(others) + 1


def test_clients_make_no_series(in_world: Any) -> None:
    """ME03: names of models, users, paths, ids, tiers and keys of clients are no labels."""

    async def series(world: Any) -> set[str]:
        async with world.http.get(world.url + "/metrics") as response:
            text = await response.text()
        return {line.rpartition(" ")[0] for line in text.splitlines() if not line.startswith("#")}

    async def ask(world: Any, number: int) -> None:
        word = f"word-{number}"
        body = {"prompt": "hi", "max_tokens": 1, "user": word, "cache_salt": word, "metadata": {word: word}}
        headers = bearer(word) | {"X-Request-Id": word}
        for path, more in (
            ("/v1/completions", {}),
            ("/v1/completions", {"model": word}),
            ("/v1/completions", {"service_tier": word}),
            (f"/v1/{word}", {}),
        ):
            async with world.post(path, body | more, headers=headers) as response:
                await response.read()

    async def scenario(world: Any) -> None:
        await world.pair()
        await ask(world, 0)
        before = await series(world)
        for number in range(1, 100):
            await ask(world, number)
        assert await series(world) == before
        assert "word" not in json.dumps(sorted(before))

    in_world(scenario)
