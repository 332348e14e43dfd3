#!/usr/bin/env python3
"""Measure an honest model's latency beside a hostile function, and beside an honest one that sends as many bytes.

    python3 bench/hostile_neighbour.py

Both stand behind one gateway, one after the other in one run of 20 s. Prints the 50th and 99th percentiles and their ratio.
See docs/security.md.
"""

import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TEST = "hostile::latency::latency_beside_a_hostile_function_is_measured"


def main() -> None:
    command = [
        "cargo", "test", "--release", "--package", "remoe-gateway", "--test", "it", "--", "--exact", TEST,
        "--ignored", "--nocapture",
    ]  # fmt: skip
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    rows = {}
    for line in output.splitlines():
        words = line.split()
        if len(words) == 5 and words[0] in ("hostile", "honest"):
            rows[words[0]] = [int(word) for word in words[1:]]
    print("| beside | requests | bytes of an answer | p50 us | p99 us |")
    print("| --- | --- | --- | --- | --- |")
    for beside, row in rows.items():
        print(f"| {beside} | " + " | ".join(map(str, row)) + " |")
    print(f"p99 beside hostile / beside honest: {rows['hostile'][3] / rows['honest'][3]:.2f}")


if __name__ == "__main__":
    main()
