#!/usr/bin/env python3
"""Memory of the gateway while many streams wait.

    scripts/idle_streams.py [STREAMS]

Starts the demo model with `remoe up`, halts its main function, opens as many streamed completions as said (2,000),
and prints what the process with the gateway has in memory before, while all of them are open and silent, and after they
were answered: the main function goes on then, and every stream has to end whole.
"""

import json
import os
import pathlib
import resource
import selectors
import signal
import socket
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
BODY = json.dumps({"prompt": "Once upon a time", "max_tokens": 2, "temperature": 0, "ignore_eos": True, "stream": True})


def resident(pid):
    """Megabytes of 1,000,000 bytes."""
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024 / 1e6


def main():
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2000
    needed = 4 * count + 1000
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (needed, max(hard, needed)))
    command = [ROOT / "target/release/remoe", "up", ROOT / "demo/model", "--remote-ratio", "0", "--port", "0", "--json"]
    command += ["--max-requests", str(2 * count)]
    environment = os.environ | {"REMOE_HTTP_MAX_CONNECTIONS": str(2 * count)}
    up = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    function = None
    try:
        ready = json.loads(up.stdout.readline())
        function = next(one for one in ready["functions"] if one["role"] == "main")["pid"]
        host, port = ready["endpoint"].removeprefix("http://").rsplit(":", 1)
        before = resident(up.pid)
        os.kill(function, signal.SIGSTOP)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(BODY)}\r\n\r\n{BODY}".encode()
        streams = []
        for _ in range(count):
            stream = socket.create_connection((host, int(port)))
            stream.sendall(request)
            streams.append(stream)
        time.sleep(5)
        during = resident(up.pid)
        os.kill(function, signal.SIGCONT)
        came = {stream: b"" for stream in streams}
        selector = selectors.DefaultSelector()
        for stream in streams:
            selector.register(stream, selectors.EVENT_READ)
        until, left = time.monotonic() + 300, count
        while left and time.monotonic() < until:
            for key, _ in selector.select(1):
                part = key.fileobj.recv(1 << 16)
                came[key.fileobj] += part
                if not part or came[key.fileobj].endswith(b"0\r\n\r\n"):
                    selector.unregister(key.fileobj)
                    left -= 1
        whole = sum(b"data: [DONE]" in text for text in came.values())
        after = resident(up.pid)
        each = (during - before) * 1e3 / count
        print(f"{count} streams: {before:.1f} MB before, {during:.1f} MB while they wait ({each:.1f} kB each), {after:.1f} MB after; {whole} complete")
        if whole < count:
            raise SystemExit(f"{count - whole} of {count} streams were not answered")
    finally:
        if function:
            os.kill(function, signal.SIGCONT)
        up.terminate()
        up.wait()


if __name__ == "__main__":
    main()
