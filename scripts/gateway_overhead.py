#!/usr/bin/env python3
"""Overhead of the gateway for a warm request: the same streams through it and directly, in turns.

    scripts/gateway_overhead.py [ROUNDS]

Starts the demo model with `remoe up`, opens one connection to the gateway and one to the main function (whose
key this user may read), and sends the same request on either in turns. Prints medians of the time to the first
token, and of the time between tokens, and how much larger the gateway's are.
"""

import json
import pathlib
import socket
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
TOKENS = 64


class Connection:
    """Sends one streamed completion after the other."""

    def __init__(self, address, key=None):
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        body = json.dumps(
            {"prompt": "Once upon a time", "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        )
        key = f"Authorization: Bearer {key}\r\n" if key else ""
        self.request = (
            f"POST /v1/completions HTTP/1.1\r\nHost: {address}\r\n{key}Content-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}"
        ).encode()

    def measure(self):
        """Seconds to the first token, and seconds a token after that."""
        begin = time.perf_counter()
        self.socket.sendall(self.request)
        first, came = None, b""
        while not came.endswith(b"0\r\n\r\n"):
            part = self.socket.recv(1 << 16)
            if not part:
                raise SystemExit(f"connection closed within an answer: {came[-500:]!r}")
            came += part
            if first is None and b"data: " in came:
                first = time.perf_counter() - begin
        if b"data: [DONE]" not in came:
            raise SystemExit(f"incomplete answer: {came[-500:]!r}")
        return first, (time.perf_counter() - begin - first) / (TOKENS - 1)


def main():
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    command = [ROOT / "target/release/remoe", "up", ROOT / "demo/model", "--remote-ratio", "0", "--port", "0", "--json"]
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = json.loads(up.stdout.readline())
        function = next(one for one in ready["functions"] if one["role"] == "main")
        environment = pathlib.Path(f"/proc/{function['pid']}/environ").read_bytes().split(b"\0")
        key = next(value[14:] for value in environment if value.startswith(b"REMOE_API_KEY=")).decode()
        ways = {
            "direct": Connection(function["http"], key),
            "gateway": Connection(ready["endpoint"].removeprefix("http://")),
        }
        for connection in ways.values():
            connection.measure()
        seen = {way: [] for way in ways}
        for number in range(rounds):
            order = list(ways) if number % 2 else list(reversed(ways))
            for way in order:
                seen[way].append(ways[way].measure())
        for name, place, scale, unit in [("first token", 0, 1e3, "ms"), ("each token", 1, 1e6, "us")]:
            direct, gateway = (statistics.median(one[place] for one in seen[way]) * scale for way in ways)
            print(f"{name}: direct {direct:.3f} {unit}, gateway {gateway:.3f} {unit}, {gateway - direct:+.3f} {unit}")
    finally:
        up.terminate()
        up.wait()


if __name__ == "__main__":
    main()
