"""OpenAI's routes of the built server: field cases FC-25 to FC-29, FC-31 and FC-35, keys, limits and errors.

The CHAIN model's text is known: A..Z and 0..9 in rings, the llama emoji byte by byte, p q r s each equally likely after any of
them, x y z . and then the end.
"""

from __future__ import annotations

import http.client
import json
import math
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from serving import BINARY, CHAIN, TOY, Server, ServingError, wait_until

LLAMA = "\U0001f999"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"


@pytest.fixture(scope="module")
def chain() -> Iterator[Server]:
    with Server(CHAIN, "--max-num-seqs", "8") as server:
        yield server


def chat_body(content: Any, **fields: Any) -> dict[str, Any]:
    return {
        "model": "chain",
        "messages": [{"role": "user", "content": content}],
        "temperature": 0,
        **fields,
    }


def choices_of(
    server: Server, path: str, body: dict[str, Any]
) -> tuple[list[tuple[str, str]], list[dict[str, Any]]]:
    """(text, finish_reason) of each choice of a stream, and its chunks."""
    with server.stream(path, {**body, "stream": True}) as stream:
        chunks = list(stream.chunks())
    texts: dict[int, str] = {}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        assert "error" not in chunk, chunk
        for choice in chunk["choices"]:
            index = choice["index"]
            assert index not in reasons, "a chunk after the choice's end"
            text = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            texts[index] = texts.get(index, "") + text
            if choice["finish_reason"]:
                reasons[index] = choice["finish_reason"]
    assert len({(c["id"], c["created"], c["object"]) for c in chunks}) == 1
    return [(texts[i], reasons[i]) for i in sorted(texts)], chunks


def whole(
    server: Server, path: str, body: dict[str, Any]
) -> tuple[list[tuple[str, str]], dict[str, Any]]:
    answer = server.post(path, body).ok()
    choices = answer["choices"]
    assert [c["index"] for c in choices] == list(range(len(choices)))
    return [
        (c["message"]["content"] if path == CHAT else c["text"], c["finish_reason"])
        for c in choices
    ], answer


def both(server: Server, path: str, body: dict[str, Any]) -> list[tuple[str, str]]:
    """The choices, which are the same in a stream and in one piece."""
    streamed, _ = choices_of(server, path, body)
    answered, _ = whole(server, path, body)
    assert streamed == answered
    return answered


# ---- FC-25: characters of several tokens


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_characters_of_several_tokens_come_whole(chain: Server, path: str) -> None:
    def body(tokens: int) -> dict[str, Any]:
        rest = (
            chat_body(LLAMA)
            if path == CHAT
            else {"model": "chain", "prompt": LLAMA, "temperature": 0}
        )
        return {**rest, "max_tokens": tokens}

    assert both(chain, path, body(8)) == [(LLAMA * 2, "length")]
    [(text, reason)] = both(chain, path, body(10))
    assert text in (LLAMA * 2, LLAMA * 2 + "\ufffd") and reason == "length"
    assert chain.post(path, body(10)).ok()["usage"]["completion_tokens"] == 10
    _, chunks = choices_of(chain, path, body(8))
    for chunk in chunks:
        for choice in chunk["choices"]:
            delta = choice["delta"].get("content", "") if path == CHAT else choice["text"]
            assert set(delta) <= {LLAMA}


def test_an_error_quotes_characters_whole(chain: Server) -> None:
    error = chain.post(CHAT, {"model": LLAMA * 60, "messages": []}).error(404)
    assert LLAMA in error["message"] and "\ufffd" not in error["message"]


# ---- FC-26: stop texts


def test_stop_texts(chain: Server) -> None:
    def run(stop: Any) -> list[tuple[str, str]]:
        return both(chain, CHAT, chat_body("ABC", max_tokens=26, stop=stop))

    ring = "DEFGHIJKLMNOPQRSTUVWXYZABC"
    assert run(["GHI"]) == [("DEF", "stop")]
    assert run("GHI") == [("DEF", "stop")]
    assert run(["ZZ", "HI", "GHI"]) == [("DEF", "stop")]
    for stop in (["GHX"], None, []):
        assert run(stop) == [(ring, "length")]
    error = chain.post(CHAT, chat_body("ABC", stop=list("ABCDE"))).error(400)
    assert error["param"] == "stop" and "4" in error["message"]


def test_log_probabilities_tell_nothing_of_a_stop_text(chain: Server) -> None:
    answer = chain.post(
        CHAT, chat_body("ABC", max_tokens=26, stop="GHI", logprobs=True, top_logprobs=1)
    ).ok()
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "DEF"


# ---- FC-27: usage


def test_usage_is_the_same_in_both_modes(chain: Server) -> None:
    for n in (1, 2):
        for path in (CHAT, TEXT):
            content = f"{n} {path[4:]} is asked " + "A" * 80
            body = (
                chat_body(content, max_tokens=5, n=n)
                if path == CHAT
                else {"prompt": content, "max_tokens": 5, "n": n}
            )
            cold = chain.post(path, body).ok()["usage"]
            warm = chain.post(path, body).ok()["usage"]
            assert cold["prompt_tokens"] == warm["prompt_tokens"] == len(content)
            assert cold["completion_tokens"] == 5 * n
            assert cold["total_tokens"] == len(content) + 5 * n
            assert cold["prompt_tokens_details"]["cached_tokens"] == 0
            assert warm["prompt_tokens_details"]["cached_tokens"] >= 80
            _, chunks = choices_of(chain, path, {**body, "stream_options": {"include_usage": True}})
            assert chunks[-1]["choices"] == []
            assert chunks[-1]["usage"] == warm
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            _, chunks = choices_of(chain, path, body)
            assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


# ---- FC-28: too long


@pytest.mark.parametrize("dtype", ["f16", "q8"])
def test_too_long_prompts_are_refused_before_a_stream(dtype: str) -> None:
    with Server(CHAIN, "-c", "512", "--kv-cache-dtype", dtype) as server:
        for stream in (False, True):
            answer = server.post(CHAT, chat_body("A" * 600, stream=stream))
            error = answer.error(400)
            assert error["code"] == "context_length_exceeded"
            assert error["n_prompt_tokens"] == 600 and error["n_ctx"] == 512
            assert "600" in error["message"] and "512" in error["message"]
        [(text, reason)] = both(server, CHAT, chat_body("A" * 500, max_tokens=100))
        assert reason == "length" and 0 < len(text) <= 12
        [(text, reason)] = both(server, CHAT, chat_body("A" * 500))
        assert reason == "length" and 0 < len(text) <= 12


# ---- FC-29: nulls and types


def test_null_is_as_absent(chain: Server) -> None:
    plain = chain.post(CHAT, chat_body("ABC", max_tokens=9)).ok()["choices"]
    names = [
        "stop",
        "max_tokens",
        "seed",
        "top_p",
        "logit_bias",
        "tools",
        "response_format",
        "stream_options",
        "n",
    ]
    nulls: dict[str, Any] = {name: None for name in names}
    nulls.update(
        tool_choice=None,
        user=None,
        logprobs=None,
        top_logprobs=None,
        frequency_penalty=None,
        metadata=None,
    )
    same: list[dict[str, Any]] = [
        {**nulls, "max_completion_tokens": 9},
        {"max_completion_tokens": 9, "max_tokens": 20},
        {
            "max_tokens": 9,
            "messages": [{"role": "user", "content": [{"type": "text", "text": "ABC"}]}],
        },
        {
            "max_tokens": 9,
            "messages": [{"role": "developer", "content": "x"}, {"role": "user", "content": "ABC"}],
        },
        {"max_tokens": 9, "a_field_from_the_future": {"x": 1}},
        {
            "max_tokens": 9,
            "tools": [],
            "tool_choice": "none",
            "response_format": {"type": "text"},
            "stop": [],
        },
        {"max_tokens": 9.0, "store": True, "user": "u", "prompt_cache_key": "k", "session_id": "s"},
    ]
    for more in same:
        assert chain.post(CHAT, {**chat_body("ABC"), **more}).ok()["choices"] == plain, more
    body = {
        k: v for k, v in chat_body("ABC", max_tokens=9).items() if k not in ("temperature", "model")
    }
    assert chain.post(CHAT, {**body, "temperature": None, "model": None}).status == 200


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": "warm"}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2**31}, "n"),
        ({"n": 1e30}, "n"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 2**31}, "max_tokens"),
        ({"max_tokens": 2**63}, "max_tokens"),
        ({"max_tokens": 1e30}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1e30}, "seed"),
        ({"top_logprobs": -1, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": 3}, "logprobs"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"logit_bias": {"65": 101}}, "logit_bias"),
        ({"logit_bias": [65]}, "logit_bias"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"messages": []}, "messages"),
        ({"messages": "ABC"}, "messages"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
                ]
            },
            "messages[0].content[0].type",
        ),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "a/b"}, "cache_salt"),
        ({"cache_salt": "a\0b"}, "cache_salt"),
        ({"cache_salt": "a" * 129}, "cache_salt"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": [2**40]}, "stop_token_ids"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"priority": 2**31}, "priority"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"prompt_cache_options": {"mode": "explicit"}}, "prompt_cache_options"),
    ],
)
def test_a_wrong_field_is_named(chain: Server, fields: dict[str, Any], param: str) -> None:
    error = chain.post(CHAT, {**chat_body("ABC", max_tokens=1), **fields}).error(400)
    assert error["param"] == param and error["type"] == "invalid_request_error"
    assert error["code"] in ("invalid_value", "unsupported_parameter", "missing_required_parameter")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [2**40]]}, "prompt"),
        ({"prompt": [1.5]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": "A", "logprobs": 6}, "logprobs"),
        ({"prompt": "A", "logprobs": True}, "logprobs"),
        ({"prompt": "A", "suffix": "B"}, "suffix"),
        ({"prompt": "A", "best_of": 2}, "best_of"),
        ({"prompt": "A", "top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_a_wrong_field_of_a_completion_is_named(
    chain: Server, fields: dict[str, Any], param: str
) -> None:
    assert chain.post(TEXT, {"model": "chain", **fields}).error(400)["param"] == param


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"1",
        b'{"model": "chain", "x": NaN}',
        b'{"x": "\xff"}',
        b'{"x": 1e999}',
        b"[" * 5000,
        b'{"a":' * 200 + b"1" + b"}" * 200,
    ],
)
def test_what_is_no_object_is_invalid_json(chain: Server, body: bytes) -> None:
    assert chain.post(CHAT, body).error(400)["code"] == "invalid_json"


def test_missing_and_unknown(chain: Server) -> None:
    error = chain.post(CHAT, {}).error(400)
    assert (error["param"], error["code"]) == ("messages", "missing_required_parameter")
    error = chain.post(CHAT, {**chat_body("A"), "model": "gpt-9"}).error(404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")


# ---- FC-31: several choices


def test_choices_differ_and_repeat(chain: Server) -> None:
    for prompt in ("p", "A" * 63 + "p"):
        body = chat_body(prompt, n=4, temperature=1, seed=7, max_tokens=32)
        first = both(chain, CHAT, body)
        assert len({text for text, _ in first}) == 4
        assert all(set(text) <= set("pqrs") and len(text) == 32 for text, _ in first)
        assert both(chain, CHAT, body) == first


def test_choices_of_several_prompts_come_prompt_by_prompt(chain: Server) -> None:
    body = {"model": "chain", "prompt": ["ABC", "012"], "n": 2, "max_tokens": 3, "temperature": 0}
    wanted = [("DEF", "length")] * 2 + [("345", "length")] * 2
    assert both(chain, TEXT, body) == wanted
    tokens = [[65, 66, 67], [48, 49, 50]]
    assert both(chain, TEXT, {**body, "prompt": tokens}) == wanted
    assert both(chain, TEXT, {**body, "prompt": tokens[0], "n": 1}) == wanted[:1]


# ---- FC-35: silence


def test_a_long_prefill_is_not_silent() -> None:
    with Server(
        TOY, "--prefill-chunk", "16", "--sse-ping", "1", env={"PAGEDKV_TEST_STEP_MS": "1000"}
    ) as server:
        begin = time.monotonic()
        body = {"prompt": "a" * 64, "max_tokens": 2, "temperature": 0, "stream": True}
        with server.stream(TEXT, body) as stream:
            assert time.monotonic() - begin < 3, "headers wait for the prompt"
            events = list(stream.events(comments=True))
        assert sum(event.comment == "ping" for event in events) >= 2
        assert events[-1].data == "[DONE]"


def test_an_error_in_mid_stream_is_one_event_and_no_end() -> None:
    with Server(TOY, env={"PAGEDKV_TEST_FAIL_AT": "10"}) as server:
        body = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
        with server.stream(TEXT, {**body, "stream": True}) as stream:
            chunks = list(stream.chunks())
        assert chunks[-1]["error"]["code"] == "internal_error"
        assert "FAIL_AT" not in chunks[-1]["error"]["message"]
        assert all(
            choice["finish_reason"] is None for chunk in chunks[:-1] for choice in chunk["choices"]
        )
        assert server.post(TEXT, body).error(500)["code"] == "internal_error"
        assert server.post(TEXT, {**body, "max_tokens": 5}).status == 200


# ---- log-probabilities


def test_chat_log_probabilities(chain: Server) -> None:
    body = chat_body("ABC", max_tokens=3, logprobs=True, top_logprobs=2)
    content = chain.post(CHAT, body).ok()["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list("DEF")
    for entry in content:
        assert abs(entry["logprob"] + 1.25e-5) < 1e-6
        assert bytes(entry["bytes"]).decode() == entry["token"]
        assert len(entry["top_logprobs"]) == 2
        assert entry["top_logprobs"][0] == {
            key: entry[key] for key in ("token", "logprob", "bytes")
        }
    _, chunks = choices_of(chain, CHAT, body)
    streamed = [
        e
        for chunk in chunks
        for c in chunk["choices"]
        if c["logprobs"]
        for e in c["logprobs"]["content"]
    ]
    assert streamed == content
    content = chain.post(CHAT, chat_body("p", max_tokens=1, logprobs=True)).ok()["choices"][0][
        "logprobs"
    ]["content"]
    assert abs(content[0]["logprob"] - math.log(0.25)) < 1e-3


def test_echo_scores_a_prompt(chain: Server) -> None:
    body = {
        "model": "chain",
        "prompt": "ABCA",
        "max_tokens": 0,
        "echo": True,
        "logprobs": 1,
        "temperature": 0,
    }
    for prompt in ("ABCA", list(b"ABCA")):
        choice = chain.post(TEXT, {**body, "prompt": prompt}).ok()["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("ABCA", "length")
        logprobs = choice["logprobs"]
        assert logprobs["tokens"] == list("ABCA")
        assert logprobs["text_offset"] == [0, 1, 2, 3]
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        assert all(abs(x + 1.25e-5) < 1e-6 for x in logprobs["token_logprobs"][1:3])
        assert logprobs["token_logprobs"][3] < -5
        assert set(logprobs["top_logprobs"][3]) == {"A", "D"}
    more = {**body, "max_tokens": 2, "n": 2}
    streamed, chunks = choices_of(chain, TEXT, more)
    answered, answer = whole(chain, TEXT, more)
    assert streamed == answered == [("ABCABC", "length")] * 2
    for i in (0, 1):
        parts = [
            c["logprobs"]
            for chunk in chunks
            for c in chunk["choices"]
            if c["index"] == i and c["logprobs"]
        ]
        joined = {key: [item for part in parts for item in part[key]] for key in parts[0]}
        assert joined == answer["choices"][i]["logprobs"]


def test_token_ids_are_returned(chain: Server) -> None:
    answer = chain.post(
        TEXT, {"prompt": "ABC", "max_tokens": 2, "temperature": 0, "return_token_ids": True}
    ).ok()
    assert answer["choices"][0]["token_ids"] == [68, 69]
    assert answer["choices"][0]["prompt_token_ids"] == [65, 66, 67]


def test_ends(chain: Server) -> None:
    assert both(chain, CHAT, chat_body("x", max_tokens=20)) == [("yz.", "stop")]
    assert both(chain, CHAT, chat_body("ABC", max_tokens=20, stop_token_ids=[70])) == [
        ("DE", "stop")
    ]
    [(text, reason)] = both(chain, CHAT, chat_body("x", max_tokens=6, ignore_eos=True))
    assert text.startswith("yz.") and reason == "length"


# ---- the other routes


def test_models(chain: Server) -> None:
    data = chain.get("/v1/models").ok()["data"]
    assert [m["id"] for m in data] == ["chain"] and data[0]["object"] == "model"
    assert data[0]["max_model_len"] == 8192
    assert chain.get("/v1/models/chain").ok() == data[0]
    assert chain.get("/v1/models/a/b").error(404)["code"] == "model_not_found"
    with Server(
        CHAIN, "--served-model-name", "team/one", "--served-model-name", "two", "--any-model-name"
    ) as server:
        assert [m["id"] for m in server.get("/v1/models").ok()["data"]] == ["team/one", "two"]
        assert server.get("/v1/models/team/one").ok()["id"] == "team/one"
        assert (
            server.post(TEXT, {"model": "gpt-9", "prompt": "A", "max_tokens": 1}).ok()["model"]
            == "gpt-9"
        )


def test_texts_and_tokens(chain: Server) -> None:
    both_names = chain.post("/tokenize", {"prompt": "ABC", "return_token_strs": True}).ok()
    assert both_names == {
        "count": 3,
        "max_model_len": 8192,
        "tokens": [65, 66, 67],
        "token_strs": ["A", "B", "C"],
    }
    assert chain.post("/tokenize", {"content": "ABC"}).ok()["tokens"] == [65, 66, 67]
    assert chain.post("/tokenize", {"content": "A", "with_pieces": True}).ok()["tokens"] == [
        {"id": 65, "piece": "A"}
    ]
    messages = [{"role": "user", "content": "ABCD"}]
    assert chain.post("/tokenize", {"messages": messages}).ok()["count"] == 4
    assert chain.post("/apply-template", {"messages": messages}).ok() == {"prompt": "ABCD"}
    assert (
        chain.post("/v1/chat/completions/input_tokens", {"messages": messages}).ok()["input_tokens"]
        == 4
    )
    for name in ("prompt", "content"):
        assert chain.post("/detokenize", {"tokens": [65, 66]}).ok()[name] == "AB"
    assert chain.post("/detokenize", {"tokens": [10**9]}).error(400)["param"] == "tokens"
    assert chain.post("/tokenize", {}).error(400)["code"] == "missing_required_parameter"


def test_the_prefix_cache_can_be_reset(chain: Server) -> None:
    body = {"prompt": "B" * 100, "max_tokens": 1}

    def cached() -> int:
        return int(chain.post(TEXT, body).ok()["usage"]["prompt_tokens_details"]["cached_tokens"])

    cached()
    assert cached() >= 96
    assert chain.post("/reset_prefix_cache").ok() == {"success": True}
    assert cached() == 0


def test_errors_of_urls_and_methods(chain: Server) -> None:
    assert chain.post("/v1/nothing", {}).error(404)["message"] == "Invalid URL (POST /v1/nothing)"
    answer = chain.request("PUT", CHAT)
    assert answer.error(405)["code"] is None and answer.headers["allow"] == "POST"
    for path in ("/v1/embeddings", "/v1/responses"):
        assert "/v1/chat/completions" in chain.post(path, {"input": "x"}).error(404)["message"]
    assert (
        chain.post(CHAT, b"{}", headers={"Content-Type": "text/plain"}).error(415)["code"] is None
    )
    assert chain.request("HEAD", "/health").status == 200
    assert chain.request("OPTIONS", CHAT).headers["allow"] == "POST, OPTIONS"
    assert chain.get("/version").ok()["version"]


def test_every_answer_has_a_request_id(chain: Server) -> None:
    assert (
        chain.get("/health", headers={"X-Request-Id": "mine-1"}).headers["x-request-id"] == "mine-1"
    )
    assert chain.get("/nothing").headers["x-request-id"]
    assert (
        chain.get("/health", headers={"X-Request-Id": "a b" * 100}).headers["x-request-id"]
        != "a b" * 100
    )


# ---- keys, origins, limits


def test_keys_and_their_salts(tmp_path: Any) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# ours\nsecond-key\n")
    with Server(
        CHAIN, "--api-key", "first-key", "--api-key-file", str(keys), key="first-key"
    ) as server:
        assert server.get("/health", key=None).status == 200
        for key in (None, "wrong", "first-key2", ""):
            headers = {"Authorization": f"Bearer {key}"} if key is not None else {}
            error = server.get("/v1/models", key=None, headers=headers).error(401)
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert server.get("/nothing", key=None).status == 401

        def cached(key: str, **fields: Any) -> int:
            body = {"prompt": "C" * 100, "max_tokens": 1, **fields}
            return int(
                server.post(TEXT, body, key=key).ok()["usage"]["prompt_tokens_details"][
                    "cached_tokens"
                ]
            )

        assert [cached("first-key") >= 96 for _ in range(2)] == [False, True]
        assert [cached("second-key") >= 96 for _ in range(2)] == [False, True]
        assert [cached("second-key", cache_salt="s") >= 96 for _ in range(2)] == [False, True]
        assert server.post("/reset_prefix_cache", key="second-key").status == 200
        assert cached("first-key") >= 96
    with Server(
        CHAIN, "--api-key", "a", "--api-key", "b", "--share-cache-between-keys", key="a"
    ) as server:
        body = {"prompt": "C" * 100, "max_tokens": 1}
        server.post(TEXT, body)
        assert (
            server.post(TEXT, body, key="b").ok()["usage"]["prompt_tokens_details"]["cached_tokens"]
            >= 96
        )


def test_pages_of_other_origins_are_refused() -> None:
    with Server(TOY, "--cors-origins", "https://good.example") as server:
        assert (
            server.get("/v1/models", headers={"Origin": "https://evil.example"}).error(403)["type"]
            == "permission_error"
        )
        assert (
            server.get(
                "/v1/models", headers={"Origin": server.url, "Host": f"127.0.0.1:{server.port}"}
            ).status
            == 200
        )
        answer = server.request("OPTIONS", CHAT, headers={"Origin": "https://good.example"})
        assert (
            answer.status == 204
            and answer.headers["access-control-allow-origin"] == "https://good.example"
        )


def test_bodies_and_heads_have_limits() -> None:
    with Server(TOY, "--max-body-bytes", "2KiB") as server:
        assert "2048" in server.post(CHAT, chat_body("a" * 4000)).error(413)["message"]
        assert len(server.get("/" + "a" * 9000).error()["message"]) < 400
        assert server.get("/health", headers={"X": "a" * 9000}).status == 400
        assert server.get("/health").status == 200


def test_connections_beyond_the_limit_are_refused_and_health_is_not() -> None:
    with Server(TOY, "--max-connections", "4", env={"PAGEDKV_TEST_STEP_MS": "200"}) as server:
        streams = [
            server.stream(
                TEXT, {"prompt": "abc", "max_tokens": 200, "stream": True, "temperature": 0}
            )
            for _ in range(4)
        ]
        begin = time.monotonic()
        assert server.get("/health").status == 200
        assert time.monotonic() - begin < 5
        refused = server.get("/v1/models")
        assert refused.error(503)["code"] == "too_many_connections"
        assert refused.headers["connection"] == "close"
        for stream in streams:
            stream.close()
        wait_until(lambda: server.get("/v1/models").status == 200, "room again")


def test_idle_connections_make_room() -> None:
    with Server(TOY, "--max-connections", "4") as server:
        idle = [socket.create_connection((server.host, server.port)) for _ in range(12)]
        wait_until(
            lambda: server.get("/v1/models").status == 200, "an answer beside idle connections"
        )
        for connection in idle:
            connection.close()


def test_a_connection_serves_many_requests(chain: Server) -> None:
    connection = chain.connect()
    for _ in range(3):
        connection.request("GET", "/v1/models")
        response = connection.getresponse()
        assert response.status == 200 and json.loads(response.read())["object"] == "list"
    connection.close()


def test_the_queue_has_a_limit() -> None:
    with Server(
        TOY, "--max-num-seqs", "1", "--max-waiting", "1", env={"PAGEDKV_TEST_STEP_MS": "100"}
    ) as server:
        body = {"prompt": "abc", "max_tokens": 300, "stream": True, "temperature": 0}
        with server.stream(TEXT, body), server.stream(TEXT, body):
            answer = server.post(TEXT, body)
            assert answer.error(429)["code"] == "queue_full" and answer.headers["retry-after"]
            assert answer.error(429)["type"] == "rate_limit_error"
        assert wait_until(
            lambda: server.post(TEXT, {**body, "stream": False, "max_tokens": 1}).status == 200,
            "room",
        )


# ---- life


def test_the_first_signal_drains_and_the_second_ends() -> None:
    with Server(TOY, env={"PAGEDKV_TEST_STEP_MS": "100"}) as server:
        with server.stream(
            TEXT, {"prompt": "abc", "max_tokens": 30, "stream": True, "temperature": 0}
        ) as stream:
            chunks = stream.chunks()
            next(chunks)
            server.signal(signal.SIGTERM)
            wait_until(lambda: "shutting down" in server.log(), "the shutdown")
            assert server.post(TEXT, {"prompt": "a"}).error(503)["code"] == "shutting_down"
            text = "".join(c["text"] for chunk in chunks for c in chunk["choices"])
            assert len(text) >= 25
        assert server.wait() == 0
    with Server(TOY, env={"PAGEDKV_TEST_STEP_MS": "500"}, exit_code=143) as server:
        with server.stream(TEXT, {"prompt": "abc", "max_tokens": 300, "stream": True}):
            server.signal(signal.SIGTERM)
            wait_until(lambda: "shutting down" in server.log(), "the shutdown")
            server.signal(signal.SIGTERM)
            assert server.wait() == 143


def test_a_port_in_use_ends_with_5() -> None:
    with Server(TOY) as server:
        command = [str(BINARY), "serve", "-m", TOY, "--port", str(server.port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        assert done.returncode == 5 and str(server.port) in done.stderr


def test_clients_that_are_gone_end_their_requests() -> None:
    with Server(TOY, "--max-num-seqs", "1", env={"PAGEDKV_TEST_STEP_MS": "20"}) as server:
        body = {"prompt": "abc", "max_tokens": 3000, "temperature": 0}
        for stream in (True, False):
            for _ in range(3):  # one runs, the others wait
                connection = server.connect()
                connection.request(
                    "POST",
                    TEXT,
                    json.dumps({**body, "stream": stream}),
                    {"Content-Type": "application/json"},
                )
                if stream:
                    connection.getresponse()
                assert connection.sock is not None
                connection.sock.shutdown(socket.SHUT_RDWR)
                connection.close()
        # Would wait for minutes behind them.
        begin = time.monotonic()
        assert server.post(TEXT, {**body, "max_tokens": 1}).status == 200
        assert time.monotonic() - begin < 30


def test_many_at_once_answer_as_alone(chain: Server) -> None:
    failures: list[Any] = []

    def client(i: int) -> None:
        start = i % 26
        prompt = "".join(chr(65 + (start + k) % 26) for k in range(20))
        wanted = "".join(chr(65 + (start + 20 + k) % 26) for k in range(40))
        try:
            assert both(chain, CHAT, chat_body(prompt, max_tokens=40)) == [(wanted, "length")]
        except (AssertionError, OSError, http.client.HTTPException, ServingError) as failure:
            failures.append(failure)

    threads = [threading.Thread(target=client, args=(i,)) for i in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
