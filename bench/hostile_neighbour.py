#!/usr/bin/env python3
"""Measure an honest model's latency beside a hostile function, and beside an honest one that sends as many bytes.

    python3 bench/hostile_neighbour.py [PROFILE]

Both stand behind a gateway, in turn, five times for 4 s each. The honest one is asked as often as the hostile one was, and
sends as many bytes. Prints the 50th and 99th percentiles and their ratio. Let nothing else run. PROFILE: a cargo profile,
`release` unless given. See docs/security.md.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = "hostile::latency::latency_beside_a_hostile_function_is_measured"


def main() -> None:
    command = [
        "cargo", "test", "--profile", sys.argv[1] if len(sys.argv) > 1 else "release", "--package", "remoe-gateway", "--test", "it", "--", "--exact", TEST,
        "--ignored", "--nocapture",
    ]  # fmt: skip
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) == 6 and words[0] in ("hostile", "honest"):
            rows[words[0]] = [int(word) for word in words[1:]]
    print("| beside | requests to it | bytes from it | requests measured | p50 us | p99 us |")
    print("| --- | --- | --- | --- | --- | --- |")
    for beside, row in rows.items():
        print(f"| {beside} | " + " | ".join(map(str, row)) + " |")
    print(f"p99 beside hostile / beside honest: {rows['hostile'][-1] / rows['honest'][-1]:.2f}")


if __name__ == "__main__":
    main()
