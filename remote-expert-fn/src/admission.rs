//! Load shedding of a remote-expert function: accepted work, in requests and bytes, and whether more is taken.

use prometheus::IntGauge;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use tokio::sync::Notify;

/// Bounds on accepted work, and what is in use of them.
pub(crate) struct Admission {
    max_requests: usize,
    max_bytes: usize,
    requests: AtomicUsize,
    bytes: AtomicUsize,
    draining: AtomicBool,
    idle: Notify,
    gauges: Gauges,
}

/// Where what is in use can be seen.
#[derive(Clone)]
pub(crate) struct Gauges {
    /// Requests.
    pub(crate) requests: IntGauge,
    /// Bytes of requests and answers.
    pub(crate) bytes: IntGauge,
}

/// Accepted work; gives its room back when dropped.
pub(crate) struct Permit {
    admission: Arc<Admission>,
    bytes: usize,
}

impl Admission {
    /// `gauges` follow what is accepted.
    pub(crate) fn new(max_requests: usize, max_bytes: usize, gauges: Gauges) -> Arc<Self> {
        Arc::new(Self {
            max_requests,
            max_bytes,
            requests: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            draining: AtomicBool::new(false),
            idle: Notify::new(),
            gauges,
        })
    }

    /// Room for one request of `bytes`, answer included; none when a bound would be passed.
    pub(crate) fn admit(self: &Arc<Self>, bytes: usize) -> Option<Permit> {
        // Taken before it is checked, so that two streams cannot both take the last room.
        let permit = Permit { admission: self.clone(), bytes };
        let requests = self.requests.fetch_add(1, Ordering::AcqRel) + 1;
        let bytes = self.bytes.fetch_add(bytes, Ordering::AcqRel) + bytes;
        self.gauges.requests.inc();
        self.gauges.bytes.add(permit.bytes as i64);
        (requests <= self.max_requests && bytes <= self.max_bytes).then_some(permit)
    }

    /// Requests accepted and not yet answered.
    pub(crate) fn in_flight(&self) -> usize {
        self.requests.load(Ordering::Acquire)
    }

    /// Takes no more work from now on.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Release);
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Acquire)
    }

    /// Waits until no accepted work is left.
    pub(crate) async fn idle(&self) {
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
    use super::{Admission, Gauges};
    use prometheus::IntGauge;
    use std::sync::Arc;

    fn admission() -> Arc<Admission> {
        let gauge = |name| IntGauge::new(name, "help").unwrap();
        Admission::new(2, 100, Gauges { requests: gauge("requests"), bytes: gauge("bytes") })
    }

    #[test]
    fn bounds_hold_and_room_comes_back() {
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
    async fn idle_returns_when_the_last_permit_is_gone() {
        let admission = admission();
        let permit = admission.admit(1).unwrap();
        let waiter = tokio::spawn({
            let admission = admission.clone();
            async move { admission.idle().await }
        });
        tokio::task::yield_now().await;
        assert!(!waiter.is_finished());
        drop(permit);
        waiter.await.unwrap();
    }
}
