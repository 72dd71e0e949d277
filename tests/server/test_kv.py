"""The routes below /v1/kv: pool, page map, prefixes, explanations, pins (FC-36) and events; /slots, /props, /health."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CHAIN, Server, wait_until

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SCALE = float(os.environ.get("PAGEDKV_TEST_SCALE", "1"))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(CHAIN, "-c", "2048") as running:
        yield running


def complete(server: Server, prompt: str, max_tokens: int = 2, **more: Any) -> int:
    """How many of its tokens were cached."""
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        **more,
    }
    return int(
        server.post("/v1/completions", body).ok()["usage"]["prompt_tokens_details"]["cached_tokens"]
    )


def explain(server: Server, prompt: str, **more: Any) -> Any:
    return server.post("/v1/kv/explain", {"prompt": prompt, **more}).ok()


def text(number: int, length: int) -> str:
    """Texts that differ from their first page on, most of them in their first letter."""
    beginning = f"{chr(33 + number % 90)}{number:07d}"
    return (beginning + LETTERS * (length // 26 + 1))[:length]


def pages_of(runs: str) -> list[tuple[str, int]]:
    """(state, references) of each page of a map, as the documentation says it is read."""
    out: list[tuple[str, int]] = []
    for run in runs.split(",") if runs else []:
        found = re.fullmatch(r"(\d*)([fcnh])(\d*)", run)
        assert found, run
        count, state, references = found.groups()
        out += [(state, int(references or 1) if state == "h" else 0)] * int(count or 1)
    return out


# ---- the pool


def test_the_map_has_the_pages_that_the_pool_counts(server: Server) -> None:
    complete(server, LETTERS * 20)
    before = server.get("/v1/kv/pool").ok()
    shown = server.get("/v1/kv/pages").ok()
    assert server.get("/v1/kv/pool").ok() == before, "idle"
    for group, counted in zip(shown["groups"], before["groups"], strict=True):
        pages = pages_of(group["map"])
        assert len(pages) == group["num_pages"]
        states = [state for state, _ in pages]
        assert states.count("h") == counted["pages"]["held"] == 0
        assert states.count("c") == counted["pages"]["cached"] >= 32
        assert states.count("f") == counted["pages"]["free"]


def test_the_map_counts_references(server: Server) -> None:
    prompt = text(77, 200)
    body = {
        "model": server.model,
        "prompt": prompt,
        "max_tokens": 1800,
        "n": 4,
        "temperature": 1,
        "stream": True,
    }
    with server.stream("/v1/completions", body):

        def shared() -> bool:
            pages = pages_of(server.get("/v1/kv/pages").ok()["groups"][0]["map"])
            return (
                sum(references == 4 for _, references in pages) >= 11
            )  # 200 tokens, but the last: 12 pages

        wait_until(shared, "pages of a prompt that four answers hold")
    wait_until(
        lambda: server.get("/v1/kv/pool").ok()["groups"][0]["pages"]["held"] == 0,
        "pages given back",
    )


def test_slots_show_what_runs(server: Server) -> None:
    assert server.get("/slots").ok() == []
    body = {
        "model": server.model,
        "prompt": text(5, 100),
        "max_tokens": 1900,
        "stream": True,
        "ignore_eos": True,
    }
    with server.stream("/v1/completions", body):
        slot = wait_until(
            lambda: [s for s in server.get("/slots").ok() if s["generated_tokens"] > 0],
            "a request that generates",
        )[0]
        assert slot["state"] == "decode" and slot["is_processing"]
        assert slot["prompt_tokens"] == 100
        assert slot["pages"] == (slot["computed_tokens"] + 15) // 16
        assert LETTERS[:5] not in str(slot)
    wait_until(lambda: server.get("/slots").ok() == [], "no request left")


def test_health_and_props_tell_how_the_cache_is_set_up() -> None:
    flags = ["--kv-cache-dtype", "k=f16,v=q8", "--no-dynamic", "--num-blocks", "64"]
    with Server("toy:", "--api-key", "right", *flags, key="right") as server:
        assert server.get("/health", key=None).ok() == {"status": "ok"}
        assert server.get("/health", key="wrong").ok() == {"status": "ok"}
        health = server.get("/health").ok()
        props = server.get("/props").ok()
        assert health["status"] == "ok"
        assert health["kv_cache"] == props["kv_cache"]
        cache = health["kv_cache"]
        assert (
            cache["mode"] == "k=f16,v=q8" and cache["growth"] is False and cache["page_size"] == 16
        )
        assert cache["capacity_tokens"] == 64 * 16
        assert cache["bytes_per_token"] == server.get("/v1/kv/pool").ok()["bytes_per_token"] > 0
        assert isinstance(health["exact"], bool) and health["exact_reason"]
        assert props["default_generation_settings"]["n_ctx"] >= 1024
        version = server.get("/version").ok()["version"]
        assert re.fullmatch(r"\d+\.\d+\.\d+", version) and version in props["build_info"]


# ---- prefixes


def test_explains_what_requests_then_find(server: Server) -> None:
    prompt = text(1, 150)
    cold = explain(server, prompt)
    assert (cold["hit_tokens"], cold["reason"], cold["prompt_tokens"]) == (0, "new_session", 150)
    assert complete(server, prompt) == 0
    warm = explain(server, prompt)
    assert (warm["hit_tokens"], warm["reason"]) == (149, "none")
    assert complete(server, prompt) == 149
    other = explain(server, prompt[:100] + "z" * 50)
    assert (other["hit_tokens"], other["first_differing_token"]) == (100, 100)
    assert other["reason"] == "prefix_divergence_at_token" and "100" in other["text"]
    assert complete(server, prompt[:100] + "z" * 50) == 100
    salted = explain(server, prompt, cache_salt="other")
    assert (salted["hit_tokens"], salted["reason"]) == (0, "salt_differs")


def test_explains_messages_as_chat_requests_have_them(server: Server) -> None:
    messages = [{"role": "user", "content": text(2, 120)}]
    answer = server.post(
        "/v1/chat/completions",
        {"model": server.model, "messages": messages, "max_tokens": 1, "temperature": 0},
    ).ok()
    found = server.post("/v1/kv/explain", {"messages": messages}).ok()
    assert found["prompt_tokens"] == answer["usage"]["prompt_tokens"]
    assert (found["hit_tokens"], found["reason"]) == (found["prompt_tokens"] - 1, "none")


def test_lists_prefixes_the_largest_first(server: Server) -> None:
    server.post("/reset_prefix_cache").ok()
    shared = text(3, 96)
    for question in "pqr":
        complete(server, shared + question * 40, 1)
    complete(server, text(4, 40), 1, cache_salt="theirs")
    listed = server.get("/v1/kv/prefixes").ok()
    assert listed["complete"] and listed["pins"] == []
    first, second = listed["data"]
    assert (first["tokens"], first["sequences"], first["salt"]) == (96, 3, None)
    assert first["begins_with"]["text"] == shared[:32]
    assert second["salt"] and "theirs" not in str(second)
    assert second["pages"] == 3 and first["bytes"] > second["bytes"]
    pool = server.get("/v1/kv/pool").ok()
    assert pool["prefixes"]["bytes"] == first["bytes"] + second["bytes"]
    assert len(server.get("/v1/kv/prefixes?limit=1").ok()["data"]) == 1


@pytest.mark.parametrize("limit", ["0", "-1", "1001", "x", "1e3", "", "9" * 30])
def test_refuses_other_limits(server: Server, limit: str) -> None:
    assert server.get(f"/v1/kv/prefixes?limit={limit}").error(400)["param"] == "limit"


# ---- pins


def test_a_pinned_prefix_outlives_a_flood() -> None:
    prefix = text(1, 512)
    with Server(CHAIN, "--num-blocks", "128", "--no-dynamic", "-c", "1900") as server:

        def flood() -> None:
            for i in range(round(100 * SCALE)):
                complete(server, text(1000 + i, 256), 1)

        complete(server, prefix + "z")
        pin = server.post("/v1/kv/pins", {"prompt": prefix, "ttl_seconds": 3600}).ok()
        assert (pin["tokens"], pin["refusal"], pin["seconds_left"]) == (512, None, 3600)
        listed = server.get("/v1/kv/pins").ok()["data"]
        assert [(p["id"], p["tokens"], p["salt"]) for p in listed] == [(pin["id"], 512, None)]
        assert 0 < listed[0]["seconds_left"] <= 3600 and listed[0]["bytes"] > 0
        assert server.get("/v1/kv/prefixes").ok()["pins"][0]["id"] == pin["id"]
        flood()
        assert complete(server, prefix + "0123456789") == 512
        assert server.request("DELETE", f"/v1/kv/pins/{pin['id']}").ok()["deleted"]
        server.request("DELETE", f"/v1/kv/pins/{pin['id']}").error(404)
        flood()
        assert complete(server, prefix + "0123456789") == 0

        # Nine tenths of the pool, of which half may be pinned.
        long = text(2, 115 * 16)
        complete(server, long, 1)
        pin = server.post("/v1/kv/pins", {"prompt": long}).ok()
        assert (
            pin["tokens"] == 64 * 16
            and "64 pages" in pin["refusal"]
            and pin["seconds_left"] is None
        )
        flood()
        assert complete(server, long, 1) == 64 * 16
        assert complete(server, text(3, 900), 1) == 0, "what is pinned stalls nobody"


def test_pins_end_with_their_time(server: Server) -> None:
    prompt = text(60, 64)
    complete(server, prompt)
    server.post("/v1/kv/pins", {"prompt": prompt, "ttl_seconds": 0.2}).ok()
    wait_until(lambda: server.get("/v1/kv/pins").ok()["data"] == [], "the end of a pin")
    unknown = server.post("/v1/kv/pins", {"prompt": text(61, 64)}).ok()
    assert unknown["id"] is None and unknown["tokens"] == 0 and "64 tokens" in unknown["refusal"]


def test_there_are_not_too_many_pins(server: Server) -> None:
    prompt = text(62, 32)
    complete(server, prompt)
    ids = [server.post("/v1/kv/pins", {"prompt": prompt}).ok()["id"] for _ in range(256)]
    assert "256" in server.post("/v1/kv/pins", {"prompt": prompt}).error(400)["message"]
    for number in ids:
        server.request("DELETE", f"/v1/kv/pins/{number}").ok()


# ---- events


def test_events_are_told_as_they_happen_and_again_to_who_comes_back(server: Server) -> None:
    with server.stream("/v1/kv/events") as stream:
        prompt = text(8, 64)
        complete(server, prompt, 20)
        events = stream.events()
        tokens = list(prompt.encode())
        seen = []
        while len(seen) < 5 * 16:
            event = next(events)
            body = event.json()
            assert event.id == str(body["sequence"])
            if body["type"] == "BlockStored" and (seen or body["token_ids"][:8] == tokens[:8]):
                assert all(re.fullmatch("[0-9a-f]{64}", name) for name in body["block_hashes"])
                assert len(body["token_ids"]) == body["block_size"] * len(body["block_hashes"])
                assert (body["parent_block_hash"] is None) == (not seen)
                seen += body["token_ids"]
        assert seen[:64] == tokens
        last = event.id
    complete(server, text(9, 32), 1)
    with server.stream("/v1/kv/events", headers={"Last-Event-ID": last}) as stream:
        first = next(stream.events())
        assert first.id == str(int(last) + 1)
    server.post("/reset_prefix_cache").ok()
    with server.stream(f"/v1/kv/events?from={int(last) + 1}") as stream:
        kinds = []
        for event in stream.events():
            kinds.append(event.json()["type"])
            if kinds[-1] == "AllBlocksCleared":
                break
        assert "BlockStored" in kinds


def test_events_that_are_no_more_are_told_as_lost(server: Server) -> None:
    # Beyond the newest: the client followed a server that ran before.
    with server.stream("/v1/kv/events", headers={"Last-Event-ID": "123456789"}) as stream:
        lost = next(stream.events())
        assert lost.name == "lost" and lost.id is None
        body = lost.json()
        assert body["type"] == "lost" and body["from"] == 123456790 and body["count"] is None
        complete(server, text(10, 32), 1)
        assert next(stream.events()).json()["sequence"] == body["next"]


def test_silent_events_are_pinged() -> None:
    with Server("toy:", "--sse-ping", "1") as server, server.stream("/v1/kv/events") as stream:
        assert next(stream.events(comments=True)).comment == "ping"


def test_followers_do_not_hold_up_the_end() -> None:
    with Server("toy:") as server:
        streams = [server.stream("/v1/kv/events") for _ in range(20)]
        complete(server, "a" * 64)
    for stream in streams:
        stream.close()


def test_many_follow_at_once(server: Server) -> None:
    numbers: list[list[int]] = []

    def follow() -> None:
        with server.stream("/v1/kv/events?from=0") as stream:
            mine = []
            for event in stream.events():
                if event.name == "lost":
                    continue
                mine.append(event.json()["sequence"])
                if event.json().get("token_ids", [])[:8] == list(text(12, 8).encode()):
                    break
            numbers.append(mine)

    threads = [threading.Thread(target=follow) for _ in range(30)]
    for thread in threads:
        thread.start()
    complete(server, text(12, 48), 1)
    for thread in threads:
        thread.join()
    assert len(numbers) == 30
    for mine in numbers:
        assert mine == list(range(mine[0], mine[-1] + 1)), "no number is missing"


# ---- bodies


@pytest.mark.parametrize("route", ["/v1/kv/explain", "/v1/kv/pins"])
@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": "A", "tokens": [65]},
        {"prompt": ""},
        {"prompt": 5},
        {"tokens": []},
        {"tokens": [-1]},
        {"tokens": [2**31]},
        {"tokens": [1e30]},
        {"tokens": ["A"]},
        {"tokens": [[65]]},
        {"tokens": "A"},
        {"messages": []},
        {"messages": [{}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [5]},
        {"prompt": "A" * 3000},
        {"prompt": "A", "cache_salt": "x" * 129},
        {"prompt": "A", "cache_salt": 5},
        {"prompt": "A", "model": 5},
    ],
)
def test_refuses_bodies_that_make_no_sense(
    server: Server, route: str, body: dict[str, Any]
) -> None:
    server.post(route, body).error(400)


@pytest.mark.parametrize("seconds", [-1, 1e30, "x", True, 2**63])
def test_refuses_times_that_make_no_sense(server: Server, seconds: Any) -> None:
    body = {"prompt": "ABC", "ttl_seconds": seconds}
    assert server.post("/v1/kv/pins", body).error(400)["param"] == "ttl_seconds"


@pytest.mark.parametrize("number", ["0", "-1", "x", "9" * 30, "1.5"])
def test_refuses_ids_that_are_none(server: Server, number: str) -> None:
    server.request("DELETE", f"/v1/kv/pins/{number}").error(400)
    server.get("/v1/kv/events", headers={"Last-Event-ID": "-1"}).error(400)


def test_needs_a_cache_to_explain() -> None:
    with Server("toy:", "--no-enable-prefix-caching") as server:
        assert "cache" in server.post("/v1/kv/explain", {"prompt": "abc"}).error(400)["message"]
