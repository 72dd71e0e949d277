"""Answers hold nothing of other conversations, whatever is evicted and whoever runs beside them (FC-11).

SmolLM2: 16 conversations, each with its own marker word, then rounds of two fresh prompts at once in a pool that holds
a few of them: 20 rounds with PAGEDKV_TEST_SCALE=10, else 4. Each answer equals, token by token and bit by bit, what the
same prompt gives alone on a server that has seen nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from serving import SMOLQ, Server
from watching import SCALE, Address, address, load, metrics, total, until_idle

ROUNDS = 20 if SCALE >= 10 else 4
POOL_PAGES = 32  # 512 tokens; a prompt and its answer take some 100
MARKERS = ["Zephyr", "Quokka", "Marzipan", "Obsidian", "Tarragon", "Walrus", "Cobalt", "Juniper", "Saffron", "Pelican",
           "Basalt", "Nutmeg", "Ocelot", "Indigo", "Fennel", "Gazelle"]  # fmt: skip


async def complete(where: Address, prompt: str) -> Any:
    body = {"prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    status, text = await load.fetch(where, "POST", "/v1/completions", body)
    assert status == 200, text
    return json.loads(text)


def told(answer: Any) -> tuple[str, list[str], list[float]]:
    choice = answer["choices"][0]
    return choice["text"], choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]


async def prompts(where: Address) -> tuple[list[str], list[str]]:
    text = load.Text(where)
    old = [
        f"{marker}: {await text.take(60)} The secret word is {marker}, and once more, the secret word is"
        for marker in MARKERS
    ]
    return old, [
        f"{i} questions. {await text.take(60)} The secret word is" for i in range(2 * ROUNDS)
    ]


async def crowded(where: Address, old: list[str], fresh: list[str]) -> list[Any]:
    for prompt in old:
        await complete(where, prompt)
    answers: list[Any] = []
    for pair in zip(fresh[::2], fresh[1::2]):
        answers += await asyncio.gather(*(complete(where, prompt) for prompt in pair))
    assert (
        total(await metrics(where), "pagedkv_evicted_pages_total") > 0
    )  # else the case shows nothing
    await until_idle(where, 30)
    return answers


async def alone(where: Address, fresh: list[str]) -> list[Any]:
    answers = []
    for prompt in fresh:
        answers.append(await complete(where, prompt))
        assert (await load.fetch(where, "POST", "/reset_prefix_cache"))[0] == 200
    return answers


def test_answers_are_as_alone() -> None:
    with Server(
        SMOLQ, "-t", "2", "-c", "512", "--no-dynamic", "--num-blocks", str(POOL_PAGES)
    ) as server:
        old, fresh = asyncio.run(prompts(address(server)))
        answers = asyncio.run(crowded(address(server), old, fresh))
    with Server(SMOLQ, "-t", "2") as server:
        right = asyncio.run(alone(address(server), fresh))
    for prompt, answer, reference in zip(fresh, answers, right):
        assert told(answer) == told(reference), prompt
        assert not any(marker in told(answer)[0] for marker in MARKERS), prompt
        # Two that begin alike share no more than that: "1", "10 questions." differ within the first tokens.
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] <= 4, prompt
