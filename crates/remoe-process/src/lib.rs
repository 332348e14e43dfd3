//! Common parts of every function process: it announces where it listens, writes structured logs, serves its metrics,
//! reads sizes and durations, drains on SIGTERM and never outlives its launcher.

mod age;
mod announce;
mod beside;
mod duration;
mod guard;
mod listen;
mod loading;
mod logs;
mod metrics;
mod shortage;
mod shutdown;
mod size;

pub use age::process_start;
pub use announce::{Announcement, Role, announce};
pub use beside::beside;
pub use duration::{
    DurationError, format_duration, parse_duration, parse_duration_or_seconds, whole_microseconds,
    whole_seconds,
};
pub use guard::{GuardError, end_with_launcher};
pub use listen::listen;
pub use loading::load_unless_stopped;
pub use logs::init_logs;
pub use metrics::{
    function_registry, program_registry, refused_connections, render as render_metrics, serve_metrics,
};
pub use shortage::{address_space_left, descriptors_for_runtime};
pub use shutdown::shutdown_on_signal;
pub use size::{SizeError, parse_size, sizes};
