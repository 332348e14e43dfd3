#!/usr/bin/env python3
"""Make the container images from binaries that were built on this host, without a container engine.

    deploy/images/build.py operator gateway main remote-expert      target/images/remoe-*.tar
    make image-cuda                                          target/images/remoe-main-cuda.tar, 3.5 GB

Each tar is an image in the OCI layout: `skopeo copy oci-archive:...`, `crane push` and `ctr images import`
take it. An image holds the binaries, the shared libraries that they load, certificate authorities and what
a user without privileges needs; no shell. It runs as user 65532 on a read-only root.

The libraries are those of this host, so build where `deploy/images/*.Containerfile` would: on Debian 12.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from oci import Layer, write_image

REPOSITORY = Path(__file__).resolve().parents[2]
REGISTRY = "ghcr.io/remoe"
USER = 65532
CERTIFICATES = Path("/etc/ssl/certs/ca-certificates.crt")
# Where libraries that are not the system's lie in an image.
LIBRARIES = "/usr/lib/remoe"
LDD_DEADLINE_S = 60
LIBTORCH_DEADLINE_S = 3600

# By image: what it is for, and its programs, the first of which it starts; NAME=BINARY where they differ: every image
# of main functions has a `main-model-fn`, whatever its operations.
IMAGES = {
    "operator": ("Remoe operator", ["remoe-operator"]),
    "gateway": ("Remoe gateway and tools", ["remoe-gateway", "remoe"]),
    "main": ("Remoe main-model function for CPUs", ["main-model-fn", "remote-expert-fn", "remoe-agent"]),
    "main-torch": ("Remoe main-model function with LibTorch", ["main-model-fn=main-model-fn-torch", "main-model-fn-torch", "remote-expert-fn", "remoe-agent"]),
    "main-cuda": ("Remoe main-model function for GPUs", ["main-model-fn=main-model-fn-torch", "main-model-fn-torch", "remote-expert-fn", "remoe-agent"]),
    "remote-expert": ("Remoe remote-expert function", ["remote-expert-fn"]),
}


def fail(message: str) -> None:
    sys.exit(f"images: {message}")


def workspace_version() -> str:
    return tomllib.loads((REPOSITORY / "Cargo.toml").read_text())["workspace"]["package"]["version"]


# What is linked with the LibTorch of such an image.
TORCH_PROGRAMS = {"main-model-fn-torch"}
# The library of NVIDIA's driver: a node's, put in where a pod is given a GPU.
DRIVER = "libcuda.so.1"


def libtorch(*flags: str) -> Path:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "scripts/libtorch.py"), *flags],
        stdout=subprocess.PIPE, text=True, timeout=LIBTORCH_DEADLINE_S,
    )  # fmt: skip
    if done.returncode != 0:
        fail("LibTorch could not be found; see its message above")
    return Path(done.stdout.strip()) / "lib"


def shared_libraries(program: Path) -> dict[str, Path]:
    """What the loader loads for `program`: path as it is asked for, path of the file."""
    done = subprocess.run(["ldd", str(program)], capture_output=True, text=True, timeout=LDD_DEADLINE_S)
    if done.returncode != 0:
        if "not a dynamic executable" in done.stdout + done.stderr:
            return {}
        fail(f"ldd {program}: {done.stderr.strip()}")
    found = {}
    for line in done.stdout.splitlines():
        if missing := re.match(r"\s*(\S+) => not found", line):
            if missing[1] == DRIVER:
                continue
            fail(f"{program} needs {missing[1]}, which this host does not have")
        # A name with the file that was found for it, or the loader by its path.
        if match := re.match(r"\s*(?:\S+ => )?(/\S+) \(0x", line):
            found[match[1]] = Path(match[1]).resolve()
    return found


def base() -> Layer:
    """What every image has beside its programs."""
    if not CERTIFICATES.exists():
        fail(f"{CERTIFICATES} is missing: apt-get install ca-certificates")
    layer = Layer()
    layer.folders["/tmp"] = 0o1777
    layer.add("/etc/passwd", f"root:x:0:0:root:/:/sbin/nologin\nremoe:x:{USER}:{USER}:remoe:/:/sbin/nologin\n".encode())
    layer.add("/etc/group", f"root:x:0:\nremoe:x:{USER}:\n".encode())
    layer.add("/etc/nsswitch.conf", b"passwd: files\ngroup: files\nhosts: files dns\n")
    layer.add(str(CERTIFICATES), CERTIFICATES)
    return layer


def configuration(title: str, version: str, entrypoint: str, environment: dict[str, str]) -> dict:
    variables = {"PATH": "/usr/bin", "SSL_CERT_FILE": str(CERTIFICATES)} | environment
    return {
        "User": f"{USER}:{USER}",
        "WorkingDir": "/",
        "Entrypoint": [entrypoint],
        "Env": [f"{name}={value}" for name, value in sorted(variables.items())],
        "Labels": {
            "org.opencontainers.image.title": title,
            "org.opencontainers.image.version": version,
            "org.opencontainers.image.source": "https://github.com/remoe/remoe",
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    }


def image(name: str, given: argparse.Namespace, out: Path, torch: Path | None) -> None:
    title, programs = IMAGES[name]
    version, is_cuda = given.version, name == "main-cuda"

    def path_of(binary: str) -> Path:
        return (given.cuda_binaries if is_cuda and binary in TORCH_PROGRAMS else given.binaries) / binary

    programs = {name: path_of(binary or name) for name, _, binary in (each.partition("=") for each in programs)}
    missing = [str(path) for path in programs.values() if not path.is_file()]
    if missing:
        fail(f"{', '.join(missing)} not found: build with `make build` or `make image-cuda`, or name other folders with --binaries, --cuda-binaries")
    # What changes least comes first, so that a node keeps it when only the programs change.
    system, own, top = base(), Layer(), Layer()
    # With CUDA most libraries are loaded when an operation first needs them: all go with it.
    late = sorted(torch.glob("*.so*")) if torch is not None and is_cuda else []
    for program, path in programs.items():
        top.add(f"/usr/bin/{program}", path, 0o755)
    for library in late:
        own.add(f"{LIBRARIES}/{library.name}", library.resolve(), 0o755)
    for path in [*programs.values(), *late]:
        for asked, file in shared_libraries(path).items():
            if torch is not None and Path(asked).is_relative_to(torch):
                own.add(f"{LIBRARIES}/{Path(asked).name}", file, 0o755)
            else:
                system.add(asked, file, 0o755)
    layers = [system, *([own] if own.files else []), top]
    environment = {"LD_LIBRARY_PATH": LIBRARIES} if own.files else {}
    if is_cuda:
        # What NVIDIA's container runtime puts in beside the devices.
        environment["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    reference = f"{REGISTRY}/remoe-{name}:{version}"
    digest = write_image(out, reference, layers, configuration(title, version, f"/usr/bin/{next(iter(programs))}", environment))
    print(f"{reference}  {digest}  {out.stat().st_size / 1e6:.1f} MB  {out}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", nargs="+", choices=[*IMAGES], help="which images")
    parser.add_argument("--binaries", type=Path, default=REPOSITORY / "target/release", help="where the programs lie")
    parser.add_argument("--cuda-binaries", type=Path, default=REPOSITORY / "target/cuda/release", help="where programs lie that were linked with CUDA")
    parser.add_argument("--folder", type=Path, default=REPOSITORY / "target/images", help="where the tars go")
    parser.add_argument("--version", default=workspace_version(), help="tag of the images (default: the workspace's version)")
    given = parser.parse_args()
    torch = {"main-torch": (), "main-cuda": ("--cuda",)}
    torch = {name: libtorch(*flags) for name, flags in torch.items() if name in given.image}
    for name in dict.fromkeys(given.image):
        image(name, given, given.folder / f"remoe-{name}.tar", torch.get(name))


if __name__ == "__main__":
    main()
