//! How far functions are with reading their weights, for the person who waits.

use crate::output::progress::Progress;
use remoe_launcher::{FunctionStatus, Status};
use remoe_model::Inspection;
use std::collections::BTreeSet;
use std::convert::Infallible;
use std::time::Duration;
use tokio::sync::watch;

/// Time between two looks.
const PAUSE: Duration = Duration::from_millis(250);

/// Shows what the functions of `status` have read of what they will read, as long as this is polled.
///
/// The kernel counts what a process reads; where it does not tell, or the weights come over a network, nothing is
/// shown.
pub(crate) async fn show(
    status: watch::Receiver<Status>,
    facts: &Inspection,
    progress: &Progress,
) -> Infallible {
    loop {
        tokio::time::sleep(PAUSE).await;
        let functions = status.borrow().functions.clone();
        let read = functions.iter().filter_map(|function| bytes_read(function.pid?)).sum::<u64>();
        let all = bytes_to_read(&functions, facts);
        if read > 0 && all > 0 {
            progress.bytes(read.min(all), all);
        }
    }
}

/// Bytes of weights at rest that the functions take together: replicas read for themselves, and the main function
/// reads what nobody else hosts.
fn bytes_to_read(functions: &[FunctionStatus], facts: &Inspection) -> u64 {
    let remote = functions.iter().flat_map(|function| &function.hosted);
    let hosted: Vec<(u32, u32)> =
        remote.flat_map(|set| set.experts.iter().map(|expert| (set.layer, *expert))).collect();
    let distinct: BTreeSet<_> = hosted.iter().collect();
    let read = |experts: usize| (experts as u64).saturating_mul(facts.expert_bytes);
    facts.total_bytes.saturating_sub(read(distinct.len())).saturating_add(read(hosted.len()))
}

/// What the kernel says that the process `pid` has read; none where it does not say.
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
