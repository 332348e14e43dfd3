#!/usr/bin/env python3
"""Real prompts beside running streams: what a long prompt does to others, and what they do to it.

    target/release/remoe-bench checkpoint --layers 4 --out target/bench/models/olmoe-4
    python3 bench/real_prompts.py --model target/bench/models/olmoe-4 --only stream,behind,prefix
    python3 bench/real_prompts.py --model target/bench/models/olmoe-4 --only mixed --peer "llama-server -m olmoe-4.gguf -np 8 -c 65536"

Each part starts a server of its own with all experts local, and prints one row per measurement:

* stream: a running stream beside a prompt of --prompt tokens, for several targets of the inter-token latency, against
  the same stream and the same prompt alone;
* behind: a prompt of 20 tokens that arrives behind one of --prompt tokens, alone and while nothing decodes;
* prefix: 16 simultaneous requests with one prefix of 2,000 tokens and tails of their own, in rows forwarded;
* mixed: --clients clients with prompts of 64 to 4,000 tokens for --seconds, here and at a peer, which is any command that
  serves OpenAI's completions at 127.0.0.1 on the port that takes the place of {port}.

Prompts are random token ids that no two requests share, unless said otherwise.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import socket
import statistics
import subprocess
import threading
import time


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class Server:
    """`remoe up`, or a peer, until the end of the block."""

    def __init__(self, command, port):
        self.port = port
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def __enter__(self):
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline:
            try:
                # Weights and code are warm afterwards.
                if complete(self.port, prompt(300, 0), 20).tokens:
                    return self
            except (OSError, http.client.HTTPException, ValueError):
                time.sleep(0.2)
        raise SystemExit("the server does not answer")

    def __exit__(self, *_):
        self.process.terminate()
        self.process.wait()

    def metric(self, name):
        """The sum of a metric's series."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        lines = (line for line in text.splitlines() if line.startswith((name + " ", name + "{")))
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


class Answer:
    """When the parts of a stream came."""

    def __init__(self, begun):
        self.begun, self.tokens, self.cached = begun, [], None

    def ttft(self):
        return self.tokens[0] - self.begun

    def gaps(self, since=0.0, until=float("inf")):
        pairs = zip(self.tokens, self.tokens[1:])
        return [later - earlier for earlier, later in pairs if later >= since and earlier <= until]


def complete(port, prompt, max_tokens, stop=None, **fields):
    """Streams a completion of the ids `prompt`; ends early once the event `stop` is set."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True, "temperature": 0, **fields}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    answer = Answer(time.monotonic())
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        raise ValueError(response.read().decode())
    for line in response:
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if event.get("choices") and event["choices"][0].get("finish_reason") is None:
                answer.tokens.append(time.monotonic())
            if event.get("usage"):
                answer.cached = (event["usage"].get("prompt_tokens_details") or {}).get("cached_tokens")
        if stop is not None and stop.is_set():
            break
    connection.close()
    return answer


class Beside(threading.Thread):
    """A completion in the background."""

    def __init__(self, *args, **fields):
        super().__init__()
        self.work, self.answer = (args, fields), None
        self.start()

    def run(self):
        args, fields = self.work
        self.answer = complete(*args, **fields)

    def result(self):
        self.join()
        if self.answer is None:
            raise SystemExit("a request failed")
        return self.answer


def prompt(tokens, seed):
    numbers = random.Random(seed)
    return [numbers.randrange(100, 50000) for _ in range(tokens)]


def quantile(values, share):
    values = sorted(values)
    return values[min(len(values) - 1, int(share * len(values)))]


class Bench:
    def __init__(self, args):
        self.args, self.seed = args, args.seed

    def serve(self, *flags):
        port = free_port()
        command = [self.args.remoe, "up", self.args.model, "--remote-ratio", "0", "--port", str(port)]
        command += ["--kv-cache-bytes", "4GiB", *shlex.split(self.args.up or ""), *flags]
        return Server(command, port)

    def prompt(self, tokens):
        self.seed += 1
        return prompt(tokens, self.seed)

    def stream(self):
        """A running stream beside a long prompt."""
        with self.serve() as server:
            gaps = complete(server.port, self.prompt(64), 200).gaps()
            median = statistics.median(gaps)
            reads = server.metric("remoe_expert_reads_total")
            alone = complete(server.port, self.prompt(self.args.prompt), 1)
            reads = server.metric("remoe_expert_reads_total") - reads
            print(f"| stream alone | median {median * 1e3:.1f} ms, p99 {quantile(gaps, 0.99) / median:.2f} x |", flush=True)
            print(f"| prompt of {self.args.prompt} alone | TTFT {alone.ttft():.2f} s, {reads:.0f} expert reads |", flush=True)
        for slowdown in self.args.slowdowns:
            flags = ["--target-itl", f"{slowdown * median * 1e3:.3f}ms"] if slowdown else []
            with self.serve(*flags) as server:
                stop = threading.Event()
                beside = Beside(server.port, self.prompt(64), 8000, stop)
                time.sleep(2)
                before = time.monotonic()
                reads, rows = (server.metric(f"remoe_{name}_total") for name in ("expert_reads", "iterations"))
                begun = time.monotonic()
                late = complete(server.port, self.prompt(self.args.prompt), 1)
                ended = late.tokens[0]
                reads = server.metric("remoe_expert_reads_total") - reads
                rows = server.metric("remoe_iterations_total") - rows
                time.sleep(1)
                stop.set()
                running = beside.result()
                gaps = running.gaps(begun, ended)
                calm = statistics.median(running.gaps(0, before))
                print(
                    f"| beside it, target {slowdown} x median | gaps: median {statistics.median(gaps) / median:.2f} x, "
                    f"p99 {quantile(gaps, 0.99) / median:.2f} x, largest {max(gaps) / median:.2f} x ({len(gaps)}); "
                    f"TTFT {late.ttft():.2f} s, {late.ttft() / alone.ttft():.2f} x; {reads:.0f} expert reads in "
                    f"{rows:.0f} iterations; stream before {calm * 1e3:.1f} ms |",
                    flush=True,
                )

    def behind(self):
        """A short prompt behind a long one."""
        with self.serve() as server:
            alone = statistics.median(complete(server.port, self.prompt(20), 1).ttft() for _ in range(5))
            long = Beside(server.port, self.prompt(self.args.prompt), 1)
            behind = []
            while True:
                time.sleep(1.5)
                if long.answer is not None:
                    break
                behind.append(complete(server.port, self.prompt(20), 1).ttft())
            print(
                f"| 20 tokens behind {self.args.prompt} | TTFT alone {alone:.3f} s, behind: median "
                f"{statistics.median(behind):.3f} s, largest {max(behind):.3f} s of {len(behind)} (limit {0.5 + 2 * alone:.3f}) |",
                flush=True,
            )

    def prefix(self):
        """Simultaneous requests with one prefix."""
        with self.serve() as server:
            shared, tails = self.prompt(2000), [self.prompt(24) for _ in range(16)]
            rows = server.metric("remoe_forwarded_positions_total")
            answers = [Beside(server.port, shared + tail, 1) for tail in tails]
            ttft = [answer.result().ttft() for answer in answers]
            rows = server.metric("remoe_forwarded_positions_total") - rows
            least = 2000 + 16 * 24
            print(f"| 16 x 2,000 + 24 | {rows:.0f} rows, {rows / least:.2f} x; last TTFT {max(ttft):.2f} s |", flush=True)

    def mixed(self):
        """Clients with mixed prompts, here and at a peer."""
        servers = {"remoe": lambda: self.serve()}
        if self.args.peer:
            port = free_port()
            command = shlex.split(self.args.peer.replace("{port}", str(port)))
            servers["peer"] = lambda: Server(command, port)
        for name, serve in servers.items():
            with serve() as server:
                answers, end = [], time.monotonic() + self.args.seconds

                def client(index, server=server, answers=answers, end=end):
                    numbers = random.Random(1000 + index)
                    while time.monotonic() < end:
                        length = int(64 * (4000 / 64) ** numbers.random())
                        ids = [numbers.randrange(100, 50000) for _ in range(length)]
                        answers.append((length, complete(server.port, ids, 64)))

                clients = [threading.Thread(target=client, args=(index,)) for index in range(self.args.clients)]
                begun = time.monotonic()
                for thread in clients:
                    thread.start()
                for thread in clients:
                    thread.join()
                took = time.monotonic() - begun
                ttft = [answer.ttft() for _, answer in answers]
                gaps = [gap for _, answer in answers for gap in answer.gaps()]
                tokens = sum(len(answer.tokens) for _, answer in answers)
                prompts = sum(length for length, _ in answers)
                print(
                    f"| {name} | {len(answers)} requests; TTFT p50 {quantile(ttft, 0.5):.2f} s, p99 {quantile(ttft, 0.99):.2f} s; "
                    f"gaps p50 {quantile(gaps, 0.5) * 1e3:.0f} ms, p99 {quantile(gaps, 0.99) * 1e3:.0f} ms; "
                    f"{tokens / took:.1f} tokens/s out, {prompts / took:.0f} in |",
                    flush=True,
                )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--up", help="further flags of remoe up")
    parser.add_argument("--only", default="stream,behind,prefix", help="parts, by commas")
    parser.add_argument("--prompt", type=int, default=8000, help="tokens of the long prompt")
    parser.add_argument(
        "--slowdowns",
        type=lambda text: [float(it) for it in text.split(",")],
        default=[2.4, 8.0],
        help="targets as multiples of the median alone; 0: the default target",
    )
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=300)
    parser.add_argument("--peer", help="command of another server; {port} is its port")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    os.environ.setdefault("REMOE_LOG", "error")
    bench = Bench(args)
    print("| measurement | result |\n| --- | --- |", flush=True)
    for part in args.only.split(","):
        getattr(bench, part)()


if __name__ == "__main__":
    main()
