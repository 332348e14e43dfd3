"""The host's side of a cluster: its namespaces, link, cgroups and files, made and removed."""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

from layout import PRIVATE, SLOTS, STATE, Cluster

CGROUPS = Path("/sys/fs/cgroup")
NODE_PROGRAM = Path(__file__).resolve().parent / "node.py"
END_DEADLINE_S = 30


@contextmanager
def lock():
    """Only one cluster is made or removed at a time: they choose slots and share mount points."""
    STATE.mkdir(parents=True, exist_ok=True)
    with open(STATE / ".lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def clusters() -> list[Cluster]:
    return [found for each in sorted(STATE.glob("*/")) if (found := Cluster.read(each))]


def free_slot() -> int:
    """The lowest share of the addresses that neither a cluster nor anything else on this host has."""
    taken = {cluster.slot for cluster in clusters()}
    routes = json.loads(subprocess.run(["ip", "-json", "route"], capture_output=True, check=True, timeout=30).stdout)
    networks = {route["dst"].rsplit(".", 1)[0] for route in routes}
    for slot in range(SLOTS):
        if slot not in taken and not {f"198.18.{slot}", f"198.19.{slot}"} & networks:
            return slot
    raise RuntimeError(f"all {SLOTS} address ranges of test clusters are taken: take one down")


def start_time(pid: int) -> str | None:
    """What tells a process from a later one of the same number, this boot's from another's."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # A process that has ended and was not collected is none (state Z, proc(5)).
    return None if fields[0] == "Z" else f"{boot}/{fields[19]}"


def init_pid(cluster: Cluster) -> int | None:
    """The init of the cluster's namespaces, as the host counts processes, if it runs."""
    try:
        recorded = json.loads((cluster.root / "init.json").read_text())
    except (FileNotFoundError, ValueError):
        return None
    return recorded["pid"] if start_time(recorded["pid"]) == recorded["start_time"] else None


def start(cluster: Cluster) -> None:
    """Make namespaces, link and cgroups and start the node inside them."""
    for folder in PRIVATE:
        Path(folder).mkdir(parents=True, exist_ok=True)
    make_cgroups(cluster)
    with open(cluster.logs / "node.log", "ab") as log:
        # unshare waits outside for the init that it has started, and each ends with the other.
        outer = subprocess.Popen(
            [
                "unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--propagation", "slave",
                "--mount-proc", sys.executable, str(NODE_PROGRAM), str(cluster.root),
            ],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
        )  # fmt: skip
    pid = child(outer)
    (cluster.root / "init.json").write_text(json.dumps({"pid": pid, "start_time": start_time(pid)}))
    for command in (
        ["ip", "link", "add", cluster.link, "type", "veth", "peer", "name", "eth0", "netns", str(pid)],
        ["ip", "address", "add", f"{cluster.host_address}/30", "dev", cluster.link],
        ["ip", "link", "set", cluster.link, "up"],
        ["ip", "route", "add", cluster.pod_range, "via", cluster.node_address],
    ):
        subprocess.run(command, check=True, timeout=30)


def refusal() -> str | None:
    """What this host does not let root do, as containers without privileges do not."""
    namespaces = ["unshare", "--net", "--mount", "--pid", "--ipc", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([*namespaces, "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, text=True, timeout=30)
    if tried.returncode != 0:
        return f"namespaces and mounts are not permitted here: {tried.stderr.strip()}"
    trial = f"remoe-test-cluster-trial-{os.getpid()}"
    try:
        for hierarchy in hierarchies():
            (hierarchy / trial).mkdir()
            (hierarchy / trial).rmdir()
    except OSError as error:
        return f"control groups cannot be made here: {error}"
    return None


def child(outer: subprocess.Popen) -> int:
    """The process that unshare forks once the namespaces are there."""
    deadline = time.monotonic() + END_DEADLINE_S
    while outer.poll() is None and time.monotonic() < deadline:
        if found := Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split():
            return int(found[0])
        time.sleep(0.01)
    raise RuntimeError(f"unshare made no namespaces (status {outer.poll()}): this takes root, see logs/node.log")


def remove(cluster: Cluster) -> None:
    """Remove everything that a cluster has, running, half made or left over from a crash."""
    if (pid := init_pid(cluster)) is not None:
        os.kill(pid, signal.SIGKILL)
        wait_for(f"process {pid} to end", lambda: start_time(pid) is None)
    if Path(f"/sys/class/net/{cluster.link}").exists():
        subprocess.run(["ip", "link", "delete", cluster.link], capture_output=True, timeout=30)
        wait_for(f"interface {cluster.link} to go", lambda: not Path(f"/sys/class/net/{cluster.link}").exists())
    remove_cgroups(cluster)
    # cluster.json goes last: as long as it is there, the rest can be found.
    for entry in cluster.root.iterdir():
        if entry.name != "cluster.json":
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    shutil.rmtree(cluster.root)
    if not clusters():
        remove_mount_points()


def remove_mount_points() -> None:
    """The empty folders that the last cluster leaves: those in use by others are not empty."""
    for folder in PRIVATE:
        try:
            os.rmdir(folder)
        except OSError:
            continue


def wait_for(what: str, condition) -> None:
    deadline = time.monotonic() + END_DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise RuntimeError(f"waited {END_DEADLINE_S} s for {what}")
        time.sleep(0.02)


def hierarchies() -> list[Path]:
    """The roots of the cgroup tree (version 2) or trees (version 1)."""
    if (CGROUPS / "cgroup.controllers").exists():
        return [CGROUPS]
    return [each for each in CGROUPS.iterdir() if each.is_dir() and not each.is_symlink()]


def make_cgroups(cluster: Cluster) -> None:
    """The kubelet wants its root cgroup to be there."""
    for hierarchy in hierarchies():
        group = hierarchy / cluster.cgroup
        group.mkdir(exist_ok=True)
        if (hierarchy / "cpuset.cpus").exists() and (group / "cpuset.cpus").exists():
            # Version 1 makes it empty, and nothing can run in it.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((hierarchy / name).read_text())


def remove_cgroups(cluster: Cluster) -> None:
    for hierarchy in hierarchies():
        root = hierarchy / cluster.cgroup
        if not root.exists():
            continue
        for folder, _, _ in os.walk(root, topdown=False):
            # Processes that were killed leave their group a moment later.
            wait_for(f"cgroup {folder} to empty", lambda: removed(folder))


def removed(folder: str) -> bool:
    try:
        os.rmdir(folder)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True
