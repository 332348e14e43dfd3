#!/usr/bin/env python3
"""The programs that a cluster consists of: the user's own, or built once from their Go modules."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import cache  # noqa: E402

MODULE = Path(__file__).resolve().parent / "binaries"
KUBERNETES = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kubectl")
ALL = (*KUBERNETES, "helm", "pause")
# By program, the package that it is built from.
PACKAGES = {"pause": "./pause", "kubernetes": "./kubernetes", "helm": "helm.sh/helm/v3/cmd/helm"}
SETTING = "REMOE_CLUSTER_ASSETS"
GO_AT_LEAST = (1, 24)
BUILD_DEADLINE_S = 5400


class Missing(Exception):
    """What is missing and how to get it."""


def folder() -> Path:
    """The folder that holds every program, built when it is not there yet."""
    if given := os.environ.get(SETTING):
        return check_given(Path(given).absolute())
    root = cache.root()
    root.mkdir(parents=True, exist_ok=True)
    ready = built()
    if complete(ready):
        return ready
    # Two builds may start at once: the second waits and then finds the work done.
    with open(root / "cluster.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not complete(ready):
            build(ready)
    return ready


def available() -> None:
    """Raise Missing when the programs are neither there nor can be built."""
    if given := os.environ.get(SETTING):
        check_given(Path(given).absolute())
    elif not complete(built()):
        go()


def built() -> Path:
    """Where programs lie that were built from the modules as they are now."""
    return cache.root() / f"cluster-{kubernetes_version()}-{source_hash()}"


def check_given(given: Path) -> Path:
    missing = [name for name in ALL if not os.access(given / name, os.X_OK)]
    if missing:
        raise Missing(f"{SETTING}={given} has no {', '.join(missing)}: add them, or unset it to have them built")
    return given


def complete(ready: Path) -> bool:
    return all((ready / name).exists() for name in ALL)


def module_version(module: str) -> str:
    """The version of a module that go.mod asks for."""
    (version,) = re.findall(rf"^\s*{re.escape(module)} (v[0-9.]+)", (MODULE / "go.mod").read_text(), re.MULTILINE)
    return version


def kubernetes_version() -> str:
    return module_version("k8s.io/kubernetes")


def link_flags() -> str:
    """Without symbols for debuggers, and with the versions that programs report and charts ask for."""
    version = kubernetes_version()
    major, minor, _ = version.removeprefix("v").split(".")
    variables = {
        "k8s.io/component-base/version.gitVersion": version,
        "k8s.io/component-base/version.gitMajor": major,
        "k8s.io/component-base/version.gitMinor": minor,
        "k8s.io/client-go/pkg/version.gitVersion": version,
        "helm.sh/helm/v3/internal/version.version": module_version("helm.sh/helm/v3"),
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMajor": major,
        "helm.sh/helm/v3/pkg/chartutil.k8sVersionMinor": minor,
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMajor": major,
        "helm.sh/helm/v3/pkg/lint/rules.k8sVersionMinor": minor,
    }
    return " ".join(["-s -w", *(f"-X {name}={value}" for name, value in variables.items())])


def source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(path for path in MODULE.rglob("*") if path.is_file()):
        digest.update(f"{path.relative_to(MODULE)}\0".encode())
        digest.update(path.read_bytes())
    digest.update(repr((PACKAGES, link_flags())).encode())
    return digest.hexdigest()[:12]


def go() -> str:
    """The Go compiler, new enough."""
    found = shutil.which("go") or ("/usr/local/go/bin/go" if os.access("/usr/local/go/bin/go", os.X_OK) else None)
    needed = ".".join(map(str, GO_AT_LEAST))
    if found is None:
        raise Missing(f"no Go compiler found: install Go {needed} or later, or set {SETTING} to a folder with {', '.join(ALL)}")
    said = subprocess.run([found, "env", "GOVERSION"], capture_output=True, text=True, timeout=60).stdout.strip()
    version = re.match(r"go(\d+)\.(\d+)", said)
    if version is None or tuple(map(int, version.groups())) < GO_AT_LEAST:
        raise Missing(f"{found} is {said or 'unusable'}: Go {needed} or later is needed")
    return found


def build(ready: Path) -> None:
    print(f"cluster: building Kubernetes {kubernetes_version()} and helm (some minutes, once)", file=sys.stderr, flush=True)
    compiler = go()
    scratch = ready.with_name(ready.name + ".building")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    for name, package in PACKAGES.items():
        command = [
            compiler, "build", "-trimpath", "-buildvcs=false", "-ldflags", link_flags(),
            "-o", str(scratch / name), package,
        ]  # fmt: skip
        environment = os.environ | {"CGO_ENABLED": "0"}
        result = subprocess.run(command, cwd=MODULE, env=environment, timeout=BUILD_DEADLINE_S)
        if result.returncode != 0:
            raise Missing(f"go could not build {package}; see its message above")
    for name in KUBERNETES:
        (scratch / name).symlink_to("kubernetes")
    shutil.rmtree(ready, ignore_errors=True)
    scratch.rename(ready)


if __name__ == "__main__":
    # Where the programs are, for scripts that use them but do not build them.
    if os.environ.get(SETTING):
        print(folder())
    elif complete(built()):
        print(built())
    else:
        sys.exit(1)
