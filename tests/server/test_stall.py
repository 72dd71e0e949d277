"""A long prompt slows running answers, and stops none (FC-17).

SmolLM2, chunks of 256: one client streams; after a second a prompt of 6,000 tokens comes (with PAGEDKV_TEST_SCALE=10;
else of 1,500). The first gets a token in every step but two, and its longest gap is two chunks' time."""

from __future__ import annotations

import asyncio
import itertools

from serving import SMOLQ, Server
from watching import PATIENCE, SCALE, address, load, until_idle

PROMPT = 6000 if SCALE >= 10 else 1500
CHUNK = 256


def streaming(prompt: str, tokens: int) -> dict[str, object]:
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip


async def drive(server: Server) -> None:
    where, victim = address(server), load.Answer()
    text = load.Text(where)
    long_prompt, short_prompt = await text.take(PROMPT), await text.take(20)
    task = asyncio.create_task(
        load.post(where, "/v1/completions", streaming(short_prompt, 400), victim)
    )
    await asyncio.sleep(1)
    other = await load.post(where, "/v1/completions", streaming(long_prompt, 1))
    assert not other.error, other.error
    assert not task.done(), f"the first answer ended too early: {victim.error}"
    task.cancel()
    between = [t for t in victim.pieces if other.sent < t < other.pieces[0]]
    num_chunks = -(-other.usage["prompt_tokens"] // CHUNK)
    chunk = other.first / num_chunks
    ends = [other.sent, *between, other.pieces[0]]
    longest = max(b - a for a, b in itertools.pairwise(ends))
    print(
        f"{other.usage['prompt_tokens']} tokens in {other.first:.2f} s; meanwhile {len(between)} tokens of the other answer, "
        f"their longest gap {longest:.3f} s = {longest / chunk:.2f} chunks"
    )
    assert len(between) >= num_chunks - 2
    assert longest <= 2 * chunk * PATIENCE
    await until_idle(where, 30)


def test_long_prompt_stalls_nobody() -> None:
    with Server(SMOLQ, "--prefill-chunk", str(CHUNK), "-t", "2") as server:
        asyncio.run(drive(server))
