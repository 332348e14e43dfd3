#!/usr/bin/env python3
"""Print the folder of LibTorch 2.11.0, fetching it once when the machine has none.

    scripts/libtorch.py            for CPUs
    scripts/libtorch.py --cuda     for GPUs: 2.4 GB to download, 3.4 GB kept

An existing LibTorch (CPU or CUDA) named by the environment variable LIBTORCH wins.
Otherwise the CPU library is taken out of the published torch wheel: the wheel is a CUDA
build, but its libtorch_cpu.so needs only two small CUDA libraries that load without a
GPU, so five libraries and the headers make a complete CPU LibTorch. With CUDA it takes the
rest of the wheel and the CUDA libraries that it loads, which come as wheels of their own; the driver
(libcuda.so.1) is the machine's. pip checks every
download against the SHA-256 in libtorch-requirements.txt or libtorch-cuda-requirements.txt. The result lands in
$REMOE_CACHE, else $XDG_CACHE_HOME/remoe, else ~/.cache/remoe, and is reused from then on.

Progress goes to stderr; the only line on stdout is the folder.
"""

import argparse
import fcntl
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import cache

VERSION = "2.11.0"
HERE = Path(__file__).resolve().parent


@dataclass
class Flavour:
    """A LibTorch that can be fetched."""

    name: str
    requirements: Path
    download: str
    # What a process loads, by the wheel that carries it.
    libraries: dict[str, set[str]]


def within(folder: str, *names: str) -> set[str]:
    return {f"{folder}/lib/{name}" for name in names}


CPU_LIBRARIES = {
    "torch-": within("torch", "libtorch_cpu.so", "libc10.so", "libgomp.so.1"),
    "nvidia_cuda_runtime-": within("nvidia/cu13", "libcudart.so.13"),
    "nvidia_cuda_cupti-": within("nvidia/cu13", "libcupti.so.13"),
}
CPU = Flavour("cpu", HERE / "libtorch-requirements.txt", "0.55 GB", CPU_LIBRARIES)
# Those that are loaded with the program, and those that are loaded when an operation first needs them.
CUDA_LIBRARIES = CPU_LIBRARIES | {
    "torch-": CPU_LIBRARIES["torch-"] | within(
        "torch", "libtorch.so", "libtorch_cuda.so", "libtorch_cuda_linalg.so", "libtorch_nvshmem.so",
        "libc10_cuda.so", "libcaffe2_nvrtc.so",
    ),
    "nvidia_cublas-": within("nvidia/cu13", "libcublas.so.13", "libcublasLt.so.13"),
    "nvidia_cuda_nvrtc-": within("nvidia/cu13", "libnvrtc.so.13", "libnvrtc-builtins.so.13.0"),
    "nvidia_cudnn_cu13-": within(
        "nvidia/cudnn", "libcudnn.so.9", "libcudnn_adv.so.9", "libcudnn_cnn.so.9", "libcudnn_engines_precompiled.so.9",
        "libcudnn_engines_runtime_compiled.so.9", "libcudnn_graph.so.9", "libcudnn_heuristic.so.9", "libcudnn_ops.so.9",
    ),
    "nvidia_cufft-": within("nvidia/cu13", "libcufft.so.12"),
    "nvidia_cufile-": within("nvidia/cu13", "libcufile.so.0"),
    "nvidia_curand-": within("nvidia/cu13", "libcurand.so.10"),
    "nvidia_cusolver-": within("nvidia/cu13", "libcusolver.so.12"),
    "nvidia_cusparse-": within("nvidia/cu13", "libcusparse.so.12"),
    "nvidia_cusparselt_cu13-": within("nvidia/cusparselt", "libcusparseLt.so.0"),
    "nvidia_nccl_cu13-": within("nvidia/nccl", "libnccl.so.2"),
    "nvidia_nvjitlink-": within("nvidia/cu13", "libnvJitLink.so.13"),
    "nvidia_nvshmem_cu13-": within("nvidia/nvshmem", "libnvshmem_host.so.3"),
}  # fmt: skip
CUDA = Flavour("cu13", HERE / "libtorch-cuda-requirements.txt", "2.4 GB", CUDA_LIBRARIES)
HEADERS = "torch/include/"


def fail(message: str) -> "None":
    sys.exit(f"libtorch: {message}")


def note(message: str) -> None:
    print(f"libtorch: {message}", file=sys.stderr, flush=True)


def complete(folder: Path) -> bool:
    """The marker is the last file that is written, so it vouches for the rest."""
    marker = folder / "build-version"
    return marker.is_file() and marker.read_text().split("+")[0].strip() == VERSION


def given(flavour: Flavour) -> Path | None:
    """The LibTorch that the user names, checked for what the build needs."""
    name = os.environ.get("LIBTORCH")
    if not name:
        return None
    folder = Path(name).absolute()
    for needed in ("lib/libtorch_cpu.so", "lib/libc10.so", "include", *(["lib/libtorch_cuda.so"] if flavour is CUDA else [])):
        if not (folder / needed).exists():
            fail(f"LIBTORCH={name} has no {needed}; point it at a LibTorch {VERSION} folder or unset it")
    return folder


def download(flavour: Flavour, into: Path) -> None:
    note(f"fetching the wheels of torch {VERSION} ({flavour.download}, once)")
    command = [
        sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes",
        "--only-binary=:all:", "--python-version", "3.11", "--implementation", "cp", "--abi", "cp311",
        *(word for glibc in range(28, 16, -1) for word in ("--platform", f"manylinux_2_{glibc}_x86_64")),
        "--platform", "manylinux2014_x86_64", "--platform", "manylinux2010_x86_64", "--progress-bar", "off",
        "--disable-pip-version-check", "--dest", str(into), "--requirement", str(flavour.requirements),
    ]  # fmt: skip
    for attempt in (1, 2, 3):
        if subprocess.run(command, stdout=sys.stderr).returncode == 0:
            return
        note(f"attempt {attempt} of 3 failed")
    fail("the wheels could not be downloaded; see pip's message above, or set LIBTORCH to a LibTorch of your own")


def extract(flavour: Flavour, wheels: Path, folder: Path) -> None:
    (folder / "lib").mkdir(parents=True)
    for prefix, wanted in flavour.libraries.items():
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


def link(flavour: Flavour, lib: Path) -> None:
    """What the linker looks for by names of its own."""
    (lib / "libgomp.so").symlink_to("libgomp.so.1")
    if flavour is CUDA:
        return
    # The wheel's libtorch.so has no code of its own but needs the CUDA library: replace it.
    command = [
        "gcc", "-shared", "-o", "libtorch.so", "-L.", "-Wl,--no-as-needed", "-l:libtorch_cpu.so", "-l:libc10.so",
        "-Wl,-rpath,$ORIGIN", "-Wl,--allow-shlib-undefined",
    ]  # fmt: skip
    if subprocess.run(command, cwd=lib).returncode != 0:
        fail("gcc could not link libtorch.so; install it with: apt-get install g++")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", action="store_true", help="LibTorch for NVIDIA GPUs (CUDA)")
    flavour = CUDA if parser.parse_args().cuda else CPU
    if folder := given(flavour):
        print(folder)
        return
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        fail(f"only Linux on x86-64 is fetched automatically; set LIBTORCH to a LibTorch {VERSION} for this machine")
    if shutil.which("gcc") is None:
        fail("no C compiler found; install it with: apt-get install g++")
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode != 0:
        fail("Python has no pip; install it with: apt-get install python3-pip")
    if flavour is CPU and Path("/dev/nvidiactl").exists():
        note("this machine has a GPU, which a LibTorch for CPUs does not use; for the GPU: make build CUDA=1")
    root = cache.root()
    root.mkdir(parents=True, exist_ok=True)
    folder = root / f"libtorch-{VERSION}-{flavour.name}"
    if not complete(folder):
        # Two builds may start at once: the second waits and then finds the work done.
        with open(root / "libtorch.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not complete(folder):
                with tempfile.TemporaryDirectory(dir=root, prefix="libtorch-") as scratch:
                    wheels, ready = Path(scratch) / "wheels", Path(scratch) / "ready"
                    wheels.mkdir()
                    download(flavour, wheels)
                    extract(flavour, wheels, ready)
                    link(flavour, ready / "lib")
                    (ready / "build-version").write_text(f"{VERSION}+{flavour.name}\n")
                    shutil.rmtree(folder, ignore_errors=True)
                    ready.rename(folder)
                note(f"ready in {folder}")
    print(folder)


if __name__ == "__main__":
    main()
