//! Points in time of the pure step.

use std::time::Duration;

/// A point in time, as the time since an origin that all others have too.
pub type Time = Duration;
