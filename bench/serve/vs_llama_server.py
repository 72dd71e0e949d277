#!/usr/bin/env python3
"""`pagedkv serve` beside llama-server built from the same sources, each with a server of its own for every case, in turn.

  bench/serve/vs_llama_server.py MODEL.gguf [--case own --case shared --case chat] [--pairs 3] [--out bench/results/serve.jsonl]

own     16 clients, each with a prompt of 512 tokens of its own, 64 tokens answered
shared  16 clients with one system prompt of 2,400 tokens, a question of 60 tokens each, 64 tokens answered; then a second
        round with other questions. `shared` is the first round, `shared again` the second
chat    one conversation of 8 turns that grows to 6,000 tokens, q8 pages (llama-server: q8_0)

The same bodies go to both; answers are of exactly that many tokens (ignore_eos), greedy; both have the same context in
all, the same KV bits and threads; llama-server caches prompts as it does by default. Ratios are medians of the pairs' ratios, ours /
theirs: of tokens per second above 1 is faster, of times below 1. Run it on a machine with nothing else to do.
"""
import argparse
import asyncio
import pathlib
import statistics
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from servers import Server, add_arguments, free_port, ours, theirs  # noqa: E402
from compare import alternate, append_record  # noqa: E402
from load import Text, post, run_clients, summary  # noqa: E402

ANSWER = 64


def completion(prompt, tokens=ANSWER):
    return {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}


def chat(messages, tokens=ANSWER):
    return {"messages": messages, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}}


def message(role, content):
    return {"role": role, "content": content}


def checked(answers):
    for a in answers:
        if not a.error and a.usage.get("completion_tokens") != ANSWER:
            a.error = f"{a.usage.get('completion_tokens')} tokens answered instead of {ANSWER}"
    return answers


class Own:
    kv, context_each = "f16", 640

    async def prepare(self, text, clients):
        self.bodies = [[completion(await text.take(512))] for _ in range(clients)]

    async def run(self, address):
        answers = await run_clients(address, "/v1/completions", self.bodies)
        return {"own": summary(checked([a for own in answers for a in own]))}


class Shared:
    kv, context_each = "f16", 2688

    async def prepare(self, text, clients):
        system = message("system", await text.take(2400))
        self.rounds = [[[chat([system, message("user", await text.take(60))])] for _ in range(clients)] for _ in range(2)]

    async def run(self, address):
        results = {}
        for name, bodies in zip(("shared", "shared again"), self.rounds):
            answers = await run_clients(address, "/v1/chat/completions", bodies)
            results[name] = summary(checked([a for own in answers for a in own]))
        return results


class Chat:
    kv, context_each = "q8", 6400

    async def prepare(self, text, clients):
        del clients
        self.says = [await text.take(680) for _ in range(8)]

    async def run(self, address):
        messages, answers = [], []
        for says in self.says:
            messages.append(message("user", says))
            answers.append(await post(address, "/v1/chat/completions", chat(messages)))
            messages.append(message("assistant", answers[-1].text))
        return {"chat": summary(checked(answers)) | {"ttft_of_each_turn_s": [round(a.first, 3) if a.pieces else None for a in answers]}}


CASES = {"own": Own, "shared": Shared, "chat": Chat}


async def prepare_and_run(case, clients, address):
    if not hasattr(case, "prepared"):
        await case.prepare(Text(address), clients)
        case.prepared = True
    await post(address, "/v1/completions", completion("Once upon a time", 4))  # whatever a first request sets up
    return await case.run(address)


def run_case(name, args):
    case = CASES[name]()
    kv = args.kv or case.kv

    def on(command):
        def measure():
            with Server(command(args, case.context_each * args.parallel, kv), free_port()) as server:
                before = server.processor_seconds()
                result = asyncio.run(prepare_and_run(case, args.clients, server.address))
                used = server.processor_seconds() - before
                if args.verbose:
                    print(server.log_text(), file=sys.stderr)
            for part in result.values():
                part["processor_seconds_of_case"] = round(used, 2)
                print(f"  {'ours' if command is ours else 'theirs'}: {part}", file=sys.stderr, flush=True)
            return result
        return measure

    if args.only:
        return [{"case": name, "kv": kv, args.only: on(ours if args.only == "ours" else theirs)()}]
    pairs = alternate(args.pairs, on(ours), on(theirs))
    rows = []
    for part in pairs[0][0]:
        both = [(a[part], b[part]) for a, b in pairs]
        if any(side["failed"] for pair in both for side in pair):
            sys.exit(f"{part}: requests failed: {[side['errors'] for pair in both for side in pair]}")

        def ratio(value):
            return round(statistics.median(value(a) / value(b) for a, b in both), 3)
        row = {"case": part, "kv": kv, "threads": args.threads, "clients": 1 if name == "chat" else args.clients,
               "ratio_tokens_per_s": ratio(lambda s: s["tokens_per_s"]), "ratio_seconds": ratio(lambda s: s["seconds"]),
               "ratio_ttft": ratio(lambda s: s["ttft_s"]["median"]),
               "ratio_gap": ratio(lambda s: s["gap_ms"]["median"]), "pairs": both}
        rows.append(row)
        print(f"{part:13} {kv:4} tokens/s {statistics.median(a['tokens_per_s'] for a, _ in both):7.1f} ours, "
              f"{statistics.median(b['tokens_per_s'] for _, b in both):7.1f} theirs  ratio {row['ratio_tokens_per_s']:.2f}  "
              f"first token {row['ratio_ttft']:.3f}  gap {row['ratio_gap']:.3f}", flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    parser.add_argument("--case", action="append", choices=list(CASES))
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--kv", help="this page format in all cases")
    parser.add_argument("--pairs", type=int, default=1)
    parser.add_argument("--only", choices=["ours", "theirs"], help="one of the two alone, to look at it")
    parser.add_argument("--verbose", action="store_true", help="print the servers' logs")
    args = parser.parse_args()
    results = [row for name in args.case or CASES for row in run_case(name, args)]
    if args.out and not args.only:
        append_record(args.out, "bench/serve/vs_llama_server.py", results, model=pathlib.Path(args.model).name, peers=args.peers)


if __name__ == "__main__":
    main()
