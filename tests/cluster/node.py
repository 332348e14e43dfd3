"""The first process inside a cluster's namespaces: sets the node up, starts its parts, keeps them running.

It is the init of a process namespace, so when it ends, for whatever reason, the kernel ends every part,
shim and container, and with the last of them go the mounts and the network. That is how a cluster is
taken down, and why nothing can be left over.

    unshare --net --mount --pid --ipc ... python3 node.py /var/lib/remoe-test-cluster/NAME
"""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import parts
from api import Api
from layout import API_PORT, API_SERVICE, NODE_CPUS, PRIVATE, SERVICE_RANGE, Cluster

LINK_DEADLINE_S = 30
START_DEADLINE_S = 300
RESTART_AFTER_S = 1.0


def log(message: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {message}", flush=True)


def run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30)


def mounts() -> None:
    for folder in PRIVATE:
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)


def processors() -> None:
    """Show the kubelet NODE_CPUS processors, and the topology of the real ones.

    Where sysfs has no NUMA nodes it counts the folders of processors, and leaves those without a
    topology out of cpusets (cadvisor, utils/sysinfo: getCPUTopology). Containers see a sysfs of their own.
    """
    real = sorted(os.sched_getaffinity(0))
    for folder in ("/sys/devices/system/node", "/sys/devices/system/cpu"):
        run("mount", "-t", "tmpfs", "-o", "mode=755", "tmpfs", folder)
    for number in {*real, *range(NODE_CPUS)}:
        Path(f"/sys/devices/system/cpu/cpu{number}").mkdir()
    for number in real:
        topology = Path(f"/sys/devices/system/cpu/cpu{number}/topology")
        topology.mkdir()
        (topology / "core_id").write_text(f"{number}\n")
        (topology / "physical_package_id").write_text("0\n")


def network(cluster: Cluster) -> None:
    """Address the node's end of the link, which the host moves into this namespace."""
    deadline = time.monotonic() + LINK_DEADLINE_S
    while subprocess.run(["ip", "link", "show", "eth0"], capture_output=True, timeout=30).returncode:
        if time.monotonic() > deadline:
            sys.exit(f"node: no eth0 appeared within {LINK_DEADLINE_S} s")
        time.sleep(0.02)
    run("ip", "link", "set", "lo", "up")
    run("ip", "address", "add", f"{cluster.node_address}/30", "dev", "eth0")
    run("ip", "link", "set", "eth0", "up")
    run("ip", "route", "add", "default", "via", cluster.host_address)
    run("ip", "address", "add", f"{API_SERVICE}/32", "dev", "lo")
    # No kube-proxy: other service addresses lead nowhere, and say so at once.
    run("ip", "route", "add", "unreachable", SERVICE_RANGE)
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")


class Supervisor:
    """Starts parts and starts them again when they end, as a service manager would."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        self.lock = threading.Lock()
        self.running: dict[int, parts.Part] = {}

    def start(self, part: parts.Part) -> None:
        log_file = os.open(self.cluster.logs / f"{part.name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        actions = [(os.POSIX_SPAWN_DUP2, log_file, 1), (os.POSIX_SPAWN_DUP2, log_file, 2)]
        environment = os.environ | {"TMPDIR": str(self.cluster.root / "tmp")}
        with self.lock:
            pid = os.posix_spawn(part.command[0], part.command, environment, file_actions=actions, setsid=True)
            self.running[pid] = part
        os.close(log_file)
        log(f"{part.name} started as {pid}")

    def reap(self) -> None:
        """Collect whatever ends, adopted orphans too, for ever."""
        while True:
            pid, status = os.waitpid(-1, 0)
            with self.lock:
                part = self.running.pop(pid, None)
            if part is not None:
                log(f"{part.name} ended with status {os.waitstatus_to_exitcode(status)}, starting it again")
                threading.Timer(RESTART_AFTER_S, self.start, [part]).start()


def wait_until(what: str, condition) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            log(f"{what} was not ready within {START_DEADLINE_S} s")
            os._exit(1)
        time.sleep(0.1)
    log(f"{what} is ready")


def start_in_order(supervisor: Supervisor) -> None:
    """The rest, once the API server answers: its clients would only end and start again before."""
    cluster = supervisor.cluster
    supervisor.start(parts.api_server(cluster))
    wait_until(f"the API server on port {API_PORT}", Api(cluster).ready)
    supervisor.start(parts.controller_manager(cluster))
    if not cluster.fast:
        supervisor.start(parts.scheduler(cluster))
        wait_until("containerd", cluster.containerd_socket.exists)
        supervisor.start(parts.kubelet(cluster))


def main() -> None:
    cluster = Cluster.read(Path(sys.argv[1]))
    if cluster is None:
        sys.exit(f"node: {sys.argv[1]} holds no cluster")
    mounts()
    if not cluster.fast:
        processors()
    network(cluster)
    parts.write_settings(cluster)
    supervisor = Supervisor(cluster)
    supervisor.start(parts.etcd(cluster))
    if not cluster.fast:
        supervisor.start(parts.containerd(cluster))
    threading.Thread(target=start_in_order, args=[supervisor], daemon=True).start()
    supervisor.reap()


if __name__ == "__main__":
    main()
