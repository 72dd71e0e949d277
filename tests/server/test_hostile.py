"""Hostile numbers (FC-34, without state files): each is refused by name or means what it says; nothing breaks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from serving import CHAIN, Server

NUMBERS = [
    "-1",
    "0.5",
    "2147483648",
    "9223372036854775808",
    "-9223372036854775809",
    "1e30",
    "-1e30",
    "1e400",
    '"x"',
    "true",
]
# Fields that are whole numbers, and the numbers of the list that they may have.
FIELDS = {
    "n": [],
    "max_tokens": ["2147483648"],
    "seed": ["-1", "2147483648"],
    "top_k": ["-1"],
    "min_tokens": [],
    "priority": ["-1"],
}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(CHAIN, "-c", "2048") as running:
        yield running


def ask(server: Server, path: str, field: str, number: str) -> Any:
    body = {"model": server.model, "stop": ["Z"], "max_tokens": 4}
    body.update(
        {"messages": [{"role": "user", "content": "A"}]} if "chat" in path else {"prompt": "A"}
    )
    body.pop(field, None)
    text = json.dumps(body)[:-1] + f', "{field}": {number}' + "}"
    return server.request("POST", path, text.encode())


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(
    "field", [*FIELDS, "top_logprobs", "logprobs", "temperature", "top_p", "stop_token_ids"]
)
@pytest.mark.parametrize("number", NUMBERS)
def test_hostile_numbers(server: Server, path: str, field: str, number: str) -> None:
    if field == "top_logprobs" and "chat" not in path:
        return  # no field of that route
    answer = ask(server, path, field, number)
    if answer.status == 200:
        allowed = FIELDS.get(field, [])
        fits = field in ("temperature", "top_p") and number == "0.5"
        flag = field == "logprobs" and "chat" in path and number == "true"
        assert number in allowed or fits or flag, f"{field} {number} was taken: {answer.text[:300]}"
        assert answer.json()["choices"]
    else:
        error = answer.error(400)
        assert (
            field in error["message"] or error["param"] == field or error["code"] == "invalid_json"
        ), error
    assert server.get("/health").status == 200


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_stop_has_at_most_four_texts(server: Server, path: str) -> None:
    for stop in (["A"] * 5, ["A"] * 100_000, [""], [5], {"a": 1}, 5):
        assert ask(server, path, "stop", json.dumps(stop)).error(400)["param"] == "stop"


@pytest.mark.parametrize(
    "bias",
    [
        '{"-1": 1}',
        '{"2147483648": 1}',
        '{"9223372036854775808": 1}',
        '{"x": 1}',
        '{"65": 1e30}',
        '{"65": "x"}',
        "[1]",
    ],
)
def test_biases_of_tokens_there_are_not(server: Server, bias: str) -> None:
    ask(server, "/v1/completions", "logit_bias", bias).error(400)


@pytest.mark.parametrize(
    "tokens",
    ["[-1]", "[2147483648]", "[9223372036854775808]", "[1e30]", "[0.5]", "[[-1]]", "[null]"],
)
def test_prompts_of_tokens_there_are_not(server: Server, tokens: str) -> None:
    server.request(
        "POST", "/v1/completions", f'{{"prompt": {tokens}, "max_tokens": 1}}'.encode()
    ).error(400)
    server.request("POST", "/v1/kv/explain", f'{{"tokens": {tokens}}}'.encode()).error(400)


def test_names_of_files_mean_nothing(server: Server) -> None:
    for name in ("../x", "/etc/passwd", "a%00b", "x" * 300, "%2e%2e%2fetc"):
        for answer in (server.get(f"/v1/models/{name}"), server.get(f"/{name}")):
            assert answer.status in (400, 404)
            assert "root:" not in answer.text


def test_its_pages_are_all_back(server: Server) -> None:
    pool = server.get("/v1/kv/pool").ok()
    assert [group["pages"]["held"] for group in pool["groups"]] == [0]
