//! The gRPC contracts between Remoe's processes, and the error codes of their services.
//!
//! `proto/` has the contracts. [`v1`] is generated from them and committed, so that a build needs no protobuf
//! compiler. A test compares it with a fresh generation.
//!
//! [`Code`](v1::Code) is the error code inside `Forward` replies. [`ServiceError`] is the error of a service to its
//! callers; it maps to one gRPC status and one HTTP status.

mod error;
mod field_limits;
mod forward_client;
pub mod identity;
mod intake;
mod limits;
mod listing;
mod placement;

pub use error::{ErrorCode, ServiceError};
pub use field_limits::{FieldLimits, LimitedCodec, LimitedMessage};
pub use forward_client::{ForwardClient, PollSettings, TimedRows};
pub use intake::{
    ConnectionRefusal, Incoming, Intake, IntakeLimits, IntakeService, MessageStream, PeerInfo, Socket,
    TlsHandshake,
};
pub use limits::{
    GENERATION_STEP, MAX_CONTROL_MESSAGE, MAX_CONTROL_REQUEST, MAX_DESCRIPTION, MAX_ENDPOINTS, MAX_EXPERTS,
    MAX_LAYERS, MAX_MESSAGE, MAX_PAYLOAD, STREAM_WINDOW, WIRE_VERSION, largest_generation,
};
pub use listing::{ListingError, format_listing, parse_listing};
pub use placement::placement_digest;

/// Generated messages, clients and servers of `remoe.v1`.
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic)]
pub mod v1 {
    include!("generated/remoe.v1.rs");
}
