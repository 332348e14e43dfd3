#!/usr/bin/env python3
"""Start the demo model with half of its experts in remote functions, chat once, stop.

Uses nothing but the standard library: what it sends is what any HTTP client would.
"""

import json
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROMPT = "Read Genesis 1:1."


def event(process: subprocess.Popen, wanted: str) -> dict:
    """The next event of that name that `remoe up` prints."""
    for line in process.stdout:
        message = json.loads(line)
        if message.get("event") == wanted:
            return message
        if "error" in message:
            sys.exit(f"demo: {message['error']['message']}")
    sys.exit(f"demo: `remoe up` ended with status {process.wait()} before it was ready")


def chat(endpoint: str, prompt: str) -> tuple[float, dict]:
    """Send `prompt`, print the answer as it comes, return the time to the first token and the usage."""
    body = {
        "model": "remoe-demo",
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": 96,
        "seed": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "include_figures": True,
    }
    request = urllib.request.Request(
        f"{endpoint}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    started, first, usage = time.monotonic(), None, {}
    with urllib.request.urlopen(request, timeout=120) as response:
        for line in response:
            data = line.decode().removeprefix("data: ").strip()
            if not data or data == "[DONE]":
                continue
            chunk = json.loads(data)
            if "error" in chunk:
                sys.exit(f"demo: {chunk['error']['message']}")
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                if text := choice["delta"].get("content"):
                    first = first or time.monotonic() - started
                    print(text, end="", flush=True)
    print()
    return first or 0.0, usage


def main() -> None:
    command = [
        ROOT / "target/release/remoe", "up", "--model", ROOT / "demo/model",
        "--served-model-name", "remoe-demo", "--remote-ratio", "0.5", "--port", "0", "--json",
    ]  # fmt: skip
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        ready = event(process, "ready")
        endpoint = ready["endpoint"]
        print(f"\nendpoint  {endpoint}")
        for function in ready["functions"]:
            print(f"  {function['name']:<9}  pid {function['pid']}  {function['address']}  experts {function['experts']}")
        print(f"\n> {PROMPT}\n")
        first, usage = chat(endpoint, PROMPT)
        figures = usage["remoe"]
        experts = figures["experts"]
        tokens = usage["completion_tokens"]
        decode = figures["decode_s"]
        print(f"\nprompt {usage['prompt_tokens']} tokens, answer {tokens} tokens")
        print(f"time to first token {1000 * first:.0f} ms, then {(tokens - 1) / decode if decode else 0:.0f} tokens/s")
        print(
            f"expert calls: {experts['local']} local, {experts['remote']} remote, "
            f"{experts['fallback']} by fallback, {experts['retries']} retries"
        )
        if not experts["remote"]:
            sys.exit("demo: expected remote expert calls, got none")
    finally:
        process.terminate()
        process.wait(timeout=60)


if __name__ == "__main__":
    main()
