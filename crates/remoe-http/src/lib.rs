//! Common parts of the HTTP servers: connections that are bounded in number and time, bodies within their limits,
//! request ids, checks of `Host`, CORS, and errors as OpenAI clients expect them.
//!
//! Main functions and the gateway share this code, so that a client gets the same errors from both.

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

pub use bearer::{API_KEY, constant_time_eq, presented_key};
pub use body::{parse_json, receive_body};
pub use connections::{ConnectionLimits, ConnectionMetrics, serve};
pub use cors::{Origins, allow_origins};
pub use entropy::{random_id, random_u64};
pub use error::{ApiError, ErrorBody, SHOULD_RETRY};
pub use fallback::{unknown_route, wrong_method};
pub use host::check_host;
pub use lanes::{BodyLanes, LanePermit};
pub use messages::{MessagesError, is_messages_path, messages_error, shape_messages_errors};
pub use probes::Probes;
pub use query::query_parameter;
pub use request_id::{REQUEST_ID, RequestId, stamp_request_id};
pub use route::route_name;
pub use traced::trace_request;
