//! How far functions are with their weights: shown to users, and noted as progress for what has a deadline.

use crate::output::progress::Progress;
use crate::output::table;
use remoe_hub::allocated;
use remoe_model::Inspection;
use remoe_rollout::{Activity, FunctionState, FunctionStatus, Status};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// Bytes that functions must have read since their last progress: less comes of looks at what others fetch.
const READ_STEP: u64 = 4 << 20;

/// Functions that start, and where their progress shows.
pub(crate) struct Loading {
    pub(crate) facts: Inspection,
    /// The model's place, for people.
    pub(crate) place: String,
    /// The part of the cache that it is fetched into, where it is elsewhere.
    pub(crate) cache: Option<PathBuf>,
    pub(crate) activity: Activity,
}

impl Loading {
    /// Notes and shows how far the functions of `status` are with their weights, until their supervisor is gone.
    ///
    /// Bytes that any process fetches show in the cache. Bytes that are read the kernel counts; where it does not tell,
    /// nothing is shown.
    pub(crate) async fn watch(self, mut status: watch::Receiver<Status>, progress: Arc<Progress>) {
        let began = Instant::now();
        let at_first = self.fetched().await;
        let mut seen = (0, at_first);
        if self.cache.is_some() {
            self.activity.begins(self.in_cache(at_first, 0.0));
        }
        loop {
            tokio::time::sleep(PAUSE).await;
            let functions = status.borrow_and_update().functions.clone();
            let loads = |function: &FunctionStatus| {
                matches!(function.state, FunctionState::Starting | FunctionState::Loading)
            };
            if !functions.iter().any(loads) {
                if status.changed().await.is_err() {
                    return;
                }
                continue;
            }
            if status.has_changed().is_err() {
                return;
            }
            let read = functions.iter().filter_map(|function| bytes_read(function.pid?)).sum::<u64>();
            let (all, fetched) = (bytes_to_read(&functions, &self.facts), self.fetched().await);
            if read > 0 && all > 0 {
                progress.bytes(read.min(all), all);
            }
            // Functions that are gone have read nothing.
            seen.0 = seen.0.min(read);
            if fetched > seen.1 {
                seen = (read, fetched);
                let rate = (fetched - at_first) as f64 / began.elapsed().as_secs_f64().max(1e-3);
                self.activity.moved(self.in_cache(fetched, rate));
            } else if read >= seen.0 + READ_STEP {
                seen.0 = read;
                let (read, all) = (table::bytes(read.min(all)), table::bytes(all));
                self.activity.moved(format!("{read} of {all} of {} are read", self.place));
            }
        }
    }

    /// Says how much the cache holds, and how many bytes came in a second.
    fn in_cache(&self, fetched: u64, rate: f64) -> String {
        format!(
            "{} of {} of {} are in the cache, {}/s until then",
            table::bytes(fetched),
            table::bytes(self.facts.total_bytes.max(fetched)),
            self.place,
            table::bytes(rate as u64)
        )
    }

    /// Bytes that the cache holds of the model.
    async fn fetched(&self) -> u64 {
        let Some(folder) = self.cache.clone() else { return 0 };
        // A folder that cannot be read shows no progress.
        tokio::task::spawn_blocking(move || allocated(&folder).unwrap_or(0)).await.unwrap_or(0)
    }
}

/// Bytes of weights at rest that the functions take together: replicas read for themselves, and the main function reads
/// what no remote function hosts.
fn bytes_to_read(functions: &[FunctionStatus], facts: &Inspection) -> u64 {
    let remote = functions.iter().flat_map(|function| &function.hosted);
    let hosted: Vec<(u32, u32)> =
        remote.flat_map(|set| set.experts.iter().map(|expert| (set.layer, *expert))).collect();
    let distinct: BTreeSet<_> = hosted.iter().collect();
    let read = |experts: usize| (experts as u64).saturating_mul(facts.expert_bytes);
    facts.total_bytes.saturating_sub(read(distinct.len())).saturating_add(read(hosted.len()))
}

/// Returns the bytes that the process `pid` has read, by the kernel's count; `None` if the kernel does not say.
fn bytes_read(pid: u32) -> Option<u64> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/io")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("rchar: "))?.parse().ok()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_this_process_reads_is_counted() {
        let before = bytes_read(std::process::id()).unwrap();
        let size = std::fs::read(std::env::current_exe().unwrap()).unwrap().len() as u64;
        assert!(bytes_read(std::process::id()).unwrap() >= before + size);
    }
}
