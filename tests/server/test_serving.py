"""The harness sees what it must see, and the server starts, answers and stops."""

from __future__ import annotations

import io
from typing import Any

import pytest
from serving import CHAIN, Event, Server, ServingError, Stream, parse_metrics


class FakeResponse(io.BytesIO):
    status = 200

    def getheaders(self) -> list[tuple[str, str]]:
        return []


def stream_of(text: bytes) -> Stream:
    return Stream(None, FakeResponse(text))  # type: ignore[arg-type]


def test_events_are_read_field_by_field() -> None:
    events = list(
        stream_of(b": ping\n\nevent: page\nid: 7\ndata: a\ndata: b\n\ndata: c\n\n").events(
            comments=True
        )
    )
    assert events == [
        Event(comment="ping"),
        Event(data="a\nb", name="page", id="7"),
        Event(data="c"),
    ]


@pytest.mark.parametrize(
    "text",
    [
        b"data: a\n",
        b"data: a\r\n\r\n",
        b"data:a\n\n",
        b"other: a\n\n",
        b"data: \xff\n\n",
        b"event: a\n\n",
    ],
)
def test_broken_streams_are_refused(text: bytes) -> None:
    with pytest.raises((ServingError, UnicodeDecodeError)):
        list(stream_of(text).events())


@pytest.mark.parametrize(
    "text",
    [
        b"data: {}\n\n",
        b"data: [DONE]\n\ndata: {}\n\n",
        b'data: {"error":{}}\n\n',
        b'data: {"a":NaN}\n\ndata: [DONE]\n\n',
    ],
)
def test_chunks_must_end_as_openais_do(text: bytes) -> None:
    with pytest.raises(ServingError):
        list(stream_of(text).chunks())


def test_metrics_are_read_with_their_labels() -> None:
    text = '# HELP a b\n# TYPE a gauge\na{x="1",y="a,\\"b"} 2\na 3\n'
    expected: dict[str, Any] = {"a": {frozenset({("x", "1"), ("y", 'a,\\"b')}): 2, frozenset(): 3}}
    assert parse_metrics(text) == expected
    for wrong in ("a 1", "a{x=1} 2\n", "a 1\na 2\n", "a b\n"):
        with pytest.raises(ValueError if wrong == "a b\n" else ServingError):
            parse_metrics(wrong)


def test_server_starts_answers_and_stops() -> None:
    with Server(CHAIN) as server:
        assert server.get("/health").ok()["status"] == "ok"
        answer = server.post(
            "/v1/completions", {"model": server.model, "prompt": "ABC", "max_tokens": 7}
        ).ok()
        assert answer["choices"][0]["text"] == "DEFGHIJ"
        with server.stream(
            "/v1/completions",
            {"model": server.model, "prompt": "ABC", "max_tokens": 7, "stream": True},
        ) as stream:
            assert "".join(chunk["choices"][0]["text"] for chunk in stream.chunks()) == "DEFGHIJ"
