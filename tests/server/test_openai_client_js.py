"""Runs openai_client.mjs: OpenAI's JavaScript client against the server."""

from __future__ import annotations

from node_tools import need, node
from serving import CHAIN, Server

need()


def test_javascript_client_drives_every_route() -> None:
    with (
        Server(CHAIN) as server,
        Server(CHAIN, "--api-key", "right", key="right") as locked,
        Server(CHAIN, "--max-num-seqs", "1", "--max-waiting", "1") as narrow,
    ):
        node(
            "--test",
            "openai_client.mjs",
            env={"SERVER": server.url, "LOCKED_SERVER": locked.url, "NARROW_SERVER": narrow.url},
        )
