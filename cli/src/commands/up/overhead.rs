//! What this process itself costs: gateway and launcher.

use crate::machine;
use remoe_gateway::Books;
use remoe_ledger::{Carry, Rate, SIGN_OF_LIFE};
use remoe_profile::Prices;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Gives the ledger signs of life, with what this process has cost since the last one: its CPU time by the price of
/// cores, and its memory by that of memory.
pub(super) struct Overhead {
    books: Arc<Books>,
    core: Rate,
    gigabyte: f64,
    carries: (Carry, Carry),
    cpu: Duration,
    since: Instant,
}

impl Overhead {
    pub(super) fn new(books: Arc<Books>, prices: &Prices) -> Self {
        Self {
            books,
            core: Rate::per_second(prices.cpu_core_hour / 3600.0),
            gigabyte: prices.memory_gb_hour / 3600.0,
            carries: Default::default(),
            cpu: machine::cpu_time().unwrap_or_default(),
            since: Instant::now(),
        }
    }

    /// Until it is dropped.
    pub(super) async fn keep(mut self) {
        loop {
            tokio::time::sleep(SIGN_OF_LIFE).await;
            self.note();
        }
    }

    fn note(&mut self) {
        let nanoseconds = |time: Duration| time.as_nanos() as u64;
        let (cpu, now) = (machine::cpu_time().unwrap_or(self.cpu), Instant::now());
        let memory = Rate::per_second(self.gigabyte * machine::resident_bytes().unwrap_or(0.0) / 1e9);
        let (cores, bytes) = &mut self.carries;
        let overhead = cores.charge(self.core, nanoseconds(cpu.saturating_sub(self.cpu)))
            + bytes.charge(memory, nanoseconds(now - self.since));
        (self.cpu, self.since) = (cpu, now);
        self.books.alive(overhead);
    }
}

impl Drop for Overhead {
    fn drop(&mut self) {
        self.note();
    }
}
