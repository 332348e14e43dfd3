//! Points in time of the pure step.

use std::time::Duration;

/// Point in time, as the duration since a common origin.
pub type Time = Duration;
