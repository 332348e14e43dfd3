//! Discrete-event simulation of the engine of one main function.
//!
//! The engine (`main-model-fn/src/engine/thread.rs`) repeats admission, one decode iteration of all running streams, and a
//! time slice of prefill. The slice is `part x target - d` seconds, at least 0.1 d, where d is the median of the last decode
//! iterations (`engine/pace.rs`). Without a stated target, the target is 3 d. `part` falls after each gap above the target
//! and rises after each other gap. Without running streams a prompt is prefilled without interruption. The shortest and the
//! oldest prompt share the time of prefill equally (`engine/scheduler.rs`).
//!
//! Equal iterations are simulated as one event, so that the work of a request does not depend on its number of steps.
//!
//! Not simulated: short prompts that share a pass, the limit of four concurrent passes, preemption, priority classes and
//! prefix caching.

use super::load::Service;
use std::collections::VecDeque;

/// Number of decode iterations in the median (`REMEMBERED` of the engine).
const REMEMBERED: usize = 31;
/// Default target in decode iterations (`DEFAULT_SLOWDOWN` of the engine).
const SLOWDOWN: f64 = 3.0;
/// Decrease of the planned part of the target after a gap above it.
const STEP_DOWN: f64 = 0.02;
/// Increase of the planned part of the target after any other gap.
const STEP_UP: f64 = STEP_DOWN / 49.0;
/// Least planned part of a target.
const LEAST_PART: f64 = 0.6;
/// Least time of prefill between two decode iterations, as a share of an iteration.
const LEAST_SHARE: f64 = 0.1;
/// Maximum number of iterations in one event while `part` changes.
const MAX_MERGED: f64 = 32.0;
/// Maximum number of iterations in one event while the median changes.
const MAX_MERGED_WHILE_MIXED: f64 = 4.0;
/// Relative tolerance for rounding.
const ROUNDING: f64 = 1e-9;

/// Returns the seconds of prefill between two decode iterations of `decode` seconds, at `part` of the target.
fn planned_slice(decode: f64, target_itl: Option<f64>, part: f64) -> f64 {
    (target_itl.unwrap_or(SLOWDOWN * decode) * part - decode).max(LEAST_SHARE * decode)
}

/// Returns the seconds of prefill between two decode iterations of `decode` seconds, while gaps keep the target.
pub(super) fn slice_seconds(decode: f64, target_itl: Option<f64>) -> f64 {
    planned_slice(decode, target_itl, 1.0)
}

/// A request before its first token.
#[derive(Debug, Clone, Copy)]
pub(super) struct PrefillingRequest {
    /// Index in the order of arrival.
    pub index: usize,
    /// Remaining seconds of prefill.
    pub left: f64,
    /// Number of decode steps.
    pub steps: f64,
}

/// A request after its first token.
#[derive(Debug, Clone, Copy)]
struct DecodingRequest {
    /// Count of the engine's decode iterations at which it is done.
    end: f64,
    first_token: f64,
    steps: f64,
}

/// Batch sizes of the latest decode iterations.
#[derive(Debug, Clone)]
struct RecentBatches {
    runs: VecDeque<(usize, usize)>,
    /// `[n]`: number of iterations with n streams.
    counts: Vec<usize>,
    len: usize,
}

impl RecentBatches {
    fn push(&mut self, batch: usize, iterations: usize) {
        let iterations = iterations.min(REMEMBERED);
        match self.runs.back_mut() {
            Some((last, count)) if *last == batch => *count += iterations,
            _ => self.runs.push_back((batch, iterations)),
        }
        self.counts[batch] += iterations;
        self.len += iterations;
        while self.len > REMEMBERED {
            let Some((oldest, count)) = self.runs.front_mut() else { break };
            let leaving = (self.len - REMEMBERED).min(*count);
            *count -= leaving;
            self.counts[*oldest] -= leaving;
            self.len -= leaving;
            if *count == 0 {
                self.runs.pop_front();
            }
        }
    }

    /// Returns the batch of the median iteration, or `None` before the first one. Steps never get shorter with more streams.
    fn median(&self) -> Option<usize> {
        if let (1, Some((batch, _))) = (self.runs.len(), self.runs.front()) {
            return Some(*batch);
        }
        let mut seen = 0;
        self.counts.iter().position(|count| {
            seen += count;
            seen > self.len / 2
        })
    }

    fn is_full_of(&self, batch: usize) -> bool {
        self.len == REMEMBERED && self.runs.len() == 1 && self.median() == Some(batch)
    }
}

/// Engine of one ready main function.
#[derive(Debug, Clone)]
pub(super) struct Engine<'a> {
    service: &'a Service,
    target_itl: Option<f64>,
    /// Simulated time. It may be later than requested, since decode iterations are not interrupted.
    pub now: f64,
    /// End of the last request.
    pub last_done: f64,
    /// Requests without a slot.
    waiting: VecDeque<PrefillingRequest>,
    /// Prompts with a slot, in the order of arrival.
    prompts: VecDeque<PrefillingRequest>,
    /// Running streams; the next one to end is the last.
    streams: Vec<DecodingRequest>,
    /// Decode iterations so far.
    iterations: f64,
    recent: RecentBatches,
    /// Seconds of the median of the recent decode iterations.
    median: f64,
    /// Set if prompts have different lengths. Otherwise the oldest prompt is also the shortest.
    varies: bool,
    part: f64,
    /// End of the last decode iteration, if prompts were prefilled since.
    last_token: Option<f64>,
    /// Index and time of first tokens.
    pub first_tokens: Vec<(usize, f64)>,
    /// Seconds per decode step of finished requests.
    pub steps_took: Vec<f64>,
}

impl<'a> Engine<'a> {
    pub(super) fn new(service: &'a Service, target_itl: Option<f64>) -> Self {
        let slots = service.concurrency.max(1) as usize;
        Self {
            service,
            target_itl,
            now: 0.0,
            last_done: f64::NEG_INFINITY,
            waiting: VecDeque::new(),
            prompts: VecDeque::new(),
            streams: Vec::new(),
            iterations: 0.0,
            recent: RecentBatches { runs: VecDeque::new(), counts: vec![0; slots + 1], len: 0 },
            median: 0.0,
            varies: false,
            part: 1.0,
            last_token: None,
            first_tokens: Vec::new(),
            steps_took: Vec::new(),
        }
    }

    pub(super) fn arrive(&mut self, prompt: PrefillingRequest) {
        self.varies |= prompt.left != self.service.prefill_seconds;
        self.waiting.push_back(prompt);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.prompts.is_empty() && self.streams.is_empty()
    }

    fn step_seconds(&self, batch: usize) -> f64 {
        let steps = &self.service.step_seconds;
        steps.get(batch.saturating_sub(1)).or(steps.last()).copied().unwrap_or(0.0)
    }

    /// Returns the seconds of prefill between two decode iterations.
    fn slice(&self) -> f64 {
        planned_slice(self.median, self.target_itl, self.part)
    }

    /// Simulates until `end`, the next arrival.
    pub(super) fn advance(&mut self, end: f64) {
        while self.now < end {
            while self.prompts.len() + self.streams.len() < self.service.concurrency.max(1) as usize {
                let Some(prompt) = self.waiting.pop_front() else { break };
                self.prompts.push_back(prompt);
            }
            match (self.prompts.is_empty(), self.streams.last()) {
                (true, None) => self.now = end,
                (false, None) => self.prefill(end),
                (true, Some(next)) => {
                    let batch = self.streams.len();
                    let step = self.step_seconds(batch);
                    let due = ((end - self.now) / step).ceil();
                    let iterations = due.min(next.end - self.iterations).max(1.0);
                    self.last_token = None;
                    self.decode(iterations, iterations * step);
                }
                (false, Some(next)) => {
                    let left = next.end - self.iterations;
                    if !self.iterate_together(end, left) {
                        self.iterate(end);
                    }
                }
            }
        }
    }

    /// Simulates one decode iteration and the time slice of prefill after it.
    fn iterate(&mut self, end: f64) {
        let step = self.step_seconds(self.streams.len());
        if let Some(before) = self.last_token.take() {
            let change = self.change_of_part(self.now + step - before);
            self.part = (self.part + change).clamp(LEAST_PART, 1.0);
        }
        self.decode(1.0, step);
        if self.streams.is_empty() {
            return;
        }
        self.last_token = Some(self.now);
        let until = (self.now + self.slice()).min(end);
        while self.now < until && !self.prompts.is_empty() {
            self.prefill(until);
        }
    }

    /// Simulates equal iterations before `end` as one event. Returns false if there are none.
    ///
    /// `left`: decode iterations until the next request is done.
    fn iterate_together(&mut self, end: f64, left: f64) -> bool {
        if self.last_token.is_none() {
            return false;
        }
        let batch = self.streams.len();
        let (slice, step) = (self.slice(), self.step_seconds(batch));
        let (oldest, shortest) = self.oldest_and_shortest();
        let (parts, least) = match oldest == shortest {
            true => (1.0, self.prompts[oldest].left),
            false => (2.0, self.prompts[oldest].left.min(self.prompts[shortest].left)),
        };
        let change = self.change_of_part(slice + step);
        let most = match self.recent.is_full_of(batch) {
            true if self.part == 1.0 && change > 0.0 => f64::INFINITY,
            true => MAX_MERGED,
            false => MAX_MERGED_WHILE_MIXED,
        };
        let fit = (parts * least / slice - ROUNDING).floor();
        let count = fit.min(left - 1.0).min(((end - self.now) / (slice + step)).floor()).min(most);
        if count < 1.0 {
            return false;
        }
        for index in [oldest, shortest].into_iter().take(parts as usize) {
            self.prompts[index].left -= count * slice / parts;
        }
        self.decode(count, count * (slice + step));
        self.part = (self.part + change * count).clamp(LEAST_PART, 1.0);
        self.last_token = Some(self.now - slice);
        true
    }

    /// Returns the change of the planned part of the target after a gap of `seconds` between two tokens.
    fn change_of_part(&self, seconds: f64) -> f64 {
        let target = self.target_itl.unwrap_or(SLOWDOWN * self.median);
        if seconds > target * (1.0 + ROUNDING) { -STEP_DOWN } else { STEP_UP }
    }

    /// Simulates decode iterations, which take `seconds` together with the prefill between them.
    fn decode(&mut self, iterations: f64, seconds: f64) {
        let batch = self.streams.len();
        if !self.recent.is_full_of(batch) {
            self.recent.push(batch, iterations as usize);
            self.median = self.recent.median().map_or(0.0, |batch| self.step_seconds(batch));
        }
        self.now += seconds;
        self.iterations += iterations;
        while let Some(stream) = self.streams.pop_if(|stream| stream.end <= self.iterations) {
            self.steps_took.push((self.now - stream.first_token) / stream.steps);
            self.last_done = self.now;
        }
    }

    /// Returns the indices of the oldest and of the shortest prompt.
    fn oldest_and_shortest(&self) -> (usize, usize) {
        if !self.varies {
            return (0, 0);
        }
        let shortest = (1..self.prompts.len()).fold(0, |least, index| {
            match self.prompts[index].left < self.prompts[least].left {
                true => index,
                false => least,
            }
        });
        (0, shortest)
    }

    /// Simulates prefill until one prompt is done, or until `until`.
    fn prefill(&mut self, until: f64) {
        let (oldest, shortest) = self.oldest_and_shortest();
        let time = until - self.now;
        let slack = ROUNDING * self.service.prefill_seconds;
        let (parts, first) = match self.prompts[shortest].left < self.prompts[oldest].left {
            true => (2.0, shortest),
            false => (1.0, oldest),
        };
        let needed = parts * self.prompts[first].left;
        let is_done = needed <= time + slack;
        let passed = if is_done { needed } else { time };
        for index in [oldest, shortest].into_iter().take(parts as usize) {
            self.prompts[index].left -= passed / parts;
        }
        self.now = if is_done { self.now + needed } else { until };
        if is_done {
            self.first_token(first);
        }
    }

    fn first_token(&mut self, position: usize) {
        let Some(prompt) = self.prompts.remove(position) else { return };
        self.first_tokens.push((prompt.index, self.now));
        if prompt.steps < 1.0 {
            self.last_done = self.now;
            return;
        }
        let stream = DecodingRequest {
            end: self.iterations + prompt.steps,
            first_token: self.now,
            steps: prompt.steps,
        };
        let place = self.streams.partition_point(|other| other.end >= stream.end);
        self.streams.insert(place, stream);
    }
}
