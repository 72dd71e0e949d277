"""Text from a GGUF model, through the installed `pagedkv` program.

    llm = LLM("model.gguf", ctx_size=4096, kv_cache_dtype="q8")
    llm.generate("Name the capital of France.", max_tokens=20, temperature=0).text
    llm.chat([{"role": "user", "content": "Hello"}], system="Be brief.").text

Nothing of the engine is in this package: each prompt is one `pagedkv run --json`, which loads the
model, answers and ends. What is left out here is taken from where `pagedkv run` takes it: its
variables (PAGEDKV_...), its configuration file, its defaults. An LLM holds no process and no state,
so threads may share one.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, overload

from pagedkv._pagedkv import CapacityError as _CapacityError

if TYPE_CHECKING:
    from typing_extensions import Unpack

__all__ = [
    "LLM",
    "CacheStats",
    "CapacityError",
    "Completion",
    "EnvironmentFailure",
    "GenerationOptions",
    "GenerationTimeout",
    "LLMError",
    "ModelError",
    "PromptToken",
    "Settings",
    "Timings",
    "Token",
    "Usage",
    "UsageError",
    "VerificationError",
    "find_binary",
]

T = TypeVar("T")
_Texts = list[str] | tuple[str, ...]  # a text is itself a Sequence[str]
StrPath = str | os.PathLike[str]


class LLMError(RuntimeError):
    """The program failed. `code` is its exit status (negative: the signal that ended it, None: it
    gave no readable answer), `stderr` all that it wrote there."""

    def __init__(self, message: str, code: int | None = None, stderr: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.stderr = stderr


class UsageError(LLMError, ValueError):
    """Exit status 2: a setting, an option or a prompt that the program refuses."""


class VerificationError(LLMError):
    """Exit status 3: a result that differs from the reference."""


class ModelError(LLMError):
    """Exit status 4: the model is missing, broken or not supported."""


class EnvironmentFailure(LLMError):
    """Exit status 5: the machine lacks something that was asked for."""


class CapacityError(LLMError, _CapacityError):
    """Exit status 6: prompt and answer do not fit the context, the pages or the memory."""


class GenerationTimeout(LLMError, TimeoutError):
    """The answer took longer than `timeout`; the program was ended."""


_ERRORS: dict[int, type[LLMError]] = {
    2: UsageError,
    3: VerificationError,
    4: ModelError,
    5: EnvironmentFailure,
    6: CapacityError,
}


@dataclass(frozen=True)
class Token:
    """A token of the answer. `logprob` is its natural log-probability before sampling's filters,
    -9999.0 for minus infinity; `text` its own bytes, replaced where they are no whole character."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class PromptToken:
    """A token of the prompt; the first, which nothing precedes, has no log-probability."""

    id: int
    logprob: float | None


@dataclass(frozen=True)
class Usage:
    """Tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


@dataclass(frozen=True)
class Timings:
    """Milliseconds and tokens a second. `first_token_ms` counts from the program's start."""

    load_ms: float
    prompt_n: int
    prompt_ms: float
    prompt_per_second: float | None
    predicted_n: int
    predicted_ms: float
    predicted_per_second: float | None
    first_token_ms: float


@dataclass(frozen=True)
class CacheStats:
    """What the page pool did. `pages_` counts are over all layer groups, `bytes_in_use` is the
    peak, `block_utilization` the share of the used pages' slots that held one of `tokens`."""

    page_format: str
    page_size: int
    pages_peak: int
    pages_capacity: int
    pages_committed: int
    num_blocks_needed: int
    tokens: int
    block_utilization: float
    bytes_per_token: int
    bytes_in_use: int
    bytes_committed: int
    bytes_resident: int
    bytes_reserved: int
    bytes_limit: int
    bytes_moved: int
    grow_events: int
    commit_events: int
    allocations: int
    refusals: int
    peak_rss_bytes: int


@dataclass(frozen=True)
class Completion:
    """An answer. `finish_reason` is "stop" (the model ended, or a stop text came), "length", or
    "cancelled" (somebody interrupted the program); `log` is what it wrote to stderr."""

    text: str
    finish_reason: str
    tokens: tuple[Token, ...]
    prompt_tokens: tuple[PromptToken, ...]
    usage: Usage
    timings: Timings
    stats: CacheStats
    log: str = ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Of the answer, the end token included where the model wrote it."""
        return tuple(token.id for token in self.tokens)

    @property
    def logprobs(self) -> tuple[float, ...]:
        """One for each of `token_ids`."""
        return tuple(token.logprob for token in self.tokens)


class Settings(TypedDict, total=False):
    """Of an LLM; each is the flag of `pagedkv run` with the same long name. None: left out."""

    ctx_size: int | None  # tokens
    kv_cache_dtype: str | None  # f16, f32, bf16, q8, q6, q4, or "k=q8,v=q4"
    cache_type_k: str | None  # keys alone
    cache_type_v: str | None  # values alone
    block_size: int | None  # tokens in a page
    num_blocks: int | None  # pages to begin with
    dynamic: bool | None  # grow beyond num_blocks
    kv_cache_memory_bytes: int | str | None  # most bytes for pages: 1 << 29 or "512MiB"
    sliding_window: int | None  # tokens that attention sees, 0: all
    prefill_chunk: int | None  # most prompt tokens in a step
    threads: int | None
    exact: bool | str | None  # "auto", "on", "off", True, False
    config: StrPath | None  # TOML file, or "none"


class GenerationOptions(TypedDict, total=False):
    """Of one call. None: left out."""

    max_tokens: int | None  # -1: until the model ends or the context is full
    temperature: float | None  # 0: always the most likely token
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | Sequence[str] | None  # the answer ends before any of these texts
    chat_template_kwargs: Mapping[str, Any] | None  # variables of the model's chat template
    timeout: float | None  # seconds for one prompt, loading the model included


# name: (flag, what kind of value)
_SETTINGS = {
    "ctx_size": ("--ctx-size", "int"),
    "kv_cache_dtype": ("--kv-cache-dtype", "text"),
    "cache_type_k": ("--cache-type-k", "text"),
    "cache_type_v": ("--cache-type-v", "text"),
    "block_size": ("--block-size", "int"),
    "num_blocks": ("--num-blocks", "int"),
    "dynamic": ("--dynamic", "bool"),
    "kv_cache_memory_bytes": ("--kv-cache-memory-bytes", "int or text"),
    "sliding_window": ("--sliding-window", "int"),
    "prefill_chunk": ("--prefill-chunk", "int"),
    "threads": ("--threads", "int"),
    "exact": ("--exact", "switch"),
    "config": ("--config", "path"),
}
_OPTIONS = {
    "max_tokens": ("--max-tokens", "int"),
    "temperature": ("--temperature", "float"),
    "top_p": ("--top-p", "float"),
    "top_k": ("--top-k", "int"),
    "min_p": ("--min-p", "float"),
    "repetition_penalty": ("--repetition-penalty", "float"),
    "seed": ("--seed", "int"),
    "stop": ("--stop", "texts"),
    "chat_template_kwargs": ("--chat-template-kwargs", "object"),
    "timeout": ("", "seconds"),
}
_ROLES = ("system", "user", "assistant")
_MOST_ARGUMENT_BYTES = 128 * 1024 - 1  # Linux takes no longer one


def find_binary(binary: StrPath | None = None) -> Path:
    """The program: `binary`, else $PAGEDKV_BINARY, else build/release or build/ci of the repository
    that this file lies in, else the PATH. Raises FileNotFoundError that names where it looked."""
    given = os.fspath(binary) if binary is not None else os.environ.get("PAGEDKV_BINARY", "")
    if given:
        path = Path(given)
        if _is_program(path):
            return path.absolute()  # a bare name is a file here, not one of the PATH
        source = "binary" if binary is not None else "PAGEDKV_BINARY"
        raise FileNotFoundError(f"{source} {given}: is no program that can be run")
    looked = []
    for root in Path(__file__).resolve().parents:
        if not (root / "src/apps/run.cpp").is_file():
            continue
        for preset in ("release", "ci"):
            path = root / "build" / preset / "apps" / "pagedkv"
            if _is_program(path):
                return path
            looked.append(str(path))
    found = shutil.which("pagedkv")
    if found:
        return Path(found).absolute()
    looked.append("the PATH " + os.environ.get("PATH", ""))
    raise FileNotFoundError(
        "the pagedkv program is not installed: PAGEDKV_BINARY is not set, and it is not at "
        + ", nor at ".join(looked)
    )


class LLM:
    """A model and how to run it."""

    def __init__(
        self,
        model: StrPath | None = None,
        *,
        binary: StrPath | None = None,
        **settings: Unpack[Settings],
    ) -> None:
        """`model` is a GGUF file (None: the one that `pagedkv run` chooses), `binary` the program
        (None: see find_binary). Raises FileNotFoundError where there is no program, TypeError for
        a setting that does not exist or is of another type. Whether the values fit is known at the
        first call, which then raises UsageError, ModelError or CapacityError."""
        self.binary = find_binary(binary)
        self.model = None if model is None else os.fspath(model)
        self.settings: dict[str, Any] = dict(settings)
        self._arguments = _flags(_SETTINGS, self.settings, "setting")
        if self.model is not None:
            if not self.model:
                raise ValueError("model: an empty text is no file")
            self._arguments.append("--model=" + self.model)

    def __repr__(self) -> str:
        words = [repr(self.model)] + [f"{name}={value!r}" for name, value in self.settings.items()]
        return f"LLM({', '.join(words)})"

    @overload
    def generate(
        self, prompt: str, *, raw: bool = ..., **options: Unpack[GenerationOptions]
    ) -> Completion: ...
    @overload
    def generate(
        self, prompt: _Texts, *, raw: bool = ..., **options: Unpack[GenerationOptions]
    ) -> list[Completion]: ...
    def generate(
        self, prompt: str | _Texts, *, raw: bool = False, **options: Unpack[GenerationOptions]
    ) -> Completion | list[Completion]:
        """Answers a prompt, or each of a list, one after the other; each loads the model anew and
        begins with the same seed. With `raw` the text is continued as it is; else it is a user's
        message in the model's chat template.

        Raises TypeError for an option that does not exist or is of another type, UsageError (a
        ValueError) for what the program refuses, ModelError, CapacityError, EnvironmentFailure,
        GenerationTimeout, and LLMError for any other failure. Whatever is raised, KeyboardInterrupt
        too, no process is left behind."""
        flags = _flags(_OPTIONS, options, "option")
        timeout = options.get("timeout")
        if isinstance(prompt, str):
            return self._run(prompt, flags, raw, timeout)
        prompts = list(prompt)
        for each in prompts:
            if not isinstance(each, str):
                raise TypeError(f"prompt: must be text, not {type(each).__name__}")
        return [self._run(each, flags, raw, timeout) for each in prompts]

    def chat(
        self,
        messages: str | Sequence[Mapping[str, str]],
        *,
        system: str | None = None,
        **options: Unpack[GenerationOptions],
    ) -> Completion:
        """Answers the last of `messages`, {"role": …, "content": …} each, in the model's chat
        template. A text is one message of the user. `system` is a first message of that role.

        Roles are user, assistant and, first and once, system; the last message must be the user's.
        The program cannot do more, and neither can this: tools, images, other roles, an answer that
        is begun in advance and further keys of a message raise ValueError, contents that are no
        text TypeError. Each call computes the whole conversation again. Other errors: generate."""
        flags = _flags(_OPTIONS, options, "option")
        turns = _conversation(messages, system)
        if turns[0]["role"] == "system":
            text = turns.pop(0)["content"]
            if not text:
                raise ValueError("system: an empty text is no message")
            flags.append(_argument("--system", text))
        last = turns.pop()["content"]
        timeout = options.get("timeout")
        if not turns:
            return self._run(last, flags, False, timeout)
        # The program reads what was said before from its state folder.
        with tempfile.TemporaryDirectory(prefix="pagedkv-", ignore_cleanup_errors=True) as state:
            folder = Path(state, "pagedkv")
            folder.mkdir(mode=0o700)
            text = json.dumps({"messages": turns})
            (folder / "conversation.json").write_text(text, encoding="utf-8")
            return self._run(last, flags, False, timeout, state)

    def _run(
        self,
        prompt: str,
        flags: list[str],
        raw: bool,
        timeout: float | None,
        state: str | None = None,
    ) -> Completion:
        """One run of the program. `state` is the folder of an earlier conversation."""
        words = [
            str(self.binary),
            "run",
            *self._arguments,
            *flags,
            "--json",
            "--stats=false",
            "--num-answers=1",
        ]
        words += ["--raw=" + _yes(raw), "--continue=" + _yes(state is not None)]
        environment = dict(os.environ)
        if state is not None:
            environment["XDG_STATE_HOME"] = state
        # Of a prompt on standard input the program drops one newline at the end.
        code, stdout, log = _call(words, (prompt + "\n").encode(), timeout, environment)
        if code != 0:
            raise _error(code, log)
        return _completion(stdout, log)


def _call(
    words: list[str], text: bytes, timeout: float | None, environment: Mapping[str, str]
) -> tuple[int, bytes, str]:
    """Exit status, standard output and error of a program that gets `text` on standard input. It is gone when this
    returns; when this raises, what it started too."""
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        raise EnvironmentFailure(f"{words[0]}: cannot be run: {error}") from error
    try:
        stdout, stderr = child.communicate(text, timeout)
    except subprocess.TimeoutExpired as late:
        log = (late.stderr or b"").decode(errors="replace")
        raise GenerationTimeout(f"no answer within {timeout:g} seconds", None, log) from None
    finally:
        if child.poll() is None:  # not waited for yet: its number is its own
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
    return child.returncode, stdout, stderr.decode(errors="replace")


def _is_program(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _yes(switch: bool) -> str:
    return "true" if switch else "false"


def _argument(flag: str, value: str) -> str:
    """--flag=value, where a dash that leads the value does no harm."""
    size = len(f"{flag}={value}".encode())
    if size > _MOST_ARGUMENT_BYTES:
        raise ValueError(f"{flag}: {size} bytes with the flag; the limit is {_MOST_ARGUMENT_BYTES}")
    if "\0" in value:
        raise ValueError(f"{flag}: a zero byte cannot be passed on")
    return f"{flag}={value}"


def _flags(known: Mapping[str, tuple[str, str]], given: Mapping[str, Any], what: str) -> list[str]:
    """The program's flags for names and values. Raises TypeError for an unknown name or a type that
    does not go with it, ValueError for a value that no flag can carry."""
    out = []
    for name, value in given.items():
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0)
            raise TypeError(f"{name}: there is no such {what}; did you mean {nearest[0]}?")
        if value is None:
            continue
        flag, kind = known[name]
        for word in _words(name, kind, value):
            if not word:
                raise ValueError(f"{name}: an empty text is no value; leave it out instead")
            out.append(_argument(flag, word))
    return out


def _words(name: str, kind: str, value: Any) -> list[str]:
    """A value as the program writes it; several for a list."""
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    number = isinstance(value, Real) and not isinstance(value, bool)
    if "int" in kind and whole:
        return [str(int(value))]
    if kind == "float" and number:
        return [repr(float(value))]
    if kind == "seconds" and number:
        if not 0 < value <= 1e9:
            raise ValueError(f"{name} {value}: must be more than 0 and at most 1e9")
        return []
    if kind == "bool" and isinstance(value, bool):
        return [_yes(value)]
    if kind == "switch" and isinstance(value, bool):
        return ["on" if value else "off"]
    if ("text" in kind or kind == "switch") and isinstance(value, str):
        return [value]
    if kind == "path" and isinstance(value, (str, os.PathLike)):
        return [os.fspath(value)]
    if kind == "texts" and isinstance(value, Sequence) and all(isinstance(x, str) for x in value):
        return list(value)
    if kind == "object" and isinstance(value, Mapping):
        return [json.dumps(dict(value)) if value else "{ }"]  # {} is no value to the program
    raise TypeError(f"{name}: must be {_KINDS[kind]}, not {type(value).__name__}")


_KINDS = {
    "int": "an integer",
    "int or text": "an integer or text",
    "float": "a number",
    "seconds": "a number",
    "bool": "True or False",
    "switch": "True, False or text",
    "text": "text",
    "path": "a path",
    "texts": "text or a list of texts",
    "object": "a mapping",
}


def _conversation(
    messages: str | Sequence[Mapping[str, str]], system: str | None
) -> list[dict[str, str]]:
    """Checked: at most one system message, which stands first; the user's at the end."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    out = [] if system is None else [{"role": "system", "content": system}]
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"message {i}: must be a mapping, not {type(message).__name__}")
        more = sorted(set(message) - {"role", "content"})
        if more:
            raise ValueError(f"message {i}: {', '.join(more)}: only role and content can be said")
        if message.get("role") not in _ROLES:
            known = ", ".join(_ROLES)
            raise ValueError(f"message {i}: role {message.get('role')!r}: there are {known}")
        out.append({"role": message["role"], "content": message.get("content", "")})
    for i, turn in enumerate(out):
        if not isinstance(turn["content"], str):
            kind = type(turn["content"]).__name__
            raise TypeError(f"{turn['role']} message: content must be text, not {kind}")
        if i > 0 and turn["role"] == "system":
            raise ValueError("a system message can only be the first, and there can be only one")
    if not out or out[-1]["role"] != "user":
        raise ValueError("the last message must be the user's")
    return out


def _error(code: int, log: str) -> LLMError:
    """The exception for an exit status, with what the program said of it."""
    start = "pagedkv: "
    said = []
    for line in log.splitlines():
        if line.startswith(start + "error: "):
            said.append(line[len(start + "error: ") :])
        elif line and not line.startswith((start, "Run with --help")):
            said.append(line)
    message = "\n".join(said) or log.strip() or "it gave no reason"
    if code < 0:
        message = f"pagedkv was ended by signal {-code}: {message}"
    elif code not in _ERRORS:
        message = f"pagedkv failed with exit status {code}: {message}"
    return _ERRORS.get(code, LLMError)(message, code, log)


def _completion(stdout: bytes, log: str) -> Completion:
    try:
        answer = json.loads(stdout)
        return Completion(
            text=answer["text"],
            finish_reason=answer["finish_reason"],
            tokens=tuple(_record(Token, each) for each in answer["tokens"]),
            prompt_tokens=tuple(_record(PromptToken, each) for each in answer["prompt_tokens"]),
            usage=_record(Usage, answer["usage"]),
            timings=_record(Timings, answer["timings"]),
            stats=_record(CacheStats, answer["stats"]),
            log=log,
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        start = stdout[:200].decode(errors="replace")
        message = f"pagedkv's answer cannot be read ({error!r}); it begins with {start!r}"
        raise LLMError(message, None, log) from error


def _record(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of the entries that it knows; a newer program may write more."""
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    return kind(**{name: values[name] for name in names})
