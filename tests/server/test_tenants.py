"""Tenants share no pages and learn nothing of each other (FC-09, without a restart)."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from serving import CHAIN, SMOLQ, Server

ONE, TWO = "key-of-tenant-one", "key-of-tenant-two"
TOKENS = 320


@pytest.fixture(params=[CHAIN, SMOLQ], ids=["chain", "smol"], scope="module")
def model(request: Any) -> str:
    if not Path(request.param).exists():
        pytest.skip(f"{request.param} is not there")
    return str(request.param)


@pytest.fixture(scope="module")
def tenants(model: str) -> Iterator[Server]:
    with Server(model, "--api-key", ONE, "--api-key", TWO, "-c", "2048", key=ONE) as running:
        yield running


def prompt(first: int) -> list[int]:
    return [65 + (first + i * i) % 26 for i in range(TOKENS)]


def cached(server: Server, tokens: list[int], key: str | None = "", **more: Any) -> int:
    body = {"model": server.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, **more}
    usage = server.post("/v1/completions", body, key=key).ok()["usage"]
    assert usage["prompt_tokens"] == TOKENS
    return int(usage["prompt_tokens_details"]["cached_tokens"])


def test_another_salt_never_hits_and_the_same_does(model: str) -> None:
    with Server(model, "-c", "2048") as server:
        tokens = prompt(1)
        salts = [
            {"cache_salt": "A"},
            {"cache_salt": "A"},
            {"cache_salt": "B"},
            {},
            {"cache_salt": "A"},
        ]
        got = [cached(server, tokens, **salt) for salt in salts]
        assert got[0] == got[2] == got[3] == 0, got
        assert got[1] >= 304 and got[4] >= 304, got


def test_keys_are_salts(tenants: Server) -> None:
    tokens = prompt(2)
    got = [cached(tenants, tokens, key) for key in (ONE, ONE, TWO, TWO)]
    assert got[0] == got[2] == 0 and got[1] >= 304 and got[3] >= 304, got
    # A salt within a key is one more; it is not the other key's.
    assert cached(tenants, tokens, ONE, cache_salt="x") == 0
    assert cached(tenants, tokens, TWO, cache_salt="x") == 0
    assert cached(tenants, tokens, ONE, cache_salt="x") >= 304


def test_keys_share_pages_when_told_to(model: str) -> None:
    with Server(
        model, "--api-key", ONE, "--api-key", TWO, "--share-cache-between-keys", "-c", "2048"
    ) as server:
        server.key = ONE
        assert cached(server, prompt(3), ONE) == 0
        assert cached(server, prompt(3), TWO) >= 304


def test_a_tenant_learns_nothing_of_another_ones_prompts(tenants: Server) -> None:
    def explain(key: str, number: int) -> Any:
        return tenants.post("/v1/kv/explain", {"tokens": prompt(number)}, key=key).ok()

    before = explain(TWO, 4)
    cached(tenants, prompt(4), ONE)
    assert explain(TWO, 4) == before, "whatever another tenant has sent"
    assert explain(ONE, 4)["hit_tokens"] == TOKENS - 1

    # It sees, pins and unpins its own alone.
    pin = tenants.post("/v1/kv/pins", {"tokens": prompt(4)}, key=TWO).ok()
    assert pin["id"] is None, "nothing of its own is stored"
    pin = tenants.post("/v1/kv/pins", {"tokens": prompt(4)}, key=ONE).ok()
    assert pin["tokens"] == TOKENS
    assert tenants.get("/v1/kv/pins", key=TWO).ok()["data"] == []
    assert [p["id"] for p in tenants.get("/v1/kv/pins", key=ONE).ok()["data"]] == [pin["id"]]
    tenants.request("DELETE", f"/v1/kv/pins/{pin['id']}", key=TWO).error(404)
    assert tenants.request("DELETE", f"/v1/kv/pins/{pin['id']}", key=ONE).ok()["deleted"]
    own = tenants.get("/v1/kv/prefixes", key=ONE).ok()["data"]
    assert own and all(p["salt"] for p in own)
    salts = {p["salt"] for p in own}
    assert not salts & {p["salt"] for p in tenants.get("/v1/kv/prefixes", key=TWO).ok()["data"]}


def test_a_tenant_sees_only_its_own_requests(tenants: Server) -> None:
    body = {
        "model": tenants.model,
        "prompt": prompt(5),
        "max_tokens": 1700,
        "stream": True,
        "ignore_eos": True,
    }
    with tenants.stream("/v1/completions", body, key=ONE):
        assert tenants.get("/slots", key=TWO).ok() == []


def test_what_shows_everything_is_for_operators(tenants: Server) -> None:
    for path in ("/v1/kv/events", "/v1/kv/pages"):
        assert tenants.get(path).error(403)["type"] == "permission_error"
    with Server("toy:", "--api-key", ONE, key=ONE) as server:  # one key: there are no tenants
        assert server.get("/v1/kv/pages").status == 200
        server.stream("/v1/kv/events").close()


def test_keys_and_salts_are_never_shown(tenants: Server) -> None:
    cached(tenants, prompt(6), ONE, cache_salt="secret-salt")
    for path in ("/v1/kv/prefixes", "/v1/kv/pool", "/metrics", "/props", "/slots", "/v1/kv/pins"):
        shown = tenants.get(path).text
        assert ONE not in shown and "secret-salt" not in shown and "key@" not in shown, path
    assert ONE not in tenants.log() and "secret-salt" not in tenants.log()


def test_a_tenant_forgets_its_own_alone(tenants: Server) -> None:
    tokens = prompt(7)
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "x"}]
    for salt in salts:
        for key in (ONE, TWO):
            cached(tenants, tokens, key, **salt)
    assert tenants.post("/reset_prefix_cache", key=ONE).status == 200
    for salt in salts:
        assert cached(tenants, tokens, ONE, **salt) == 0
        assert cached(tenants, tokens, TWO, **salt) >= 304
