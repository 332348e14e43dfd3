//! A deployment's engines, iteration by iteration, with arrivals by chance: what closed forms are held
//! against. It knows none of them.

use crate::generate::Random;
use std::collections::VecDeque;

/// One deployment and what comes to it.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) per_second: f64,
    pub(crate) burst: f64,
    pub(crate) idle_seconds: Option<f64>,
    pub(crate) start_seconds: f64,
    pub(crate) prefill_seconds: f64,
    /// At index n - 1 with n requests that decode.
    pub(crate) step_seconds: Vec<f64>,
    /// In the mean.
    pub(crate) steps: f64,
    /// Whether all requests have as many, else geometrically distributed ones.
    pub(crate) fixed_steps: bool,
    pub(crate) slots: usize,
    pub(crate) mains: usize,
}

/// What was seen, in the mean.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Observed {
    pub(crate) share: f64,
    pub(crate) wakes_per_second: f64,
    pub(crate) cold_share: f64,
    pub(crate) cold_wait_seconds: f64,
    /// Per main.
    pub(crate) in_flight: f64,
    pub(crate) service_seconds: f64,
    /// From a slot to the first token.
    pub(crate) first_token_seconds: f64,
    pub(crate) tpot_seconds: f64,
    pub(crate) wait_seconds: f64,
}

struct Request {
    arrived: f64,
    began: f64,
    first_token: f64,
    prefilled: bool,
    steps: u64,
    left: u64,
}

/// A main function that is ready: its slots, in the order of admission, and its queue.
#[derive(Default)]
struct Engine {
    queue: VecDeque<Request>,
    slots: Vec<Request>,
    /// The iteration that runs: its end, the slot whose prompt is in it, the slots that decode.
    iteration: Option<(f64, Option<usize>, usize)>,
}

#[derive(Default)]
struct Totals {
    requests: f64,
    done: f64,
    waited: f64,
    served: f64,
    to_first: f64,
    decoded: f64,
    decoded_steps: f64,
    alive: f64,
    wakes: f64,
    cold: f64,
    cold_wait: f64,
    slot_seconds: f64,
}

fn exponential(random: &mut Random, mean: f64) -> f64 {
    -mean * (1.0 - random.unit()).ln()
}

/// At least 1.
fn geometric(random: &mut Random, mean: f64) -> u64 {
    if mean <= 1.0 {
        return 1;
    }
    1 + ((1.0 - random.unit()).ln() / (1.0 - 1.0 / mean).ln()) as u64
}

impl Engine {
    /// Gives free slots to those that wait, and begins an iteration where none runs.
    fn go(&mut self, now: f64, setting: &Setting, totals: &mut Totals) {
        while self.slots.len() < setting.slots {
            let Some(mut request) = self.queue.pop_front() else { break };
            request.began = now;
            totals.waited += now - request.arrived;
            self.slots.push(request);
        }
        if self.iteration.is_none() && !self.slots.is_empty() {
            let prompt = self.slots.iter().position(|request| !request.prefilled);
            let decoding = self.slots.iter().filter(|request| request.prefilled).count();
            let prefill = if prompt.is_some() { setting.prefill_seconds } else { 0.0 };
            let step = if decoding > 0 { setting.step_seconds[decoding - 1] } else { 0.0 };
            self.iteration = Some((now + prefill + step, prompt, decoding));
        }
    }

    fn end_iteration(&mut self, now: f64, totals: &mut Totals) {
        let Some((_, prompt, _)) = self.iteration.take() else { return };
        // Requests that were admitted meanwhile stand behind, and had no part in it.
        let prompt_of = |index| prompt == Some(index);
        for (index, request) in self.slots.iter_mut().enumerate() {
            if prompt_of(index) {
                request.prefilled = true;
                request.first_token = now;
            } else if request.prefilled {
                request.left -= 1;
            }
        }
        self.slots.retain(|request| {
            let stays = !request.prefilled || request.left > 0;
            if !stays {
                totals.done += 1.0;
                totals.served += now - request.began;
                totals.to_first += request.first_token - request.began;
                totals.decoded += now - request.first_token;
                totals.decoded_steps += request.steps as f64;
            }
            stays
        });
    }
}

/// `requests` of them, from an empty deployment; the first tenth is not counted.
pub(crate) fn observe(setting: &Setting, requests: usize, seed: u64) -> Observed {
    let random = &mut Random::new(seed);
    let mut engines: Vec<Engine> = (0..setting.mains).map(|_| Engine::default()).collect();
    let (mut totals, mut now, mut begun) = (Totals::default(), 0.0, 0.0);
    let (mut came, mut counting) = (0, false);
    let between = setting.burst / setting.per_second;
    let mut next_burst = exponential(random, between);
    // Alive from a wake on; ready from the end of the start on; idle since the last request went.
    let (mut alive, mut ready_at, mut idle_since) = (setting.idle_seconds.is_none(), 0.0, 0.0);
    while came < requests {
        let busy = engines.iter().any(|engine| !engine.slots.is_empty() || !engine.queue.is_empty());
        let starting = alive && now < ready_at;
        let mut next = next_burst;
        if starting {
            next = next.min(ready_at);
        }
        for engine in &engines {
            if let Some((end, ..)) = engine.iteration {
                next = next.min(end);
            }
        }
        let sleep_at = match setting.idle_seconds {
            Some(idle) if alive && !starting && !busy => idle_since + idle,
            _ => f64::INFINITY,
        };
        next = next.min(sleep_at);
        if alive {
            totals.alive += next - now;
        }
        let in_slots: usize = engines.iter().map(|engine| engine.slots.len()).sum();
        totals.slot_seconds += (next - now) * in_slots as f64;
        now = next;

        if now == next_burst {
            let size = geometric(random, setting.burst);
            if !alive {
                (alive, ready_at) = (true, now + setting.start_seconds);
                totals.wakes += 1.0;
            }
            for _ in 0..size {
                came += 1;
                totals.requests += 1.0;
                let cold = now < ready_at;
                if cold {
                    totals.cold += 1.0;
                    totals.cold_wait += ready_at - now;
                }
                let steps =
                    if setting.fixed_steps { setting.steps as u64 } else { geometric(random, setting.steps) };
                let arrived = now.max(ready_at);
                let request =
                    Request { arrived, began: 0.0, first_token: 0.0, prefilled: false, steps, left: steps };
                let chosen = random.whole(0, setting.mains as u64 - 1) as usize;
                engines[chosen].queue.push_back(request);
            }
            next_burst = now + exponential(random, between);
        } else if now == sleep_at {
            alive = false;
        }
        for engine in &mut engines {
            if engine.iteration.is_some_and(|(end, ..)| end <= now) {
                engine.end_iteration(now, &mut totals);
                idle_since = now;
            }
        }
        if alive && now >= ready_at {
            for engine in &mut engines {
                engine.go(now, setting, &mut totals);
            }
        }
        if !counting && came >= requests / 10 {
            (totals, begun, counting) = (Totals::default(), now, true);
        }
    }
    let span = now - begun;
    Observed {
        share: totals.alive / span,
        wakes_per_second: totals.wakes / span,
        cold_share: totals.cold / totals.requests,
        cold_wait_seconds: totals.cold_wait / totals.cold.max(1.0),
        in_flight: totals.slot_seconds / span / setting.mains as f64,
        service_seconds: totals.served / totals.done,
        first_token_seconds: totals.to_first / totals.done,
        tpot_seconds: totals.decoded / totals.decoded_steps.max(1.0),
        wait_seconds: totals.waited / totals.done,
    }
}
