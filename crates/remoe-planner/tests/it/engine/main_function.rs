//! Simulation of one main function: a loop of admission, one decode iteration and one slice of prompts.

use super::Setting;
use std::collections::VecDeque;

/// Seconds of a slice of prompts while nothing decodes, and of one of several prompts.
const SLICE_WITHOUT_DECODING: f64 = 0.25;
const SLICE_OF_SEVERAL: f64 = 0.05;
/// Most concurrent prefills.
const MAX_PREFILLS: usize = 4;
/// Most seconds of credit of the shortest or the oldest prompt.
const MAX_CREDIT: f64 = 1.0;
/// Seconds below which a difference is rounding.
const ROUNDING: f64 = 1e-9;

pub(super) struct EngineRequest {
    pub(super) arrived: f64,
    /// When functions were ready for it.
    pub(super) ready: f64,
    /// When it had a slot.
    pub(super) began: f64,
    pub(super) first_token: f64,
    pub(super) ended: f64,
    pub(super) steps: u64,
    prefill_left: f64,
    is_under_way: bool,
    is_prefilled: bool,
    steps_left: u64,
}

impl EngineRequest {
    pub(super) fn new(arrived: f64, ready: f64, prefill_left: f64, steps: u64) -> Self {
        Self {
            arrived,
            ready,
            began: 0.0,
            first_token: 0.0,
            ended: 0.0,
            steps,
            prefill_left,
            is_under_way: false,
            is_prefilled: false,
            steps_left: steps,
        }
    }

    pub(super) fn tpot(&self) -> f64 {
        (self.ended - self.first_token) / self.steps as f64
    }
}

pub(super) struct Engine<'s> {
    setting: &'s Setting,
    pub(super) now: f64,
    pub(super) last_done: f64,
    pub(super) done: Vec<EngineRequest>,
    waiting: VecDeque<EngineRequest>,
    running: Vec<EngineRequest>,
    /// Seconds of the latest decode iterations, at most 31.
    decoded: VecDeque<f64>,
    part: f64,
    last_token: Option<f64>,
    owed: f64,
}

impl<'s> Engine<'s> {
    pub(super) fn new(setting: &'s Setting) -> Self {
        Self {
            setting,
            now: 0.0,
            last_done: 0.0,
            done: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            decoded: VecDeque::new(),
            part: 1.0,
            last_token: None,
            owed: 0.0,
        }
    }

    pub(super) fn arrive(&mut self, request: EngineRequest) {
        self.waiting.push_back(request);
    }

    pub(super) fn is_idle(&self) -> bool {
        self.waiting.is_empty() && self.running.is_empty()
    }

    /// Until a request arrives at `end`. What runs then goes on beyond, if the engine does not look.
    pub(super) fn run(&mut self, end: f64) {
        while self.now < end {
            while self.running.len() < self.setting.slots {
                let Some(mut request) = self.waiting.pop_front() else { break };
                request.began = self.now.max(request.ready);
                self.running.push(request);
            }
            if self.running.is_empty() {
                self.now = end;
                return;
            }
            self.iterate();
            self.prefill(end);
        }
    }

    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.decoded.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len() / 2).copied()
    }

    fn target(&self) -> Option<f64> {
        self.setting.target_itl.or_else(|| Some(3.0 * self.median()?))
    }

    fn iterate(&mut self) {
        let decoding = self.running.iter().filter(|request| request.is_prefilled).count();
        if decoding == 0 {
            return;
        }
        let before = self.last_token.take();
        let target = before.and(self.target());
        let step = self.setting.step_seconds[decoding - 1];
        self.now += step;
        self.decoded.push_back(step);
        if self.decoded.len() > 31 {
            self.decoded.pop_front();
        }
        if let (Some(before), Some(target)) = (before, target) {
            let is_above = self.now - before > target + ROUNDING;
            let change = if is_above { -0.02 } else { 0.02 / 49.0 };
            self.part = (self.part + change).clamp(0.6, 1.0);
        }
        self.running
            .iter_mut()
            .filter(|request| request.is_prefilled)
            .for_each(|request| request.steps_left -= 1);
        self.leave();
    }

    fn leave(&mut self) {
        let now = self.now;
        let ended = self.running.extract_if(.., |request| request.is_prefilled && request.steps_left == 0);
        for mut request in ended {
            request.ended = now;
            self.last_done = now;
            self.done.push(request);
        }
    }

    fn prefill(&mut self, end: f64) {
        if self.running.iter().all(|request| request.is_prefilled) {
            return;
        }
        let streams = self.running.iter().any(|request| request.is_prefilled);
        let time = match (streams, self.target(), self.median()) {
            (false, ..) => SLICE_WITHOUT_DECODING,
            (true, Some(target), Some(decode)) => (target * self.part - decode).max(0.1 * decode),
            (true, ..) => SLICE_OF_SEVERAL,
        };
        if streams {
            self.last_token = Some(self.now);
        }
        let until = self.now + time;
        let mut any = false;
        while !any || self.now < until - ROUNDING {
            if !self.prefill_one(until, end) {
                break;
            }
            any = true;
            let begins = !streams && self.running.iter().any(|request| request.is_prefilled);
            if begins || self.now >= end {
                break;
            }
        }
        self.leave();
    }

    fn prefill_one(&mut self, until: f64, end: f64) -> bool {
        let under_way = self.running.iter().filter(|request| request.is_under_way).count();
        let could = |request: &EngineRequest| {
            !request.is_prefilled && (request.is_under_way || under_way < MAX_PREFILLS)
        };
        let prompts: Vec<usize> =
            (0..self.running.len()).filter(|index| could(&self.running[*index])).collect();
        let left = |index: &usize| self.running[*index].prefill_left;
        let Some(&oldest) = prompts.first() else { return false };
        let shortest = prompts.iter().copied().min_by(|a, b| left(a).total_cmp(&left(b))).unwrap();
        let chosen = if self.owed > 0.0 { oldest } else { shortest };
        let until = if prompts.len() > 1 { until.min(self.now + SLICE_OF_SEVERAL) } else { until };
        // A request that arrives is looked at first.
        let until = until.min(end).max(self.now);
        let request = &mut self.running[chosen];
        request.is_under_way = true;
        let is_done = self.now + request.prefill_left <= until + ROUNDING;
        let took = if is_done { request.prefill_left } else { until - self.now };
        request.prefill_left -= took;
        self.now += took;
        if is_done {
            (request.is_prefilled, request.is_under_way) = (true, false);
            request.first_token = self.now;
        }
        self.owed = match chosen {
            _ if oldest == shortest => 0.0,
            _ if chosen == oldest => (self.owed - took).max(-MAX_CREDIT),
            _ => (self.owed + took).min(MAX_CREDIT),
        };
        true
    }
}
