"""Runs chat_page.mjs: the chat page in Chromium."""

from __future__ import annotations

from node_tools import CHROMIUM, need, node
from serving import CHAIN, Server

need(chromium=True)


def test_chat_page_works_in_chromium() -> None:
    with (
        Server(CHAIN) as server,
        Server(CHAIN, "--api-key", "right", key="right") as locked,
        Server(CHAIN, env={"PAGEDKV_TEST_STEP_MS": "20"}) as slow,
    ):
        node(
            "--test",
            "chat_page.mjs",
            env={
                "SERVER": server.url,
                "LOCKED_SERVER": locked.url,
                "SLOW_SERVER": slow.url,
                "CHROMIUM": CHROMIUM,
            },
        )
        slow.wait_idle()
