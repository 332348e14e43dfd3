//! The front door: one address for all models, always there, whatever runs behind it.
//!
//! ```text
//! client ─▶ key ─▶ body (model, stream) ─▶ tenant's limits ─▶ model: enter ─▶ grant ─▶ relay ─▶ client
//!                                                              │    ▲
//!                                            waiting, fairly ──┘    └── a backend with room
//! ```
//!
//! A request is held while its model has nothing that answers, and released when it has. What the client
//! sees then is what the main function sends: status, headers, bytes. What an answer cost is written down before its
//! end leaves ([`CostAccounting`]). [`remoe_autoscale::scale_to_zero`] decides when a model
//! sleeps; [`queue`] and [`timeline`] are pure; [`Model`]
//! joins them under one lock; all models share [`PrefixIndex`]; `relay` moves bytes.
//!
//! Modules use each other in one direction: those of a line use those below it.
//!
//! | modules | for |
//! | --- | --- |
//! | `server`, `router` | listeners and paths |
//! | `answer`, `retry`, `relay`, `account`, `bill`, `budget` | a request: admitted, sent, relayed, accounted for |
//! | `authentication`, `key_file`, `listing`, `placement`, `stored_response`, `page` | API keys, all other paths |
//! | `federation`, `exposition`, `function_page` | `/metrics`, with those of functions |
//! | `gateway` | all models behind one address, and the bounds that they share |
//! | `access_log`, `headers`, `request_spans`, `caller`, `keys`, `tenant`, `names`, `endpoint_picker` | clients, and what they may use |
//! | `model`, `usage_observer`, `prefix_index`, `queue`, `connector` | one model: its queue, phase and main functions |
//! | `cost_accounting`, `overhead`, `cost_metrics`, `spending`, `metrics` | costs and counts |
//! | `body_budget`, `scrapes`, `responses`, `rate_limit`, `usage_bound`, `stream_ending`, `cost_field`, `timeline` | bounds, parts of answers |
//! | `api`, `request_fields`, `privacy`, `key_entries` | formats |

mod access_log;
mod account;
mod answer;
mod api;
mod authentication;
mod bill;
mod body_budget;
mod budget;
mod caller;
mod connector;
mod cost_accounting;
mod cost_field;
mod cost_metrics;
mod endpoint_picker;
mod exposition;
mod federation;
mod function_page;
mod gateway;
mod headers;
mod key_entries;
mod key_file;
mod keys;
mod listing;
mod metrics;
mod model;
mod names;
mod overhead;
mod page;
mod placement;
mod prefix_index;
mod privacy;
mod queue;
mod rate_limit;
mod relay;
mod request_fields;
mod request_spans;
mod responses;
mod retry;
mod router;
mod scrapes;
mod server;
mod spending;
mod stored_response;
mod stream_ending;
mod tenant;
mod timeline;
mod usage_bound;
mod usage_observer;

pub use access_log::{AccessLog, AccessLogFormat, AccessLogTarget, AccessLogTargetError};
pub use connector::{Connector, uri};
pub use cost_accounting::{Billing, CompletedRequest, CostAccounting, CostAccountingError};
pub use exposition::first_label;
pub use gateway::{Gateway, GatewayOptions};
pub use key_file::KeyFile;
pub use keys::{Keys, KeysError};
pub use metrics::{GatewayMetrics, WakeCause};
pub use model::{
    ApartGroup, Backend, DesiredState, Directive, FunctionLine, LauncherOrder, Model, ModelLoad,
    ModelOptions, RunningFunctions,
};
pub use names::ShortNames;
pub use overhead::Overhead;
pub use prefix_index::PrefixIndex;
pub use privacy::Privacy;
pub use remoe_autoscale::scale_to_zero::ScalingPhase;
pub use responses::{ResponseFolderError, ResponseLimits, ResponseStore};
pub use spending::DaySpending;
pub use timeline::{ColdStart, WakeMarks};
pub use usage_observer::UsageObserver;
