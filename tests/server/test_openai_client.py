"""OpenAI's own Python client drives every route of OpenAI's that the server has. CHAIN's text is known exactly."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from serving import CHAIN, Server, wait_until

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(CHAIN, "--max-num-seqs", "16") as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[OpenAI]:
    with client_of(server) as made:
        yield made


def client_of(server: Server, **options: Any) -> OpenAI:
    options = {"api_key": "none", "max_retries": 0, **options}
    return OpenAI(base_url=f"{server.url}/v1", **options)


def say(text: str) -> Any:
    return [{"role": "user", "content": text}]


# ---- models


def test_models_are_listed_and_retrieved(client: OpenAI) -> None:
    models = client.models.list().data
    assert [model.object for model in models] == ["model"] * len(models)
    assert models
    assert client.models.retrieve(models[0].id) == models[0]
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.code == "model_not_found"


# ---- chat


def test_chat_answers(server: Server, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=say("ABC"), max_tokens=7, temperature=0
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == server.model
    assert abs(answer.created - time.time()) < 3600
    assert answer.system_fingerprint
    [choice] = answer.choices
    assert (choice.index, choice.message.role, choice.message.content) == (
        0,
        "assistant",
        "DEFGHIJ",
    )
    assert (choice.finish_reason, choice.logprobs, choice.message.refusal) == ("length", None, None)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 0


def test_chat_ends_where_the_model_does(server: Server, client: OpenAI) -> None:
    answer = client.chat.completions.create(model=server.model, messages=say("x"), temperature=0)
    assert answer.choices[0].message.content == "yz."
    assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("stop", ["GHI", ["GHI"], ["9", "GH", "GHI"]])
def test_chat_ends_before_a_stop_text(
    server: Server, client: OpenAI, stop: str | list[str]
) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=say("ABC"), max_tokens=26, temperature=0, stop=stop
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("DEF", "stop")


def test_chat_streams_the_same(server: Server, client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=server.model, messages=say("ABC"), max_tokens=7, temperature=0, stream=True
        )
    )
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert {chunk.created for chunk in chunks} == {chunks[0].created}
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert all(chunk.usage is None for chunk in chunks)
    assert (chunks[0].choices[0].delta.role, chunks[0].choices[0].delta.content) == (
        "assistant",
        "",
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "DEFGHIJ"
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + [
        "length"
    ]
    assert chunks[-1].choices[0].delta.content is None


def test_stream_ends_with_usage_where_asked_for(server: Server, client: OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model=server.model,
            messages=say("ABC"),
            max_tokens=7,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    usage = chunks[-1].usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (3, 7, 10)
    assert usage.prompt_tokens_details is not None


def test_clients_own_stream_helper_accumulates(server: Server, client: OpenAI) -> None:
    with client.chat.completions.stream(
        model=server.model, messages=say("x"), temperature=0
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_completion()
    assert kinds.count("content.done") == 1
    assert final.choices[0].message.content == "yz."


def test_n_choices_differ_and_repeat_with_their_seed(server: Server, client: OpenAI) -> None:
    request: dict[str, Any] = {
        "model": server.model,
        "messages": say("p"),
        "n": 2,
        "seed": 7,
        "temperature": 1,
        "max_tokens": 32,
    }
    answer = client.chat.completions.create(**request)
    texts = [choice.message.content or "" for choice in answer.choices]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert texts[0] != texts[1]
    assert all(len(text) == 32 and set(text) <= set("pqrs") for text in texts)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (1, 64)
    streamed = ["", ""]
    for chunk in client.chat.completions.create(**request, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts


def test_chat_gives_log_probabilities(server: Server, client: OpenAI) -> None:
    answer = client.chat.completions.create(
        model=server.model,
        messages=say("p"),
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=4,
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
    for entry in logprobs.content:
        assert entry.bytes == list(entry.token.encode())
        assert entry.logprob == pytest.approx(-1.3863, abs=1e-3)
        assert sorted(top.token for top in entry.top_logprobs) == ["p", "q", "r", "s"]
    assert sum(choice.logprobs is not None for choice in answer.choices) == 1


def test_logprobs_come_with_the_stream(server: Server, client: OpenAI) -> None:
    tokens: list[str] = []
    for chunk in client.chat.completions.create(
        model=server.model,
        messages=say("ABC"),
        max_tokens=5,
        temperature=0,
        logprobs=True,
        stream=True,
    ):
        logprobs = chunk.choices[0].logprobs
        if logprobs and logprobs.content:
            tokens += [entry.token for entry in logprobs.content]
    assert tokens == list("DEFGH")


def test_nulls_parts_and_unknown_fields_change_nothing(server: Server, client: OpenAI) -> None:
    nulls = ["stop", "max_tokens", "seed", "top_p", "logit_bias", "tools", "response_format"]
    nulls += ["stream_options", "n", "logprobs", "top_logprobs", "presence_penalty", "stream"]
    nulls += ["frequency_penalty", "tool_choice", "user", "metadata", "store"]
    answer = client.chat.completions.create(
        model=server.model,
        messages=[
            {"role": "developer", "content": "Letters."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "AB"}, {"type": "text", "text": "C"}],
            },
        ],
        max_completion_tokens=7,
        temperature=0,
        extra_body={**dict.fromkeys(nulls), "unheard_of": {"a": 1}},
    )
    assert answer.choices[0].message.content == "DEFGHIJ"


def test_logit_bias_and_extensions_are_honoured(server: Server, client: OpenAI) -> None:
    def chat(text: str, **fields: Any) -> tuple[str | None, str]:
        answer = client.chat.completions.create(
            model=server.model, messages=say(text), max_tokens=4, temperature=0, **fields
        )
        return answer.choices[0].message.content, answer.choices[0].finish_reason

    assert chat("A", logit_bias={str(ord("q")): 100}) == ("qqqq", "length")
    assert chat("x", extra_body={"ignore_eos": True})[1] == "length"
    assert chat("ABC", extra_body={"stop_token_ids": [ord("F")]})[1] == "stop"


@pytest.mark.parametrize("top_p", [0, 1e-50, 1e-9])
def test_least_top_p_leaves_the_likeliest_token(
    server: Server, client: OpenAI, top_p: float
) -> None:
    answer = client.chat.completions.create(
        model=server.model, messages=say("ABC"), max_tokens=7, temperature=2, top_p=top_p
    )
    assert answer.choices[0].message.content == "DEFGHIJ"


def test_second_turn_is_found_in_the_cache(server: Server, client: OpenAI) -> None:
    prompt = (LETTERS * 4)[:64]
    for expected in (0, 63):
        answer = client.chat.completions.create(
            model=server.model,
            messages=say(prompt),
            max_tokens=1,
            extra_body={"cache_salt": "second-turn"},
        )
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == expected


# ---- completions


def test_completion_answers_and_streams_the_same(server: Server, client: OpenAI) -> None:
    answer = client.completions.create(
        model=server.model, prompt="ABC", max_tokens=7, temperature=0
    )
    assert answer.id.startswith("cmpl-")
    assert (answer.object, answer.choices[0].text) == ("text_completion", "DEFGHIJ")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.total_tokens == 10
    chunks = list(
        client.completions.create(
            model=server.model, prompt="ABC", max_tokens=7, temperature=0, stream=True
        )
    )
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "DEFGHIJ"
    assert chunks[-1].choices[0].finish_reason == "length"


def test_completion_writes_sixteen_tokens_unless_told(server: Server, client: OpenAI) -> None:
    answer = client.completions.create(model=server.model, prompt="A", temperature=0)
    assert answer.choices[0].text == LETTERS[1:17]


def test_completion_takes_several_prompts_and_tokens(server: Server, client: OpenAI) -> None:
    for prompts in (["AB", "12", "x"], [[65, 66], [49, 50], [120]]):
        answer = client.completions.create(
            model=server.model, prompt=prompts, max_tokens=3, temperature=0, n=2
        )
        assert [choice.index for choice in answer.choices] == list(range(6))
        assert [choice.text for choice in answer.choices] == [
            "CDE",
            "CDE",
            "345",
            "345",
            "yz.",
            "yz.",
        ]
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == 5
    answer = client.completions.create(
        model=server.model, prompt=[65, 66], max_tokens=3, temperature=0
    )
    assert answer.choices[0].text == "CDE"


def test_completion_scores_a_prompt(server: Server, client: OpenAI) -> None:
    answer = client.completions.create(
        model=server.model, prompt="ABCX", max_tokens=0, echo=True, logprobs=2, temperature=0
    )
    [choice] = answer.choices
    assert (choice.text, choice.finish_reason) == ("ABCX", "length")
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["A", "B", "C", "X"]
    assert logprobs.text_offset == [0, 1, 2, 3]
    assert logprobs.token_logprobs is not None
    first, *rest = logprobs.token_logprobs
    assert first is None
    assert rest[:2] == [pytest.approx(-1.25e-5, abs=1e-4)] * 2
    assert rest[2] < -5
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0
    both = client.completions.create(
        model=server.model, prompt="AB", max_tokens=2, echo=True, logprobs=0, temperature=0
    ).choices[0]
    assert both.text == "ABCD"
    assert both.logprobs is not None
    assert both.logprobs.tokens == ["A", "B", "C", "D"]


# ---- errors


def test_what_the_server_does_not_have_is_not_found(server: Server, client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as error:
        client.chat.completions.create(model="other", messages=say("A"))
    assert (error.value.code, error.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.embeddings.create(model=server.model, input="A")
    with pytest.raises(openai.NotFoundError, match="chat/completions"):
        client.responses.create(model=server.model, input="A")


def test_bad_requests_name_the_field(server: Server, client: OpenAI) -> None:
    def refusal(**fields: Any) -> openai.BadRequestError:
        with pytest.raises(openai.BadRequestError) as error:
            client.chat.completions.create(
                model=server.model, messages=say("A"), max_tokens=1, extra_body=fields
            )
        return error.value

    for fields, param in (
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": 3}, "temperature"),
        ({"n": 0}, "n"),
        ({"stop": list("abcdefghijklmnopqr")}, "stop"),
        ({"messages": []}, "messages"),
        ({"cache_salt": "a/b"}, "cache_salt"),
    ):
        error = refusal(**fields)
        assert (error.param, error.code, error.type) == (
            param,
            "invalid_value",
            "invalid_request_error",
        )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    assert refusal(messages=[{"role": "user", "content": [image]}]).type == "invalid_request_error"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    assert refusal(tools=[tool]).param == "tools"


def test_prompt_beyond_the_context_is_a_bad_request(server: Server, client: OpenAI) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError, match="8192") as error:
            client.chat.completions.create(
                model=server.model, messages=say("A" * 9000), max_tokens=1, stream=stream
            )
        assert error.value.code == "context_length_exceeded"
        assert "9000" in error.value.message


def test_wrong_key_is_an_authentication_error() -> None:
    with Server(CHAIN, "--api-key", "right", key="right") as server:
        for key in ("wrong", "right2"):
            with pytest.raises(openai.AuthenticationError) as error:
                client_of(server, api_key=key).models.list()
            assert error.value.code == "invalid_api_key"
        assert client_of(server, api_key="right").models.list().data


def test_answers_carry_request_ids(server: Server, client: OpenAI) -> None:
    own = client.chat.completions.with_raw_response.create(
        model=server.model,
        messages=say("A"),
        max_tokens=1,
        extra_headers={"X-Request-Id": "mine-7"},
    )
    assert own.headers["x-request-id"] == "mine-7"
    answer = client.chat.completions.create(model=server.model, messages=say("A"), max_tokens=1)
    assert answer._request_id
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("other")
    assert error.value.request_id


# ---- time and load


def test_full_queue_is_a_rate_limit_error_and_retries_get_through() -> None:
    with Server(CHAIN, "--max-num-seqs", "1", "--max-waiting", "1") as server:
        request: dict[str, Any] = {"model": server.model, "messages": say("ABC"), "temperature": 0}
        impatient, patient = client_of(server), client_of(server, max_retries=20)
        held = [
            impatient.chat.completions.create(**request, max_tokens=8000, stream=True)
            for _ in range(2)
        ]
        with pytest.raises(openai.RateLimitError) as error:
            impatient.chat.completions.create(**request, max_tokens=1)
        assert error.value.code == "queue_full"
        assert float(error.value.response.headers["retry-after"]) > 0
        begun = time.monotonic()
        for stream in held:
            stream.close()
        answer = patient.chat.completions.create(**request, max_tokens=3)
        assert answer.choices[0].message.content == "DEF"
        assert time.monotonic() - begun < 60


def test_timeout_and_closed_stream_free_what_they_held(server: Server, client: OpenAI) -> None:
    request: dict[str, Any] = {"model": server.model, "messages": say("ABC"), "max_tokens": 8000}
    with pytest.raises(openai.APITimeoutError):
        client.with_options(timeout=0.2).chat.completions.create(**request)
    server.wait_idle()
    stream = client.chat.completions.create(**request, stream=True)
    assert next(iter(stream)).choices
    wait_until(lambda: server.running() == 1, "a running request")
    stream.close()
    server.wait_idle()


# ---- asyncio


def test_async_client_runs_many_at_once(server: Server) -> None:
    async def one(client: AsyncOpenAI, i: int) -> str:
        text = LETTERS[i : i + 3]
        request: dict[str, Any] = {
            "model": server.model,
            "messages": say(text),
            "max_tokens": 5,
            "temperature": 0,
        }
        if i % 2:
            parts = []
            async for chunk in await client.chat.completions.create(**request, stream=True):
                parts.append(chunk.choices[0].delta.content or "")
            return "".join(parts)
        answer = await client.chat.completions.create(**request)
        return answer.choices[0].message.content or ""

    async def all_of_them() -> list[str]:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            return await asyncio.gather(*(one(client, i) for i in range(16)))

    assert asyncio.run(all_of_them()) == [(LETTERS * 2)[i + 3 : i + 8] for i in range(16)]


def test_async_cancellation_ends_the_request(server: Server) -> None:
    async def cancelled() -> None:
        async with AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            task = asyncio.create_task(
                client.chat.completions.create(
                    model=server.model, messages=say("ABC"), max_tokens=8000
                )
            )
            await asyncio.to_thread(wait_until, lambda: server.running() == 1, "a running request")
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(cancelled())
    server.wait_idle()


# ---- what tests make fail (builds with PAGEDKV_TEST_HOOKS)


def test_refused_memory_is_not_asked_for_again() -> None:
    with Server(CHAIN, env={"PAGEDKV_TEST_COMMIT_BYTES": "65536"}) as server:
        asked = []
        http = openai.DefaultHttpxClient(event_hooks={"request": [asked.append]})
        with client_of(server, max_retries=5, http_client=http) as client:
            with pytest.raises(openai.InternalServerError) as error:
                client.chat.completions.create(
                    model=server.model, messages=say("A" * 4000), max_tokens=1
                )
            assert (error.value.status_code, error.value.code) == (507, "kv_pool_exhausted")
            assert len(asked) == 1
            answer = client.chat.completions.create(
                model=server.model, messages=say("ABC"), max_tokens=3, temperature=0
            )
            assert answer.choices[0].message.content == "DEF"
        server.wait_idle()


def test_error_in_mid_stream_is_raised() -> None:
    with Server(CHAIN, env={"PAGEDKV_TEST_FAIL_AT": "10"}) as server:
        texts = []
        with pytest.raises(openai.APIError) as error:
            for chunk in client_of(server).chat.completions.create(
                model=server.model, messages=say("ABC"), max_tokens=20, temperature=0, stream=True
            ):
                assert chunk.choices[0].finish_reason is None
                texts.append(chunk.choices[0].delta.content or "")
        assert LETTERS[3:].startswith("".join(texts))
        assert error.value.type == "server_error"
        server.wait_idle()
