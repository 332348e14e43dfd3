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
//! end leaves ([`Books`]). When a model sleeps is [`remoe_autoscale::scale_to_zero`]'s; [`queue`] and [`timeline`] are pure; [`Model`]
//! joins them under one lock; all models share [`Beginnings`]; `relay` moves bytes.

mod access_log;
mod account;
mod answer;
mod api;
mod ask;
mod beginnings;
mod bill;
mod books;
mod budget;
mod caller;
mod connector;
mod cost_field;
mod cost_metrics;
mod course;
mod ending;
mod federation;
mod gateway;
mod key_file;
mod keys;
mod listing;
mod metrics;
mod model;
mod names;
mod overhead;
mod page;
mod picker;
mod placement;
mod queue;
mod rates;
mod relay;
mod responses;
mod room;
mod router;
mod spending;
mod tenant;
mod timeline;
mod usage_bound;
mod witness;

pub use access_log::{AccessLog, AccessLogFormat, AccessLogTarget, AccessLogTargetError};
pub use beginnings::Beginnings;
pub use books::{Answered, Billing, Books, BooksError};
pub use connector::{Connector, uri};
pub use federation::first_label;
pub use gateway::{Gateway, GatewayOptions};
pub use key_file::KeyFile;
pub use keys::{Keys, KeysError, Privacy};
pub use metrics::{GatewayMetrics, WakeCause};
pub use model::{
    ApartGroup, Backend, Directive, FunctionLine, Load, Model, ModelOptions, Running, Want, Wanted,
};
pub use names::ShortNames;
pub use overhead::Overhead;
pub use remoe_autoscale::scale_to_zero::Phase;
pub use responses::{ResponseFolderError, ResponseLimits, ResponseStore};
pub use spending::DaySpending;
pub use timeline::{ColdStart, WakeMarks};
pub use witness::Witness;
