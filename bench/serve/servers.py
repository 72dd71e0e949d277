"""Starts and stops the two servers that bench/serve compares, with the same model, threads, context in total and KV bits."""
import asyncio
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from compare import ROOT, peers  # noqa: E402
from load import fetch  # noqa: E402

LLAMA_TYPES = {"f16": "f16", "f32": "f32", "bf16": "bf16", "q8": "q8_0", "q4": "q4_0"}


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class Server:
    """A server of its own process, ready when the constructor returns; stops at the end of a `with` block."""

    def __init__(self, command, port, most_seconds=120):
        self.address = ("127.0.0.1", port)
        self.log = tempfile.TemporaryFile()
        self.process = subprocess.Popen([*map(str, command), "--host", "127.0.0.1", "--port", str(port)], stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=self.log)
        end = time.monotonic() + most_seconds
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                self.stop()
                sys.exit(f"{' '.join(map(str, command))}: not ready (exit {self.process.returncode})\n{self.log_text()[-3000:]}")
            time.sleep(0.05)

    def is_ready(self):
        try:
            return asyncio.run(fetch(self.address, "GET", "/health"))[0] == 200
        except OSError:
            return False

    def get(self, path):
        return json.loads(asyncio.run(fetch(self.address, "GET", path))[1])

    def log_text(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def memory(self):
        """Resident bytes: in all, and of them what no file backs."""
        fields = {}
        for line in open(f"/proc/{self.process.pid}/status"):
            name, _, value = line.partition(":")
            fields[name] = value.split()
        return {"resident": int(fields["VmRSS"][0]) * 1024, "anonymous": int(fields["RssAnon"][0]) * 1024,
                "of_files": int(fields["RssFile"][0]) * 1024}

    def processor_seconds(self):
        """What all its threads have used so far."""
        after_name = open(f"/proc/{self.process.pid}/stat").read().rpartition(")")[2].split()
        return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")

    def stop(self):
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stop()


def ours(args, context, kv, extra=()):
    """`context` tokens in all, for args.parallel requests."""
    return [args.pagedkv, "serve", "-m", args.model, "-t", args.threads, "-np", args.parallel, "-c", context // args.parallel,
            "--kv-cache-dtype", kv, *args.our_args, *extra]


def theirs(args, context, kv, extra=()):
    return [peers(args.peers) / "llama-server", "-m", args.model, "-t", args.threads, "-np", args.parallel, "-c", context, "-fa", "on",
            "-ctk", LLAMA_TYPES[kv], "-ctv", LLAMA_TYPES[kv], *args.peer_args, *extra]


def add_arguments(parser):
    import shlex
    parser.add_argument("model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parallel", type=int, default=16, help="requests that run at once: llama-server's slots")
    parser.add_argument("--peers", default="default", choices=["default", "ours"], help="llama.cpp's flags, or ours")
    parser.add_argument("--peer-args", type=shlex.split, default=[], metavar="ARGS", help="more arguments for llama-server: --no-repack where its AMX code is an illegal instruction")
    parser.add_argument("--our-args", type=shlex.split, default=[], metavar="ARGS", help="more arguments for pagedkv serve")
    parser.add_argument("--pagedkv", default=ROOT / "build/release/apps/pagedkv")
    parser.add_argument("--out", help="append the result to this JSON-lines file")
