#!/usr/bin/env python3
"""A real Kubernetes cluster on this host, for tests: no container registry, nothing shared with the host.

    cluster.py up [--fast]     start it, print where its kubeconfig is
    cluster.py env             print what a shell needs to use it: eval "$(tests/cluster/cluster.py env)"
    cluster.py load TAR...     put images on its node
    cluster.py volume ...      make a claim that holds a folder of this host
    cluster.py status          which clusters there are
    cluster.py check           whether one can be made here; if not, why, and status 1
    cluster.py prepare         install and build what it consists of
    cluster.py down            remove it and everything it left

etcd, API server, controller manager, scheduler, kubelet and containerd run in namespaces of their own
(docs/cluster.md). `up`, `load` and `down` need root. `up` and `down` may be repeated, also
after a crash. Clusters of different --name stand side by side.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
from pathlib import Path

# The writer of images, which no package installs.
sys.path.append(str(Path(__file__).resolve().parents[2] / "deploy/images"))

import binaries
import host
import oci
import parts
import pki
from api import Api
from layout import STATE, Cluster

# Commands that are needed, and the Debian package that has each.
PROGRAMS = {"ip": "iproute2", "openssl": "openssl", "unshare": "util-linux", "mount": "mount"}
NODE_PROGRAMS = {"runc": "runc", "prometheus": "prometheus"}
UP_DEADLINE_S = 180
APT_DEADLINE_S = 900
LOAD_DEADLINE_S = 600
# At the end of each log, when the cluster does not come up.
LOG_LINES = 15


def fail(message: str) -> None:
    sys.exit(f"cluster: {message}")


def note(message: str) -> None:
    print(f"cluster: {message}", file=sys.stderr, flush=True)


def need_root() -> None:
    if os.geteuid() != 0:
        fail("this needs root: it makes network and mount namespaces")


def missing_packages(fast: bool) -> list[str]:
    programs = PROGRAMS if fast else PROGRAMS | NODE_PROGRAMS
    missing = {package for program, package in programs.items() if shutil.which(program) is None}
    if not fast:
        if any(parts.containerd_program(name) is None for name in ("containerd", "ctr")):
            missing.add("containerd")
        if parts.cni_folder() is None:
            missing.add("containernetworking-plugins")
    return sorted(missing)


def install(fast: bool) -> None:
    """Install what is missing, where the host is a Debian."""
    if not (missing := missing_packages(fast)):
        return
    names = " ".join(missing)
    if shutil.which("apt-get") is None:
        fail(f"install these, under the names that your distribution gives them: {names}")
    note(f"installing {names}")
    # No service of the host is to be started by them.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    command = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    run = lambda command: subprocess.run(command, stdout=sys.stderr, env=environment, timeout=APT_DEADLINE_S).returncode
    if run(command) != 0 and (run(["apt-get", "update"]) != 0 or run(command) != 0):
        fail(f"apt-get could not install {names}; see its message above")


def obstacle() -> str | None:
    """Why no cluster can be made here, as far as can be told beforehand."""
    if os.geteuid() != 0:
        return "root is needed to make network and mount namespaces"
    missing = missing_packages(fast=False)
    if missing and shutil.which("apt-get") is None:
        return f"{' '.join(missing)} are missing, and there is no apt-get to install them"
    try:
        binaries.available()
    except binaries.Missing as error:
        return str(error)
    return host.refusal()


def find(name: str) -> Cluster:
    cluster = Cluster.read(STATE / name)
    if cluster is None or host.init_pid(cluster) is None:
        fail(f"no cluster {name!r} is running: start it with {sys.argv[0]} up --name {name}")
    return cluster


def up(name: str, fast: bool) -> None:
    need_root()
    started = time.monotonic()
    install(fast)
    folder = binaries.folder()
    with host.lock():
        cluster = Cluster.read(STATE / name)
        running = cluster is not None and host.init_pid(cluster) is not None
        if running and cluster.fast and not fast:
            fail(f"cluster {name!r} is running without a node (--fast): take it down first")
        if not running:
            if cluster is not None:
                note(f"removing what is left of an earlier cluster {name!r}")
                host.remove(cluster)
            cluster = Cluster(name, host.free_slot(), fast, str(folder))
            try:
                make(cluster)
            except (OSError, RuntimeError, subprocess.SubprocessError) as error:
                host.remove(cluster)
                fail(f"cluster {name!r} could not be started: {error}")
    wait(cluster)
    note(f"{name!r} is ready after {time.monotonic() - started:.1f} s")
    print(cluster.kubeconfig)


def make(cluster: Cluster) -> None:
    cluster.write()
    for each in ("logs", "run", "tmp", "volumes", "pod-logs"):
        (cluster.root / each).mkdir()
    pki.make(cluster)
    host.start(cluster)


def wait(cluster: Cluster) -> None:
    """Until pods can be made, or until nothing can be made of it."""
    api = Api(cluster)
    until(cluster, "the API server", api.ready)
    if not cluster.fast:
        until(cluster, "containerd", lambda: ctr(cluster, "version").returncode == 0)
        load_pause(cluster)
        until(cluster, "the node", api.node_ready)
    until(cluster, "the default service account", api.default_account_exists)


def until(cluster: Cluster, what: str, condition) -> None:
    deadline = time.monotonic() + UP_DEADLINE_S
    while not condition():
        if host.init_pid(cluster) is None or time.monotonic() > deadline:
            print_logs(cluster)
            fail(f"{what} did not become ready; the logs end as above and lie in {cluster.logs}")
        time.sleep(0.1)


def print_logs(cluster: Cluster) -> None:
    for log in sorted(cluster.logs.glob("*.log")):
        if log == cluster.audit_log:
            continue
        note(f"--- {log}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-LOG_LINES:]), file=sys.stderr)


def ctr(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess:
    command = [parts.containerd_program("ctr"), "--address", str(cluster.containerd_socket), "--namespace", "k8s.io"]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=LOAD_DEADLINE_S)


def load_pause(cluster: Cluster) -> None:
    """The image that holds every pod's namespaces: one static program."""
    tar = cluster.root / "tmp/pause.tar"
    layer = oci.Layer()
    layer.add("/pause", Path(cluster.binaries) / "pause", 0o755)
    oci.write_image(tar, parts.PAUSE_IMAGE, [layer], {"User": "65535:65535", "Entrypoint": ["/pause"]})
    load(cluster, [tar])
    tar.unlink()


def load(cluster: Cluster, tars: list[Path]) -> None:
    """Put images on the node, those that are not there yet."""
    if cluster.fast:
        fail(f"cluster {cluster.name!r} has no node (--fast) to put images on")
    for tar in tars:
        reference, digest = oci.read_name(tar)
        listed = ctr(cluster, "images", "list", f"name=={reference}").stdout
        if digest in listed:
            note(f"{reference} is on the node already")
            continue
        started = time.monotonic()
        done = ctr(cluster, "images", "import", "--snapshotter", parts.snapshotter(cluster), str(tar))
        if done.returncode != 0:
            fail(f"{tar} could not be imported: {done.stderr.strip()}")
        note(f"{reference} is on the node after {time.monotonic() - started:.1f} s")


def environment(cluster: Cluster) -> None:
    """What tests read (tests/e2e), and what makes kubectl and helm work by hand."""
    for name, value in {
        "KUBECONFIG": cluster.kubeconfig,
        "REMOE_E2E_KUBECONFIG": cluster.kubeconfig,
        "REMOE_E2E_TOOLS": cluster.binaries,
        "REMOE_E2E_AUDIT_LOG": cluster.audit_log,
        "REMOE_E2E_CLUSTER": cluster.name,
        "REMOE_E2E_HOST": cluster.host_address,
    }.items():
        print(f"export {name}={value}")
    print(f'export PATH="{cluster.binaries}:$PATH"')


def volume(cluster: Cluster, namespace: str, claim: str, contents: list[str]) -> None:
    """A claim, bound to a folder of the cluster that holds copies of folders of this host."""
    name = f"{namespace}-{claim}"
    folder = cluster.volumes / name
    for entry in contents:
        path, _, source = entry.partition("=")
        target = (folder / path).resolve()
        if not source or not target.is_relative_to(folder.resolve()) or not Path(source).is_dir():
            fail(f"--put {entry!r}: PATH=FOLDER is wanted, a path below the volume and a folder of this host")
        shutil.copytree(source, target, dirs_exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)
    # Any user of a pod may write: the volume is a test's own.
    for each in (folder, *folder.rglob("*")):
        each.chmod(0o777 if each.is_dir() or each.stat().st_mode & 0o100 else 0o666)
    size = {"storage": "10Gi"}
    api = Api(cluster)
    api.create(
        "/api/v1/persistentvolumes",
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                "capacity": size,
                "accessModes": ["ReadWriteMany"],
                "hostPath": {"path": str(folder), "type": "Directory"},
                "storageClassName": "",
                "claimRef": {"namespace": namespace, "name": claim},
            },
        },
    )
    api.create(
        f"/api/v1/namespaces/{namespace}/persistentvolumeclaims",
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim},
            "spec": {
                "accessModes": ["ReadWriteMany"],
                "storageClassName": "",
                "volumeName": name,
                "resources": {"requests": size},
            },
        },
    )
    print(folder)


def down(name: str) -> None:
    need_root()
    with host.lock():
        cluster = Cluster.read(STATE / name)
        if cluster is None:
            note(f"there is no cluster {name!r}")
            return
        host.remove(cluster)
    note(f"{name!r} is gone")


def status() -> None:
    for cluster in host.clusters():
        state = "dead" if host.init_pid(cluster) is None else "running without a node" if cluster.fast else "running"
        print(f"{cluster.name}\t{state}\t{cluster.server}\t{cluster.kubeconfig}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="remoe", help="which cluster (default: remoe)")
    up = commands.add_parser("up", parents=[named], help="start a cluster")
    up.add_argument("--fast", action="store_true", help="only etcd, API server and controller manager: no pods run")
    commands.add_parser("down", parents=[named], help="remove a cluster")
    commands.add_parser("env", parents=[named], help="print what a shell needs to use it")
    commands.add_parser("status", help="list clusters")
    commands.add_parser("check", help="say what stands in the way of a cluster")
    commands.add_parser("prepare", help="install and build what a cluster consists of")
    load = commands.add_parser("load", parents=[named], help="put images on the node")
    load.add_argument("tar", nargs="+", type=Path)
    volume = commands.add_parser("volume", parents=[named], help="make a bound claim")
    volume.add_argument("--namespace", required=True)
    volume.add_argument("--claim", required=True)
    volume.add_argument("--put", action="append", default=[], metavar="PATH=FOLDER", help="copy FOLDER to PATH in it")
    return parser.parse_args()


def main() -> None:
    given = arguments()
    try:
        if given.command == "status":
            return status()
        if given.command == "check":
            if reason := obstacle():
                print(reason)
                sys.exit(1)
            return
        if given.command == "prepare":
            need_root()
            install(fast=False)
            binaries.folder()
            return
        name = Cluster.check(given.name)
        match given.command:
            case "up":
                up(name, given.fast)
            case "down":
                down(name)
            case "env":
                environment(find(name))
            case "load":
                load(find(name), given.tar)
            case "volume":
                volume(find(name), given.namespace, given.claim, given.put)
    except (binaries.Missing, ValueError, RuntimeError) as error:
        fail(str(error))
    except urllib.error.HTTPError as error:
        fail(f"the API server answered {error.code}: {json.loads(error.read()).get('message')}")
    except subprocess.CalledProcessError as error:
        fail(f"{' '.join(map(str, error.cmd))} failed with status {error.returncode}")


if __name__ == "__main__":
    main()
