#!/usr/bin/env python3
"""Accuracy of plans under load: expected against measured times to first token of requests that come at random.

    target/release/remoe-bench checkpoint --layers 4 --out target/bench/models/olmoe-4
    python3 bench/load_accuracy.py --model target/bench/models/olmoe-4 --utilisations 0.2,0.5,0.8

Profiles the model, plans it with all experts local for Poisson arrivals of prompts whose lengths are lognormal, serves the
plan with `remoe up`, and sends such requests, with at most --slots of them running at once. Before, --alone requests are served
one at a time. Their times correct the profile (`remoe plan --measured`), so that what is compared is the queue: near the most
that a server can do, a prefill that takes 10 % longer doubles the wait. Every utilisation is a share of the most requests that
the corrected plan serves. Times are the client's: mean, median and 95th percentile of the time to first token.
"""

import argparse
import json
import math
import os
import random
import statistics
import tempfile
import threading
import time
import urllib.request

from plan_accuracy import run
from real_prompts import Server, complete, free_port, quantile


class Bench:
    def __init__(self, args, folder):
        self.args, self.folder = args, folder
        self.profile = args.profile or os.path.join(folder, "profile.json")
        if not args.profile:
            run([args.remoe, "profile", "--model", args.model, "--quick", "--out", self.profile, "--json"])
        self.measured = os.path.join(folder, "measured.jsonl")
        self.vocabulary = run([args.remoe, "inspect", "--model", args.model, "--json"])["vocab_size"]

    def plan(self, per_hour):
        """The plan for so many requests an hour."""
        workload = os.path.join(self.folder, "workload.json")
        with open(workload, "w") as file:
            json.dump({
                "typicalInputTokens": self.args.prompt, "typicalOutputTokens": self.args.tokens,
                "maxInputTokens": 4096, "maxOutputTokens": 4 * self.args.tokens, "concurrency": self.args.slots,
                "arrivals": {"perHour": per_hour, "inputVariation": self.args.variation},
            }, file)
        cores = os.cpu_count() * 1000
        corrected = ["--measured", self.measured] if os.path.exists(self.measured) else []
        return run([
            self.args.remoe, "plan", "--model", self.args.model, "--profile", self.profile, "--workload", workload,
            "--remote", "never", "--main-cpu", f"{cores}:{cores}:1000",
            "--remote-cpu", f"{cores}:{cores}:1000", "--ttft", "600s", "--tpot", "60s", "--json", *corrected,
        ])

    def arrivals(self, per_second, count, seed):
        """Gaps between requests and lengths of their prompts as the workload states them: each quantile of both once, in random
        order, so that few requests are like many."""
        numbers = random.Random(seed)
        deviation = math.sqrt(math.log1p(self.args.variation ** 2))
        middles = [(index + 0.5) / count for index in range(count)]
        normal = statistics.NormalDist(-deviation ** 2 / 2, deviation or 1e-9)
        lengths = [max(1, min(4096, round(self.args.prompt * math.exp(normal.inv_cdf(share))))) for share in middles]
        gaps = [-math.log(share) / per_second for share in middles]
        numbers.shuffle(lengths)
        numbers.shuffle(gaps)
        return list(zip(gaps, lengths))

    def prompt(self, length, seed):
        numbers = random.Random(seed)
        return [numbers.randrange(self.vocabulary) for _ in range(length)]

    def alone(self, port):
        """Median time to first token of requests that are served one at a time; keeps what they say of the plan."""
        lines, times = [], []
        for seed in range(self.args.alone):
            body = {"prompt": self.prompt(self.args.prompt, seed), "max_tokens": self.args.tokens, "ignore_eos": True,
                    "include_figures": True}
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(),
                                             {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=600) as answer:
                lines.append(answer.read().decode())
            times.append(json.loads(lines[-1])["usage"]["remoe"]["plan"]["measured"]["ttft_s"])
        with open(self.measured, "w") as file:
            file.write("\n".join(lines) + "\n")
        return statistics.median(times)

    def under_load(self, server, per_second, seconds, seed):
        """Times to first token of requests that come at random for so many seconds."""
        count = max(30, round(per_second * seconds))
        found, threads, due = [], [], time.monotonic()

        def one(prompt):
            found.append(complete(server.port, prompt, self.args.tokens).ttft())

        for index, (gap, length) in enumerate(self.arrivals(per_second, count, seed)):
            due += gap
            prompt = self.prompt(length, seed * 100_000 + index)
            time.sleep(max(0.0, due - time.monotonic()))
            thread = threading.Thread(target=one, args=(prompt,))
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()
        if len(found) < count:
            raise SystemExit(f"{count - len(found)} of {count} requests failed")
        return found


def most_per_hour(plan):
    """The most requests that the plan for one an hour serves."""
    return 1.0 / plan["evaluation"]["life"]["utilisation"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", help="profile of the model [default: measured first]")
    parser.add_argument("--prompt", type=int, default=256, help="mean length of prompts, in tokens")
    parser.add_argument("--variation", type=float, default=0.8, help="deviation of that length over its mean")
    parser.add_argument("--tokens", type=int, default=32, help="generated tokens per request")
    parser.add_argument("--slots", type=int, default=8, help="requests that run at once")
    parser.add_argument("--utilisations", type=lambda text: [float(share) for share in text.split(",")],
                        default=[0.2, 0.5, 0.8], metavar="SHARE,..")
    parser.add_argument("--alone", type=int, default=20, help="requests that correct the profile")
    parser.add_argument("--seconds", type=float, default=60, help="duration of each load")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        plan = bench.plan(1.0)
        file = os.path.join(folder, "plan.json")
        with open(file, "w") as out:
            json.dump(plan, out)
        port = free_port()
        command = [args.remoe, "up", args.model, "--plan", file, "--port", str(port), "--max-batch", str(args.slots)]
        with Server([*command, "--kv-cache-bytes", "4GiB"], port) as server:

            def row(name, what, expected, measured):
                print(f"| {name} | {what} | {expected * 1e3:.0f} ms | {measured * 1e3:.0f} ms | {expected / measured:.2f} |",
                      flush=True)

            print("| utilisation | TTFT | expected | measured | expected / measured |")
            print("| ---: | --- | ---: | ---: | ---: |")
            row("alone", "median", plan["evaluation"]["ttft_seconds"], bench.alone(port))
            most = most_per_hour(bench.plan(1.0))
            for number, share in enumerate(args.utilisations):
                rate = share * most
                latency = bench.plan(rate)["evaluation"]["life"]["latency"]["ttft"]
                found = bench.under_load(server, rate / 3600, args.seconds, number + 1)
                for what, measured in (("mean", statistics.mean(found)), ("p50", quantile(found, 0.5)),
                                       ("p95", quantile(found, 0.95))):
                    row(share, what, latency[what], measured)
        print(f"\n{most / 3600:.2f} requests/s at most; the profile said {most_per_hour(plan) / 3600:.2f}")


if __name__ == "__main__":
    main()
