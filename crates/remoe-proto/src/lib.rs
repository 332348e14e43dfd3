//! The gRPC contracts between Remoe's processes, and the one error code of its services.
//!
//! `proto/` holds the contracts; [`v1`] is generated from them, committed, and compared with a fresh generation by a
//! test, so that a build needs no protobuf compiler.
//!
//! [`Code`](v1::Code) travels inside `Forward` answers; [`ServiceError`] is what a service says to
//! its callers, mapped once to a gRPC status and once to an HTTP answer.

mod conversation;
mod counts;
mod error;
pub mod identity;
mod intake;
mod limits;
mod listing;
mod placement;

pub use conversation::{Conversation, PollSettings, TimedRows};
pub use counts::{Counted, CountedCodec, Counts};
pub use error::{ErrorCode, ServiceError};
pub use intake::{
    Incoming, Intake, IntakeLimits, IntakeService, Messages, PeerInfo, Refusal, Socket, TlsHandshake,
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
