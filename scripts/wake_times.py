#!/usr/bin/env python3
"""Time of a wake to the first token: with remote functions, and everything in one process, in turns.

    scripts/wake_times.py [MODEL] [ROUNDS] [-- FURTHER ARGUMENTS OF up]

Starts `remoe up` for MODEL (the demo model) twice, with half of its experts remote and with none, both so that they fall asleep
after a second without requests, and asks each of them ROUNDS (10) times for one token when nothing of it runs, in turns. Prints
for both the time from the start of `remoe up` to the first answer, the medians (and the least and the most) of the time from a
request to its answer, with the parts that the gateway told, and how much the first is of the second.
"""

import json
import pathlib
import statistics
import subprocess
import sys
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
PARTS = ("decide", "schedule", "start", "load", "ready", "first")
WAYS = {"with remote functions": "0.5", "everything in one process": "0"}


class Deployment:
    """A running `remoe up` that falls asleep."""

    def __init__(self, model, ratio, further):
        self.begin = time.perf_counter()
        command = [ROOT / "target/release/remoe", "up", model, "--remote-ratio", ratio, "--port", "0", "--json", "--idle", "1s"]
        self.process = subprocess.Popen([*command, *further], stdout=subprocess.PIPE, text=True)

    def first(self):
        """Waits until it is there, and asks it."""
        self.endpoint = json.loads(self.process.stdout.readline())["endpoint"]
        self.asleep = threading.Event()
        threading.Thread(target=self.watch, daemon=True).start()
        self.ask()
        self.start = time.perf_counter() - self.begin

    def watch(self):
        for line in self.process.stdout:
            if json.loads(line)["event"] == "asleep":
                self.asleep.set()

    def ask(self):
        """Seconds to the answer of one token, and its parts in milliseconds."""
        body = {"prompt": list(range(5, 13)), "max_tokens": 1, "temperature": 0, "include_figures": True}
        request = urllib.request.Request(f"{self.endpoint}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        begin = time.perf_counter()
        with urllib.request.urlopen(request, timeout=600) as answer:
            answered = json.load(answer)
        return time.perf_counter() - begin, answered["usage"]["remoe"]["timing"]

    def wake(self):
        """The same when nothing of it runs."""
        if not self.asleep.wait(120):
            raise SystemExit("the model did not fall asleep within 120 s")
        # The process that was told to end has ended, and gives its memory back.
        time.sleep(0.5)
        self.asleep.clear()
        return self.ask()


def main():
    arguments, further = sys.argv[1:], []
    if "--" in arguments:
        at = arguments.index("--")
        arguments, further = arguments[:at], arguments[at + 1 :]
    model = arguments[0] if arguments else ROOT / "demo/model"
    rounds = int(arguments[1]) if len(arguments) > 1 else 10
    deployments = {}
    try:
        for way, ratio in WAYS.items():
            deployments[way] = Deployment(model, ratio, further)
            deployments[way].first()
        seen = {way: [] for way in WAYS}
        for number in range(rounds):
            for way in list(WAYS) if number % 2 else list(reversed(WAYS)):
                seen[way].append(deployments[way].wake())
    finally:
        for deployment in deployments.values():
            deployment.process.terminate()
        for deployment in deployments.values():
            deployment.process.wait(60)
    medians = {}
    for way, wakes in seen.items():
        times = [took * 1e3 for took, _ in wakes]
        medians[way] = statistics.median(times)
        parts = ", ".join(f"{part} {statistics.median(timing.get(part, 0) for _, timing in wakes):.0f}" for part in PARTS)
        print(f"{way}: {medians[way]:.0f} ms ({min(times):.0f} to {max(times):.0f}): {parts}; from the start of up {deployments[way].start * 1e3:.0f} ms")
    remote, whole = medians.values()
    print(f"ratio: {remote / whole:.2f}")


main()
