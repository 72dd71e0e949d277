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
import re
import shlex
import statistics
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from compare import ROOT, alternate, append_record, median_ratio, output, peers  # noqa: E402


def parse_test(text):
    """(prompt tokens, generated tokens, depth)"""
    m = re.fullmatch(r"(pp|tg)(\d+)(?:@(\d+))?", text)
    if not m:
        sys.exit(f"test {text!r}: write pp512, tg64 or tg32@7168")
    return (int(m[2]), 0, int(m[3] or 0)) if m[1] == "pp" else (0, int(m[2]), int(m[3] or 0))


def rates(command):
    """Tokens per second by (prompt tokens, generated tokens)."""
    return {(row["n_prompt"], row["n_gen"]): statistics.median(row["samples_ts"]) for row in json.loads(output(command))}


def speed(args, peer):
    results = []
    tests = [(text, parse_test(text)) for text in args.test]
    types = {"f16": "f16", "f32": "f32", "q8": "q8_0", "bf16": "bf16", "q4": "q4_0"}
    # One process a depth: reaching a depth takes longer than what is measured there.
    for depth in dict.fromkeys(depth for _, (_, _, depth) in tests):
        here = [(text, (prompt, gen)) for text, (prompt, gen, d) in tests if d == depth]
        counts = {flag: ",".join(str(sizes[i]) for _, sizes in here if sizes[i]) or "0" for i, flag in ((0, "-p"), (1, "-n"))}
        common = ["-m", args.model, "-t", str(args.threads), "-r", str(args.repetitions), "-o", "json", "-d", str(depth),
                  *(word for flag, value in counts.items() for word in (flag, value))]
        ours = [args.pagedkv, "bench", *common, "--exact", args.exact, "--kv-cache-dtype", args.kv]
        theirs = [peer / "llama-bench", *common, "-fa", "1", "-ctk", types[args.kv], "-ctv", types[args.kv], *args.peer_args]
        both = alternate(args.pairs, lambda: rates(ours), lambda: rates(theirs))
        for text, sizes in here:
            pairs = [(a[sizes], b[sizes]) for a, b in both]
            row = {"test": text, "kv": args.kv, "exact": args.exact, "threads": args.threads,
                   "ours_ts": statistics.median(p[0] for p in pairs), "theirs_ts": statistics.median(p[1] for p in pairs),
                   "ratio": median_ratio(pairs), "pairs": pairs}
            results.append(row)
            print(f"{text:14} {args.kv:4} exact {args.exact:4}  ours {row['ours_ts']:8.2f}  theirs {row['theirs_ts']:8.2f}  "
                  f"ratio {row['ratio']:.3f}", flush=True)
    return results


def start(args, peer):
    prompt = "Write one sentence about the sea."
    ours = [args.pagedkv, "run", "-m", args.model, "-t", str(args.threads), "-n", "1", "--exact", args.exact, prompt]
    theirs = [peer / "llama-completion", "-m", args.model, "-t", str(args.threads), "-n", "1", "-p", prompt, "-no-cnv", "--temp", "0", *args.peer_args]
    def seconds(command):
        begin = time.monotonic()
        output(command)
        return time.monotonic() - begin
    pairs = alternate(args.pairs + 1, lambda: seconds(ours), lambda: seconds(theirs))[1:]  # the first warms the file
    row = {"test": "start to first token", "ours_s": statistics.median(p[0] for p in pairs),
           "theirs_s": statistics.median(p[1] for p in pairs), "ratio": median_ratio(pairs), "pairs": pairs}
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
    parser.add_argument("--peer-args", type=shlex.split, default=[], metavar="ARGS",
                        help="more arguments for llama.cpp's program: '--repack 0' where its AMX code is an illegal instruction")
    parser.add_argument("--pagedkv", default=ROOT / "build/release/apps/pagedkv")
    parser.add_argument("--out", help="append the result to this JSON-lines file")
    args = parser.parse_args()
    args.test = args.test or ["pp512", "tg64"]
    peer = peers(args.peers)
    results = speed(args, peer) if args.what == "speed" else start(args, peer)
    if args.out:
        append_record(args.out, "bench/model/vs_llama_bench.py", results, model=pathlib.Path(args.model).name, peers=args.peers)


if __name__ == "__main__":
    main()
