//! A remote-expert function under measurement.

use crate::certificates::Certificates;
use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::process::ChildProcess;
use remoe_process::Announcement;
use remoe_proto::ForwardClient;
use std::path::Path;
use std::process::Command;

/// A running remote-expert function.
#[derive(Debug)]
pub(crate) struct RemoteFunction {
    pub(crate) announcement: Announcement,
    certificates: Option<Certificates>,
    _process: ChildProcess,
}

impl RemoteFunction {
    /// Starts one that hosts `experts` (`0:0-7`: experts 0 to 7 of layer 0), with the threads that a
    /// launcher gives it, within TLS where there are `certificates`; returns when it has announced itself.
    pub(crate) fn start(
        context: &BenchContext,
        model: &Path,
        experts: &str,
        certificates: Option<Certificates>,
    ) -> Result<Self> {
        let mut command = Command::new(context.program("remote-expert-fn")?);
        command.arg("--model").arg(model).args(["--experts", experts]);
        command.arg("--launcher-pid").arg(std::process::id().to_string());
        command.env("REMOE_LOG", "warn");
        if let Some(certificates) = &certificates {
            command.arg("--identity-dir").arg(certificates.of_remote());
        }
        let mut process = ChildProcess::start("remote-expert-fn", command)?;
        let line = process.line()?;
        let announcement =
            serde_json::from_str(&line).doing(|| format!("reading the announcement {line:?}"))?;
        Ok(Self { announcement, certificates, _process: process })
    }

    /// A stream to it that asks one question at a time, as the engine does.
    pub(crate) fn forward_client(&self) -> Result<ForwardClient> {
        let trust = self.certificates.as_ref().map(Certificates::trust);
        ForwardClient::open(&self.announcement.grpc.to_string(), trust)
            .doing(|| "connecting to a remote function")
    }
}
