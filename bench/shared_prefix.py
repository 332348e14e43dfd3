#!/usr/bin/env python3
"""Time saved by a shared prefix: the second request with the same first tokens, against the first one and against itself alone.

    python3 bench/shared_prefix.py --model target/bench/models/olmoe-4 --rounds 5

Two deployments of the model: one sees both requests of a round, the other one only the second, so that nothing of its
prompt is kept there. Prompts are random token ids, new in every round. The second request's time to first token is
divided by the first one's of the same round; its greedy tokens must be the same in both deployments.
"""

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import time
import urllib.request


class Deployment:
    """`remoe up` with every expert local."""

    def __init__(self, remoe, model):
        command = [remoe, "up", "--model", model, "--remote-ratio", "0", "--port", "0", "--json", "--ready-timeout", "300"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.endpoint = json.loads(self.process.stdout.readline())["endpoint"]

    def complete(self, ids, tokens):
        """Seconds to the first token, the tokens, and how many of the prompt were kept."""
        body = {"prompt": ids, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
                "return_token_ids": True, "stream_options": {"include_usage": True}}
        request = urllib.request.Request(
            self.endpoint + "/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began = time.monotonic()
        first, found, kept = None, [], 0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                for choice in event["choices"]:
                    if choice.get("token_ids"):
                        first = first or time.monotonic() - began
                        found += choice["token_ids"]
                if event.get("usage"):
                    kept = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        return first, found, kept

    def end(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def spread(values):
    """Median, least and most."""
    return f"{statistics.median(values):.4f} ({min(values):.4f} - {max(values):.4f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prefix", type=int, default=2000, help="tokens of the shared prefix")
    parser.add_argument("--own", type=int, default=16, help="further tokens of each request")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of an answer")
    parser.add_argument("--vocab", type=int, default=50000, help="size of the vocabulary for random ids")
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    draw = random.Random(17)
    ids = lambda count: [draw.randrange(args.vocab) for _ in range(count)]
    deployments = []
    firsts, seconds, ratios, same = [], [], [], 0
    try:
        deployments += [Deployment(args.remoe, args.model) for _ in range(2)]
        shared, alone = deployments
        for deployment in deployments:
            deployment.complete(ids(64), 4)
        for _ in range(args.rounds):
            prefix = ids(args.prefix)
            first, _, _ = shared.complete(prefix + ids(args.own), args.tokens)
            prompt = prefix + ids(args.own)
            second, tokens, kept = shared.complete(prompt, args.tokens)
            _, expected, none = alone.complete(prompt, args.tokens)
            if kept == 0 or none > 0:
                sys.exit(f"expected prefix cache hits in the shared deployment alone, got {kept} cached tokens there and {none} in the other")
            firsts.append(first)
            seconds.append(second)
            ratios.append(second / first)
            same += tokens == expected
    finally:
        for deployment in deployments:
            deployment.end()
    print(f"TTFT of the first request, in seconds: {spread(firsts)}")
    print(f"TTFT of the second request: {spread(seconds)}; second / first: {spread(ratios)}")
    print(f"equal answers of {args.tokens} tokens: {same} of {args.rounds}")
    sys.exit(0 if same == args.rounds else 1)


if __name__ == "__main__":
    main()
