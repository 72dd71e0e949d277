"""pagedkv.llm: what it asks of the program, what it makes of the answers, what it leaves behind.

Most tests run a fake program that this file writes. Those named `real` need PAGEDKV_TEST_BINARY (a
built `pagedkv`) and, where they need a model file, PAGEDKV_TEST_MODELS (a folder that has them).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pagedkv import llm as module
from pagedkv.llm import (
    LLM,
    CapacityError,
    Completion,
    EnvironmentFailure,
    GenerationTimeout,
    LLMError,
    ModelError,
    UsageError,
    VerificationError,
    find_binary,
)

ANSWER: dict[str, Any] = {
    "text": "DE",
    "finish_reason": "length",
    "tokens": [
        {"id": 68, "text": "D", "logprob": -0.5},
        {"id": 69, "text": "E", "logprob": -9999.0},
    ],
    "prompt_tokens": [{"id": 66, "logprob": None}, {"id": 67, "logprob": -1.25}],
    "usage": {"prompt_tokens": 2, "completion_tokens": 2, "total_tokens": 4},
    "timings": {
        "load_ms": 1.5,
        "prompt_n": 2,
        "prompt_ms": 0.5,
        "prompt_per_second": 4000.0,
        "predicted_n": 2,
        "predicted_ms": 0.25,
        "predicted_per_second": 4000.0,
        "first_token_ms": 2.0,
    },
    "stats": {
        "page_format": "q8",
        "page_size": 16,
        "pages_peak": 1,
        "pages_capacity": 4,
        "pages_committed": 4,
        "num_blocks_needed": 1,
        "tokens": 3,
        "block_utilization": 0.1875,
        "bytes_per_token": 100,
        "bytes_in_use": 1600,
        "bytes_committed": 6400,
        "bytes_resident": 4096,
        "bytes_reserved": 6400,
        "bytes_limit": 1 << 40,
        "bytes_moved": 0,
        "grow_events": 0,
        "commit_events": 1,
        "allocations": 1,
        "refusals": 0,
        "peak_rss_bytes": 1 << 20,
    },
}


LONG = pytest.param("a" * 300_000, id="long")


class Fake:
    """A program that keeps what it was called with and answers as it is told."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "fake-pagedkv"
        self.calls_path = folder / "calls.jsonl"
        self.does("print(ANSWER)")

    def does(self, code: str) -> None:
        head = f"""\
            import json, os, pathlib, signal, sys, time
            ANSWER = {json.dumps(ANSWER)!r}
            state = os.environ.get("XDG_STATE_HOME", "")
            kept = pathlib.Path(state, "pagedkv", "conversation.json")
            call = {{
                "pid": os.getpid(),
                "args": sys.argv[1:],
                "stdin": sys.stdin.buffer.read().decode(),
                "state": state,
                "conversation": json.loads(kept.read_text()) if kept.exists() else None,
            }}
            with open({str(self.calls_path)!r}, "a") as calls:
                calls.write(json.dumps(call) + "\\n")
            """
        script = self.path.with_suffix(".py")
        script.write_text(textwrap.dedent(head) + code + "\n")
        # The interpreter's path may hold a blank, which the line of a script that names it may not.
        self.path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
        self.path.chmod(0o755)

    @property
    def calls(self) -> list[dict[str, Any]]:
        if not self.calls_path.exists():
            return []
        return [json.loads(line) for line in self.calls_path.read_text().splitlines()]

    @property
    def call(self) -> dict[str, Any]:
        (only,) = self.calls
        return only


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fake:
    program = Fake(tmp_path)
    monkeypatch.setenv("PAGEDKV_BINARY", str(program.path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    return program


def is_running(pid: int) -> bool:
    """Zombies count: they are what a parent left behind."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# What is asked


def test_a_setting_becomes_the_flag_of_its_long_name(fake: Fake) -> None:
    llm = LLM(
        "-model.gguf",
        ctx_size=4096,
        kv_cache_dtype="q8",
        cache_type_k="f16",
        cache_type_v="q4",
        block_size=32,
        num_blocks=7,
        dynamic=False,
        kv_cache_memory_bytes="512MiB",
        sliding_window=-1,
        prefill_chunk=64,
        threads=2,
        exact=True,
        config="none",
    )
    llm.generate("x")
    assert fake.call["args"][0] == "run"
    assert set(fake.call["args"][1:]) == {
        "--model=-model.gguf",
        "--ctx-size=4096",
        "--kv-cache-dtype=q8",
        "--cache-type-k=f16",
        "--cache-type-v=q4",
        "--block-size=32",
        "--num-blocks=7",
        "--dynamic=false",
        "--kv-cache-memory-bytes=512MiB",
        "--sliding-window=-1",
        "--prefill-chunk=64",
        "--threads=2",
        "--exact=on",
        "--config=none",
        "--json",
        "--stats=false",
        "--num-answers=1",
        "--raw=false",
        "--continue=false",
    }


def test_an_option_becomes_the_flag_of_its_long_name(fake: Fake) -> None:
    LLM().generate(
        "x",
        max_tokens=5,
        temperature=0.5,
        top_p=1,
        top_k=40,
        min_p=0.0,
        repetition_penalty=1.1,
        seed=3,
        stop=["-a", "b c"],
        chat_template_kwargs={"enable_thinking": False},
        raw=True,
    )
    assert fake.call["args"][1:] == [
        "--max-tokens=5",
        "--temperature=0.5",
        "--top-p=1.0",
        "--top-k=40",
        "--min-p=0.0",
        "--repetition-penalty=1.1",
        "--seed=3",
        "--stop=-a",
        "--stop=b c",
        '--chat-template-kwargs={"enable_thinking": false}',
        "--json",
        "--stats=false",
        "--num-answers=1",
        "--raw=true",
        "--continue=false",
    ]


def test_what_is_none_is_left_to_the_program(fake: Fake) -> None:
    LLM(ctx_size=None, dynamic=None).generate("x", max_tokens=None, stop=None, timeout=None)
    always = ["--json", "--stats=false", "--num-answers=1", "--raw=false", "--continue=false"]
    assert fake.call["args"] == ["run", *always]


@pytest.mark.parametrize("prompt", ["x", "two\nlines\n", "-n 5", "ümläut 🦙", "", LONG])
def test_a_prompt_goes_whole_to_standard_input(fake: Fake, prompt: str) -> None:
    LLM().generate(prompt)
    assert fake.call["stdin"] == prompt + "\n"  # which the program drops


def test_each_prompt_of_a_list_is_answered_in_order(fake: Fake) -> None:
    answers = LLM().generate(["one", "two"])
    assert [call["stdin"] for call in fake.calls] == ["one\n", "two\n"]
    assert [type(answer) for answer in answers] == [Completion, Completion]
    assert LLM().generate([]) == []
    with pytest.raises(TypeError, match="not int"):
        LLM().generate(["one", 2])  # type: ignore[list-item]
    assert len(fake.calls) == 2


def test_an_unknown_name_is_a_type_error_that_tells_the_nearest(fake: Fake) -> None:
    with pytest.raises(TypeError, match="context_size.*ctx_size"):
        LLM(context_size=5)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="temprature.*temperature"):
        LLM().generate("x", temprature=0)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="max_new_tokens.*max_tokens"):
        LLM().chat("x", max_new_tokens=3)  # type: ignore[call-arg]
    assert fake.calls == []


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"ctx_size": "many"}, TypeError),
        ({"ctx_size": 1.5}, TypeError),
        ({"threads": True}, TypeError),
        ({"dynamic": 1}, TypeError),
        ({"kv_cache_dtype": 8}, TypeError),
        ({"config": 1}, TypeError),
        ({"kv_cache_dtype": ""}, ValueError),
        ({"kv_cache_dtype": "q\0"}, ValueError),
    ],
)
def test_a_setting_of_another_type_is_refused_at_once(
    fake: Fake, settings: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(settings)).replace("_", ".")):
        LLM(**settings)
    assert fake.calls == []


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"temperature": "hot"}, TypeError),
        ({"temperature": True}, TypeError),
        ({"max_tokens": 2.0}, TypeError),
        ({"stop": [1]}, TypeError),
        ({"stop": b"x"}, TypeError),
        ({"stop": ""}, ValueError),
        ({"stop": ["a", ""]}, ValueError),
        ({"stop": "a" * 200_000}, ValueError),
        ({"timeout": 0}, ValueError),
        ({"timeout": float("nan")}, ValueError),
        ({"chat_template_kwargs": "{}"}, TypeError),
    ],
)
def test_an_option_of_another_type_is_refused_at_once(
    fake: Fake, options: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=next(iter(options)).replace("_", ".")):
        LLM().generate("x", **options)
    assert fake.calls == []


# Chats


def test_a_chat_of_one_message_needs_no_conversation(fake: Fake) -> None:
    LLM().chat("Hello", system="-Be brief.")
    assert fake.call["stdin"] == "Hello\n"
    assert "--system=-Be brief." in fake.call["args"]
    assert "--continue=false" in fake.call["args"]
    assert fake.call["state"] == ""


def test_earlier_messages_go_through_a_private_state_folder(fake: Fake) -> None:
    turns = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    LLM().chat(turns)
    assert fake.call["stdin"] == "And of Italy?\n"
    assert fake.call["conversation"] == {"messages": turns[1:3]}
    assert "--system=Be brief." in fake.call["args"]
    assert "--continue=true" in fake.call["args"]
    assert not Path(fake.call["state"]).exists()
    assert "XDG_STATE_HOME" not in os.environ


def test_the_private_folder_goes_when_the_program_fails_too(fake: Fake) -> None:
    fake.does("sys.exit(4)")
    turn = {"role": "user", "content": "x"}
    with pytest.raises(ModelError):
        LLM().chat([turn, {"role": "assistant", "content": "y"}, turn])
    assert fake.call["conversation"] is not None
    assert not Path(fake.call["state"]).exists()


USER = {"role": "user", "content": "x"}


@pytest.mark.parametrize(
    ("messages", "system", "error"),
    [
        ([], None, "last message"),
        ([USER, {"role": "assistant", "content": "begun"}], None, "last message"),
        ([{"role": "system", "content": "s"}], None, "last message"),
        ([{"role": "system", "content": "s"}, USER], "again", "only one"),
        ([USER, {"role": "system", "content": "s"}, USER], None, "only be the first"),
        ([{"role": "tool", "content": "4"}, USER], None, "tool"),
        ([{"role": "user", "content": "x", "name": "Ann"}], None, "name"),
        ([{"content": "x"}], None, "None"),
        ([USER], "", "system"),
    ],
)
def test_what_a_chat_cannot_say_is_refused(
    fake: Fake, messages: Any, system: str | None, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        LLM().chat(messages, system=system)
    assert fake.calls == []


def test_contents_that_are_no_text_are_refused(fake: Fake) -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "x"}]}]
    with pytest.raises(TypeError, match="list"):
        LLM().chat(parts)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="NoneType"):
        LLM().chat([{"role": "user", "content": None}])  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="str"):
        LLM().chat(["x"])  # type: ignore[list-item]
    assert fake.calls == []


# What comes back


def test_a_completion_holds_what_the_program_wrote(fake: Fake) -> None:
    fake.does("print('pagedkv: seed 7', file=sys.stderr); print(ANSWER)")
    answer = LLM().generate("x")
    assert (answer.text, answer.finish_reason) == ("DE", "length")
    assert answer.token_ids == (68, 69)
    assert answer.logprobs == (-0.5, -9999.0)
    assert [token.text for token in answer.tokens] == ["D", "E"]
    assert [token.logprob for token in answer.prompt_tokens] == [None, -1.25]
    assert answer.usage.total_tokens == 4
    assert answer.timings.first_token_ms == 2.0
    assert (answer.stats.page_format, answer.stats.bytes_limit) == ("q8", 1 << 40)
    assert answer.log == "pagedkv: seed 7\n"
    with pytest.raises(AttributeError):
        answer.text = "other"  # type: ignore[misc]


def test_what_a_newer_program_adds_is_no_error(fake: Fake) -> None:
    fake.does("x = json.loads(ANSWER); x['new'] = x['stats']['new'] = 1; print(json.dumps(x))")
    assert LLM().generate("x").text == "DE"


@pytest.mark.parametrize(
    "code",
    [
        "print('hello')",
        "pass",
        "print('[]')",
        "sys.stdout.buffer.write(b'\\xff')",
        "x = json.loads(ANSWER); del x['usage']; print(json.dumps(x))",
        "x = json.loads(ANSWER); x['stats'] = 1; print(json.dumps(x))",
    ],
)
def test_an_answer_that_cannot_be_read_is_an_error_that_shows_it(fake: Fake, code: str) -> None:
    fake.does(code)
    with pytest.raises(LLMError, match="cannot be read.*begins with"):
        LLM().generate("x")


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, LLMError),
        (2, UsageError),
        (3, VerificationError),
        (4, ModelError),
        (5, EnvironmentFailure),
        (6, CapacityError),
        (77, LLMError),
    ],
)
def test_an_exit_status_is_an_exception_with_the_programs_words(
    fake: Fake, code: int, kind: type[LLMError]
) -> None:
    fake.does(
        "print('pagedkv: llama | pages f16', file=sys.stderr)\n"
        "print('pagedkv: error: the reason', file=sys.stderr)\n"
        f"sys.exit({code})"
    )
    with pytest.raises(LLMError) as caught:
        LLM().generate("x")
    assert type(caught.value) is kind
    assert str(caught.value).endswith("the reason")
    assert "pages f16" not in str(caught.value)
    assert "pages f16" in caught.value.stderr
    assert caught.value.code == code
    assert isinstance(caught.value, RuntimeError)
    assert isinstance(caught.value, ValueError) == (code in (2, 6))


def test_a_signal_that_ends_the_program_is_named(fake: Fake) -> None:
    fake.does("os.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(LLMError, match="signal 9") as caught:
        LLM().generate("x")
    assert caught.value.code == -signal.SIGKILL


def test_a_program_that_does_not_read_its_input_is_no_hang(fake: Fake) -> None:
    fake.path.write_text("#!/bin/sh\necho 'pagedkv: error: no' >&2\nexit 2\n")
    with pytest.raises(UsageError, match="^no$"):
        LLM().generate("x" * 10_000_000)


# What is left behind


def test_a_timeout_ends_the_program(fake: Fake) -> None:
    fake.does("time.sleep(600)")
    begin = time.monotonic()
    with pytest.raises(GenerationTimeout, match="2 seconds") as caught:
        LLM().generate("x", timeout=2)
    assert time.monotonic() - begin < 60
    assert isinstance(caught.value, TimeoutError)
    assert not is_running(fake.call["pid"])


def test_an_interrupt_ends_the_program(fake: Fake) -> None:
    fake.does("signal.signal(signal.SIGINT, signal.SIG_IGN)\ntime.sleep(600)")
    code = "from pagedkv.llm import LLM; LLM().generate('x')"
    path = str(Path(module.__file__).parents[1])
    path += os.pathsep + os.environ.get("PYTHONPATH", "")
    caller = subprocess.Popen(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        stderr=subprocess.PIPE,
    )
    try:
        deadline = time.monotonic() + 60
        while not fake.calls and time.monotonic() < deadline:
            time.sleep(0.05)
        pid = fake.call["pid"]
        assert is_running(pid)
        caller.send_signal(signal.SIGINT)
        _, said = caller.communicate(timeout=60)
    finally:
        caller.kill()
        caller.wait()
    assert b"KeyboardInterrupt" in said
    assert not is_running(pid)


def test_threads_may_share_one(fake: Fake) -> None:
    fake.does("x = json.loads(ANSWER); x['text'] = call['stdin']; print(json.dumps(x))")
    llm = LLM("m.gguf", threads=1)
    prompts = [f"prompt {i}" for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(llm.generate, prompts))
    assert [answer.text for answer in answers] == [prompt + "\n" for prompt in prompts]
    assert not any(is_running(call["pid"]) for call in fake.calls)


# Where the program is


def test_the_variable_names_the_program(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_binary() == fake.path
    assert LLM().binary == fake.path
    monkeypatch.setenv("PAGEDKV_BINARY", str(fake.path.parent / "gone"))
    with pytest.raises(FileNotFoundError, match="PAGEDKV_BINARY .*gone"):
        LLM()
    assert LLM(binary=fake.path).binary == fake.path
    with pytest.raises(FileNotFoundError, match="binary .*calls"):
        LLM(binary=fake.calls_path)


def test_a_build_of_the_repository_comes_before_the_path(
    fake: Fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PAGEDKV_BINARY")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    installed = tmp_path / "bin" / "pagedkv"
    release, ci = (tmp_path / f"repo/build/{name}/apps/pagedkv" for name in ("release", "ci"))
    source = tmp_path / "repo/src/apps/run.cpp"
    for path in (installed, release, ci, source):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("#!/bin/sh\n")
        path.chmod(0o755)
    for place in ("repo/python/pagedkv/llm.py", "repo/build/ci/python/pagedkv/llm.py"):
        monkeypatch.setattr(module, "__file__", str(tmp_path / place))
        assert find_binary() == release
    release.chmod(0o644)
    assert find_binary() == ci
    ci.unlink()
    assert find_binary() == installed
    installed.unlink()
    with pytest.raises(FileNotFoundError) as caught:
        find_binary()
    for where in ("PAGEDKV_BINARY", str(release), str(ci), str(tmp_path / "bin")):
        assert where in str(caught.value)
    monkeypatch.setattr(module, "__file__", str(tmp_path / "lib/pagedkv/llm.py"))
    ci.write_text("#!/bin/sh\n")
    with pytest.raises(FileNotFoundError):
        find_binary()


# The program itself


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    binary = os.environ.get("PAGEDKV_TEST_BINARY")
    if not binary:
        pytest.skip("PAGEDKV_TEST_BINARY is not set")
    for variable in list(os.environ):
        if variable.startswith("MTPLX_") or (
            variable.startswith("PAGEDKV_") and not variable.startswith("PAGEDKV_TEST_")
        ):
            monkeypatch.delenv(variable)
    monkeypatch.setenv("PAGEDKV_BINARY", binary)
    monkeypatch.setenv("PAGEDKV_CONFIG", "none")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return binary


@pytest.fixture
def models(real: str) -> Path:
    """The folder that tools/make_chain.py and tools/make_model_variants.py write to."""
    folder = os.environ.get("PAGEDKV_TEST_MODELS")
    if not folder:
        pytest.skip("PAGEDKV_TEST_MODELS is not set")
    return Path(folder)


@pytest.fixture
def chain(models: Path) -> str:
    """A model whose text is known: A follows Z, and a letter the one before it."""
    return str(models / "chain.gguf")


def test_real_a_known_text_comes_back(chain: str) -> None:
    llm = LLM(chain, threads=1)
    answer = llm.generate("ABC", max_tokens=26)
    assert answer.text == "DEFGHIJKLMNOPQRSTUVWXYZABC"
    assert answer.token_ids == tuple(answer.text.encode())
    assert answer.finish_reason == "length"
    assert all(-0.001 < logprob <= 0 for logprob in answer.logprobs)
    assert len(answer.prompt_tokens) == answer.usage.prompt_tokens
    assert llm.generate("ABC", max_tokens=26, stop=["GHI"]).text == "DEF"
    assert llm.generate("x", max_tokens=30).finish_reason == "stop"
    assert [each.text for each in llm.generate(["A", "7"], max_tokens=3)] == ["BCD", "890"]


def test_real_prompts_are_continued_byte_for_byte(chain: str) -> None:
    llm = LLM(chain, threads=1)
    for prompt in ("-n 5", "ends\n", "ends\n\n", "'quoted' \"text\" $HOME", "🦙"):
        assert prompt_text(llm.generate(prompt, max_tokens=1, raw=True)) == prompt


def test_real_stop_texts_are_taken_as_they_are(chain: str) -> None:
    llm = LLM(chain, threads=1)
    assert llm.generate("ABC", max_tokens=6, stop="FG", raw=True).text == "DE"
    for stop in ("{}", "[F,G]", "-", "--raw", "%%", "a b", "\n", '"F"'):
        answer = llm.generate("ABC", max_tokens=6, stop=[stop, "HI"], raw=True)
        assert answer.text == "DEFG", stop


def test_real_settings_reach_the_pages(real: str) -> None:
    base: dict[str, Any] = {"threads": 1, "ctx_size": 64}
    llm = LLM("toy:", kv_cache_dtype="q8", cache_type_v="f32", block_size=4, num_blocks=3, **base)
    stats = llm.generate("hello", max_tokens=20).stats
    assert (stats.page_format, stats.page_size) == ("k=q8,v=f32", 4)
    assert stats.num_blocks_needed == 6
    assert stats.bytes_moved == 0
    few = LLM("toy:", block_size=4, num_blocks=3, dynamic=False, **base)
    with pytest.raises(CapacityError, match="12"):
        few.generate("hello", max_tokens=20)
    with pytest.raises(CapacityError, match="64"):
        LLM("toy:", **base).generate("x" * 100)


def test_real_refusals_are_exceptions_of_their_kind(real: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="q5"):
        LLM("toy:", kv_cache_dtype="q5").generate("x")
    with pytest.raises(ValueError, match="257"):
        LLM("toy:", block_size=257).generate("x")
    with pytest.raises(UsageError, match="no prompt"):
        LLM("toy:").generate("")
    with pytest.raises(UsageError, match="temperature"):
        LLM("toy:").generate("x", temperature=-1)
    with pytest.raises(ModelError, match="nowhere.gguf"):
        LLM(tmp_path / "nowhere.gguf").generate("x")


def test_real_a_seed_gives_the_same_answer_again(real: str) -> None:
    llm = LLM("toy:", threads=1)
    one, two, other = (
        llm.generate("hello", max_tokens=30, temperature=1.0, seed=seed) for seed in (5, 5, 6)
    )
    assert one.token_ids == two.token_ids
    assert one.token_ids != other.token_ids


def prompt_text(answer: Completion) -> str:
    """Of a model whose tokens are bytes; control tokens are left out."""
    ids = [token.id for token in answer.prompt_tokens if token.id < 256]
    return bytes(ids).decode()


def test_real_a_conversation_is_told_whole_and_not_kept(models: Path, tmp_path: Path) -> None:
    # Its template writes each message as "role: content" and a newline.
    llm = LLM(models / "model-variants" / "untied.gguf", threads=1)
    turns = [
        {"role": "user", "content": 'Zo\u00eb\nand "I"\n'},
        {"role": "assistant", "content": "\U0001f999"},
        {"role": "user", "content": "-n 3\n"},
    ]
    told = 'user: Zo\u00eb\nand "I"\n\nassistant: \U0001f999\nuser: -n 3\n\nassistant:'
    assert prompt_text(llm.chat(turns, max_tokens=2)) == told
    system = "system: --be brief\n"
    assert prompt_text(llm.chat(turns, system="--be brief", max_tokens=2)) == system + told
    turns.insert(0, {"role": "system", "content": "--be brief"})
    assert prompt_text(llm.chat(turns, max_tokens=2)) == system + told
    assert prompt_text(llm.chat("A", max_tokens=2)) == "user: A\nassistant:"
    assert prompt_text(llm.generate("A", max_tokens=2)) == "user: A\nassistant:"
    assert prompt_text(llm.generate("A", max_tokens=2, raw=True)) == "A"
    assert not (tmp_path / "state").exists()


def test_real_variables_set_only_what_is_left_out(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    variables = {"CONTINUE": "1", "RAW": "1", "STATS": "1", "PREDICT": "3", "BLOCK_SIZE": "4"}
    for name, value in variables.items():
        monkeypatch.setenv(f"PAGEDKV_{name}", value)
    path = models / "model-variants" / "untied.gguf"
    answer = LLM(path, threads=1).generate("A")
    assert prompt_text(answer) == "user: A\nassistant:"
    assert (answer.usage.completion_tokens, answer.stats.page_size) == (3, 4)
    answer = LLM(path, threads=1, block_size=8).generate("A", max_tokens=2)
    assert (answer.usage.completion_tokens, answer.stats.page_size) == (2, 8)
    assert not (tmp_path / "state").exists()


def test_real_a_timeout_leaves_no_answer(real: str) -> None:
    with pytest.raises(GenerationTimeout):
        LLM("toy:", threads=1).generate("x" * 4_000, timeout=0.001)
