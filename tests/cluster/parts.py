"""What a cluster consists of: the command line and the settings of each part."""

import json
import os
from dataclasses import dataclass
from pathlib import Path

from layout import API_PORT, API_SERVICE, DNS_SERVICE, NODE, SERVICE_RANGE, Cluster

PAUSE_IMAGE = "remoe.test/pause:1"
ETCD = "http://127.0.0.1:2379"
# Where distributions put the CNI plug-ins.
CNI_FOLDERS = ("/usr/lib/cni", "/opt/cni/bin", "/usr/libexec/cni")
CONTAINERD_FOLDERS = ("/usr/bin", "/usr/local/bin", "/usr/sbin")


@dataclass(frozen=True)
class Part:
    name: str
    command: list[str]


def kubernetes(cluster: Cluster, name: str, **flags: object) -> Part:
    """A part of Kubernetes: flags by their names, `_` for `-`."""
    arguments = [f"--{flag.replace('_', '-')}={value}" for flag, value in flags.items()]
    return Part(name, [str(Path(cluster.binaries) / name), *arguments])


def etcd(cluster: Cluster) -> Part:
    return kubernetes(
        cluster, "etcd",
        data_dir=cluster.root / "etcd",
        listen_client_urls=ETCD,
        advertise_client_urls=ETCD,
        listen_peer_urls="http://127.0.0.1:2380",
        log_level="warn",
        # A test's cluster does not outlive the machine.
        unsafe_no_fsync="true",
    )  # fmt: skip


def api_server(cluster: Cluster) -> Part:
    pki = cluster.root / "pki"
    return kubernetes(
        cluster, "kube-apiserver",
        etcd_servers=ETCD,
        bind_address="0.0.0.0",
        secure_port=API_PORT,
        # What the Service `kubernetes` leads to: loopback is refused there.
        advertise_address=cluster.node_address,
        allow_privileged="true",
        authorization_mode="Node,RBAC",
        enable_admission_plugins="NodeRestriction",
        service_cluster_ip_range=SERVICE_RANGE,
        client_ca_file=pki / "ca.crt",
        tls_cert_file=pki / "apiserver.crt",
        tls_private_key_file=pki / "apiserver.key",
        kubelet_client_certificate=pki / "apiserver-kubelet-client.crt",
        kubelet_client_key=pki / "apiserver-kubelet-client.key",
        kubelet_preferred_address_types="InternalIP",
        service_account_issuer="https://kubernetes.default.svc",
        service_account_key_file=pki / "service-accounts.pub",
        service_account_signing_key_file=pki / "service-accounts.key",
        audit_policy_file=cluster.root / "audit-policy.json",
        audit_log_path=cluster.audit_log,
        audit_log_maxsize=200,
        audit_log_maxbackup=1,
    )  # fmt: skip


def controller_manager(cluster: Cluster) -> Part:
    pki = cluster.root / "pki"
    return kubernetes(
        cluster, "kube-controller-manager",
        kubeconfig=pki / "controller-manager.kubeconfig",
        root_ca_file=pki / "ca.crt",
        service_account_private_key_file=pki / "service-accounts.key",
        use_service_account_credentials="true",
        leader_elect="false",
        bind_address="127.0.0.1",
    )  # fmt: skip


def scheduler(cluster: Cluster) -> Part:
    kubeconfig = cluster.root / "pki/scheduler.kubeconfig"
    return kubernetes(
        cluster, "kube-scheduler",
        kubeconfig=kubeconfig,
        authentication_kubeconfig=kubeconfig,
        authorization_kubeconfig=kubeconfig,
        leader_elect="false",
        bind_address="127.0.0.1",
    )  # fmt: skip


def kubelet(cluster: Cluster) -> Part:
    return kubernetes(
        cluster, "kubelet",
        kubeconfig=cluster.root / "pki/kubelet.kubeconfig",
        config=cluster.root / "kubelet.json",
        hostname_override=NODE,
        node_ip=cluster.node_address,
        root_dir=cluster.root / "kubelet",
    )  # fmt: skip


def containerd_program(name: str) -> str | None:
    """Where containerd or ctr lies; a service's PATH often lacks the folder."""
    for folder in CONTAINERD_FOLDERS:
        if os.access(f"{folder}/{name}", os.X_OK):
            return f"{folder}/{name}"
    return None


def containerd(cluster: Cluster) -> Part:
    return Part("containerd", [containerd_program("containerd"), "--config", str(cluster.root / "containerd.toml")])


def cni_folder() -> str | None:
    return next((folder for folder in CNI_FOLDERS if os.access(f"{folder}/bridge", os.X_OK)), None)


def write_settings(cluster: Cluster) -> None:
    """Write the settings that are files."""
    (cluster.root / "audit-policy.json").write_text(json.dumps(AUDIT_POLICY))
    if cluster.fast:
        return
    (cluster.root / "kubelet.json").write_text(json.dumps(kubelet_settings(cluster)))
    (cluster.root / "containerd.toml").write_text(containerd_settings(cluster))
    folder = cluster.root / "cni"
    folder.mkdir(exist_ok=True)
    (folder / "10-bridge.conflist").write_text(json.dumps(cni_settings(cluster)))


# Who asked for what, without the bodies: tests read from it what the operator wrote and what it was
# denied. The cluster's own parts are left out.
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [
        {"level": "None", "userGroups": ["system:nodes", "system:serviceaccounts:kube-system"]},
        {
            "level": "None",
            "users": ["system:kube-controller-manager", "system:kube-scheduler", "system:apiserver", "system:anonymous"],
        },
        {"level": "Metadata"},
    ],
}


def kubelet_settings(cluster: Cluster) -> dict:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "containerRuntimeEndpoint": f"unix://{cluster.containerd_socket}",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.root / "pki/ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{cluster.cgroup}",
        "clusterDNS": [DNS_SERVICE],
        "clusterDomain": "cluster.local",
        "enforceNodeAllocatable": ["pods"],
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "failCgroupV1": False,
        "failSwapOn": False,
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "kubeAPIQPS": 200,
        "kubeAPIBurst": 400,
        "maxPods": 200,
        # A sandboxed host refuses negative values.
        "oomScoreAdj": 0,
        "podLogsDir": str(cluster.root / "pod-logs"),
        "serializeImagePulls": False,
        "shutdownGracePeriod": "0s",
    }


def cni_settings(cluster: Cluster) -> dict:
    return {
        "cniVersion": "0.4.0",
        "name": "remoe-test",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "cni0",
                "isGateway": True,
                "hairpinMode": True,
                # The host has a route to the pods, so their addresses stay as they are.
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": cluster.pod_range}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            }
        ],
    }


def snapshotter(cluster: Cluster) -> str:
    """Overlays cannot lie on an overlay: copy there, where this host is a container itself."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    above = [(mount[1], mount[2]) for mount in mounts if cluster.root.is_relative_to(mount[1])]
    # The longest mount point holds the folder; of equal ones the last hides the others.
    longest = max(len(point) for point, _ in above)
    kind = [kind for point, kind in above if len(point) == longest][-1]
    return "native" if kind == "overlay" else "overlayfs"


def containerd_settings(cluster: Cluster) -> str:
    root = cluster.root
    return f"""version = 2
root = "{root}/containerd"
state = "{root}/run/containerd"

[grpc]
  address = "{cluster.containerd_socket}"

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # A sandboxed host refuses negative values, and every pod with them.
  restrict_oom_score_adj = true
  stream_server_address = "127.0.0.1"

[plugins."io.containerd.grpc.v1.cri".containerd]
  snapshotter = "{snapshotter(cluster)}"
  default_runtime_name = "runc"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
  SystemdCgroup = false

[plugins."io.containerd.grpc.v1.cri".cni]
  bin_dir = "{cni_folder()}"
  conf_dir = "{root}/cni"
  max_conf_num = 1

[plugins."io.containerd.internal.v1.opt"]
  path = "{root}/opt"
"""
