//! Progress of functions that load weights. It is shown to users, and extends the readiness deadline.

use crate::output::progress::Progress;
use crate::output::table;
use remoe_hub::allocated_bytes;
use remoe_model::Inspection;
use remoe_rollout::{Activity, FunctionState, FunctionStatus, Status};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Interval of polling.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// Bytes that count as progress of reading. Functions read less than this while they only poll the cache.
const READ_PROGRESS_BYTES: u64 = 4 << 20;

/// Progress of the functions of a deployment while they load weights.
pub(crate) struct LoadingProgress {
    pub(crate) inspection: Inspection,
    /// Location of the model, for messages.
    pub(crate) location: String,
    /// Cache folder of a remote model. `None` for a model in a local folder.
    pub(crate) cache: Option<PathBuf>,
    pub(crate) activity: Activity,
}

impl LoadingProgress {
    /// Records and shows the progress of the functions in `status`, until their supervisor ends.
    ///
    /// Fetched bytes are measured as the size of the cache, and read bytes by the kernel's counters. Without counters,
    /// the progress of reading is not shown.
    pub(crate) async fn watch(self, mut status: watch::Receiver<Status>, progress: Arc<Progress>) {
        let started = Instant::now();
        let initial_bytes = self.cached_bytes().await;
        let (mut last_read, mut last_fetched) = (0, initial_bytes);
        if self.cache.is_some() {
            self.activity.begins(self.cache_message(initial_bytes, 0.0));
        }
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let functions = status.borrow_and_update().functions.clone();
            let is_loading = |function: &FunctionStatus| {
                matches!(function.state, FunctionState::Starting | FunctionState::Loading)
            };
            if !functions.iter().any(is_loading) {
                if status.changed().await.is_err() {
                    return;
                }
                continue;
            }
            if status.has_changed().is_err() {
                return;
            }
            let read = functions.iter().filter_map(|function| bytes_read(function.pid?)).sum::<u64>();
            let (total, fetched) = (bytes_to_read(&functions, &self.inspection), self.cached_bytes().await);
            if read > 0 && total > 0 {
                progress.bytes(read.min(total), total);
            }
            // The sum decreases when a function ends.
            last_read = last_read.min(read);
            if fetched > last_fetched {
                (last_read, last_fetched) = (read, fetched);
                let rate = (fetched - initial_bytes) as f64 / started.elapsed().as_secs_f64().max(1e-3);
                self.activity.moved(self.cache_message(fetched, rate));
            } else if read >= last_read + READ_PROGRESS_BYTES {
                last_read = read;
                let (read, total) = (table::bytes(read.min(total)), table::bytes(total));
                self.activity.moved(format!("{read} of {total} of {} are read", self.location));
            }
        }
    }

    /// Formats the cached bytes and the rate of fetching, in bytes per second.
    fn cache_message(&self, fetched: u64, rate: f64) -> String {
        format!(
            "{} of {} of {} are in the cache, {}/s until then",
            table::bytes(fetched),
            table::bytes(self.inspection.total_bytes.max(fetched)),
            self.location,
            table::bytes(rate as u64)
        )
    }

    /// Returns the bytes of the model that are in the cache.
    async fn cached_bytes(&self) -> u64 {
        let Some(folder) = self.cache.clone() else { return 0 };
        // If the folder cannot be read, no progress is shown.
        tokio::task::spawn_blocking(move || allocated_bytes(&folder).unwrap_or(0)).await.unwrap_or(0)
    }
}

/// Returns the bytes of stored weights that all functions read together. Each replica reads its own experts, and the
/// main function reads all weights that no remote function hosts.
fn bytes_to_read(functions: &[FunctionStatus], inspection: &Inspection) -> u64 {
    let remote = functions.iter().flat_map(|function| &function.hosted);
    let hosted: Vec<(u32, u32)> =
        remote.flat_map(|set| set.experts.iter().map(|expert| (set.layer, *expert))).collect();
    let distinct: BTreeSet<_> = hosted.iter().collect();
    let expert_bytes = |experts: usize| (experts as u64).saturating_mul(inspection.expert_bytes);
    inspection
        .total_bytes
        .saturating_sub(expert_bytes(distinct.len()))
        .saturating_add(expert_bytes(hosted.len()))
}

/// Returns the bytes that the process `pid` has read, from the kernel's counter.
fn bytes_read(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn reads_of_this_process_are_counted() {
        let before = bytes_read(std::process::id()).unwrap();
        let size = std::fs::read(std::env::current_exe().unwrap()).unwrap().len() as u64;
        assert!(bytes_read(std::process::id()).unwrap() >= before + size);
    }
}
