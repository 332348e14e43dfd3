//! Priority class and queue deadline: fields of all generation routes.

use crate::engine::request::Priority;
use remoe_process::parse_duration;
use remoe_proto::ServiceError;
use std::time::Duration;

/// Priority class and queue deadline of a request.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Urgency {
    pub(super) priority: Priority,
    pub(super) queue_deadline: Option<Duration>,
}

impl Urgency {
    /// Reads the fields `priority` and `queue_deadline`.
    ///
    /// # Errors
    /// Fails if the class is unknown or the deadline is no duration.
    pub(super) fn read(priority: Option<&str>, queue_deadline: Option<&str>) -> Result<Self, ServiceError> {
        let priority = match priority {
            None => Priority::default(),
            Some("interactive") => Priority::Interactive,
            Some("batch") => Priority::Batch,
            Some(other) => {
                let other: String = other.chars().take(64).collect();
                let message = format!("invalid `priority`: expected interactive or batch, got {other:?}");
                return Err(ServiceError::invalid("priority", message));
            }
        };
        let wrong =
            |error| ServiceError::invalid("queue_deadline", format!("invalid `queue_deadline`: {error}"));
        Ok(Self { priority, queue_deadline: queue_deadline.map(parse_duration).transpose().map_err(wrong)? })
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn classes_and_deadlines_are_read_or_refused_by_name() {
        assert_eq!(Urgency::read(None, None).unwrap(), Urgency::default());
        let read = Urgency::read(Some("batch"), Some("1.5s")).unwrap();
        assert_eq!(
            (read.priority, read.queue_deadline),
            (Priority::Batch, Some(Duration::from_millis(1500)))
        );
        for (priority, deadline, field) in [
            (Some("urgent"), None, "priority"),
            (None, Some("soon"), "queue_deadline"),
            (None, Some("0s"), "queue_deadline"),
        ] {
            let error = Urgency::read(priority, deadline).unwrap_err();
            assert_eq!(error.field.as_deref(), Some(field));
        }
    }
}
