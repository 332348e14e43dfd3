"""Where a test cluster keeps its files, and which addresses it has."""

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path

# Everything that a cluster writes is below one folder that bears its name.
STATE = Path("/var/lib/remoe-test-cluster")

# Folders that containerd, the CNI plug-ins and the kubelet use whatever they are told. Each cluster
# sees a tmpfs of its own there, so that clusters do not meet each other or a containerd of the host.
PRIVATE = (
    "/run/containerd", "/run/netns", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers", "/var/log/pods",
)  # fmt: skip

# The API server listens here, on the node's address and on the first address of the services:
# that makes the in-cluster address of the API server work without kube-proxy.
API_PORT = 443
SERVICE_RANGE = "10.96.0.0/16"
API_SERVICE = "10.96.0.1"
# No server answers here (there is no DNS in the cluster), and routes say so at once.
DNS_SERVICE = "10.96.0.10"
NODE = "node-1"
# What the node says it has, so that the requests of several tests' pods fit beside each other on a
# small host. Limits are the host's own work: pods share its processors.
NODE_CPUS = 16
# A slot is one byte of the addresses below.
SLOTS = 256


@dataclass(frozen=True)
class Cluster:
    """One cluster: its name, its share of the addresses and what it consists of."""

    name: str
    slot: int
    # etcd, API server and controller manager alone: no node, no pod runs.
    fast: bool
    # The folder with kube-apiserver, kubelet and so on.
    binaries: str

    @staticmethod
    def check(name: str) -> str:
        if not re.fullmatch(r"[a-z][a-z0-9-]{0,23}", name):
            raise ValueError(f"--name {name!r}: up to 24 of a-z, 0-9 and '-', a letter first")
        return name

    @property
    def root(self) -> Path:
        return STATE / self.name

    # 198.18.0.0/15 is set apart for tests of networks (RFC 2544), so it is not the network of any host.
    @property
    def host_address(self) -> str:
        return f"198.18.{self.slot}.1"

    @property
    def node_address(self) -> str:
        return f"198.18.{self.slot}.2"

    @property
    def pod_range(self) -> str:
        return f"198.19.{self.slot}.0/24"

    @property
    def link(self) -> str:
        """The host's end of the pair of interfaces that joins host and node."""
        return f"remoe-tc{self.slot}"

    @property
    def cgroup(self) -> str:
        return f"remoe-test-cluster-{self.name}"

    @property
    def server(self) -> str:
        return f"https://{self.node_address}:{API_PORT}"

    @property
    def kubeconfig(self) -> Path:
        return self.root / "kubeconfig"

    @property
    def containerd_socket(self) -> Path:
        return self.root / "run/containerd.sock"

    @property
    def logs(self) -> Path:
        return self.root / "logs"

    @property
    def audit_log(self) -> Path:
        return self.logs / "audit.log"

    @property
    def volumes(self) -> Path:
        """What persistent volumes of this cluster hold, one folder each."""
        return self.root / "volumes"

    def write(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        (self.root / "cluster.json").write_text(json.dumps(asdict(self)))

    @staticmethod
    def read(root: Path) -> "Cluster | None":
        try:
            return Cluster(**json.loads((root / "cluster.json").read_text()))
        except (FileNotFoundError, ValueError, TypeError):
            return None
