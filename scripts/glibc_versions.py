#!/usr/bin/env python3
"""Print the glibc that programs need, and fail where one needs a later one or another library.

    scripts/glibc_versions.py --at-most 2.28 target/x86_64-unknown-linux-gnu/dist/remoe

Reads the versions of the symbols that a program imports, with objdump (binutils).
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

Version = tuple[int, ...]

# Libraries of glibc, and the one that every Debian and Red Hat system has beside them.
LIBRARIES = {
    "libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2", "libgcc_s.so.1",
}  # fmt: skip
DEADLINE_S = 60


def parse(text: str) -> Version:
    return tuple(int(part) for part in text.split("."))


def text_of(version: Version) -> str:
    return ".".join(str(part) for part in version)


def needed(program: Path) -> Version:
    """Returns the latest glibc whose symbols `program` imports; exits if it loads a library that is not expected."""
    command = ["objdump", "--private-headers", str(program)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    if done.returncode != 0:
        sys.exit(f"cannot read {program}: {done.stderr.strip()}")
    libraries = set(re.findall(r"^ +NEEDED +(\S+)", done.stdout, re.MULTILINE))
    if foreign := libraries - LIBRARIES:
        sys.exit(f"{program} loads {', '.join(sorted(foreign))}, which a target machine may lack")
    if "GLIBC_PRIVATE" in done.stdout:
        sys.exit(f"{program} imports private symbols of glibc")
    versions = [parse(text) for text in re.findall(r" GLIBC_([0-9.]+)$", done.stdout, re.MULTILINE)]
    if not versions:
        sys.exit(f"{program} imports no symbol of glibc: expected a dynamic program")
    return max(versions)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", nargs="+", type=Path)
    parser.add_argument("--at-most", type=parse, metavar="VERSION", help="fail if a program needs a later glibc")
    given = parser.parse_args()
    failed = False
    for program in given.program:
        version = needed(program)
        print(f"{program}: glibc {text_of(version)}")
        failed |= given.at_most is not None and version > given.at_most
    if failed:
        sys.exit(f"a program needs a glibc later than {text_of(given.at_most)}")


if __name__ == "__main__":
    main()
