#!/usr/bin/env python3
"""Run `cargo build` with the given arguments and show how far it is: on a terminal by cargo's own progress bar, without a
line for every crate; elsewhere by a line every 15 seconds. Errors and warnings are shown as ever. Uses nothing but the
standard library.
"""

import os
import re
import shutil
import subprocess
import sys
import time

# What cargo says of every crate, in the column in which it says it.
STEPS = ("Compiling", "Downloaded", "Downloading", "Fresh", "Locking", "Updating", "Adding", "Finished", "Blocking")
INTERVAL_S = 15
# The bar of cargo: crates done, and of how many.
BAR = re.compile(rb"\] +(\d+)/(\d+)")


class Terminal:
    """Cargo's bar, each drawn over the one before."""

    def bar(self, text: bytes) -> None:
        # Bars are shorter or longer than each other.
        sys.stderr.write("\033[K" + text.decode(errors="replace") + "\r")
        sys.stderr.flush()

    def line(self, text: bytes) -> None:
        sys.stderr.write("\033[K" + text.decode(errors="replace") + "\n")

    def end(self) -> None:
        sys.stderr.write("\033[K")


class Log:
    """A line now and then."""

    def __init__(self) -> None:
        self.begun = self.said = time.monotonic()

    def bar(self, text: bytes) -> None:
        now = time.monotonic()
        if (count := BAR.search(text)) and now - self.said >= INTERVAL_S:
            self.said = now
            done, of = (number.decode() for number in count.groups())
            print(f"building: {done} of {of} crates after {now - self.begun:.0f} s", file=sys.stderr, flush=True)

    def line(self, text: bytes) -> None:
        print(text.decode(errors="replace"), file=sys.stderr, flush=True)

    def end(self) -> None:
        if (passed := time.monotonic() - self.begun) >= INTERVAL_S:
            print(f"built after {passed:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    shown = Terminal() if sys.stderr.isatty() else Log()
    width = str(shutil.get_terminal_size().columns)
    environment = os.environ | {
        "CARGO_TERM_PROGRESS_WHEN": "always", "CARGO_TERM_PROGRESS_WIDTH": width, "CARGO_TERM_COLOR": "never",
    }  # fmt: skip
    cargo = subprocess.Popen(["cargo", "build", *sys.argv[1:]], stderr=subprocess.PIPE, env=environment)
    # A bar ends with a carriage return, a line with a line break.
    rest = b""
    while chunk := cargo.stderr.read1(4096):
        *parts, rest = re.split(rb"([\r\n])", rest + chunk)
        for text, end in zip(parts[::2], parts[1::2]):
            words = text.decode(errors="replace").split()
            if end == b"\r":
                shown.bar(text)
            elif not words or words[0] not in STEPS:
                shown.line(text)
    shown.end()
    return cargo.wait()


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
