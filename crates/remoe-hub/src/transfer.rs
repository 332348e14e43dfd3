//! Transfer of bytes from the source into the cache: in pieces, by parallel requests, shared with other processes.

use crate::cache::{CachedFile, ClaimOutcome, RangeClaim};
use crate::client::{RangeBody, RangeResponse, SourceClient, VersionCondition};
use crate::error::FetchError;
use crate::progress::{self, FetchProgress};
use crate::response::no_response;
use crate::timeouts::{Attempts, FailedAttempt, FetchTimeouts, RetryDecision, SourceActivity};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Number of parallel requests.
const PARALLEL_REQUESTS: usize = 16;
/// Bytes of one request: enough for a connection's full throughput, few enough to share pieces among processes.
const PIECE_BYTES: u64 = 8 << 20;
/// Interval of polling the progress of another process.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Means to transfer bytes from one source.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) client: SourceClient,
    pub(crate) timeouts: FetchTimeouts,
    pub(crate) activity: Arc<SourceActivity>,
}

/// Range of a file's bytes that one request fetches.
#[derive(Debug)]
struct ByteRange {
    file: Arc<CachedFile>,
    bytes: Range<u64>,
    /// Number of bytes that were missing at the last check.
    missing: u64,
}

/// Wanted bytes that are not in the cache.
#[derive(Debug)]
pub(crate) struct MissingRanges {
    pieces: VecDeque<ByteRange>,
    files: Vec<Arc<CachedFile>>,
    bytes: u64,
}

impl MissingRanges {
    /// Finds the bytes of `wanted` that are not in the cache.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn find(
        wanted: impl IntoIterator<Item = (Arc<CachedFile>, Vec<Range<u64>>)>,
    ) -> Result<Self, FetchError> {
        let mut all = Self { pieces: VecDeque::new(), files: Vec::new(), bytes: 0 };
        for (file, ranges) in wanted {
            for wanted in ranges {
                for missing in file.missing(&wanted)? {
                    all.bytes += missing.end - missing.start;
                    all.pieces.extend(split_into_pieces(missing).map(|bytes| ByteRange {
                        missing: bytes.end - bytes.start,
                        file: Arc::clone(&file),
                        bytes,
                    }));
                }
            }
            all.files.push(file);
        }
        Ok(all)
    }

    /// Returns the number of missing bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn split_into_pieces(bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (bytes.start..bytes.end).step_by(PIECE_BYTES as usize);
    starts.map(move |start| start..bytes.end.min(start + PIECE_BYTES))
}

/// Queue of the pieces that no task of this process is fetching.
#[derive(Debug)]
struct PieceQueue(Mutex<VecDeque<ByteRange>>);

impl PieceQueue {
    fn pieces(&self) -> MutexGuard<'_, VecDeque<ByteRange>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transfer {
    /// Fetches the missing bytes. With `report`, prints progress lines.
    ///
    /// # Errors
    /// The first piece that cannot be fetched.
    pub(crate) async fn fetch_missing(
        self: Arc<Self>,
        missing: MissingRanges,
        progress: Arc<FetchProgress>,
        report: bool,
    ) -> Result<(), FetchError> {
        let workers = PARALLEL_REQUESTS.min(missing.pieces.len());
        let queue = Arc::new(PieceQueue(Mutex::new(missing.pieces)));
        let mut tasks = JoinSet::new();
        for _ in 0..workers {
            tasks.spawn(Arc::clone(&self).run_worker(Arc::clone(&queue), Arc::clone(&progress)));
        }
        let mut ticks = interval(progress::REPORT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first tick completes immediately.
        ticks.tick().await;
        loop {
            tokio::select! {
                ended = tasks.join_next() => match ended {
                    None => break,
                    Some(Ok(worked)) => worked?,
                    Some(Err(error)) => return Err(self.crashed(&error)),
                },
                _ = ticks.tick(), if report => progress.print(),
            }
        }
        for file in missing.files {
            self.verify(&file).await?;
            // Syncs in the background, while the caller uses the bytes.
            tokio::task::spawn_blocking(move || {
                if let Err(error) = file.sync() {
                    progress::print_line(&format!("fetch: {error}"));
                }
            });
        }
        if report {
            progress.print();
        }
        Ok(())
    }

    /// Fetches pieces from the queue end_of_body it is empty.
    async fn run_worker(
        self: Arc<Self>,
        queue: Arc<PieceQueue>,
        progress: Arc<FetchProgress>,
    ) -> Result<(), FetchError> {
        let mut busy_pieces = 0;
        let mut last_progress = None;
        loop {
            let Some(mut piece) = queue.pieces().pop_front() else {
                return Ok(());
            };
            match piece.file.claim(piece.bytes.clone())? {
                ClaimOutcome::Complete => progress.add_cached(piece.missing),
                ClaimOutcome::Claimed(claim) => {
                    self.fetch(claim, &piece, &progress).await?;
                    (busy_pieces, last_progress) = (0, None);
                    continue;
                }
                ClaimOutcome::Busy => {
                    let missing = total_bytes(&piece.file.missing(&piece.bytes)?);
                    progress.add_cached(piece.missing.saturating_sub(missing));
                    piece.missing = missing;
                    self.check_other_tasks(&mut last_progress, &piece, &progress)?;
                    let queued = {
                        let mut pieces = queue.pieces();
                        pieces.push_back(piece);
                        pieces.len()
                    };
                    busy_pieces += 1;
                    if busy_pieces >= queued {
                        // All remaining pieces are being fetched by other tasks or processes.
                        sleep(POLL_INTERVAL).await;
                        busy_pieces = 0;
                    }
                }
            }
        }
    }

    /// Checks that the other tasks and processes make progress on the pieces of this transfer.
    fn check_other_tasks(
        &self,
        last_progress: &mut Option<(u64, Instant)>,
        piece: &ByteRange,
        progress: &FetchProgress,
    ) -> Result<(), FetchError> {
        // Counts the whole file too, because another process may first fetch bytes that are not wanted here.
        let cached_bytes = progress.cached_bytes() + piece.file.complete();
        match last_progress {
            Some((before, since)) if *before == cached_bytes => {
                if since.elapsed() < self.timeouts.other_process {
                    return Ok(());
                }
                Err(FetchError::Stalled {
                    location: self.client.location(&piece.file.name),
                    cache: piece.file.path().to_owned(),
                    seconds: self.timeouts.other_process.as_secs(),
                })
            }
            _ => {
                *last_progress = Some((cached_bytes, Instant::now()));
                Ok(())
            }
        }
    }

    async fn fetch(
        &self,
        mut claim: RangeClaim,
        piece: &ByteRange,
        progress: &FetchProgress,
    ) -> Result<(), FetchError> {
        let parts = claim.missing()?;
        progress.add_cached(piece.missing.saturating_sub(total_bytes(&parts)));
        for part in parts {
            let mut offset = part.start;
            let mut attempts = Attempts::new(self.timeouts, &self.activity);
            while offset < part.end {
                let before = offset;
                if let Err(failed) =
                    self.fetch_once(&mut claim, &piece.file, &mut offset, part.end, progress).await
                {
                    if offset > before {
                        attempts.reset();
                    }
                    // Makes the progress visible to other processes during a long pause.
                    claim.record()?;
                    attempts.pause(failed).await?;
                }
            }
        }
        claim.record()
    }

    /// Fetches the bytes from `offset` to `end` with one request. Advances `offset` past the bytes that were written.
    async fn fetch_once(
        &self,
        claim: &mut RangeClaim,
        file: &CachedFile,
        offset: &mut u64,
        end: u64,
        progress: &FetchProgress,
    ) -> Result<(), FailedAttempt> {
        let condition = VersionCondition::Same(&file.identity);
        match self.client.get(&file.name, *offset..end, condition).await? {
            RangeResponse::Bytes(bytes) => {
                self.receive(*bytes, claim, &file.name, offset, end, progress).await
            }
            RangeResponse::Absent(error) => Err(error.into()),
            RangeResponse::Unchanged => {
                let location = self.client.location(&file.name);
                Err(FetchError::InvalidResponse {
                    location,
                    problem: "304 to an unconditional request".to_owned(),
                }
                .into())
            }
        }
    }

    /// Writes the bytes from `offset` to `end` of a response, which may contain further bytes.
    pub(crate) async fn receive(
        &self,
        bytes: RangeBody,
        claim: &mut RangeClaim,
        name: &str,
        offset: &mut u64,
        end: u64,
        progress: &FetchProgress,
    ) -> Result<(), FailedAttempt> {
        let mut position = bytes.range.start;
        let end_of_body = end.min(bytes.range.end);
        if let Some(mut response) = bytes.response {
            while *offset < end_of_body {
                let chunk = response.chunk().await;
                let Some(chunk) = chunk.map_err(|error| no_response(self.client.location(name), error))?
                else {
                    break;
                };
                let length = chunk.len() as u64;
                self.activity.record(length);
                let from = offset.saturating_sub(position).min(length);
                let to = end_of_body.saturating_sub(position).min(length);
                position += length;
                if let Some(wanted) =
                    chunk.get(from as usize..to as usize).filter(|wanted| !wanted.is_empty())
                {
                    claim.write(wanted, *offset)?;
                    *offset += wanted.len() as u64;
                    progress.add_received(wanted.len() as u64);
                }
            }
        }
        if *offset < end_of_body {
            let problem = "the answer was shorter than announced".to_owned();
            let error = FetchError::Unavailable { location: self.client.location(name), problem };
            return Err(FailedAttempt { error, retry: RetryDecision::Retry(None) });
        }
        Ok(())
    }

    /// Compares a file that has become complete with the SHA-256 that the source states.
    async fn verify(&self, file: &Arc<CachedFile>) -> Result<(), FetchError> {
        while file.is_unverified() {
            let (checked, location) = (Arc::clone(file), self.client.location(&file.name));
            let verified = tokio::task::spawn_blocking(move || checked.verify(&location)).await;
            if verified.map_err(|error| self.crashed(&error))?? {
                return Ok(());
            }
            // Another process verifies the file. If it dies, the lock is released and this one verifies it.
            sleep(POLL_INTERVAL).await;
        }
        Ok(())
    }

    fn crashed(&self, error: &dyn std::error::Error) -> FetchError {
        let location = self.client.root().display().to_string();
        FetchError::Unavailable { location, problem: format!("the task that fetches crashed: {error}") }
    }
}

/// Returns the number of bytes of `ranges`, which must not overlap.
pub(crate) fn total_bytes(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_the_whole_range() {
        let all: Vec<_> = split_into_pieces(5..PIECE_BYTES * 2 + 5).collect();
        assert_eq!(all, [5..PIECE_BYTES + 5, PIECE_BYTES + 5..PIECE_BYTES * 2 + 5]);
        assert_eq!(split_into_pieces(3..4).collect::<Vec<_>>(), [3..4]);
    }
}
