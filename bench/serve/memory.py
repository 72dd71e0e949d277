#!/usr/bin/env python3
"""Resident memory of `pagedkv serve` and of llama-server at equal context: idle after the start, and again a minute after a
prompt of 6,000 tokens.

  bench/serve/memory.py MODEL.gguf [--context 8192] [--out bench/results/serve.jsonl]

Both map the model's file; its pages that are resident count here as in VmRSS. `anonymous` is what no file backs.
"""
import argparse
import asyncio
import pathlib
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from servers import Server, add_arguments, free_port, ours, theirs  # noqa: E402
from compare import append_record  # noqa: E402
from load import Text, post, summary  # noqa: E402


async def long_request(address, tokens):
    text = Text(address)
    body = {"prompt": await text.take(tokens), "max_tokens": 16, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}
    return summary([await post(address, "/v1/completions", body)])


def measure(command, args):
    with Server(command(args, args.context, args.kv), free_port()) as server:
        time.sleep(5)
        result = {"idle": server.memory()}
        result["request"] = asyncio.run(long_request(server.address, args.prompt_tokens))
        result["after_request"] = server.memory()
        time.sleep(args.wait)
        result[f"idle_{args.wait}_s_after"] = server.memory()
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.set_defaults(parallel=1)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--kv", default="f16")
    parser.add_argument("--wait", type=int, default=60, help="seconds after the request")
    args = parser.parse_args()
    sides = {"ours": measure(ours, args), "theirs": measure(theirs, args)}
    for name, side in sides.items():
        print(f"{name:7}", *(f"{what} {value['resident'] / (1 << 20):.1f} MiB ({value['anonymous'] / (1 << 20):.1f} anonymous) "
                             for what, value in side.items() if "resident" in value))
    differences = {what: round((sides["ours"][what]["resident"] - sides["theirs"][what]["resident"]) / (1 << 20), 1)
                   for what in sides["ours"] if what.startswith("idle")}
    print("ours - theirs, MiB:", differences)
    if args.out:
        append_record(args.out, "bench/serve/memory.py", [{"kv": args.kv, "context": args.context, "ours_less_theirs_mib": differences, **sides}],
                      model=pathlib.Path(args.model).name, peers=args.peers)


if __name__ == "__main__":
    main()
