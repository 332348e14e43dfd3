//! Ports of the functions' containers.

/// HTTP interface of main functions.
pub(crate) const HTTP_PORT: u16 = 8000;
/// Health probes of all functions. A kubelet reaches its own pods whatever network policies say; the operator probes
/// starting remote functions.
pub(crate) const HEALTH_PORT: u16 = 8081;
/// Control interface of main functions.
pub(crate) const CONTROL_PORT: u16 = 9000;
/// Expert interface of remote functions.
pub(crate) const EXPERT_PORT: u16 = 9001;
/// Metrics of all functions.
pub(crate) const METRICS_PORT: u16 = 9090;
