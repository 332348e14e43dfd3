#!/usr/bin/env python3
"""Check that loops over rows are compiled for the processor's vectors and not for the least processor.

usage: check_vectors.py PROGRAM

PROGRAM is a release build that contains `remoe_kernels::elementwise`, such as
target/release/examples/attention_speed. `by_avx512` and `by_avx2` (crates/remoe-kernels/src/vectors.rs) have to hold the loops
themselves: arithmetic on 256 or 512 bits. A function of `elements.rs` or a closure of an operation with a symbol of its own
was not inlined, and so was compiled for every processor. Needs objdump (Debian's binutils).
"""

import re
import subprocess
import sys

FUNCTION = re.compile(r"^[0-9a-f]+ <(.*)>:$")
PACKED = re.compile(r"\bv(add|mul|sub|fmadd\w*)ps\b.*%[yz]mm")
WANTED = ("remoe_kernels::vectors::by_avx512", "remoe_kernels::vectors::by_avx2")
OUTSIDE = re.compile(r"remoe_kernels::(elements::|elementwise::(.*Loops.*::run|Part|.*\{\{closure\}\}))")


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    listing = subprocess.run(
        ["objdump", "--disassemble", "--demangle", "--no-show-raw-insn", sys.argv[1]],
        check=True, capture_output=True, text=True,
    ).stdout
    packed, name = {}, ""
    for line in listing.splitlines():
        if found := FUNCTION.match(line):
            name = found.group(1)
            packed.setdefault(name, 0)
        elif PACKED.search(line):
            packed[name] += 1
    wrong = [f"{name}: {packed.get(name, 0)} packed operations, expected 30" for name in WANTED if packed.get(name, 0) < 30]
    wrong += [f"{name}: a function of its own, expected inlined" for name in packed if OUTSIDE.match(name)]
    if wrong:
        sys.exit("\n".join(wrong))
    print(", ".join(f"{name}: {packed[name]} packed operations" for name in WANTED))


if __name__ == "__main__":
    main()
