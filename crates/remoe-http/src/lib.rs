//! Common parts of all HTTP fronts: connections that are bounded in number and time, bodies within their
//! limits, request ids, `Host`, calls from browsers, and errors as OpenAI clients expect them.
//!
//! The main function and the gateway answer through the same code, so that a client cannot tell which
//! of them refused it.

mod bearer;
mod body;
mod connections;
mod cors;
mod entropy;
mod error;
mod fallback;
mod host;
pub mod internal_headers;
mod lanes;
mod messages;
mod probes;
mod query;
mod request_id;
mod route;
mod traced;

pub use bearer::{API_KEY, presented_key, same};
pub use body::{parse, receive};
pub use connections::{ConnectionLimits, ConnectionMetrics, serve};
pub use cors::{Origins, allow_origins};
pub use entropy::{random_id, random_u64};
pub use error::{ApiError, ErrorBody, SHOULD_RETRY};
pub use fallback::{unknown_route, wrong_method};
pub use host::check_host;
pub use lanes::{Lanes, Pass};
pub use messages::{MessagesError, is_messages_path, messages_error, shape_messages_errors};
pub use probes::Probes;
pub use query::query;
pub use request_id::{REQUEST_ID, RequestId, stamp_request_id};
pub use route::route_name;
pub use traced::trace_request;
