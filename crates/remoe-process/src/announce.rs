//! Announcement of a function process to its launcher.

use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::net::SocketAddr;

/// Role of a function process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Main function: engine and HTTP server.
    Main,
    /// Remote-expert function.
    Remote,
}

/// The one JSON line that a function writes to standard output when it accepts connections. The launcher reads it,
/// since the system may choose the ports.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// Role of the process.
    pub role: Role,
    /// gRPC address.
    pub grpc: SocketAddr,
    /// HTTP address for clients; main functions only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
    /// Address of `/metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// Address of HTTP health probes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health: Option<SocketAddr>,
    /// Microseconds from the start of the process to this line.
    pub start_us: u64,
}

/// Writes `announcement` to standard output.
///
/// # Errors
/// Standard output is closed.
pub fn announce(announcement: &Announcement) -> io::Result<()> {
    let mut out = io::stdout().lock();
    serde_json::to_writer(&mut out, announcement)?;
    out.write_all(b"\n")?;
    out.flush()
}
