#!/usr/bin/env python3
"""From nothing to one token: whole processes, from their start to their end, one right after the other.

    python3 bench/first_token.py --model target/bench/models/olmoe-4 --rounds 7
    python3 bench/first_token.py --model demo/model --tokens 1 --peer "llama-completion -m demo.gguf -p a -n 1 -t 2 -no-cnv"

`remoe generate` starts a main function with the native operations and one with LibTorch's; a peer is any command that
makes one token and ends, fairly of a prompt of as many tokens: a main function first reads the experts that the answer
uses, and a longer prompt uses more of them. The first round fills the page cache and is not counted. Times are the
client's, so that they contain what is around the main function too.
"""

import argparse
import shlex
import statistics
import subprocess
import time


def seconds(command):
    """How long `command` runs."""
    began = time.monotonic()
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.monotonic() - began


def spread(values, digits):
    """Median, least and most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} - {max(values):.{digits}f})"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--remoe", default="target/release/remoe")
    parser.add_argument("--model", required=True)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of the prompt")
    parser.add_argument("--native", action="store_true", help="skip LibTorch")
    parser.add_argument("--peer", help="command of another program to compare with")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    ids = ",".join(str(7 * i + 1) for i in range(args.tokens))
    generate = [args.remoe, "generate", "--model", args.model, "--remote-ratio", "0", "--prompt-ids", ids]
    generate += ["--max-tokens", "1", "--ignore-eos"]
    commands = {"native": generate}
    if not args.native:
        commands["LibTorch"] = [*generate, "--backend", "torch"]
    if args.peer:
        commands["peer"] = shlex.split(args.peer)
    seen = {name: [] for name in commands}
    for number in range(args.rounds + 1):
        for name, command in commands.items():
            took = seconds(command)
            if number > 0:
                seen[name].append(took)
    print("| | seconds | native / this |")
    print("| --- | ---: | ---: |")
    for name, values in seen.items():
        ratios = [ours / other for ours, other in zip(seen["native"], values)]
        print(f"| {name} | {spread(values, 3)} | {spread(ratios, 2) if name != 'native' else ''} |")


if __name__ == "__main__":
    main()
