#!/usr/bin/env python3
"""Whole models beside llama.cpp's own programs, in one run, as ratios.

  bench/model/vs_llama_bench.py speed MODEL.gguf [--kv f16] [--exact auto] [--test pp512 --test tg64 --test tg32@7168] ...
  bench/model/vs_llama_bench.py start MODEL.gguf

speed alternates `pagedkv bench` and `llama-bench -fa 1` (same KV bits, same threads) --pairs times and reports the
median of the pairs' ratios (ours / theirs, tokens per second: above 1 is faster). start times the whole command up to
its first token (`pagedkv run -n 1`, `llama-completion -n 1`, warm file; below 1 is faster). JSON goes to --out with the
command, the machine and every sample. Run it on a machine with nothing else to do.
"""
import argparse
import json
import pathlib
import platform
import re
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]


def output(command):
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def cpu():
    for line in open("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def parse_test(text):
    m = re.fullmatch(r"(pp|tg)(\d+)(?:@(\d+))?", text)
    if not m:
        sys.exit(f"test {text!r}: write pp512, tg64 or tg32@7168")
    prompt, gen = (m[2], "0") if m[1] == "pp" else ("0", m[2])
    return ["-p", prompt, "-n", gen, "-d", m[3] or "0"]


def rate(command):
    rows = json.loads(output(command))
    return statistics.median(rows[0]["samples_ts"])


def speed(args, peer):
    results = []
    for test in args.test:
        flags = parse_test(test)
        common = ["-m", args.model, "-t", str(args.threads), "-r", str(args.repetitions), "-o", "json", *flags]
        types = {"f16": "f16", "f32": "f32", "q8": "q8_0", "bf16": "bf16", "q4": "q4_0"}
        ours = [args.pagedkv, "bench", *common, "--exact", args.exact, "--kv-cache-dtype", args.kv]
        theirs = [peer / "llama-bench", *common, "-fa", "1", "-ctk", types[args.kv], "-ctv", types[args.kv]]
        pairs = []
        for i in range(args.pairs):
            first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
            a, b = rate(first), rate(second)
            pairs.append((a, b) if i % 2 == 0 else (b, a))
        row = {"test": test, "kv": args.kv, "exact": args.exact, "threads": args.threads,
               "ours_ts": statistics.median(p[0] for p in pairs), "theirs_ts": statistics.median(p[1] for p in pairs),
               "ratio": statistics.median(p[0] / p[1] for p in pairs), "pairs": pairs}
        results.append(row)
        print(f"{test:14} {args.kv:4} exact {args.exact:4}  ours {row['ours_ts']:8.2f}  theirs {row['theirs_ts']:8.2f}  "
              f"ratio {row['ratio']:.3f}", flush=True)
    return results


def start(args, peer):
    prompt = "Write one sentence about the sea."
    ours = [args.pagedkv, "run", "-m", args.model, "-t", str(args.threads), "-n", "1", "--exact", args.exact, prompt]
    theirs = [peer / "llama-completion", "-m", args.model, "-t", str(args.threads), "-n", "1", "-p", prompt, "-no-cnv", "--temp", "0"]
    pairs = []
    for i in range(args.pairs + 1):
        times = []
        for command in (ours, theirs):
            begin = time.monotonic()
            output(command)
            times.append(time.monotonic() - begin)
        if i > 0:  # the first warms the file
            pairs.append(times)
    row = {"test": "start to first token", "ours_s": statistics.median(p[0] for p in pairs),
           "theirs_s": statistics.median(p[1] for p in pairs), "ratio": statistics.median(p[0] / p[1] for p in pairs), "pairs": pairs}
    print(f"start  ours {row['ours_s'] * 1e3:.0f} ms  theirs {row['theirs_s'] * 1e3:.0f} ms  ratio {row['ratio']:.3f}")
    return [row]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "start"])
    parser.add_argument("model")
    parser.add_argument("--test", action="append", help="pp512, tg64, tg32@7168; may be given more than once")
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--exact", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--peers", default="default", choices=["default", "ours"], help="llama.cpp's flags, or ours")
    parser.add_argument("--pagedkv", default=ROOT / "build/release/apps/pagedkv")
    parser.add_argument("--out", help="append the result to this JSON-lines file")
    args = parser.parse_args()
    args.test = args.test or ["pp512", "tg64"]
    peer = pathlib.Path(output([ROOT / "bench/peers/build.sh", args.peers]).strip().splitlines()[-1])
    results = speed(args, peer) if args.what == "speed" else start(args, peer)
    if args.out:
        record = {"command": " ".join(["bench/model/vs_llama_bench.py", *(pathlib.Path(a).name if "/" in a else a for a in sys.argv[1:])]),
                  "machine": cpu(), "model": pathlib.Path(args.model).name, "peers": args.peers, "date": time.strftime("%Y-%m-%d"), "results": results}
        with open(args.out, "a") as f:
            f.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
