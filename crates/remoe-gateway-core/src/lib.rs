//! Core of the gateway: one address for all models, which stays available while they scale to zero.
//!
//! ```text
//! client ─▶ key ─▶ body (model, stream) ─▶ tenant's limits ─▶ model: admit ─▶ grant ─▶ relay ─▶ client
//!                                                              │    ▲
//!                                                 fair queue ──┘    └── a backend with a free slot
//! ```
//!
//! A request waits in the queue while no main function of its model has a free slot, through a cold start too. The
//! client then gets the main function's answer: status, headers and bytes. The cost of an answer is in the ledger
//! before the last bytes are sent ([`CostAccounting`]). [`remoe_autoscale::scale_to_zero`] decides when a model
//! sleeps. [`queue`] and [`timeline`] are pure. [`Model`] combines them under one lock. All models share one
//! [`PrefixIndex`].
//!
//! Dependencies of modules point downwards: the modules of a line use those of the lines below it.
//!
//! | modules | for |
//! | --- | --- |
//! | `server`, `router` | listeners and paths |
//! | `answer`, `retry`, `relay`, `account`, `bill`, `budget` | a request: admission, retries, relay, accounting |
//! | `authentication`, `key_file`, `listing`, `placement`, `stored_response`, `page` | API keys, and all other paths |
//! | `federation`, `exposition`, `function_page` | `/metrics`, with the metrics of functions |
//! | `gateway` | all models behind one address, and the limits that they share |
//! | `access_log`, `headers`, `request_spans`, `caller`, `keys`, `tenant`, `names`, `endpoint_picker` | clients, and the models that they may use |
//! | `model`, `usage_observer`, `prefix_index`, `queue`, `connector` | one model: its queue, phase and main functions |
//! | `cost_accounting`, `overhead`, `cost_metrics`, `spending`, `metrics` | costs and counts |
//! | `body_budget`, `scrapes`, `responses`, `rate_limit`, `usage_bound`, `stream_ending`, `cost_field`, `timeline` | limits, and parts of answers |
//! | `api`, `request_fields`, `privacy`, `key_entries` | formats of requests, answers and keys files |

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
pub use connector::{Connector, function_uri};
pub use cost_accounting::{Billing, CompletedRequest, CostAccounting, CostAccountingError};
pub use exposition::first_label;
pub use gateway::{Gateway, GatewayOptions};
pub use key_file::KeyFile;
pub use keys::{Keys, KeysError};
pub use metrics::{GatewayMetrics, WakeCause};
pub use model::{
    Backend, DesiredState, Directive, FunctionLine, InactiveGroup, LauncherOrder, Model, ModelLoad,
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
