use serde::{Deserialize, Serialize};
use std::io::{self, Write};
use std::net::SocketAddr;

/// The part that a function process plays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// The main model: LibTorch engine and HTTP front.
    Main,
    /// A remote-expert function.
    Remote,
}

/// The one line that a function writes to standard output, as JSON, when it accepts connections.
/// The launcher reads it: ports can be chosen by the system.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Announcement {
    /// The part that the process plays.
    pub role: Role,
    /// Where it speaks gRPC.
    pub grpc: SocketAddr,
    /// Where it speaks HTTP to users; main functions only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub http: Option<SocketAddr>,
    /// Where it serves `/metrics`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metrics: Option<SocketAddr>,
    /// Where it answers probes by HTTP.
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
