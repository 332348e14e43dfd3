#!/usr/bin/env python3
"""A cold start in parts: from `remoe up` to the first token, in several orders.

    python3 bench/cold_start.py --model demo/model --profile profile.json --rounds 5

Orders: everything in one process (--remote never), planned functions at the same time, the main function before the
plan (--start preallocated), one function after the other. The parts that `up` reports and the first request are
compared with the time that the client saw.
"""

import argparse
import json
import signal
import statistics
import subprocess
import time
import urllib.request

ORDERS = {
    "one process": ["--remote", "never"],
    "planned": ["--remote", "always"],
    "preallocated": ["--remote", "always", "--start", "preallocated"],
    "one after the other": ["--remote", "always", "--start", "sequential"],
}


def start(remoe, model, profile, flags, extra):
    """Seconds that the client saw, and the parts."""
    arguments = [remoe, "up", "--model", model, "--profile", profile, "--port", "0", "--json", *flags, *extra]
    began = time.monotonic()
    up = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        ready = json.loads(up.stdout.readline())
        body = {"prompt": [7] * 32, "max_tokens": 1, "ignore_eos": True, "include_figures": True}
        request = urllib.request.Request(
            ready["endpoint"] + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=600) as answer:
            figures = json.load(answer)["usage"]["remoe"]
        seen = time.monotonic() - began
        return seen, {**ready["start"], "first_token_s": figures["ttft_s"]}, len(ready["functions"])
    finally:
        up.send_signal(signal.SIGTERM)
        up.wait(60)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("flags", nargs="*", help="further flags of `remoe up`, after --")
    args = parser.parse_args()
    runs = {order: [] for order in ORDERS}
    for number in range(args.rounds + 1):
        for order, flags in ORDERS.items():
            run = start(args.remoe, args.model, args.profile, flags, args.flags)
            # The first round fills the page cache.
            if number > 0:
                runs[order].append(run)
    base = statistics.median(seen for seen, _, _ in runs["one process"])
    print("order                functions   seen    / one process   facts   plan   functions  placement  first token  parts / seen")
    for order, found in runs.items():
        seen = statistics.median(seen for seen, _, _ in found)
        parts = {name: statistics.median(parts[name] for _, parts, _ in found) for name in found[0][1]}
        share = statistics.median(sum(parts.values()) / seen for seen, parts, _ in found)
        print(f"{order:20} {found[0][2]:9}  {seen:6.3f} s  {seen / base:12.2f}   {parts['facts_s']:6.3f} {parts['plan_s']:6.3f} "
              f"{parts['functions_s']:9.3f}  {parts['placement_s']:9.3f} {parts['first_token_s']:11.3f}  {share:12.1%}")


if __name__ == "__main__":
    main()
