#!/usr/bin/env python3
"""Print the folder of LibTorch 2.11.0, fetching it once when the machine has none.

An existing LibTorch (CPU or CUDA) named by the environment variable LIBTORCH wins.
Otherwise the CPU library is taken out of the published torch wheel: the wheel is a CUDA
build, but its libtorch_cpu.so needs only two small CUDA libraries that load without a
GPU, so five libraries and the headers make a complete CPU LibTorch. pip checks every
download against the SHA-256 in libtorch-requirements.txt. The result lands in
$REMOE_CACHE, else $XDG_CACHE_HOME/remoe, else ~/.cache/remoe, and is reused from then on.

Progress goes to stderr; the only line on stdout is the folder.
"""

import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSION = "2.11.0"
HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE / "libtorch-requirements.txt"

# What a CPU process loads, by the wheel that carries it.
LIBRARIES = {
    "torch-": {
        "torch/lib/libtorch_cpu.so",
        "torch/lib/libc10.so",
        "torch/lib/libgomp.so.1",
    },
    "nvidia_cuda_runtime-": {"nvidia/cu13/lib/libcudart.so.13"},
    "nvidia_cuda_cupti-": {"nvidia/cu13/lib/libcupti.so.13"},
}
HEADERS = "torch/include/"


def fail(message: str) -> "None":
    sys.exit(f"libtorch: {message}")


def note(message: str) -> None:
    print(f"libtorch: {message}", file=sys.stderr, flush=True)


def complete(folder: Path) -> bool:
    """The marker is the last file that is written, so it vouches for the rest."""
    marker = folder / "build-version"
    return marker.is_file() and marker.read_text().split("+")[0].strip() == VERSION


def cache_root() -> Path:
    if chosen := os.environ.get("REMOE_CACHE"):
        return Path(chosen).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "remoe"


def given() -> Path | None:
    """The LibTorch that the user names, checked for what the build needs."""
    name = os.environ.get("LIBTORCH")
    if not name:
        return None
    folder = Path(name).absolute()
    for needed in ("lib/libtorch_cpu.so", "lib/libc10.so", "include"):
        if not (folder / needed).exists():
            fail(f"LIBTORCH={name} has no {needed}; point it at a LibTorch {VERSION} folder or unset it")
    return folder


def download(into: Path) -> None:
    note(f"fetching the wheels of torch {VERSION} (0.55 GB, once)")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311",
        "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_25_x86_64",
        "--platform", "manylinux_2_17_x86_64", "--platform", "manylinux2014_x86_64",
        "--disable-pip-version-check", "--dest", str(into), "--requirement", str(REQUIREMENTS),
    ]  # fmt: skip
    for attempt in (1, 2, 3):
        if subprocess.run(command, stdout=sys.stderr).returncode == 0:
            return
        note(f"attempt {attempt} of 3 failed")
    fail("the wheels could not be downloaded; see pip's message above, or set LIBTORCH to a LibTorch of your own")


def extract(wheels: Path, folder: Path) -> None:
    (folder / "lib").mkdir(parents=True)
    for prefix, wanted in LIBRARIES.items():
        (wheel,) = wheels.glob(f"{prefix}*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            for name in sorted(wanted):
                if name not in names:
                    fail(f"{wheel.name} has no {name}")
                note(f"unpacking {Path(name).name}")
                with archive.open(name) as source, open(folder / "lib" / Path(name).name, "wb") as target:
                    shutil.copyfileobj(source, target, 1 << 22)
            if prefix == "torch-":
                for name in names:
                    if name.startswith(HEADERS) and not name.endswith("/"):
                        target = folder / "include" / name[len(HEADERS) :]
                        target.parent.mkdir(parents=True, exist_ok=True)
                        target.write_bytes(archive.read(name))


def link_stub(lib: Path) -> None:
    """The wheel's libtorch.so has no code of its own but needs the CUDA library: replace it."""
    command = [
        "gcc", "-shared", "-o", "libtorch.so", "-L.", "-Wl,--no-as-needed", "-l:libtorch_cpu.so", "-l:libc10.so",
        "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined",
    ]  # fmt: skip
    if subprocess.run(command, cwd=lib).returncode != 0:
        fail("gcc could not link libtorch.so; install it with: apt-get install g++")
    # The linker looks for the name without a version.
    (lib / "libgomp.so").symlink_to("libgomp.so.1")


def main() -> None:
    if folder := given():
        print(folder)
        return
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        fail(f"only Linux on x86-64 is fetched automatically; set LIBTORCH to a LibTorch {VERSION} for this machine")
    if shutil.which("gcc") is None:
        fail("no C compiler found; install it with: apt-get install g++")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        fail("Python has no pip; install it with: apt-get install python3-pip")
    root = cache_root()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"libtorch-{VERSION}-cpu"
    if not complete(folder):
        # Two builds may start at once: the second waits and then finds the work done.
        with open(root / "libtorch.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete(folder):
                with tempfile.TemporaryDirectory(dir=root, prefix="libtorch-") as scratch:
                    wheels, ready = Path(scratch) / "wheels", Path(scratch) / "ready"
                    wheels.mkdir()
                    download(wheels)
                    extract(wheels, ready)
                    link_stub(ready / "lib")
                    (ready / "build-version").write_text(f"{VERSION}+cpu\n")
                    shutil.rmtree(folder, ignore_errors=True)
                    ready.rename(folder)
                note(f"ready in {folder}")
    print(folder)


if __name__ == "__main__":
    main()
