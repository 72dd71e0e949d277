"""docs/openapi.yaml has no fault that Redocly's linter finds."""

from __future__ import annotations

from node_tools import HERE, need, node

need()


def test_document_is_clean() -> None:
    said = node(
        "node_modules/@redocly/cli/bin/cli.js",
        "lint",
        "--max-problems=1000",
        str(HERE / "../../docs/openapi.yaml"),
        env={"REDOCLY_TELEMETRY": "off", "REDOCLY_SUPPRESS_UPDATE_NOTICE": "true"},
    )
    assert "warning" not in said.lower().replace("deprecation warning", "")
