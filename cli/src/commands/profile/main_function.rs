//! The main function in use: what it takes besides experts, and what experts take beside everything
//! else, over prompts and vCPUs.

use super::Subject;
use super::functions::Running;
use super::grid::median;
use super::lines::{Points, lines};
use crate::exit::CliError;
use remoe_function::Role;
use remoe_launcher::control;
use remoe_planner::{Affine, CpuProfile, PAGE_POSITIONS};
use remoe_profile::{DeviceTimes, Start};
use remoe_wire::v1::generate_event::Event;
use remoe_wire::v1::main_model_client::MainModelClient;
use remoe_wire::v1::{
    Endpoint, ExpertTime, Finished, GenerateRequest, InspectRequest, LayerExperts, Routing, TokenIds,
    generate_request, inspect_request,
};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::transport::Channel;

/// Nothing that is measured takes this long.
const LIMIT: Duration = Duration::from_secs(600);
/// Decode steps of a measurement.
const STEPS: u32 = 24;
/// Tokens of the prompt in front of them.
const DECODE_PROMPT: usize = 64;
/// Measurements of each prompt.
const ROUNDS: usize = 5;
/// Before each: requests meet functions that have waited for them.
const REST: Duration = Duration::from_millis(50);
/// Experts that are remote where calls are measured, in bytes.
const REMOTE_BYTES: u64 = 1 << 30;
/// A long prompt that would take longer is left out.
const LONG_PROMPT_SECONDS: f64 = 60.0;
/// Several periods of a CPU quota.
const SUSTAINED: Duration = Duration::from_millis(500);

const NOTHING: Affine = Affine { base: 0.0, per_token: 0.0 };

/// What the main function takes.
pub(super) struct MainFigures {
    pub(super) expert_seconds: CpuProfile,
    pub(super) nonexpert_seconds: CpuProfile,
    pub(super) context_seconds: CpuProfile,
    pub(super) device: Option<DeviceTimes>,
    pub(super) start: Start,
    pub(super) main_bytes: f64,
    pub(super) call: RemoteCall,
}

/// A remote layer as the main function sees it, in seconds.
#[derive(Clone, Copy)]
pub(super) struct RemoteCall {
    /// Before its own experts: messages are sent.
    pub(super) send: f64,
    /// After them: waiting, computation included.
    pub(super) wait: f64,
}

/// What is measured, and what is told about it.
pub(super) struct MainSetup<'a> {
    pub(super) subject: &'a Subject<'a>,
    /// Where the non-expert part runs: `cpu`, or a device of its own.
    pub(super) device: &'a str,
    /// One expert alone on all cores, over the grid's tokens.
    pub(super) alone: Vec<f64>,
}

/// A prompt's or a decode step's seconds, besides local experts and in them.
#[derive(Clone, Copy)]
struct Parts {
    rest: f64,
    experts: f64,
}

/// A prompt and the decode steps behind it.
#[derive(Clone, Copy)]
struct Answered {
    prompt: Parts,
    step: Parts,
}

/// What was measured with one number of vCPUs.
struct Column {
    /// Decode steps over tokens of context.
    steps: Points,
    /// Experts in a decode step.
    experts: f64,
    /// Each prompt of the grid.
    prompts: Vec<Parts>,
}

impl MainSetup<'_> {
    /// Measures everything on CPUs, then the non-expert part on the device where there is one.
    pub(super) fn measure(&self, step: &dyn Fn(String)) -> Result<MainFigures, CliError> {
        let mut expert_columns = Vec::new();
        let mut columns: Vec<Column> = Vec::new();
        let mut last = None;
        let mut main_bytes = 0.0;
        let mut loads = None;
        let mut call = RemoteCall { send: 0.0, wait: 0.0 };
        for (threads, vcpus) in self.subject.grid.by_threads(self.subject.functions.quotas) {
            let main = Main::start(self, threads, "cpu", step)?;
            let loads = loads.get_or_insert(self.loads(&main)?);
            for vcpus in vcpus {
                main.function.limit(vcpus)?;
                step(format!("the main function with {vcpus} vCPUs, {threads} threads"));
                let column = main.column(vcpus)?;
                expert_columns.push(self.experts(&column, loads));
                columns.push(column);
            }
            main.function.limit(f64::from(self.subject.grid.cores))?;
            step("remote experts as the main function sees them".to_owned());
            call = main.remote_call()?;
            let counted = self.weights() + self.cache_bytes() as f64;
            main_bytes = f64::max(main_bytes, main.function.peak_bytes().unwrap_or(0.0) - counted);
            last = Some(main.start_times());
        }
        let device = match self.device {
            "cpu" => None,
            device => Some(self.on_device(device, step)?),
        };
        let quotas = self.subject.functions.quotas;
        let prompts: Vec<Vec<f64>> =
            columns.iter().map(|column| column.prompts.iter().map(|parts| parts.rest).collect()).collect();
        let steps = lines(&columns.into_iter().map(|column| column.steps).collect::<Vec<_>>());
        let rest_columns: Vec<Vec<f64>> =
            steps.iter().zip(prompts).map(|(step, prompts)| [vec![step.base], prompts].concat()).collect();
        let longest = self.subject.grid.long_prompt as f64;
        let context_columns: Vec<Vec<f64>> =
            steps.iter().map(|step| vec![step.per_token * longest]).collect();
        let points =
            std::iter::once(1.0).chain(self.subject.grid.prompts.iter().map(|tokens| *tokens as f64));
        Ok(MainFigures {
            expert_seconds: self.subject.grid.table(
                self.subject.grid.tokens.clone(),
                &expert_columns,
                quotas,
            ),
            nonexpert_seconds: self.subject.grid.table(points.collect(), &rest_columns, quotas),
            context_seconds: self.subject.grid.table(vec![longest], &context_columns, quotas),
            device,
            start: last.ok_or_else(|| CliError::runtime("no number of vCPUs to measure"))?,
            main_bytes: main_bytes.max(0.0),
            call,
        })
    }

    /// Bytes of all weights as they are resident.
    fn weights(&self) -> f64 {
        self.subject.inspection.resident_total_bytes(self.subject.dtype) as f64
    }

    /// Keys and values of the longest request that is measured: room for no more, so that all of it has been used, and plans
    /// count them apart.
    fn cache_bytes(&self) -> u64 {
        let longest = self.subject.grid.long_prompt.max(DECODE_PROMPT) as u64 + u64::from(STEPS) + 1;
        let pages = longest.div_ceil(u64::from(PAGE_POSITIONS)) + 1;
        let inspection = self.subject.inspection;
        let position = inspection.resident_bytes(inspection.kv_bytes_per_token, self.subject.dtype);
        pages * u64::from(PAGE_POSITIONS) * position.max(1)
    }

    /// How many experts receive how many tokens of each prompt, all layers together.
    fn loads(&self, main: &Main<'_>) -> Result<Vec<BTreeMap<u32, u32>>, CliError> {
        self.subject.grid.prompts.iter().map(|&tokens| main.loads(tokens)).collect()
    }

    /// Seconds of one expert in use over the grid's tokens: alone, times how much longer experts took
    /// in use, at one token and at the mean load of each prompt, and between them.
    fn experts(&self, column: &Column, loads: &[BTreeMap<u32, u32>]) -> Vec<f64> {
        let per_step = (self.subject.inspection.moe_layers.len() * self.subject.inspection.top_k) as f64;
        let mut factors = vec![(1.0, column.experts / (per_step * self.alone_at(1.0)))];
        for (parts, loads) in column.prompts.iter().zip(loads) {
            let alone: f64 = loads
                .iter()
                .map(|(tokens, experts)| f64::from(*experts) * self.alone_at(f64::from(*tokens)))
                .sum();
            let rows: f64 = loads.iter().map(|(tokens, experts)| f64::from(tokens * experts)).sum();
            let mean = rows / loads.values().copied().map(f64::from).sum::<f64>();
            if alone > 0.0 && mean > factors.last().map_or(0.0, |(tokens, _)| *tokens) {
                factors.push((mean, parts.experts / alone));
            }
        }
        let tokens = self.subject.grid.tokens.iter();
        tokens.map(|&tokens| self.alone_at(tokens) * between(&factors, tokens)).collect()
    }

    fn alone_at(&self, tokens: f64) -> f64 {
        let points: Vec<(f64, f64)> =
            self.subject.grid.tokens.iter().copied().zip(self.alone.iter().copied()).collect();
        between(&points, tokens)
    }

    fn on_device(&self, device: &str, step: &dyn Fn(String)) -> Result<DeviceTimes, CliError> {
        let main = Main::start(self, self.subject.grid.threads(), device, step)?;
        step(format!("the main function on {device}"));
        let column = main.column(f64::from(self.subject.grid.cores))?;
        let prompts = self.subject.grid.prompts.iter().zip(&column.prompts);
        let prompts = prompts.map(|(tokens, parts)| (*tokens as f64, parts.rest)).collect();
        let vcpus = column.steps.vcpus;
        let line = |points: Points| lines(&[points]).first().copied();
        let decode = line(column.steps).unwrap_or(NOTHING);
        Ok(DeviceTimes {
            prefill_seconds: line(Points { vcpus, points: prompts }).unwrap_or(NOTHING),
            decode_seconds: decode.base,
            context_seconds_per_token: decode.per_token,
            // Moves to the host and back are part of what was measured.
            swap_seconds: NOTHING,
        })
    }
}

/// A main function with every expert local.
struct Main<'s> {
    setup: &'s MainSetup<'s>,
    function: Running<'s>,
    client: MainModelClient<Channel>,
    runtime: tokio::runtime::Handle,
    /// Packing all experts.
    placed: Duration,
    /// Prompts so far: each begins with a token of its own, so that nothing kept of one before is of any use.
    prompts: Cell<u64>,
}

impl<'s> Main<'s> {
    fn start(
        setup: &'s MainSetup<'_>,
        threads: usize,
        device: &str,
        step: &dyn Fn(String),
    ) -> Result<Self, CliError> {
        step(format!("starting the main function with {threads} threads"));
        let mut arguments = setup.subject.source.arguments();
        arguments.extend(setup.subject.precision());
        arguments.extend(setup.subject.dense());
        arguments.extend(["--device".into(), device.into(), "--threads".into(), threads.to_string().into()]);
        arguments.extend(["--kv-cache-bytes".into(), setup.cache_bytes().to_string().into()]);
        if threads == 1 {
            arguments.extend(["--poll-us".into(), "0".into()]);
        }
        let function =
            setup.subject.functions.start(Role::Main, arguments, f64::from(setup.subject.grid.cores))?;
        let runtime = tokio::runtime::Handle::current();
        let started = Instant::now();
        let routing = Routing { generation: 1, ..Routing::default() };
        runtime.block_on(control::set_routing(function.grpc, routing, LIMIT))?;
        runtime.block_on(control::all_experts_read(function.grpc, LIMIT))?;
        let placed = started.elapsed();
        let client = runtime.block_on(async { control::main_client(function.grpc) })?;
        let main = Self { setup, function, client, runtime, placed, prompts: Cell::new(0) };
        // Everything is touched once.
        main.generate(setup.subject.grid.prompts.last().copied().unwrap_or(DECODE_PROMPT), 4)?;
        Ok(main)
    }

    fn start_times(&self) -> Start {
        let facts = self.setup.subject.inspection;
        let experts = self.setup.subject.resident_experts(facts.moe_layers.len() * facts.experts);
        let rate = experts / self.placed.as_secs_f64().max(1e-6);
        let rest = self.setup.weights() - experts;
        Start {
            process_seconds: (self.function.start.as_secs_f64() - rest / rate).max(0.0),
            load_bytes_per_second: rate.clamp(1.0, 1e12),
        }
    }

    /// Decode steps behind prompts of several lengths, and each prompt of the grid, with `vcpus`.
    fn column(&self, vcpus: f64) -> Result<Column, CliError> {
        let typical = if self.setup.subject.functions.quotas && vcpus < 1.0 { sustained } else { rested };
        let answered = |tokens: usize| typical(&mut || self.answer(tokens));
        let behind = answered(DECODE_PROMPT)?;
        let grid = &self.setup.subject.grid;
        let prompts: Vec<Answered> =
            grid.prompts.iter().map(|&tokens| answered(tokens)).collect::<Result<_, _>>()?;
        let mut steps = vec![(DECODE_PROMPT, behind.step.rest)];
        steps.extend(grid.prompts.iter().zip(&prompts).map(|(tokens, answer)| (*tokens, answer.step.rest)));
        let expected = grid.prompts.iter().zip(&prompts).next_back().map_or(0.0, |(tokens, answer)| {
            (answer.prompt.rest + answer.prompt.experts) * grid.long_prompt as f64 / *tokens as f64
        });
        if vcpus >= 1.0 && !grid.prompts.contains(&grid.long_prompt) && expected < LONG_PROMPT_SECONDS {
            // The farthest point turns the line most: one disturbance is not to decide it.
            let (one, other) = (self.answer(grid.long_prompt)?, self.answer(grid.long_prompt)?);
            steps.push((grid.long_prompt, one.step.rest.min(other.step.rest)));
        }
        // Half of the steps are behind it in the mean.
        let context = |tokens: usize| tokens as f64 + f64::from(STEPS + 1) / 2.0;
        let points = steps.into_iter().map(|(tokens, seconds)| (context(tokens), seconds));
        Ok(Column {
            steps: Points { vcpus, points: points.collect() },
            experts: behind.step.experts,
            prompts: prompts.iter().map(|answer| answer.prompt).collect(),
        })
    }

    fn answer(&self, tokens: usize) -> Result<Answered, CliError> {
        let finished = self.generate(tokens, STEPS + 1)?;
        let (prefill, decode) = (local(finished.prefill_experts), local(finished.decode_experts));
        let steps = f64::from(STEPS);
        Ok(Answered {
            prompt: Parts { rest: finished.ttft_s - prefill, experts: prefill },
            step: Parts { rest: (finished.decode_s - decode) / steps, experts: decode / steps },
        })
    }

    /// Decode steps with all experts of the first layers in a remote function, against steps without.
    fn remote_call(&self) -> Result<RemoteCall, CliError> {
        let facts = self.setup.subject.inspection;
        let expert_bytes = facts.resident_expert_bytes(self.setup.subject.dtype);
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
                std::thread::sleep(REST);
                let finished = self.generate(DECODE_PROMPT, STEPS + 1)?;
                let time = finished.decode_experts.unwrap_or_default();
                rest.push((finished.decode_s - time.local_s - time.waited_s) / steps);
                let seconds = if waited { time.waited_s } else { time.local_s };
                experts.push(seconds / steps);
            }
            Ok::<_, CliError>(Parts { rest: median(rest), experts: median(experts) })
        };
        let local = step(false)?;
        let function = super::remote::start(self.setup.subject, &sets, 1)?;
        let endpoint =
            Endpoint { address: function.grpc.to_string(), layers: Vec::new(), experts: Vec::new() };
        let count = sets.len() as f64;
        let routing =
            Routing { generation: 2, endpoints: vec![endpoint], remote: sets, ..Routing::default() };
        self.runtime.block_on(control::set_routing(self.function.grpc, routing, LIMIT))?;
        let remote = step(true)?;
        let send = ((remote.rest - local.rest) / count).max(0.0);
        Ok(RemoteCall { send, wait: remote.experts / count })
    }

    fn generate(&self, tokens: usize, max_tokens: u32) -> Result<Finished, CliError> {
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Ids(self.another_prompt(tokens))),
            max_tokens,
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        let mut client = self.client.clone();
        let finished = self.runtime.block_on(async move {
            let finished = timeout(LIMIT, async {
                let mut events = client.generate(request).await?.into_inner();
                while let Some(message) = events.message().await? {
                    if let Some(Event::Finished(finished)) = message.event {
                        return Ok(finished);
                    }
                }
                Err(CliError::runtime("the answer broke off"))
            });
            finished.await.map_err(|_elapsed| CliError::runtime(format!("no answer within {LIMIT:?}")))?
        })?;
        // Computed are all tokens but the last one that was drawn.
        let computed = (tokens as u64 + u64::from(max_tokens)).saturating_sub(1);
        if finished.forwarded_positions < computed {
            return Err(CliError::runtime(format!(
                "{} of {computed} tokens were computed: the main function kept some from before, and no time is that of a \
                 whole prompt",
                finished.forwarded_positions
            )));
        }
        Ok(finished)
    }

    fn loads(&self, tokens: usize) -> Result<BTreeMap<u32, u32>, CliError> {
        let prompt = inspect_request::Prompt::Ids(self.prompt(tokens));
        let request = InspectRequest { prompt: Some(prompt), hidden: false, scores: false };
        let mut client = self.client.clone();
        let reply = self.runtime.block_on(async move { timeout(LIMIT, client.inspect(request)).await });
        let reply = reply.map_err(|_elapsed| CliError::runtime(format!("no answer within {LIMIT:?}")))??;
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

    /// The same, but for the first one, which no other prompt begins with.
    fn another_prompt(&self, tokens: usize) -> TokenIds {
        let mut prompt = self.prompt(tokens);
        let number = self.prompts.replace(self.prompts.get() + 1);
        let vocabulary = self.setup.subject.inspection.vocab_size.max(1) as u64;
        // Small vocabularies need a second one to tell that many apart.
        let digits = [number % vocabulary, number / vocabulary % vocabulary];
        prompt.ids.iter_mut().zip(digits).for_each(|(id, digit)| *id = digit as u32);
        prompt
    }

    /// Tokens of all kinds, always the same.
    fn prompt(&self, tokens: usize) -> TokenIds {
        let vocabulary = self.setup.subject.inspection.vocab_size.max(1) as u64;
        let ids = (1..=tokens as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33) % vocabulary);
        TokenIds { ids: ids.map(|id| id as u32).collect() }
    }
}

fn local(time: Option<ExpertTime>) -> f64 {
    time.map_or(0.0, |time| time.local_s)
}

/// The median of measurements with rests between them.
fn rested(measure: &mut dyn FnMut() -> Result<Answered, CliError>) -> Result<Answered, CliError> {
    let measured = (0..ROUNDS).map(|_| {
        std::thread::sleep(REST);
        measure()
    });
    let answers = measured.collect::<Result<Vec<_>, _>>()?;
    let middle = |of: fn(&Answered) -> Parts| Parts {
        rest: median(answers.iter().map(|answer| of(answer).rest).collect()),
        experts: median(answers.iter().map(|answer| of(answer).experts).collect()),
    };
    Ok(Answered { prompt: middle(|answer| answer.prompt), step: middle(|answer| answer.step) })
}

/// The mean of measurements without rests over several periods of the quota, in each of which a function
/// runs freely at first and then waits.
fn sustained(measure: &mut dyn FnMut() -> Result<Answered, CliError>) -> Result<Answered, CliError> {
    let started = Instant::now();
    let mut answers = Vec::new();
    while answers.len() < 2 || started.elapsed() < SUSTAINED {
        answers.push(measure()?);
    }
    let mean = |of: fn(&Answered) -> f64| answers.iter().map(of).sum::<f64>() / answers.len() as f64;
    Ok(Answered {
        prompt: Parts {
            rest: mean(|answer| answer.prompt.rest),
            experts: mean(|answer| answer.prompt.experts),
        },
        step: Parts { rest: mean(|answer| answer.step.rest), experts: mean(|answer| answer.step.experts) },
    })
}

/// The value at `x` between points ascending in x: linear, the nearest one's outside.
fn between(points: &[(f64, f64)], x: f64) -> f64 {
    let above = points.partition_point(|(known, _)| *known <= x);
    match (above.checked_sub(1).and_then(|below| points.get(below)), points.get(above)) {
        (Some((from, low)), Some((to, high))) => low + (high - low) * (x - from) / (to - from),
        (Some((_, only)), None) | (None, Some((_, only))) => *only,
        (None, None) => 0.0,
    }
}
