"""The OpenAPI document says what the server does: schemathesis asks what it allows and what it forbids, and looks at every
answer.

PAGEDKV_TEST_SCALE=10 (scripts/test.sh --all) asks ten times as much.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from serving import CHAIN, Server

DOCUMENT = Path(__file__).parent / "../../docs/openapi.yaml"
SCALE = int(os.environ.get("PAGEDKV_TEST_SCALE", "1"))
VOCABULARY = 288  # CHAIN's


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """CHAIN, but with a template that makes a prompt of every conversation."""
    model = tmp_path_factory.mktemp("model") / "chain.gguf"
    template, other = b"{{ messages[-1].content }}", b"A{{ messages[-1].content}}"
    content = Path(CHAIN).read_bytes()
    assert content.count(template) == 1
    model.write_bytes(content.replace(template, other))
    with Server(str(model), "-c", "512") as running:
        yield running


def operations(document: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for path, item in document["paths"].items():
        for method, operation in item.items():
            yield method.upper(), path, operation


def test_document_is_served_with_the_programs_version(server: Server) -> None:
    served = server.get("/openapi.json").ok()
    document = yaml.safe_load(DOCUMENT.read_text())
    document["info"]["version"] = server.get("/version").ok()["version"]
    assert served == document


def test_every_operation_is_there(server: Server) -> None:
    for method, path, _ in operations(server.get("/openapi.json").ok()):
        if path == "/v1/kv/events":
            server.stream(path).close()
            continue
        body = None if method in ("GET", "DELETE") else b"{"
        answer = server.request(method, path.replace("{id}", "other"), body)
        assert answer.status != 405, (method, path)
        if answer.status == 404:
            assert "Invalid URL" not in answer.text, (method, path)


def test_every_operation_but_public_ones_wants_the_key() -> None:
    with Server(CHAIN, "--api-key", "right", key="right") as server:
        for method, path, operation in operations(server.get("/openapi.json").ok()):
            body = None if method in ("GET", "DELETE") else b"{"
            answer = server.request(method, path.replace("{id}", "other"), body, key=None)
            public = operation.get("security") == []
            assert (answer.status == 401) != public, (method, path, answer.status)


def fill_in_limits(document: dict[str, Any], model: str) -> None:
    """What the document can only describe: the model's name and its tokens."""
    schemas = document["components"]["schemas"]
    schemas["ModelName"] = {"enum": [model, None]}
    schemas["Token"]["maximum"] = VOCABULARY - 1
    schemas["TokenKey"] = {"type": "string", "enum": [str(i) for i in range(0, VOCABULARY, 41)]}


def test_schemathesis_finds_nothing(server: Server, tmp_path: Path) -> None:
    document = server.get("/openapi.json").ok()
    fill_in_limits(document, server.model)
    file = tmp_path / "openapi.json"
    file.write_text(json.dumps(document))
    done = subprocess.run(
        [
            str(Path(sys.executable).parent / "schemathesis"),
            "run",
            str(file),
            f"--url={server.url}",
            "--checks=all",
            f"--max-examples={8 * SCALE}",
            "--seed=1",
            "--generation-database=none",
            "--request-timeout=120",
            "--suppress-health-check=all",
            "--warnings=off",
            "--phases=coverage,fuzzing",
            "--workers=2",
            "--continue-on-failure",
            "--exclude-path=/v1/kv/events",
        ],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "NO_COLOR": "1"},
    )
    assert done.returncode == 0, f"{done.stdout[-40000:]}\n{done.stderr[-2000:]}"
    counted = re.search(r"(\d+) generated", done.stdout)
    assert counted and int(counted[1]) > 500, done.stdout
    server.wait_idle()
