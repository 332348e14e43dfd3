#!/usr/bin/env python3
"""Accuracy of plans: expected against measured times and costs of requests.

    python3 bench/plan_accuracy.py --model demo/model --out target/bench/plans-demo.json

Plans the model in several ways from its profile (made by `remoe profile`), serves each plan with
`remoe up`, sends prompts of several lengths, and reports the errors of time to first token, time per
output token and cost, and the peak memory of every function beside its specification and prediction.
With --rounds every plan is served so many times, by other processes and in turn, so that what the
machine does for a minute hits all of them.
"""

import argparse
import concurrent.futures
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

MB = 1_000_000


def run(arguments):
    done = subprocess.run(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(arguments)} exited with code {done.returncode}:\n{done.stdout}{done.stderr}")
    return json.loads(done.stdout)


def plans(remoe, model, workload, folder, longest):
    """The planner's own plans, and drafts from a quarter of the experts remote to all of them."""
    base = [remoe, "plan", "--model", model, "--profile", workload["profile"], "--workload", workload["file"]]
    # Below one vCPU a quota comes in bursts: single requests are quicker than what lasts.
    base += ["--main-memory-mb", "1000:16000:100", "--remote-memory-mb", "100:16000:100", "--json"]
    cheapest = run(base + ["--remote", "never"])
    yield "all local, cheapest", cheapest
    larger = int(cheapest["plan"]["main_bytes"] / MB) + 2000
    base[base.index("--main-memory-mb") + 1] = f"{larger}:{larger}:100"
    yield "all local, 2 GB more", run(base + ["--remote", "never"])
    base[base.index("--main-memory-mb") + 1] = "1000:16000:100"
    yield "remote everywhere, cheapest", run(base + ["--remote", "always"])
    problem = cheapest["problem"]
    for ratio, replicas, spare in ((0.25, 1, 0), (0.5, 1, 0), (0.5, 2, 0), (0.75, 1, 500), (1.0, 1, 1000)):
        layers, local = [], 0
        for layer in problem["layers"]:
            remote = int(layer["experts"] * ratio + 0.5)
            local += (layer["experts"] - remote) * layer["expert_bytes"]
            needed = remote * layer["expert_bytes"] + problem["function_bytes"]
            needed += longest * problem["token_bytes"] * layer["top_k"]
            size = math.ceil(needed / (100 * MB)) * 100 * MB + spare * MB
            ids = list(range(layer["experts"] - remote, layer["experts"]))
            layers.append({"remote": ids, "memory_bytes": size, "replicas": replicas})
        main = math.ceil((local + problem["runtime_bytes"]) / (100 * MB)) * 100 * MB + 1000 * MB
        plan = {"main_bytes": main, "layers": layers}
        file = os.path.join(folder, "draft.json")
        with open(file, "w") as out:
            json.dump(plan, out)
        evaluation = run(base + ["--evaluate", file])
        yield f"{ratio:.0%} remote, {replicas} replicas", {"problem": problem, "plan": plan, "evaluation": evaluation}


def group_plans(remoe, model, workload, folder, vcpus):
    """All experts, or half of them, in 1, 2 and 4 groups that each hold a slice of every layer, every function with the
    same quota."""
    millis = int(vcpus * 1000)
    base = [remoe, "plan", "--model", model, "--profile", workload["profile"], "--workload", workload["rare"]]
    base += ["--main-cpu", f"{millis}:{millis}:1000", "--remote-cpu", f"{millis}:{millis}:1000",
             "--remote-memory-mb", "100:16000:100", "--tpot", "60s", "--ttft", "600s", "--json"]
    answer = run(base + ["--remote", "never"])
    main = answer["plan"]["main_bytes"]
    # `up` serves it here: all functions share this machine.
    problem = {**answer["problem"], "shared_cores": os.cpu_count()}
    stated = os.path.join(folder, "problem.json")
    with open(stated, "w") as out:
        json.dump(problem, out)
    for ratio in (1.0, 0.5):
        for count in (1, 2, 4):
            dealt = [[] for _ in range(count)]
            for index, layer in enumerate(problem["layers"]):
                remote = int(layer["experts"] * ratio + 0.5)
                ids = range(layer["experts"] - remote, layer["experts"])
                for group in range(count):
                    own = [str(expert) for expert in ids if expert % count == group]
                    dealt[group].append(f"{index}:{','.join(own)}")
            plan = {"main_bytes": main, "main_vcpus": vcpus,
                    "groups": [{"experts": ",".join(group), "vcpus": vcpus, "replicas": 1} for group in dealt]}
            file = os.path.join(folder, "draft.json")
            with open(file, "w") as out:
                json.dump(plan, out)
            evaluation = run([remoe, "plan", "--problem", stated, "--evaluate", file, "--json"])
            whole = {**plan, "layers": [{"remote": sorted(int(e) for group in dealt for e in group[index].split(":")[1].split(","))}
                                        for index in range(len(problem["layers"]))]}
            for group, terms in zip(whole["groups"], evaluation["groups"]):
                group["memory_bytes"] = math.ceil(terms["needed_bytes"] / (100 * MB)) * 100 * MB
            yield f"{ratio:.0%} remote in {count} groups", {"problem": problem, "plan": whole, "evaluation": evaluation}


def peak_bytes(pid):
    """The most memory that the process had of its own, without what files back."""
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return None


def post(endpoint, body):
    request = urllib.request.Request(
        endpoint + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def expected_step(evaluation, requests):
    """Seconds of a decode step of so many requests, between those that the planner works out."""
    for low, high in zip(evaluation["steps"], evaluation["steps"][1:]):
        if low["requests"] <= requests <= high["requests"]:
            beside = (requests - low["requests"]) / (high["requests"] - low["requests"])
            return low["seconds"] + (high["seconds"] - low["seconds"]) * beside
    return evaluation["steps"][-1]["seconds"]


def at_once(endpoint, evaluation, generator, vocabulary, streams, tokens):
    """Figures of `streams` requests that decode in the same steps."""
    def one(prompt):
        body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "include_figures": True}
        return post(endpoint, body)["usage"]["remoe"]["plan"]["measured"]

    prompts = [[generator.randrange(vocabulary) for _ in range(24)] for _ in range(streams)]
    with concurrent.futures.ThreadPoolExecutor(streams) as pool:
        answers = list(pool.map(one, prompts))
    # Who had a token while prompts of others were still read waited for those as well.
    last = max(answer["ttft_s"] for answer in answers)
    return [{"streams": streams, "expected": {"tpot_s": expected_step(evaluation, streams)}, "measured": answer}
            for answer in answers if answer["ttft_s"] > 0.9 * last]


def measure(remoe, model, answer, facts, requests, tokens, streams, lengths):
    """Serves the plan; figures of every request and of every stream among others, and peaks of every function."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(answer, file)
        file.flush()
        arguments = [remoe, "up", "--model", model, "--plan", file.name, "--port", "0", "--json"]
        up = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        try:
            ready = json.loads(up.stdout.readline())
            if "endpoint" not in ready:
                sys.exit(f"remoe up did not start: {ready}")
            generator = random.Random(7)
            lengths = [generator.choice(lengths) for _ in range(requests)]
            compared = []
            for number, length in enumerate([32, 128] + lengths):
                prompt = [generator.randrange(facts["vocab_size"]) for _ in range(length)]
                body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "include_figures": True}
                figures = post(ready["endpoint"], body)["usage"]["remoe"]
                # The first two warm up.
                if number >= 2:
                    compared.append({"input_tokens": length, **figures["plan"], "experts": figures["experts"],
                                     "expert_seconds": figures["expert_seconds"]})
                time.sleep(0.05)
            beside = []
            for count in streams:
                for _ in range(requests):
                    beside += at_once(ready["endpoint"], answer["evaluation"], generator, facts["vocab_size"], count, tokens)
            peaks = [{"name": function["name"], "role": function["role"], "peak_bytes": peak_bytes(function["pid"])}
                     for function in ready["functions"]]
            return ready["start"], compared, beside, peaks
        finally:
            up.send_signal(signal.SIGTERM)
            up.wait(60)


def memory(answer, moe_layers, peaks, profile):
    """Specification, prediction and peak of every function. The plan also holds room for experts of remote functions
    that fail; none does here, so that the prediction leaves it out."""
    problem, plan, evaluation = answer["problem"], answer["plan"], answer["evaluation"]
    on_cpu = problem["device"] == "cpu"
    local = sum((layer["experts"] - len(part["remote"])) * layer["expert_bytes"]
                for layer, part in zip(problem["layers"], plan["layers"]))
    rows = []
    for function in peaks:
        if function["role"] == "main":
            beside = evaluation["gpu_bytes"] if on_cpu else 0
            expected = local + profile["memory"]["main_bytes"] + beside
            specified = plan["main_bytes"] + beside
        else:
            kind, index = function["name"].split("-")[:2]
            of, position = ("groups", int(index)) if kind == "group" else ("layers", moe_layers.index(int(index)))
            expected = evaluation[of][position]["needed_bytes"]
            specified = plan[of][position]["memory_bytes"]
        rows.append({**function, "expected_bytes": expected, "specified_bytes": specified})
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--profile", help="profile of the model [default: measured first]")
    parser.add_argument("--rounds", type=int, default=1, help="runs of every plan")
    parser.add_argument("--requests", type=int, default=6, help="requests per plan and round")
    parser.add_argument("--tokens", type=int, default=24, help="generated tokens per request")
    parser.add_argument("--groups", type=float, metavar="VCPUS",
                        help="plan 1, 2 and 4 groups with a slice of every layer instead, each function with this quota")
    parser.add_argument("--streams", type=lambda text: [int(count) for count in text.split(",")], default=[], metavar="N,..",
                        help="with --groups, also measure this many concurrent requests")
    parser.add_argument("--lengths", type=lambda text: [int(count) for count in text.split(",")],
                        default=[24, 64, 128, 200], metavar="N,..", help="lengths of prompts, in tokens")
    parser.add_argument("--out", help="output file of all figures, as JSON")
    args = parser.parse_args()
    facts = run([args.remoe, "inspect", "--model", args.model, "--json"])
    with tempfile.TemporaryDirectory() as folder:
        profile_file = args.profile or os.path.join(folder, "profile.json")
        if not args.profile:
            run([args.remoe, "profile", "--model", args.model, "--quick", "--out", profile_file, "--json"])
        profile = json.load(open(profile_file))
        longest = max(256, *args.lengths)
        workload_file = os.path.join(folder, "workload.json")
        with open(workload_file, "w") as file:
            json.dump({"typicalInputTokens": 128, "typicalOutputTokens": args.tokens,
                       "maxInputTokens": longest, "maxOutputTokens": max(args.tokens, 64)}, file)
        # So rarely that each finds functions idle: the planner then says what steps of several take.
        rare_file = os.path.join(folder, "rare.json")
        with open(workload_file) as stated, open(rare_file, "w") as file:
            json.dump({**json.load(stated), "concurrency": max(args.streams, default=1), "arrivals": {"perHour": 1}}, file)
        workload = {"profile": profile_file, "file": workload_file, "rare": rare_file}
        chosen = plans(args.remoe, args.model, workload, folder, longest)
        if args.groups:
            chosen = group_plans(args.remoe, args.model, workload, folder, args.groups)
        chosen = [(answer, {"plan": name, "groups": len(answer["plan"].get("groups", [])),
                            "main_bytes": answer["plan"]["main_bytes"],
                            "remote_experts": sum(len(layer["remote"]) for layer in answer["plan"]["layers"]),
                            "starts": [], "requests": [], "streams": [], "memory": []})
                  for name, answer in chosen]
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds}", file=sys.stderr)
            for answer, result in chosen:
                start, compared, beside, peaks = measure(
                    args.remoe, args.model, answer, facts, args.requests, args.tokens, args.streams, args.lengths)
                result["starts"].append(start)
                result["requests"] += compared
                result["streams"] += beside
                result["memory"] += [] if args.groups else memory(answer, facts["moe_layers"], peaks, profile)
    results = [result for _, result in chosen]
    for result in results:
        report(result)
    summarise(results)
    if args.out:
        os.makedirs(os.path.dirname(args.out) or ".", exist_ok=True)
        with open(args.out, "w") as file:
            json.dump({"model": args.model, "profile": profile, "plans": results}, file, indent=1)


def errors(requests, key):
    return [request["measured"][key] / request["expected"][key] - 1 for request in requests]


def report(result):
    line = f"{result['plan']}: main {result['main_bytes'] / 1e9:.1f} GB, {result['remote_experts']} remote;"
    for key, unit in (("ttft_s", 1e3), ("tpot_s", 1e3)):
        expected = statistics.median(request["expected"][key] for request in result["requests"]) * unit
        measured = statistics.median(request["measured"][key] for request in result["requests"]) * unit
        error = statistics.median(errors(result["requests"], key))
        line += f" {key[:4]} {measured:.2f} ms (expected {expected:.2f}, {error:+.0%})"
    print(line)
    for streams in sorted({row["streams"] for row in result["streams"]}):
        rows = [row for row in result["streams"] if row["streams"] == streams]
        measured = statistics.median(row["measured"]["tpot_s"] for row in rows) * 1e3
        print(f"  {streams} concurrent: tpot {measured:.2f} ms (expected {rows[0]['expected']['tpot_s'] * 1e3:.2f}, "
              f"{statistics.median(errors(rows, 'tpot_s')):+.0%})")


def median_step(rows, which):
    return statistics.median(row[which]["tpot_s"] for row in rows)


def by_length(requests):
    """Decode steps over the context, over all plans."""
    for length in sorted({request["input_tokens"] for request in requests}):
        rows = [request for request in requests if request["input_tokens"] == length]
        error = statistics.median(errors(rows, "tpot_s"))
        print(f"  TPOT after {length} tokens: {median_step(rows, 'measured') * 1e3:.2f} ms measured, "
              f"{median_step(rows, 'expected') * 1e3:.2f} expected, median error {error:+.1%} ({len(rows)} requests)")


def speed_ups(results):
    """What more groups with the same experts are quicker by, beside what was expected: of one request, and of several."""
    kinds = {}
    for result in results:
        if result["groups"]:
            kinds.setdefault(result["remote_experts"], []).append(result)
    for remote, plans in kinds.items():
        one, others = plans[0], plans[1:]
        for streams in [1] + sorted({row["streams"] for row in one["streams"]}):
            of = lambda plan: plan["requests"] if streams == 1 else [r for r in plan["streams"] if r["streams"] == streams]
            for other in others:
                measured, expected = (median_step(of(one), which) / median_step(of(other), which)
                                      for which in ("measured", "expected"))
                print(f"  {remote} experts remote, {streams} concurrent, {other['groups']} groups: {measured:.2f} times as fast "
                      f"as {one['groups']}, {expected:.2f} expected: {measured / expected:.2f} of it")


def summarise(results):
    requests = [request for result in results for request in result["requests"]]
    print(f"\n{len(requests)} requests, {len(results)} plans")
    for key, name in (("ttft_s", "TTFT"), ("tpot_s", "TPOT"), ("cost", "cost")):
        found = sorted(abs(error) for error in errors(requests, key))
        signed = statistics.median(errors(requests, key))
        print(f"  {name}: median error {statistics.median(found):.1%} (signed {signed:+.1%}), "
              f"90 % within {found[int(0.9 * (len(found) - 1))]:.1%}")
    by_length(requests)
    speed_ups(results)
    beside = [row for result in results for row in result["streams"]]
    for streams in sorted({row["streams"] for row in beside}):
        found = sorted(abs(error) for error in errors([row for row in beside if row["streams"] == streams], "tpot_s"))
        print(f"  TPOT of {streams} concurrent: median error {statistics.median(found):.1%}, "
              f"90 % within {found[int(0.9 * (len(found) - 1))]:.1%} ({len(found)} requests)")
    functions = [row for result in results for row in result["memory"]]
    if not functions:
        return
    over = [row for row in functions if row["peak_bytes"] > row["specified_bytes"]]
    off = [row["peak_bytes"] / row["expected_bytes"] - 1 for row in functions]
    print(f"  memory: {len(functions)} functions, {len(over)} above their specification; "
          f"peak against prediction {min(off):+.1%} to {max(off):+.1%}")


if __name__ == "__main__":
    main()
