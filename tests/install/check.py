#!/usr/bin/env python3
"""Install packages on an empty Debian without a network, as its users do, and get the demo model's first answer.

    tests/install/check.py                       target/packages, in Debian 12
    tests/install/check.py --suite bullseye wheel

Each form gets a root of its own, with neither Rust nor a compiler, and no network but the loopback device. How long
installation and first answer take is printed and not judged. Takes root and mmdebstrap; the roots are made once and
stay in the cache (scripts/cache.py). Where the programs need a later glibc than Debian 12 has, Debian 13 is taken.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY / "scripts"))

import cache  # noqa: E402

# Debian's releases and the glibc of each.
SUITES = {"bullseye": (2, 31), "bookworm": (2, 36), "trixie": (2, 41)}
DEFAULT = "bookworm"
PYTHON = ["python3-venv"]
USER = 1000
ROOT_DEADLINE_S = 1800
COMMAND_DEADLINE_S = 300

ANSWER = 'run demo "Read Genesis 1:1."'
# By form: packages of Debian that it needs, commands that install, and the program then.
FORMS = {
    "archive": ([], ["tar xf /packages/remoe-*.tar.gz"], "remoe-*/bin/remoe"),
    "script": ([], ["REMOE_FROM=/packages sh /packages/install.sh"], ".local/bin/remoe"),
    "wheel": (PYTHON, ["python3 -m venv env", "env/bin/pip install /packages/remoe-*.whl"], "env/bin/remoe"),
    "debian": ([], ["dpkg -i /packages/remoe_*.deb"], "remoe"),
}
AS_ROOT = "dpkg "


def fail(message: str) -> None:
    sys.exit(f"install: {message}")


def root_archive(suite: str, packages: list[str]) -> Path:
    """Returns the archive of an installed Debian, which is made the first time."""
    folder = cache.root() / "debian"
    path = folder / f"{'-'.join([suite, *packages])}.tar.gz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        unfinished = folder / f".{path.name}"
        begun = time.monotonic()
        command = ["mmdebstrap", "--quiet", "--mode=root", "--variant=minbase"]
        command += [f"--include={','.join(packages)}"] if packages else []
        subprocess.run([*command, suite, str(unfinished)], check=True, timeout=ROOT_DEADLINE_S, stdin=subprocess.DEVNULL)
        unfinished.rename(path)
        print(f"install: made {path} in {time.monotonic() - begun:.0f} s", flush=True)
    return path


def run(root: Path, command: str) -> str:
    """Runs a shell command in `root` without a network, and returns what it prints."""
    user = 0 if command.startswith(AS_ROOT) else USER
    inside = [
        "chroot", f"--userspec={user}:{user}", str(root), "/usr/bin/env", "--ignore-environment", "HOME=/home/user",
        "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "PIP_DISABLE_PIP_VERSION_CHECK=1", "sh", "-c", f"cd && {command}",
    ]  # fmt: skip
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", f"--mount-proc={root / 'proc'}"]
    loopback = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    done = subprocess.run(
        [*apart, *loopback, *inside], capture_output=True, text=True, timeout=COMMAND_DEADLINE_S, stdin=subprocess.DEVNULL
    )
    if done.returncode != 0:
        fail(f"`{command}` exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def check(form: str, suite: str, packages: Path, scratch: Path) -> str:
    """Installs one form, prints how long it and the first answer took, and returns an answer that every form must give."""
    needs, commands, program = FORMS[form]
    root = scratch / form
    root.mkdir()
    subprocess.run(["tar", "--extract", "--file", str(root_archive(suite, needs)), "--directory", str(root)], check=True)
    shutil.copytree(packages, root / "packages")
    shutil.copy(REPOSITORY / "scripts/install.sh", root / "packages/install.sh")
    (root / "home/user").mkdir()
    os.chown(root / "home/user", USER, USER)
    begun = time.monotonic()
    for command in commands:
        run(root, command)
    installed = time.monotonic()
    first = run(root, f"{program} {ANSWER}")
    answered = time.monotonic()
    if not first:
        fail(f"{form}: the first answer is empty")
    greedy = f"{program} {ANSWER} --temperature 0 --max-tokens 32"
    local, remote = run(root, greedy), run(root, f"{greedy} --remote-ratio 0.5")
    if not local or local != remote:
        fail(f"{form}: local experts answer {local!r}, remote ones {remote!r}")
    took = f"{installed - begun:.1f} s, first answer {answered - installed:.1f} s, together {answered - begun:.1f} s"
    print(f"{suite} {form:8} {len(commands) + 1} commands: installation {took}", flush=True)
    shutil.rmtree(root)
    return local


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("form", nargs="*", help=f"which of {', '.join(FORMS)} [default: all]")
    parser.add_argument("--packages", type=Path, default=REPOSITORY / "target/packages", help="folder of the packages")
    parser.add_argument("--suite", choices=SUITES, help=f"release of Debian [default: {DEFAULT}, or the first with the glibc]")
    given = parser.parse_args()
    if unknown := set(given.form) - set(FORMS):
        fail(f"unknown form {', '.join(sorted(unknown))}; expected {', '.join(FORMS)}")
    if os.geteuid() != 0:
        fail("cannot change the root folder: expected root")
    for tool in ("mmdebstrap", "unshare", "ip"):
        if shutil.which(tool) is None:
            fail(f"missing {tool}: apt-get install mmdebstrap debian-archive-keyring util-linux iproute2")
    wheels = list(given.packages.glob("remoe-*.whl"))
    if len(wheels) != 1 or not (named := re.search(r"manylinux_(\d+)_(\d+)", wheels[0].name)):
        fail(f"expected one wheel in {given.packages}: run `make dist` or `make packages`")
    needed = int(named[1]), int(named[2])
    suites = [given.suite] if given.suite else list(SUITES)[list(SUITES).index(DEFAULT) :]
    suite = next((each for each in suites if SUITES[each] >= needed), None)
    if suite is None:
        fail(f"the programs need glibc {needed[0]}.{needed[1]}, which {' or '.join(suites)} does not have")
    # Not among temporary files, which may lie in memory.
    with tempfile.TemporaryDirectory(dir=given.packages.parent, prefix=".install-") as scratch:
        answers = {form: check(form, suite, given.packages, Path(scratch)) for form in given.form or FORMS}
    if len(set(answers.values())) != 1:
        fail(f"forms give different answers: {answers}")
    print(f"install: every form answers on {suite} without a network")


if __name__ == "__main__":
    main()
