//! Bytes from the source into the cache: in pieces, several at a time, shared with other processes.

use crate::answer::unanswered;
use crate::cache::{CachedFile, ClaimOutcome, RangeClaim};
use crate::client::{Bytes, Condition, Reply, SourceClient};
use crate::error::FetchError;
use crate::progress::{self, FetchProgress};
use crate::timeouts::{Attempts, Failed, FetchTimeouts, RetryDecision, SourceActivity};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

/// Requests at the same time.
const PARALLEL: usize = 16;
/// Bytes of one request: long enough to fill a connection, short enough to be shared among processes.
const PIECE: u64 = 8 << 20;
/// Time between two looks at what another process does.
pub(crate) const POLL: Duration = Duration::from_millis(50);

/// Where bytes come from.
#[derive(Debug)]
pub(crate) struct Transfer {
    pub(crate) client: SourceClient,
    pub(crate) patience: FetchTimeouts,
    pub(crate) heard: Arc<SourceActivity>,
}

/// Bytes of a file that one request asks for.
#[derive(Debug)]
struct ByteRange {
    file: Arc<CachedFile>,
    bytes: Range<u64>,
    /// How many of them were missing when last looked at.
    missing: u64,
}

/// The bytes that are wanted and missing.
#[derive(Debug)]
pub(crate) struct Missing {
    pieces: VecDeque<ByteRange>,
    files: Vec<Arc<CachedFile>>,
    bytes: u64,
}

impl Missing {
    /// Collects the missing bytes of `wanted`.
    ///
    /// # Errors
    /// The cache cannot be read.
    pub(crate) fn of(
        wanted: impl IntoIterator<Item = (Arc<CachedFile>, Vec<Range<u64>>)>,
    ) -> Result<Self, FetchError> {
        let mut all = Self { pieces: VecDeque::new(), files: Vec::new(), bytes: 0 };
        for (file, ranges) in wanted {
            for wanted in ranges {
                for missing in file.missing(&wanted)? {
                    all.bytes += missing.end - missing.start;
                    all.pieces.extend(pieces(missing).map(|bytes| ByteRange {
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

    /// How many bytes are missing.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }
}

fn pieces(bytes: Range<u64>) -> impl Iterator<Item = Range<u64>> {
    let starts = (bytes.start..bytes.end).step_by(PIECE as usize);
    starts.map(move |start| start..bytes.end.min(start + PIECE))
}

/// Pieces that no task of this process works on.
#[derive(Debug)]
struct Queue(Mutex<VecDeque<ByteRange>>);

impl Queue {
    fn pieces(&self) -> MutexGuard<'_, VecDeque<ByteRange>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transfer {
    /// Fetches what is missing. With `report`, lines say how far it is.
    ///
    /// # Errors
    /// The first piece that cannot be had.
    pub(crate) async fn bring(
        self: Arc<Self>,
        missing: Missing,
        progress: Arc<FetchProgress>,
        report: bool,
    ) -> Result<(), FetchError> {
        let workers = PARALLEL.min(missing.pieces.len());
        let queue = Arc::new(Queue(Mutex::new(missing.pieces)));
        let mut working = JoinSet::new();
        for _ in 0..workers {
            working.spawn(Arc::clone(&self).work(Arc::clone(&queue), Arc::clone(&progress)));
        }
        let mut ticks = interval(progress::EVERY);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        // The first one comes at once.
        ticks.tick().await;
        loop {
            tokio::select! {
                ended = working.join_next() => match ended {
                    None => break,
                    Some(Ok(worked)) => worked?,
                    Some(Err(error)) => return Err(self.broken(&error)),
                },
                _ = ticks.tick(), if report => progress.print(),
            }
        }
        for file in missing.files {
            self.verify(&file).await?;
            // Meanwhile its bytes are used.
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

    /// Works on pieces until none is left.
    async fn work(
        self: Arc<Self>,
        queue: Arc<Queue>,
        progress: Arc<FetchProgress>,
    ) -> Result<(), FetchError> {
        let mut busy = 0;
        let mut watch = None;
        loop {
            let Some(mut piece) = queue.pieces().pop_front() else {
                return Ok(());
            };
            match piece.file.claim(piece.bytes.clone())? {
                ClaimOutcome::Complete => progress.found(piece.missing),
                ClaimOutcome::Claimed(claim) => {
                    self.fetch(claim, &piece, &progress).await?;
                    (busy, watch) = (0, None);
                    continue;
                }
                ClaimOutcome::Busy => {
                    let missing = total(&piece.file.missing(&piece.bytes)?);
                    progress.found(piece.missing.saturating_sub(missing));
                    piece.missing = missing;
                    self.check_others(&mut watch, &piece, &progress)?;
                    let others = {
                        let mut pieces = queue.pieces();
                        pieces.push_back(piece);
                        pieces.len()
                    };
                    busy += 1;
                    if busy >= others {
                        // Other tasks or processes fetch all that is left.
                        sleep(POLL).await;
                        busy = 0;
                    }
                }
            }
        }
    }

    /// Checks that the tasks and processes that fetch bytes for this transfer make progress.
    fn check_others(
        &self,
        watch: &mut Option<(u64, Instant)>,
        piece: &ByteRange,
        progress: &FetchProgress,
    ) -> Result<(), FetchError> {
        // Their pieces can begin with bytes that are not wanted here.
        let there = progress.there() + piece.file.complete();
        match watch {
            Some((before, since)) if *before == there => {
                if since.elapsed() < self.patience.others {
                    return Ok(());
                }
                Err(FetchError::Stalled {
                    place: self.client.place(&piece.file.name),
                    cache: piece.file.path().to_owned(),
                    seconds: self.patience.others.as_secs(),
                })
            }
            _ => {
                *watch = Some((there, Instant::now()));
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
        progress.found(piece.missing.saturating_sub(total(&parts)));
        for part in parts {
            let mut at = part.start;
            let mut attempts = Attempts::new(self.patience, &self.heard);
            while at < part.end {
                let before = at;
                if let Err(failed) =
                    self.fetch_some(&mut claim, &piece.file, &mut at, part.end, progress).await
                {
                    if at > before {
                        attempts.progress();
                    }
                    // Others see how far we are, also during a long pause.
                    claim.record()?;
                    attempts.pause(failed).await?;
                }
            }
        }
        claim.record()
    }

    /// Fetches the bytes from `at` to `end`, with one request; `at` moves with what has been kept.
    async fn fetch_some(
        &self,
        claim: &mut RangeClaim,
        file: &CachedFile,
        at: &mut u64,
        end: u64,
        progress: &FetchProgress,
    ) -> Result<(), Failed> {
        let condition = Condition::Same(&file.identity);
        match self.client.get(&file.name, *at..end, condition).await? {
            Reply::Bytes(bytes) => self.receive(*bytes, claim, &file.name, at, end, progress).await,
            Reply::Absent(error) => Err(error.into()),
            Reply::Unchanged => {
                let place = self.client.place(&file.name);
                Err(FetchError::Answer { place, problem: "304 to an unconditional request".to_owned() }
                    .into())
            }
        }
    }

    /// Keeps the bytes from `at` to `end` of an answer that may hold more.
    pub(crate) async fn receive(
        &self,
        bytes: Bytes,
        claim: &mut RangeClaim,
        name: &str,
        at: &mut u64,
        end: u64,
        progress: &FetchProgress,
    ) -> Result<(), Failed> {
        let mut position = bytes.range.start;
        let until = end.min(bytes.range.end);
        if let Some(mut response) = bytes.response {
            while *at < until {
                let chunk = response.chunk().await;
                let Some(chunk) = chunk.map_err(|error| unanswered(self.client.place(name), error))? else {
                    break;
                };
                let length = chunk.len() as u64;
                self.heard.note(length);
                let from = at.saturating_sub(position).min(length);
                let to = until.saturating_sub(position).min(length);
                position += length;
                if let Some(wanted) =
                    chunk.get(from as usize..to as usize).filter(|wanted| !wanted.is_empty())
                {
                    claim.write(wanted, *at)?;
                    *at += wanted.len() as u64;
                    progress.fetched(wanted.len() as u64);
                }
            }
        }
        if *at < until {
            let problem = "the answer was shorter than announced".to_owned();
            let error = FetchError::Unavailable { place: self.client.place(name), problem };
            return Err(Failed { error, again: RetryDecision::Soon(None) });
        }
        Ok(())
    }

    /// Compares a file that has become complete with the SHA-256 that the source states.
    async fn verify(&self, file: &Arc<CachedFile>) -> Result<(), FetchError> {
        while file.is_unverified() {
            let (checked, place) = (Arc::clone(file), self.client.place(&file.name));
            let verified = tokio::task::spawn_blocking(move || checked.verify(&place)).await;
            if verified.map_err(|error| self.broken(&error))?? {
                return Ok(());
            }
            // Another process is at it, which ends however that process ends.
            sleep(POLL).await;
        }
        Ok(())
    }

    fn broken(&self, error: &dyn std::error::Error) -> FetchError {
        let place = self.client.root().display().to_string();
        FetchError::Unavailable { place, problem: format!("the task that fetches crashed: {error}") }
    }
}

/// Bytes of `ranges`, which do not overlap.
pub(crate) fn total(ranges: &[Range<u64>]) -> u64 {
    ranges.iter().map(|range| range.end - range.start).sum()
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init, reason = "lists of ranges")]
mod tests {
    use super::*;

    #[test]
    fn pieces_cover_their_range() {
        let all: Vec<_> = pieces(5..PIECE * 2 + 5).collect();
        assert_eq!(all, [5..PIECE + 5, PIECE + 5..PIECE * 2 + 5]);
        assert_eq!(pieces(3..4).collect::<Vec<_>>(), [3..4]);
    }
}
