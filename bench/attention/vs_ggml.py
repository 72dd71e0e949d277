#!/usr/bin/env python3
"""Attention over pages beside ggml's flash attention over contiguous K and V, as ratios.

  bench/attention/vs_ggml.py [--out results.jsonl]
  bench/attention/vs_ggml.py --case 'keys=q8 values=q8 heads=32/8 dims=128/128 seqs=8192:1' --threads 1,2

Each case alternates a process of attention_bench and one of ggml_attention (same words, same threads; q8 and q4 beside
q8_0 and q4_0) --pairs times and reports the median of the pairs' ratios, theirs / ours in milliseconds: above 1 ours is
faster. Without --case: decode and prefill with each format, with the threads shown. JSON goes to --out with the command,
the machine and every sample. Run it on a machine with nothing else to do.
"""
import argparse
import json
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from compare import ROOT, alternate, append_record, median_ratio, output, peers  # noqa: E402

# What is computed, and with how many threads.
CASES = [(f"keys={f} values={f} {words}", threads)
         for words, threads in [("heads=32/8 dims=128/128 seqs=32768:1", 1),
                                ("heads=9/3 dims=64/64 seqs=8192:1", 1),
                                ("heads=32/8 dims=128/128 seqs=4096:512", 2), ("heads=9/3 dims=64/64 seqs=4096:512", 2)]
         for f in ("f16", "q8", "q4")]


def compare(args, words, threads, peer):
    set_flag = ["--set", args.set] if args.set else []
    ours = [args.attention_bench, "--case", words, "--threads", str(threads), "--runs", str(args.runs), "--no-peaks", *set_flag]
    theirs = [peer / "ggml_attention", words, str(threads), str(args.runs)]
    # Without --set the best set comes first.
    pairs = alternate(args.pairs, lambda: json.loads(output(ours).splitlines()[0]), lambda: json.loads(output(theirs)))
    row = {"case": words, "kernel_set": pairs[0][0]["kernel_set"], "threads": threads}
    # cpu_ms is there with one thread alone.
    for key, ratio in (("ms", "ratio"), ("cpu_ms", "cpu_ratio")):
        if key in pairs[0][0]:
            row[f"ours_{key}"] = statistics.median(a[key] for a, _ in pairs)
            row[f"theirs_{key}"] = statistics.median(b[key] for _, b in pairs)
            row[ratio] = median_ratio((b[key], a[key]) for a, b in pairs)
    row["pairs"] = [[a["samples_ms"], b["samples_ms"]] for a, b in pairs]
    print(f"{words:58} {row['kernel_set']:7} {threads} threads  ours {row['ours_ms']:9.3f} ms  ggml {row['theirs_ms']:9.3f} ms  "
          f"ratio {row['ratio']:6.2f}" + (f"  of processor time {row['cpu_ratio']:6.2f}" if "cpu_ratio" in row else ""), flush=True)
    return row


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", action="append", help="words of attention_bench; may be given more than once")
    parser.add_argument("--threads", help="a list; default: the case's own, else 1")
    parser.add_argument("--set", help="kernel set; default: the best of this CPU")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--runs", type=int, default=15, help="timed calls of a process")
    parser.add_argument("--peers", default="default", choices=["default", "ours"], help="llama.cpp's flags, or ours")
    parser.add_argument("--attention-bench", default=ROOT / "build/release/bench/attention/attention_bench")
    parser.add_argument("--out", help="append the result to this JSON-lines file")
    args = parser.parse_args()
    cases = [(words, 1) for words in args.case] if args.case else CASES
    if args.threads:
        words = dict.fromkeys(words for words, _ in cases)
        cases = [(w, int(t)) for w in words for t in args.threads.split(",")]
    peer = peers(args.peers)
    results = [compare(args, words, threads, peer) for words, threads in cases]
    if args.out:
        append_record(args.out, "bench/attention/vs_ggml.py", results, peers=args.peers)


if __name__ == "__main__":
    main()
