//! Command line of the operator.

use super::deployment_policy::{DeploymentPolicy, NameList, PriceList};
use super::exposure::GatewayService;
use super::identity::{Identities, IssuerRef, Signer, SignerName};
use super::manifests::{OperatorEnvironment, PodExtras};
use super::pod_comparison::{PodComparison, PodField};
use super::source_policy::SourcePolicy;
use super::trace_collector::{
    CollectorEndpoint, CollectorPeers, SamplingRatio, TraceCollector, UnknownCollector,
};
use clap::{Parser, Subcommand};
use kube::Client;
use prometheus::IntCounterVec;
use remoe_hub::EgressRule;
use remoe_process::whole_seconds;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

/// Runs MoEDeployments on Kubernetes.
#[derive(Debug, Clone, Parser)]
#[command(name = "remoe-operator", version)]
pub struct Settings {
    /// Command. Default: run the operator.
    #[command(subcommand)]
    pub command: Option<Command>,
    /// Options.
    #[command(flatten)]
    pub run: RunSettings,
}

/// Other commands.
#[derive(Debug, Clone, Subcommand)]
pub enum Command {
    /// Print the definitions of the custom resources.
    Crds {
        /// Write one file per definition into this folder instead.
        #[arg(long, value_name = "FOLDER")]
        out: Option<PathBuf>,
    },
}

/// Options of the operator.
#[derive(Debug, Clone, clap::Args)]
pub struct RunSettings {
    /// Image of main functions.
    #[arg(long, env = "REMOE_MAIN_IMAGE", default_value = concat!("ghcr.io/remoe/remoe-main:", env!("CARGO_PKG_VERSION")))]
    pub main_image: String,
    /// Image of main functions with device cuda.
    #[arg(long, env = "REMOE_MAIN_CUDA_IMAGE", default_value = concat!("ghcr.io/remoe/remoe-main-cuda:", env!("CARGO_PKG_VERSION")))]
    pub main_cuda_image: String,
    /// Image of remote functions and inspectors.
    #[arg(long, env = "REMOE_REMOTE_IMAGE", default_value = concat!("ghcr.io/remoe/remoe-remote-expert:", env!("CARGO_PKG_VERSION")))]
    pub remote_image: String,
    /// Image pull policy: Always, IfNotPresent or Never.
    #[arg(long, env = "REMOE_IMAGE_PULL_POLICY", default_value = "IfNotPresent", value_parser = ["Always", "IfNotPresent", "Never"])]
    pub image_pull_policy: String,
    /// Additions to all function pods as JSON: imagePullSecrets, labels, annotations, env, and arbitraryUser if the
    /// cluster assigns the user.
    #[arg(long, env = "REMOE_PODS", value_name = "JSON", default_value = "{}")]
    pub pods: PodExtras,
    /// Allowed sources of models, separated by commas: HOST[:PORT] with * for any characters, CIDR for addresses that
    /// are not public, !CIDR to refuse addresses.
    #[arg(long, env = "REMOE_ALLOW_SOURCE", value_name = "LIST", value_delimiter = ',', default_value = "*")]
    pub allow_source: Vec<EgressRule>,
    /// Allow spec.model.ambientCredentials: pods that fetch from s3:// may use the role of their account or node.
    #[arg(long, env = "REMOE_ALLOW_AMBIENT_CREDENTIALS")]
    pub allow_ambient_credentials: bool,
    /// Namespaces whose MoEDeployments are served, separated by commas. Default: all.
    #[arg(
        long = "watch-namespace",
        env = "REMOE_WATCH_NAMESPACE",
        value_name = "NAMES",
        value_delimiter = ','
    )]
    pub watch_namespaces: Vec<String>,
    /// Namespace of Prometheus, which network policies allow to scrape functions.
    #[arg(long, env = "REMOE_METRICS_NAMESPACE", default_value = "monitoring")]
    pub metrics_namespace: String,
    /// Namespace of the operator.
    #[arg(long, env = "POD_NAMESPACE", default_value = "remoe-system")]
    pub namespace: String,
    /// Helm release of this operator and its gateways. Gateways of other releases in the namespace are ignored.
    #[arg(long, env = "REMOE_RELEASE", default_value = "remoe")]
    pub release: String,
    /// Name of this operator as the holder of the Lease.
    #[arg(long, env = "POD_NAME", default_value = "remoe-operator")]
    pub identity: String,
    /// Enable leader election with the Lease RELEASE-operator, for several replicas of the operator.
    #[arg(long, env = "REMOE_LEADER_ELECTION")]
    pub leader_election: bool,
    /// Duration of the Lease, such as 15s or a number of seconds; another operator takes over a Lease that was not renewed for this long.
    #[arg(long, env = "REMOE_LEASE_SECONDS", value_name = "TIME", default_value_t = 15, value_parser = whole_seconds::<u16>(1..=3600))]
    pub lease_seconds: u16,
    /// Address of /metrics, /healthz and /readyz. Port 0 selects a free port.
    #[arg(long, env = "REMOE_METRICS_LISTEN", default_value = "127.0.0.1:8080")]
    pub metrics_listen: SocketAddr,
    /// Signer of the certificates for mutual TLS: operator, cert-manager, or none. Without a signer, every peer that
    /// reaches a port of a function is trusted.
    #[arg(long, env = "REMOE_SIGNER", default_value = "none")]
    pub signer: SignerName,
    /// Lifetime of certificates, such as 24h or a number of seconds. They are renewed at half of it.
    #[arg(long, env = "REMOE_CERTIFICATE_SECONDS", value_name = "TIME", default_value_t = 86_400, value_parser = whole_seconds::<u32>(60..=31_536_000))]
    pub certificate_seconds: u32,
    /// Issuer for signer cert-manager.
    #[arg(long, env = "REMOE_ISSUER", default_value = "remoe")]
    pub issuer: String,
    /// Kind of the issuer.
    #[arg(long, env = "REMOE_ISSUER_KIND", default_value = "ClusterIssuer", value_parser = ["ClusterIssuer", "Issuer"])]
    pub issuer_kind: String,
    /// Folder with the operator's own certificate (tls.crt, tls.key, ca.crt) for signer cert-manager.
    #[arg(long, env = "REMOE_IDENTITY_DIR", default_value = "/identity")]
    pub identity_dir: PathBuf,
    /// DNS name of the gateways' Service, as NAME.NAMESPACE.svc.DOMAIN: clients reach deployments through the gateways,
    /// and scale to zero works. Default: clients reach main functions directly.
    #[arg(long, env = "REMOE_GATEWAY", value_name = "NAME")]
    pub gateway: Option<String>,
    /// Gateways serve TLS: status.url begins with https.
    #[arg(long, env = "REMOE_GATEWAY_TLS", requires = "gateway")]
    pub gateway_tls: bool,
    /// Gateways take requests without keys: the condition Exposed says so.
    #[arg(long, env = "REMOE_GATEWAY_OPEN", requires = "gateway")]
    pub gateway_open: bool,
    /// Any namespace can take a short name at the gateways: the condition Exposed says so.
    #[arg(long, env = "REMOE_GATEWAY_ANY_SHORT_NAME", requires = "gateway")]
    pub gateway_any_short_name: bool,
    /// Collector of request traces, by OTLP over gRPC, as http://HOST:PORT. Default: none.
    #[arg(long, env = "REMOE_TRACING_ENDPOINT", value_name = "URL")]
    pub tracing_endpoint: Option<CollectorEndpoint>,
    /// Sampling ratio of traces without a sampling decision of the caller, 0 to 1.
    #[arg(long, env = "REMOE_TRACING_RATIO", value_name = "RATIO", default_value = "0.05")]
    pub tracing_ratio: SamplingRatio,
    /// NetworkPolicyPeers of the collector, as a JSON list. Defaults to the namespace or address in --tracing-endpoint;
    /// required if it has neither.
    #[arg(long, env = "REMOE_TRACING_TO", value_name = "PEERS")]
    pub tracing_to: Option<CollectorPeers>,
    /// Price list as JSON: billing, cpuCoreHour, memoryGBHour, and gpuHour by extended resource. It applies in place of
    /// spec.pricing. Default: spec.pricing of each MoEDeployment applies.
    #[arg(long, env = "REMOE_PRICES", value_name = "JSON")]
    pub prices: Option<PriceList>,
    /// PriorityClasses that MoEDeployments may name, separated by commas. `*`: all but those that begin with system-.
    #[arg(long, env = "REMOE_ALLOWED_PRIORITY_CLASSES", value_name = "NAMES", default_value = "*")]
    pub allowed_priority_classes: NameList,
    /// RuntimeClasses that MoEDeployments may name, separated by commas. `*`: all.
    #[arg(long, env = "REMOE_ALLOWED_RUNTIME_CLASSES", value_name = "NAMES", default_value = "*")]
    pub allowed_runtime_classes: NameList,
    /// Replace a pod whose image is not the one that the operator wrote, also if it never was. Without, pods are replaced
    /// whose image changed after their creation. For clusters whose admission leaves images as they are.
    #[arg(long, env = "REMOE_EXACT_IMAGES")]
    pub exact_images: bool,
    /// Fields of pods that admission of the cluster rewrites, separated by commas: they are not compared with what the
    /// operator wrote. Precedes --exact-images.
    #[arg(long, env = "REMOE_REWRITTEN_FIELDS", value_name = "FIELDS", value_delimiter = ',')]
    pub rewritten_fields: Vec<PodField>,
    /// Concurrent reconciles.
    #[arg(long, env = "REMOE_CONCURRENCY", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    pub concurrency: u16,
    /// Threads for plans, and as many again for plans of wakes. One namespace never has all of them, if there are
    /// several.
    #[arg(long, env = "REMOE_PLANNING_THREADS", default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub planning_threads: u16,
}

impl RunSettings {
    /// Returns the identities that the settings ask for, with the signer of certificates.
    pub(crate) fn identities(&self, client: &Client, writes: IntCounterVec) -> Identities {
        let issuer = || IssuerRef { name: self.issuer.clone(), kind: self.issuer_kind.clone() };
        let signer = match self.signer {
            SignerName::Operator => Signer::Operator,
            SignerName::CertManager => Signer::CertManager(issuer(), self.identity_dir.clone()),
            SignerName::Unsigned => Signer::Unsigned,
        };
        let lifetime = Duration::from_secs(self.certificate_seconds.into());
        Identities::new(signer, lifetime, (&self.namespace, &self.release), client.clone(), writes)
    }

    /// Returns the settings that deployments depend on.
    ///
    /// # Errors
    /// The peers of the collector cannot be derived from its endpoint.
    pub(crate) fn environment(&self) -> Result<OperatorEnvironment, UnknownCollector> {
        let trace_collector = |endpoint: &CollectorEndpoint| {
            TraceCollector::new(endpoint.clone(), self.tracing_ratio.clone(), self.tracing_to.clone())
        };
        Ok(OperatorEnvironment {
            main_image: self.main_image.clone(),
            main_cuda_image: self.main_cuda_image.clone(),
            remote_image: self.remote_image.clone(),
            pull_policy: self.image_pull_policy.clone(),
            sources: SourcePolicy::new(&self.allow_source, self.allow_ambient_credentials),
            pods: self.pods.clone(),
            operator_namespace: self.namespace.clone(),
            metrics_namespace: self.metrics_namespace.clone(),
            release: self.release.clone(),
            signer: self.signer,
            gateway: self.gateway.clone().map(|name| GatewayService {
                name,
                tls: self.gateway_tls,
                open: self.gateway_open,
                any_short_name: self.gateway_any_short_name,
            }),
            uncertified_gateways: false,
            trace_collector: self.tracing_endpoint.as_ref().map(trace_collector).transpose()?,
            comparison: PodComparison {
                exact_images: self.exact_images,
                rewritten: self.rewritten_fields.clone(),
            },
            policy: DeploymentPolicy {
                prices: self.prices.clone(),
                priority_classes: self.allowed_priority_classes.clone(),
                runtime_classes: self.allowed_runtime_classes.clone(),
            },
        })
    }

    /// The Lease that the operators of the release compete for.
    pub(crate) fn lease(&self) -> String {
        format!("{}-operator", self.release)
    }

    pub(crate) fn lease_duration(&self) -> Duration {
        Duration::from_secs(self.lease_seconds.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_may_have_units() {
        let taken = |lease: &str, life: &str| {
            let arguments = ["remoe-operator", "--lease-seconds", lease, "--certificate-seconds", life];
            Settings::try_parse_from(arguments)
                .map(|it| (it.run.lease_seconds, it.run.certificate_seconds))
                .ok()
        };
        assert_eq!(taken("30", "3600"), Some((30, 3600)));
        assert_eq!(taken("30s", "1h"), Some((30, 3600)));
        assert_eq!(taken("2h", "1h"), None);
        assert_eq!(taken("30s", "1s"), None);
    }
}
