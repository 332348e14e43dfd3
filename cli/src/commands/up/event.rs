//! Events of `up` as JSON.

use super::start::StartTimes;
use crate::deployment::MainReport;
use remoe_process::Role;
use remoe_proto::format_listing;
use remoe_proto::v1::LayerExperts;
use remoe_rollout::{FunctionState, FunctionStatus, MoeLayer, placement};
use serde::Serialize;
use std::net::SocketAddr;

/// An event of `up`, with the state of all functions.
#[derive(Debug, Serialize)]
pub(super) struct UpEvent<'a> {
    /// RFC 3339 in UTC.
    pub(super) time: String,
    pub(super) event: &'a str,
    pub(super) model: &'a str,
    pub(super) endpoint: &'a str,
    pub(super) generation: Option<u64>,
    /// Durations of the start's phases. Only in the first event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) start: Option<&'a StartTimes>,
    /// Size of a planned main function. Only in the first event.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) main: Option<MainReport>,
    pub(super) functions: Vec<FunctionEntry<'a>>,
}

/// State of one function.
#[derive(Debug, Serialize)]
pub(super) struct FunctionEntry<'a> {
    name: &'a str,
    role: Role,
    state: FunctionState,
    pid: Option<u32>,
    /// Address of its gRPC server.
    address: Option<String>,
    /// Address of its HTTP server for the gateway.
    #[serde(skip_serializing_if = "Option::is_none")]
    http: Option<String>,
    /// Address at which clients read its `/metrics`.
    metrics: Option<String>,
    /// Experts in its own memory, as `LAYER:FIRST-LAST,..`.
    experts: String,
}

impl<'a> FunctionEntry<'a> {
    /// Describes a function with `status` of a model with `moe_layers`, of which the experts in `remote` are remote.
    ///
    /// Metrics of a main function are read through `gateway`, which holds its key.
    pub(super) fn of(
        status: &'a FunctionStatus,
        moe_layers: &[MoeLayer],
        remote: &[LayerExperts],
        gateway: SocketAddr,
    ) -> Self {
        let experts = match status.role {
            Role::Main => format_listing(&placement::local_experts(moe_layers, remote)),
            Role::Remote => format_listing(&status.hosted),
        };
        Self {
            name: &status.name,
            role: status.role,
            state: status.state,
            pid: status.pid,
            address: status.grpc.map(|address| address.to_string()),
            http: status.http.map(|address| address.to_string()),
            metrics: status.metrics.map(|address| match status.role {
                Role::Main => gateway.to_string(),
                Role::Remote => address.to_string(),
            }),
            experts,
        }
    }
}
