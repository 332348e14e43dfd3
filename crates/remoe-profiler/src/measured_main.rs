//! Measures a main function in use: prompts and decode steps, alone and batched, and calls of remote functions.

use crate::MIN_WARM_UP;
use crate::ProfiledModel;
use crate::error::ProfileError;
use crate::functions::ListeningFunction;
use crate::grid::median;
use crate::line_fit::Points;
use futures_util::future::try_join_all;
use remoe_hardware::Start;
use remoe_planner::PAGE_POSITIONS;
use remoe_process::Role;
use remoe_proto::v1::generate_event::Event;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{
    Endpoint, ExpertTime, Finished, GenerateEvent, GenerateRequest, InspectRequest, LayerExperts, Routing,
    TokenIds, generate_request, inspect_request,
};
use remoe_rollout::control;
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::transport::Channel;

/// Timeout of any measured call.
const CALL_TIMEOUT: Duration = Duration::from_secs(600);
/// Decode steps per measurement.
pub(crate) const STEPS: u32 = 24;
/// Prompt length in tokens before these steps.
pub(crate) const DECODE_PROMPT: usize = 64;
/// Prompt length in tokens of batched requests.
const BATCH_PROMPT_TOKENS: usize = 16;
/// Decode steps of the last batched request, which is measured.
const BATCH_STEPS: u32 = 8;
/// Maximum tokens of the other batched requests, which continue until the last one has ended.
const OTHER_REQUEST_TOKENS: u32 = 8 * BATCH_STEPS;
/// Maximum tokens of each batched request.
pub(crate) const MAX_BATCHED_REQUEST_TOKENS: usize = BATCH_PROMPT_TOKENS + OTHER_REQUEST_TOKENS as usize;
/// Mean context of the last batched request over its steps, in tokens.
pub(crate) const MEAN_BATCH_CONTEXT: f64 = context(BATCH_PROMPT_TOKENS, BATCH_STEPS);
/// Measurements per prompt.
const ROUNDS: usize = 5;
/// Measurements per batch size, each with several requests.
const BATCH_ROUNDS: usize = 3;
/// Pause before each measurement, since real requests meet idle functions.
const PAUSE: Duration = Duration::from_millis(50);
/// Bytes of remote experts when calls are measured.
const REMOTE_BYTES: u64 = 1 << 30;
/// Maximum expected time of the long prompt; it is skipped if it would take longer.
const MAX_LONG_PROMPT_SECONDS: f64 = 60.0;
/// Duration of a sustained measurement: several periods of a CPU quota.
const SUSTAINED_DURATION: Duration = Duration::from_millis(500);

/// Time of a remote layer in the main function, in seconds.
#[derive(Clone, Copy)]
pub(crate) struct RemoteCall {
    /// Time to send messages, before its own experts.
    pub(crate) send: f64,
    /// Time to wait for answers after them, including remote computation.
    pub(crate) wait: f64,
}

/// Seconds of a prompt or a decode step: without local experts, and in them.
#[derive(Clone, Copy)]
pub(crate) struct StepSeconds {
    pub(crate) rest: f64,
    pub(crate) experts: f64,
}

impl StepSeconds {
    /// Scales the times for one vCPU to a fraction of a vCPU.
    fn scaled_to(self, vcpus: f64) -> Self {
        Self { rest: self.rest / vcpus, experts: self.experts / vcpus }
    }
}

/// Times of a prompt and of a decode step after it.
#[derive(Clone, Copy)]
struct MeasuredRequest {
    prompt: StepSeconds,
    step: StepSeconds,
}

/// Measurements with one number of vCPUs.
pub(crate) struct Column {
    /// Seconds of decode steps by tokens of context.
    pub(crate) steps: Points,
    /// Seconds of experts in a decode step.
    pub(crate) experts: f64,
    /// Decode steps by batch size, including context. Below one vCPU, prompts would use up the quota of the steps:
    /// see [`fill_batched`].
    pub(crate) batched: Vec<StepSeconds>,
    /// Times of each prompt of the grid.
    pub(crate) prompts: Vec<StepSeconds>,
}

/// Fills in batched times below one vCPU: those for one vCPU, divided by the vCPUs, as for context
/// ([`crate::line_fit`]).
pub(crate) fn fill_batched(columns: &mut [Column]) {
    let one = columns.iter().find(|column| column.steps.vcpus >= 1.0).map(|column| column.batched.clone());
    for column in columns.iter_mut().filter(|column| column.steps.vcpus < 1.0) {
        let part = |parts: &StepSeconds| parts.scaled_to(column.steps.vcpus);
        column.batched = one.iter().flatten().map(part).collect();
    }
}

/// Main function with all experts local.
pub(crate) struct ProfiledMain<'s> {
    subject: &'s ProfiledModel<'s>,
    pub(crate) function: ListeningFunction<'s>,
    client: MainModelClient<Channel>,
    runtime: tokio::runtime::Handle,
    /// Time to pack all experts and to read what follows them.
    placed: Duration,
    /// Number of prompts so far. Each starts with different tokens, so that the prefix cache never hits.
    prompts: Cell<u64>,
}

impl<'s> ProfiledMain<'s> {
    pub(crate) fn start(
        subject: &'s ProfiledModel<'_>,
        threads: usize,
        device: &str,
        step: &dyn Fn(String),
    ) -> Result<Self, ProfileError> {
        step(format!("starting the main function: threads {threads}"));
        let mut arguments = subject.source.arguments();
        arguments.extend(subject.precision());
        arguments.extend(subject.dense_precision());
        arguments.extend(["--device".into(), device.into(), "--threads".into(), threads.to_string().into()]);
        arguments.extend(["--kv-cache-bytes".into(), cache_bytes(subject).to_string().into()]);
        if threads == 1 {
            arguments.extend(["--poll-us".into(), "0".into()]);
        }
        let function = subject.functions.start(Role::Main, arguments, f64::from(subject.grid.cores))?;
        let runtime = tokio::runtime::Handle::current();
        let (started, total_pause) = (Instant::now(), subject.gate().total_pause());
        let routing = Routing { generation: 1, ..Routing::default() };
        runtime.block_on(control::set_routing(function.grpc, routing, CALL_TIMEOUT))?;
        runtime.block_on(control::all_experts_read(function.grpc, CALL_TIMEOUT))?;
        let placed = started.elapsed().saturating_sub(subject.gate().total_pause() - total_pause);
        let client = runtime.block_on(async { control::main_client(function.grpc) })?;
        let main = Self { subject, function, client, runtime, placed, prompts: Cell::new(0) };
        let began = Instant::now();
        main.generate(subject.grid.prompts.last().copied().unwrap_or(DECODE_PROMPT), 4)?;
        while began.elapsed() < MIN_WARM_UP {
            main.generate(DECODE_PROMPT, 4)?;
        }
        Ok(main)
    }

    pub(crate) fn start_times(&self) -> Start {
        let facts = self.subject.inspection;
        let experts = self.subject.resident_experts(facts.moe_layers.len() * facts.experts);
        let rate = experts / self.placed.as_secs_f64().max(1e-6);
        let rest = self.subject.weight_bytes() - experts;
        Start {
            process_seconds: (self.function.start.as_secs_f64() - rest / rate).max(0.0),
            load_bytes_per_second: rate.clamp(1.0, 1e12),
        }
    }

    /// Measures decode steps after prompts of several lengths, and each prompt of the grid, with `vcpus`. From one
    /// vCPU on, also measures decode steps with the batch sizes `rows`.
    pub(crate) fn column(&self, vcpus: f64, rows: &[usize]) -> Result<Column, ProfileError> {
        let bursts = self.subject.functions.quotas && vcpus < 1.0;
        let answered = |tokens: usize| match bursts {
            true => self.subject.gate().undisturbed(|| sustained(&mut || self.answer(tokens))),
            false => self.median_with_pauses(ROUNDS, &|| self.answer(tokens)),
        };
        let rows = if bursts { &[] } else { rows };
        let batched = rows
            .iter()
            .map(|&rows| Ok(self.median_with_pauses(BATCH_ROUNDS, &|| self.measure_batched(rows))?.step));
        let batched = batched.collect::<Result<_, ProfileError>>()?;
        let after_prompt = answered(DECODE_PROMPT)?;
        let grid = &self.subject.grid;
        let prompts: Vec<MeasuredRequest> =
            grid.prompts.iter().map(|&tokens| answered(tokens)).collect::<Result<_, _>>()?;
        let mut steps = vec![(DECODE_PROMPT, after_prompt.step.rest)];
        steps.extend(grid.prompts.iter().zip(&prompts).map(|(tokens, answer)| (*tokens, answer.step.rest)));
        let expected = grid.prompts.iter().zip(&prompts).next_back().map_or(0.0, |(tokens, answer)| {
            (answer.prompt.rest + answer.prompt.experts) * grid.long_prompt as f64 / *tokens as f64
        });
        if vcpus >= 1.0 && !grid.prompts.contains(&grid.long_prompt) && expected < MAX_LONG_PROMPT_SECONDS {
            // The farthest point has the most leverage on the line, so it is measured twice.
            let (one, other) = (self.answer(grid.long_prompt)?, self.answer(grid.long_prompt)?);
            steps.push((grid.long_prompt, one.step.rest.min(other.step.rest)));
        }
        let points = steps.into_iter().map(|(tokens, seconds)| (context(tokens, STEPS), seconds));
        Ok(Column {
            steps: Points { vcpus, points: points.collect() },
            experts: after_prompt.step.experts,
            batched,
            prompts: prompts.iter().map(|answer| answer.prompt).collect(),
        })
    }

    fn answer(&self, tokens: usize) -> Result<MeasuredRequest, ProfileError> {
        let finished = self.subject.gate().undisturbed(|| self.generate(tokens, STEPS + 1))?;
        Ok(MeasuredRequest::of(&finished, STEPS))
    }

    /// Returns the median of `rounds` measurements with pauses between them.
    fn median_with_pauses(
        &self,
        rounds: usize,
        measure: &dyn Fn() -> Result<MeasuredRequest, ProfileError>,
    ) -> Result<MeasuredRequest, ProfileError> {
        let measured = (0..rounds).map(|_| {
            self.subject.gate().undisturbed(|| {
                std::thread::sleep(PAUSE);
                measure()
            })
        });
        let answers = measured.collect::<Result<Vec<_>, _>>()?;
        let middle = |of: fn(&MeasuredRequest) -> StepSeconds| StepSeconds {
            rest: median(answers.iter().map(|answer| of(answer).rest).collect()),
            experts: median(answers.iter().map(|answer| of(answer).experts).collect()),
        };
        Ok(MeasuredRequest { prompt: middle(|answer| answer.prompt), step: middle(|answer| answer.step) })
    }

    /// Measures one request that arrives while `rows` - 1 others decode, and that ends before them.
    fn measure_batched(&self, rows: usize) -> Result<MeasuredRequest, ProfileError> {
        let within = async {
            let others = (1..rows).map(|_| self.send_request(BATCH_PROMPT_TOKENS, OTHER_REQUEST_TOKENS));
            let mut others = try_join_all(others).await?;
            // Each has its first token.
            try_join_all(others.iter_mut().map(Streaming::message)).await?;
            self.send_request(BATCH_PROMPT_TOKENS, BATCH_STEPS + 1).await?.finished().await
            // Dropping the streams ends the others.
        };
        Ok(MeasuredRequest::of(&self.within_limit(within)?, BATCH_STEPS))
    }

    /// Measures decode steps with all experts of the first layers in a remote function, compared with local ones.
    pub(crate) fn remote_call(&self) -> Result<RemoteCall, ProfileError> {
        let facts = self.subject.inspection;
        let expert_bytes = facts.resident_expert_bytes(self.subject.dtype);
        let layer_bytes = (expert_bytes * facts.experts as u64).max(1);
        let layers = usize::try_from(REMOTE_BYTES / layer_bytes).unwrap_or(1).max(1);
        let experts: Vec<u32> = (0..u32::try_from(facts.experts).unwrap_or(u32::MAX)).collect();
        let sets: Vec<LayerExperts> = facts
            .moe_layers
            .iter()
            .take(layers)
            .map(|&layer| LayerExperts { layer: layer as u32, experts: experts.clone() })
            .collect();
        let step = |waited: bool| {
            let steps = f64::from(STEPS);
            let (mut rest, mut experts) = (Vec::with_capacity(ROUNDS), Vec::with_capacity(ROUNDS));
            for _ in 0..ROUNDS {
                let finished = self.subject.gate().undisturbed(|| {
                    std::thread::sleep(PAUSE);
                    self.generate(DECODE_PROMPT, STEPS + 1)
                })?;
                let time = finished.decode_experts.unwrap_or_default();
                rest.push((finished.decode_s - time.local_s - time.waited_s) / steps);
                let seconds = if waited { time.waited_s } else { time.local_s };
                experts.push(seconds / steps);
            }
            Ok::<_, ProfileError>(StepSeconds { rest: median(rest), experts: median(experts) })
        };
        let local = step(false)?;
        let function = crate::remote::start(self.subject, &sets, 1)?;
        let endpoint =
            Endpoint { address: function.grpc.to_string(), layers: Vec::new(), experts: Vec::new() };
        let count = sets.len() as f64;
        let routing =
            Routing { generation: 2, endpoints: vec![endpoint], remote: sets, ..Routing::default() };
        self.runtime.block_on(control::set_routing(self.function.grpc, routing, CALL_TIMEOUT))?;
        let remote = step(true)?;
        let send = ((remote.rest - local.rest) / count).max(0.0);
        Ok(RemoteCall { send, wait: remote.experts / count })
    }

    fn generate(&self, tokens: usize, max_tokens: u32) -> Result<Finished, ProfileError> {
        self.within_limit(async { self.send_request(tokens, max_tokens).await?.finished().await })
    }

    fn within_limit<T>(
        &self,
        answer: impl Future<Output = Result<T, ProfileError>>,
    ) -> Result<T, ProfileError> {
        let answer = self.runtime.block_on(async { timeout(CALL_TIMEOUT, answer).await });
        answer.map_err(late)?
    }

    /// Sends a request with a new prompt. Tokens are sampled, as by default, with a different seed each time.
    async fn send_request(&self, tokens: usize, max_tokens: u32) -> Result<Streaming, ProfileError> {
        let seed = self.prompts.get();
        let prompt = self.unique_prompt(tokens);
        // All tokens are computed except the last sampled one.
        let computed = (prompt.ids.len() as u64 + u64::from(max_tokens)).saturating_sub(1);
        let request = GenerateRequest {
            seed,
            prompt: Some(generate_request::Prompt::Ids(prompt)),
            max_tokens,
            temperature: Some(1.0),
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        Ok(Streaming { events: self.client.clone().generate(request).await?.into_inner(), computed })
    }

    pub(crate) fn loads(&self, tokens: usize) -> Result<BTreeMap<u32, u32>, ProfileError> {
        let prompt = inspect_request::Prompt::Ids(self.prompt(0, tokens));
        let request = InspectRequest { prompt: Some(prompt), hidden: false, scores: false };
        let mut client = self.client.clone();
        let reply =
            self.runtime.block_on(async move { timeout(CALL_TIMEOUT, client.inspect(request)).await });
        let reply = reply.map_err(late)??;
        let mut loads = BTreeMap::new();
        for layer in reply.into_inner().routing {
            let mut tokens: BTreeMap<u32, u32> = BTreeMap::new();
            for expert in layer.tokens.iter().flat_map(|token| &token.experts) {
                *tokens.entry(*expert).or_default() += 1;
            }
            for count in tokens.into_values() {
                *loads.entry(count).or_default() += 1;
            }
        }
        Ok(loads)
    }

    /// Returns a prompt of varied tokens that shares no prefix with others.
    fn unique_prompt(&self, tokens: usize) -> TokenIds {
        let number = self.prompts.replace(self.prompts.get() + 1);
        let mut prompt = self.prompt(number * tokens as u64, tokens);
        let vocabulary = self.subject.inspection.vocab_size.max(1) as u64;
        // Small vocabularies need a second token to distinguish all prompts.
        let digits = [number % vocabulary, number / vocabulary % vocabulary];
        prompt.ids.iter_mut().zip(digits).for_each(|(id, digit)| *id = digit as u32);
        prompt
    }

    /// Returns a deterministic sequence of varied tokens, from position `before` on.
    fn prompt(&self, before: u64, tokens: usize) -> TokenIds {
        let vocabulary = self.subject.inspection.vocab_size.max(1) as u64;
        let numbers = (1..=tokens as u64).map(|number| before.wrapping_add(number));
        let ids = numbers.map(|number| (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocabulary);
        TokenIds { ids: ids.map(|id| id as u32).collect() }
    }
}

/// Returns the bytes of the KV cache for the longest measured request or the largest batch. It is exactly that large,
/// so that all of it is touched, since plans count it separately.
pub(crate) fn cache_bytes(subject: &ProfiledModel<'_>) -> u64 {
    let pages = |positions: usize| (positions as u64).div_ceil(u64::from(PAGE_POSITIONS)) + 1;
    let longest = subject.grid.long_prompt.max(DECODE_PROMPT) + STEPS as usize + 1;
    let rows = subject.grid.rows.last().copied().unwrap_or(0) as u64;
    let pages = pages(longest).max(rows * pages(MAX_BATCHED_REQUEST_TOKENS));
    let inspection = subject.inspection;
    let position = inspection.resident_bytes(inspection.kv_bytes_per_token, subject.dtype);
    pages * u64::from(PAGE_POSITIONS) * position.max(1)
}

/// Returns the error of an answer that takes longer than [`CALL_TIMEOUT`].
fn late(_elapsed: tokio::time::error::Elapsed) -> ProfileError {
    ProfileError::Late { function: "main function", within: CALL_TIMEOUT }
}

/// Streaming answer.
struct Streaming {
    events: tonic::Streaming<GenerateEvent>,
    /// Positions that it must compute.
    computed: u64,
}

impl Streaming {
    /// Waits for the next event.
    async fn message(&mut self) -> Result<Event, ProfileError> {
        while let Some(message) = self.events.message().await? {
            match message.event {
                Some(Event::Started(_)) | None => {}
                Some(event) => return Ok(event),
            }
        }
        Err(ProfileError::Cut)
    }

    async fn finished(mut self) -> Result<Finished, ProfileError> {
        loop {
            let Event::Finished(finished) = self.message().await? else { continue };
            if finished.forwarded_positions >= self.computed {
                return Ok(finished);
            }
            return Err(ProfileError::Cached {
                computed: finished.forwarded_positions,
                tokens: self.computed,
            });
        }
    }
}

impl MeasuredRequest {
    /// Extracts the times of an answer with this number of decode steps.
    fn of(finished: &Finished, steps: u32) -> Self {
        let (prefill, decode) = (local(finished.prefill_experts), local(finished.decode_experts));
        let steps = f64::from(steps);
        Self {
            prompt: StepSeconds { rest: finished.ttft_s - prefill, experts: prefill },
            step: StepSeconds { rest: (finished.decode_s - decode) / steps, experts: decode / steps },
        }
    }
}

/// Returns the mean context in tokens over `steps` decode steps after a prompt of `tokens`.
const fn context(tokens: usize, steps: u32) -> f64 {
    tokens as f64 + (steps + 1) as f64 / 2.0
}

fn local(time: Option<ExpertTime>) -> f64 {
    time.map_or(0.0, |time| time.local_s)
}

/// Returns the mean of back-to-back measurements over several quota periods, in each of which a function first runs
/// freely and then waits.
fn sustained(
    measure: &mut dyn FnMut() -> Result<MeasuredRequest, ProfileError>,
) -> Result<MeasuredRequest, ProfileError> {
    let started = Instant::now();
    let mut answers = Vec::new();
    while answers.len() < 2 || started.elapsed() < SUSTAINED_DURATION {
        answers.push(measure()?);
    }
    let mean = |of: fn(&MeasuredRequest) -> f64| answers.iter().map(of).sum::<f64>() / answers.len() as f64;
    Ok(MeasuredRequest {
        prompt: StepSeconds {
            rest: mean(|answer| answer.prompt.rest),
            experts: mean(|answer| answer.prompt.experts),
        },
        step: StepSeconds {
            rest: mean(|answer| answer.step.rest),
            experts: mean(|answer| answer.step.experts),
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_below_one_vcpu_are_stretched_times_of_one_vcpu() {
        let column = |vcpus: f64, batched: Vec<StepSeconds>| Column {
            steps: Points { vcpus, points: Vec::new() },
            experts: 0.0,
            batched,
            prompts: Vec::new(),
        };
        let several = [StepSeconds { rest: 2.0, experts: 1.0 }, StepSeconds { rest: 3.0, experts: 4.0 }];
        let fewer = several.map(|parts| StepSeconds { rest: parts.rest / 2.0, experts: parts.experts / 2.0 });
        let mut columns =
            [column(0.25, Vec::new()), column(1.0, several.to_vec()), column(2.0, fewer.to_vec())];
        fill_batched(&mut columns);
        let figures = columns
            .map(|column| column.batched.iter().map(|parts| [parts.rest, parts.experts]).collect::<Vec<_>>());
        assert_eq!(
            figures,
            [vec![[8.0, 4.0], [12.0, 16.0]], vec![[2.0, 1.0], [3.0, 4.0]], vec![[1.0, 0.5], [1.5, 2.0]],]
        );
    }
}
