#!/usr/bin/env python3
"""Run `cargo build --release` with the given arguments: on a terminal behind cargo's own progress bar alone, without a
line for every crate; elsewhere quietly. Errors and warnings are shown as ever. Uses nothing but the standard library.
"""

import os
import shutil
import subprocess
import sys

# What cargo says of every crate, in the column in which it says it.
STEPS = ("Compiling", "Downloaded", "Downloading", "Fresh", "Locking", "Updating", "Adding", "Finished", "Blocking")


def on_terminal(command: list[str]) -> int:
    """Cargo's standard error holds its bar, which ends with a carriage return, and lines, which end with a line break."""
    width = str(shutil.get_terminal_size().columns)
    bar = {"CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": width, "CARGO_TERM_COLOR": "never"}
    cargo = subprocess.Popen(command, stderr=subprocess.PIPE, env=os.environ | bar)
    line = b""
    while byte := cargo.stderr.read1(4096):
        for part in byte.replace(b"\r", b"\r\0").replace(b"\n", b"\n\0").split(b"\0"):
            line += part
            if line.endswith(b"\r") or line.endswith(b"\n"):
                words = line.decode(errors="replace").split()
                if line.endswith(b"\r") or not (words and words[0] in STEPS):
                    # Bars are shorter or longer than each other.
                    sys.stderr.write("\033[K" + line.decode(errors="replace"))
                    sys.stderr.flush()
                line = b""
    sys.stderr.write("\r\033[K" + line.decode(errors="replace"))
    return cargo.wait()


def main() -> int:
    command = ["cargo", "build", "--release", *sys.argv[1:]]
    if sys.stderr.isatty():
        return on_terminal(command)
    print("building (minutes the first time)", file=sys.stderr, flush=True)
    return subprocess.call([*command, "--quiet"])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
