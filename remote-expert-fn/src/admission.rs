//! Admission control and load shedding of a remote-expert function: bounds the accepted requests and their bytes.

use prometheus::IntGauge;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// Limits on accepted work, and its present amount.
pub(crate) struct Admission {
    max_requests: usize,
    max_bytes: usize,
    requests: AtomicUsize,
    bytes: AtomicUsize,
    is_draining: AtomicBool,
    idle: Notify,
    gauges: InFlightGauges,
}

/// Gauges of accepted work.
#[derive(Clone)]
pub(crate) struct InFlightGauges {
    /// Number of requests.
    pub(crate) requests: IntGauge,
    /// Bytes of requests and their answers.
    pub(crate) bytes: IntGauge,
}

/// Permit of an accepted request, which releases its share of the limits on drop.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    bytes: usize,
}

impl Admission {
    /// Creates an admission control that updates `gauges`.
    pub(crate) fn new(max_requests: usize, max_bytes: usize, gauges: InFlightGauges) -> Arc<Self> {
        Arc::new(Self {
            max_requests,
            max_bytes,
            requests: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            is_draining: AtomicBool::new(false),
            idle: Notify::new(),
            gauges,
        })
    }

    /// Admits one request of `bytes`, with its answer. Returns `None` if it would exceed a limit.
    pub(crate) fn admit(self: &Arc<Self>, bytes: usize) -> Option<Permit> {
        // Counts first and checks then, so that two streams cannot both take the last share.
        let permit = Permit { admission: self.clone(), bytes };
        let requests = self.requests.fetch_add(1, Ordering::AcqRel) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.gauges.requests.inc();
        self.gauges.bytes.add(permit.bytes as i64);
        (requests <= self.max_requests && bytes <= self.max_bytes).then_some(permit)
    }

    /// Returns the number of requests accepted and not yet answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.load(Ordering::Acquire)
    }

    /// Starts to drain: callers must admit no more work.
    pub(crate) fn drain(&self) {
        self.is_draining.store(true, Ordering::Release);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.is_draining.load(Ordering::Acquire)
    }

    /// Waits until all accepted work is answered.
    pub(crate) async fn wait_until_idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.in_flight() == 0 {
                return;
            }
            idle.await;
        }
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.admission.gauges.requests.dec();
        self.admission.gauges.bytes.sub(self.bytes as i64);
        self.admission.bytes.fetch_sub(self.bytes, Ordering::AcqRel);
        if self.admission.requests.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.admission.idle.notify_waiters();
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::{Admission, InFlightGauges};
    use prometheus::IntGauge;
    use std::sync::Arc;

    fn admission() -> Arc<Admission> {
        let gauge = |name| IntGauge::new(name, "help").unwrap();
        Admission::new(2, 100, InFlightGauges { requests: gauge("requests"), bytes: gauge("bytes") })
    }

    #[test]
    fn limits_hold_and_dropped_permits_return_their_share() {
        let admission = admission();
        let first = admission.admit(60).unwrap();
        assert!(admission.admit(41).is_none(), "bytes");
        let second = admission.admit(40).unwrap();
        assert!(admission.admit(0).is_none(), "requests");
        assert_eq!(admission.in_flight(), 2);
        assert_eq!((admission.gauges.requests.get(), admission.gauges.bytes.get()), (2, 100));
        drop((first, second));
        assert_eq!(admission.in_flight(), 0);
        assert_eq!((admission.gauges.requests.get(), admission.gauges.bytes.get()), (0, 0));
        assert!(admission.admit(100).is_some());
    }

    #[tokio::test]
    async fn wait_until_idle_ends_with_the_last_permit() {
        let admission = admission();
        let permit = admission.admit(1).unwrap();
        let waiter = tokio::spawn({
            let admission = admission.clone();
            async move { admission.wait_until_idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(permit);
        waiter.await.unwrap();
    }
}
