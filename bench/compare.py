"""What the comparisons with other programs share: alternating pairs, and a record that says where it comes from."""
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


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


def peers(flavour):
    """The folder of the programs to measure against, built if need be."""
    return pathlib.Path(output([ROOT / "bench/peers/build.sh", flavour]).strip().splitlines()[-1])


def alternate(pairs, ours, theirs):
    """(ours(), theirs()) `pairs` times, each side first in turn, so that a drift of the machine meets both."""
    results = []
    for i in range(pairs):
        if i % 2 == 0:
            a = ours()
            b = theirs()
        else:
            b = theirs()
            a = ours()
        results.append((a, b))
    return results


def median_ratio(pairs):
    return statistics.median(a / b for a, b in pairs)


def append_record(path, program, results, **facts):
    """Appends one line: the command (without the paths of this machine), the machine, the facts and the results."""
    words = [pathlib.Path(word).name if "/" in word and "=" not in word else word for word in sys.argv[1:]]
    record = {"command": " ".join([program, *(f"'{word}'" if " " in word else word for word in words)]),
              "machine": cpu(), "cores": os.cpu_count(), **facts, "date": time.strftime("%Y-%m-%d"), "results": results}
    with open(path, "a") as f:
        f.write(json.dumps(record) + "\n")
