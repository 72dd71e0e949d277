"""Starts the built `pagedkv serve`, talks to it and stops it. The standard library is all it needs.

    with Server(CHAIN, "--max-num-seqs", "4") as server:
        answer = server.post("/v1/completions", {"model": server.model, "prompt": "ABC", "max_tokens": 4})
        with server.stream("/v1/completions", {..., "stream": True}) as stream:
            for chunk in stream.chunks(): ...

Leaving the block sends SIGTERM; a server that then does not exit with 0, or that has written a sanitizer's report, is a
failure, and so is one that has died before.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

BINARY = Path(os.environ.get("PAGEDKV_TEST_BINARY", "pagedkv"))
MODELS = Path(os.environ.get("PAGEDKV_TEST_MODELS", "build/test-models"))
CHAIN = str(MODELS / "chain.gguf")
SMOL = str(MODELS / "SmolLM2-135M-Instruct.F32.gguf")
SMOLQ = str(MODELS / "SmolLM2-135M-Instruct.Q4_1.gguf")
TOY = "toy:"

# Generous: sanitizers and busy machines are slow, and nothing waits for longer than it takes.
START_SECONDS = 120.0
STOP_SECONDS = 60.0
ANSWER_SECONDS = 120.0

SANITIZER_REPORT = re.compile(r"(ERROR: \w+Sanitizer|WARNING: ThreadSanitizer|runtime error:).*")
T = TypeVar("T")


class ServingError(AssertionError):
    """The server did what no server may do, whatever it was asked."""


def wait_until(condition: Callable[[], T | None], what: str, seconds: float = 60.0) -> T:
    """The first true value of `condition`; ServingError when there is none in time."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise ServingError(f"not within {seconds} s: {what} (last: {value!r})")
        time.sleep(0.01)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")

    def json(self) -> Any:
        return json.loads(self.text, parse_constant=_no_constant)

    def ok(self) -> Any:
        """The JSON of an answer that must be 200."""
        if self.status != 200:
            raise ServingError(f"HTTP {self.status}: {self.text[:2000]}")
        return self.json()

    def error(self, status: int | None = None) -> dict[str, Any]:
        """The error object of an answer that must be one, with exactly the fields of OpenAI's (CONVENTIONS.md 2.1)."""
        if self.status < 400 or (status is not None and self.status != status):
            raise ServingError(
                f"HTTP {self.status}, not {status or 'an error'}: {self.text[:2000]}"
            )
        return check_error_object(self.json())


def check_error_object(body: Any) -> dict[str, Any]:
    error = body.get("error") if isinstance(body, dict) else None
    if set(body) != {"error"} or not isinstance(error, dict):
        raise ServingError(f"not an error body: {body}")
    for name, kinds in {
        "message": str,
        "type": str,
        "param": (str, type(None)),
        "code": (str, type(None)),
    }.items():
        if name not in error or not isinstance(error[name], kinds):  # type: ignore[arg-type]
            raise ServingError(f"{name} of an error: {error}")
    if not error["message"]:
        raise ServingError(f"an error without a message: {error}")
    return error


def _no_constant(name: str) -> Any:
    raise ServingError(f"{name} in JSON")


@dataclass(frozen=True)
class Event:
    """One event of a stream, or one comment."""

    data: str | None = None
    name: str = "message"
    id: str | None = None
    comment: str | None = None

    def json(self) -> Any:
        assert self.data is not None
        return json.loads(self.data, parse_constant=_no_constant)


class Stream:
    """An answer of text/event-stream. Every line is checked as it comes."""

    def __init__(
        self, connection: http.client.HTTPConnection, response: http.client.HTTPResponse
    ) -> None:
        self._connection = connection
        self._response = response
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection, whatever is still to come."""
        if self._connection.sock is not None:
            with contextlib.suppress(OSError):
                self._connection.sock.shutdown(socket.SHUT_RDWR)
        self._response.close()
        self._connection.close()

    def events(self, comments: bool = False) -> Iterator[Event]:
        """The events up to the end of the stream; comments too where asked for."""
        fields: dict[str, str] = {}
        data: list[str] = []
        while True:
            line = self._response.readline()
            if not line:
                if fields or data:
                    raise ServingError(f"the stream ends inside an event: {fields} {data}")
                return
            if not line.endswith(b"\n") or b"\r" in line:
                raise ServingError(f"end of a line: {line!r}")
            text = line[:-1].decode("utf-8")
            if text.startswith(":"):
                if comments:
                    yield Event(comment=text[1:].strip())
                continue
            if text:
                name, colon, value = text.partition(": ")
                if not colon or name not in ("data", "event", "id", "retry"):
                    raise ServingError(f"a line of a stream: {text!r}")
                if name == "data":
                    data.append(value)
                else:
                    fields[name] = value
                continue
            if data:
                yield Event(
                    data="\n".join(data), name=fields.get("event", "message"), id=fields.get("id")
                )
            elif fields and "retry" not in fields:
                raise ServingError(f"an event without data: {fields}")
            fields, data = {}, []

    def chunks(self) -> Iterator[dict[str, Any]]:
        """The JSON of OpenAI's chunks. The stream must end with [DONE], or with an error object, which is yielded."""
        last: Any = None
        for event in self.events():
            if last == "[DONE]" or (isinstance(last, dict) and "error" in last):
                raise ServingError(f"after the end of the stream: {event}")
            if event.name != "message":
                raise ServingError(f"an event with a name among chunks: {event}")
            last = event.data if event.data == "[DONE]" else event.json()
            if isinstance(last, dict):
                if "error" in last:
                    check_error_object(last)
                yield last
        if last != "[DONE]" and not (isinstance(last, dict) and "error" in last):
            raise ServingError(f"the stream ends with {last!r}, not with [DONE]")


class Server:
    def __init__(
        self,
        model: str | None = CHAIN,
        *flags: str,
        env: Mapping[str, str] | None = None,
        binary: str | Path = BINARY,
        key: str | None = None,
        start_seconds: float = START_SECONDS,
        exit_code: int = 0,
    ) -> None:
        """`model` None starts without -m. `key` goes with every request. `exit_code`: what it must end with."""
        self._flags = [*(["-m", model] if model is not None else []), "--port", "0", *flags]
        self._env = dict(env or {})
        self._binary = str(binary)
        self.key = key
        self._start_seconds = start_seconds
        self._exit_code = exit_code
        self._process: subprocess.Popen[bytes] | None = None
        self._log: Any = None
        self._model: str | None = None
        self.host, self.port = "127.0.0.1", 0

    # ---- life

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is None:
            self.stop()
        else:
            self.kill()

    def start(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        environment = {
            k: v for k, v in os.environ.items() if not k.startswith(("PAGEDKV_", "MTPLX_"))
        }
        environment.update(self._env)
        self._process = subprocess.Popen(
            [self._binary, "serve", *self._flags],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            env=environment,
        )
        try:
            found = wait_until(self._address, "the address of the server", self._start_seconds)
            self.host, self.port = found[1].strip("[]"), int(found[2])
            wait_until(self._healthy, "/health", self._start_seconds)
        except BaseException:
            self.kill()
            raise

    def _address(self) -> re.Match[str] | None:
        self.check_alive()
        return re.search(r"https?://(\[[0-9a-f:]+\]|[\w.-]+):(\d+)", self.log())

    def _healthy(self) -> bool:
        self.check_alive()
        try:
            return self.get("/health", key=None).status == 200
        except OSError:
            return False

    def log(self) -> str:
        """What it has written so far to stdout and stderr."""
        size = os.fstat(self._log.fileno()).st_size
        return os.pread(self._log.fileno(), size, 0).decode("utf-8", "replace")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}"

    def check_alive(self) -> None:
        assert self._process is not None
        if self._process.poll() is not None:
            raise ServingError(
                f"the server ended with {self._process.returncode}:\n{self.log()[-4000:]}"
            )

    def signal(self, number: int) -> None:
        self.check_alive()
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, seconds: float = STOP_SECONDS) -> int:
        """Its exit status; ServingError when it does not end, or has written a sanitizer's report."""
        assert self._process is not None
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            log = self.log()
            self.kill()
            raise ServingError(
                f"the server did not end within {seconds} s:\n{log[-4000:]}"
            ) from None
        report = SANITIZER_REPORT.search(self.log())
        if report:
            raise ServingError(f"a sanitizer's report:\n{self.log()[report.start() :][:8000]}")
        return code

    def stop(self) -> None:
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        code = self.wait()
        if code != self._exit_code:
            raise ServingError(
                f"the server ended with {code}, not {self._exit_code}:\n{self.log()[-4000:]}"
            )
        self._close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _close(self) -> None:
        self._process = None

    # ---- requests

    def connect(self, seconds: float = ANSWER_SECONDS) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=seconds)

    def _send(
        self,
        method: str,
        path: str,
        body: Any,
        headers: Mapping[str, str] | None,
        key: str | None,
        seconds: float,
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        all_headers = {"Connection": "close"}
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        if body is not None:
            all_headers["Content-Type"] = "application/json"
        if key is not None:
            all_headers["Authorization"] = f"Bearer {key}"
        all_headers.update(headers or {})
        connection = self.connect(seconds)
        try:
            connection.request(method, path, body, all_headers)
            return connection, connection.getresponse()
        except BaseException:
            connection.close()
            raise

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = "",
        seconds: float = ANSWER_SECONDS,
    ) -> Answer:
        """`body`: bytes as they are, anything else as JSON. `key` "": the server's own; None: none."""
        connection, response = self._send(
            method, path, body, headers, self.key if key == "" else key, seconds
        )
        try:
            return Answer(
                response.status, {k.lower(): v for k, v in response.getheaders()}, response.read()
            )
        finally:
            response.close()
            connection.close()

    def get(self, path: str, **options: Any) -> Answer:
        return self.request("GET", path, **options)

    def post(self, path: str, body: Any = None, **options: Any) -> Answer:
        return self.request("POST", path, body, **options)

    def stream(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        key: str | None = "",
        seconds: float = ANSWER_SECONDS,
    ) -> Stream:
        """A POST (GET without a body) that must be answered with an event stream; its end is the caller's."""
        method = "GET" if body is None else "POST"
        connection, response = self._send(
            method, path, body, headers, self.key if key == "" else key, seconds
        )
        stream = Stream(connection, response)
        kind = stream.headers.get("content-type", "")
        if stream.status != 200 or kind != "text/event-stream; charset=utf-8":
            text = response.read()[:2000].decode("utf-8", "replace")
            stream.close()
            raise ServingError(f"HTTP {stream.status}, {kind or 'no type'}, not a stream: {text}")
        return stream

    # ---- what it says of itself

    @property
    def model(self) -> str:
        """The name of its model."""
        if self._model is None:
            self._model = str(self.get("/v1/models").ok()["data"][0]["id"])
        return self._model

    def metrics(self) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
        """{name: {labels: value}} of /metrics."""
        answer = self.get("/metrics")
        if answer.status != 200:
            raise ServingError(f"/metrics: HTTP {answer.status}: {answer.text[:500]}")
        return parse_metrics(answer.text)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of the samples that have these labels; 0 where there is none."""
        wanted = set(labels.items())
        return sum(value for have, value in self.metrics().get(name, {}).items() if wanted <= have)

    def pages(self, state: str) -> int:
        """Pages that are free, held or cached, over all groups."""
        return int(self.metric("pagedkv_pool_pages", state=state))

    def running(self) -> int:
        return int(self.metric("pagedkv_requests_running"))

    def waiting(self) -> int:
        return int(self.metric("pagedkv_requests_waiting"))

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until nothing runs or waits and no page is held."""
        wait_until(
            lambda: self.running() == 0 and self.waiting() == 0 and self.pages("held") == 0,
            "an idle server",
            seconds,
        )

    def resident_bytes(self) -> int:
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"^VmRSS:\s+(\d+) kB$", status, re.MULTILINE)
        assert found
        return int(found[1]) * 1024

    def open_files(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


METRIC = re.compile(r"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\["\\n])*)"(?:,|$)')


def parse_metrics(text: str) -> dict[str, dict[frozenset[tuple[str, str]], float]]:
    """Prometheus's text form 0.0.4; a line that is none is an error."""
    families: dict[str, dict[frozenset[tuple[str, str]], float]] = {}
    if not text.endswith("\n"):
        raise ServingError("metrics do not end with a line feed")
    for line in text.splitlines():
        if not line or line.startswith(("# HELP ", "# TYPE ")):
            continue
        found = METRIC.fullmatch(line)
        if not found:
            raise ServingError(f"a line of metrics: {line!r}")
        name, inside, value = found.groups()
        labels: list[tuple[str, str]] = []
        at = 0
        while inside and at < len(inside):
            label = LABEL.match(inside, at)
            if not label:
                raise ServingError(f"labels of metrics: {line!r}")
            labels.append((label[1], label[2]))
            at = label.end()
        samples = families.setdefault(name, {})
        key = frozenset(labels)
        if key in samples or len(key) != len(labels):
            raise ServingError(f"a sample stands twice: {line!r}")
        samples[key] = float(value)
    return families
