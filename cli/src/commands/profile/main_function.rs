//! The main function in use: what it takes besides experts, and what experts take beside everything
//! else, over prompts and vCPUs.

use super::Subject;
use super::functions::Running;
use super::grid::median;
use crate::exit::CliError;
use remoe_function::Role;
use remoe_launcher::control;
use remoe_planner::{Affine, CpuProfile};
use remoe_profile::{DeviceTimes, Start};
use remoe_wire::v1::generate_event::Event;
use remoe_wire::v1::main_model_client::MainModelClient;
use remoe_wire::v1::{
    Endpoint, ExpertTime, Finished, GenerateRequest, InspectRequest, LayerExperts, Routing, TokenIds,
    generate_request, inspect_request,
};
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
/// Several periods of a CPU quota.
const SUSTAINED: Duration = Duration::from_millis(500);

/// What the main function takes.
pub(super) struct MainFigures {
    pub(super) expert_seconds: CpuProfile,
    pub(super) nonexpert_seconds: CpuProfile,
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
    /// What the main function computes for it.
    pub(super) cpu: f64,
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

impl MainSetup<'_> {
    /// Measures everything on CPUs, then the non-expert part on the device where there is one.
    pub(super) fn measure(&self, step: &dyn Fn(String)) -> Result<MainFigures, CliError> {
        let mut expert_columns = Vec::new();
        let mut rest_columns = Vec::new();
        let mut last = None;
        let mut main_bytes = 0.0;
        let mut loads = None;
        let mut call = RemoteCall { send: 0.0, wait: 0.0, cpu: 0.0 };
        for (threads, vcpus) in self.subject.grid.by_threads(self.subject.functions.quotas) {
            let main = Main::start(self, threads, "cpu", step)?;
            let loads = loads.get_or_insert(self.loads(&main)?);
            for vcpus in vcpus {
                main.function.limit(vcpus)?;
                step(format!("the main function with {vcpus} vCPUs, {threads} threads"));
                let (decode, prompts) = main.parts(vcpus)?;
                expert_columns.push(self.experts(decode, &prompts, loads));
                let prompts = prompts.iter().map(|parts| parts.rest);
                rest_columns.push(std::iter::once(decode.rest).chain(prompts).collect::<Vec<f64>>());
            }
            main.function.limit(f64::from(self.subject.grid.cores))?;
            step("remote experts as the main function sees them".to_owned());
            let seen = main.remote_call()?;
            // What polls or computes in several threads does not say what it works.
            call = RemoteCall { cpu: if threads == 1 { seen.cpu } else { call.cpu }, ..seen };
            main_bytes = f64::max(main_bytes, main.function.peak_bytes().unwrap_or(0.0) - self.weights());
            last = Some(main.start_times());
        }
        let device = match self.device {
            "cpu" => None,
            device => Some(self.on_device(device, step)?),
        };
        let quotas = self.subject.functions.quotas;
        let points =
            std::iter::once(1.0).chain(self.subject.grid.prompts.iter().map(|tokens| *tokens as f64));
        Ok(MainFigures {
            expert_seconds: self.subject.grid.table(
                self.subject.grid.tokens.clone(),
                &expert_columns,
                quotas,
            ),
            nonexpert_seconds: self.subject.grid.table(points.collect(), &rest_columns, quotas),
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

    /// How many experts receive how many tokens of each prompt, all layers together.
    fn loads(&self, main: &Main<'_>) -> Result<Vec<BTreeMap<u32, u32>>, CliError> {
        self.subject.grid.prompts.iter().map(|&tokens| main.loads(tokens)).collect()
    }

    /// Seconds of one expert in use over the grid's tokens: alone, times how much longer experts took
    /// in use, at one token and at the mean load of each prompt, and between them.
    fn experts(&self, decode: Parts, prompts: &[Parts], loads: &[BTreeMap<u32, u32>]) -> Vec<f64> {
        let per_step = (self.subject.inspection.moe_layers.len() * self.subject.inspection.top_k) as f64;
        let mut factors = vec![(1.0, decode.experts / (per_step * self.alone_at(1.0)))];
        for (parts, loads) in prompts.iter().zip(loads) {
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
        let (decode, prompts) = main.parts(f64::from(self.subject.grid.cores))?;
        let tokens: Vec<f64> = self.subject.grid.prompts.iter().map(|tokens| *tokens as f64).collect();
        let seconds: Vec<f64> = prompts.iter().map(|parts| parts.rest).collect();
        Ok(DeviceTimes {
            prefill_seconds: line(&tokens, &seconds),
            decode_seconds: decode.rest,
            // Moves to the host and back are part of what was measured.
            swap_seconds: Affine { base: 0.0, per_token: 0.0 },
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
        if threads == 1 {
            arguments.extend(["--poll-us".into(), "0".into()]);
        }
        let function =
            setup.subject.functions.start(Role::Main, arguments, f64::from(setup.subject.grid.cores))?;
        let runtime = tokio::runtime::Handle::current();
        let started = Instant::now();
        let routing = Routing { generation: 1, ..Routing::default() };
        runtime.block_on(control::set_routing(function.grpc, routing, LIMIT))?;
        let placed = started.elapsed();
        let client = runtime.block_on(async { control::main_client(function.grpc) })?;
        let main = Self { setup, function, client, runtime, placed };
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

    /// A decode step, and each prompt of the grid, with `vcpus`.
    fn parts(&self, vcpus: f64) -> Result<(Parts, Vec<Parts>), CliError> {
        let steps = f64::from(STEPS);
        let typical = if self.setup.subject.functions.quotas && vcpus < 1.0 { sustained } else { rested };
        let decode = typical(&mut || {
            let finished = self.generate(DECODE_PROMPT, STEPS + 1)?;
            let experts = local(finished.decode_experts);
            Ok(Parts { rest: (finished.decode_s - experts) / steps, experts: experts / steps })
        })?;
        let prompts = self.setup.subject.grid.prompts.iter().map(|&tokens| {
            typical(&mut || {
                let finished = self.generate(tokens, 1)?;
                let experts = local(finished.prefill_experts);
                Ok(Parts { rest: finished.ttft_s - experts, experts })
            })
        });
        Ok((decode, prompts.collect::<Result<_, _>>()?))
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
            rested(&mut || {
                let finished = self.generate(DECODE_PROMPT, STEPS + 1)?;
                let time = finished.decode_experts.unwrap_or_default();
                let experts = if waited { time.waited_s } else { time.local_s };
                Ok(Parts {
                    rest: (finished.decode_s - time.local_s - time.waited_s) / steps,
                    experts: experts / steps,
                })
            })
        };
        let (local, local_cpu) = (step(false)?, self.step_cpu()?);
        let function = super::remote::start(self.setup.subject, &sets, 1)?;
        let endpoint =
            Endpoint { address: function.grpc.to_string(), layers: Vec::new(), experts: Vec::new() };
        let count = sets.len() as f64;
        let routing =
            Routing { generation: 2, endpoints: vec![endpoint], remote: sets, ..Routing::default() };
        self.runtime.block_on(control::set_routing(self.function.grpc, routing, LIMIT))?;
        let (remote, remote_cpu) = (step(true)?, self.step_cpu()?);
        let send = ((remote.rest - local.rest) / count).max(0.0);
        let cpu = remote_cpu.zip(local_cpu).map_or(send, |(remote, local)| (remote - local).max(0.0) / count);
        Ok(RemoteCall { send, wait: remote.experts / count, cpu })
    }

    /// CPU seconds of a decode step besides local experts, where the kernel counts them.
    fn step_cpu(&self) -> Result<Option<f64>, CliError> {
        let computed = |tokens: u32| {
            let before = self.function.cpu_seconds();
            let finished = self.generate(DECODE_PROMPT, tokens)?;
            let computed = self.function.cpu_seconds().zip(before).map(|(after, before)| after - before);
            Ok::<_, CliError>((computed, local(finished.decode_experts)))
        };
        let mut steps = Vec::with_capacity(ROUNDS);
        for _ in 0..ROUNDS {
            let ((all, experts), (prefill, _)) = (computed(STEPS + 1)?, computed(1)?);
            let (Some(all), Some(prefill)) = (all, prefill) else { return Ok(None) };
            steps.push((all - prefill - experts) / f64::from(STEPS));
        }
        Ok(Some(median(steps)))
    }

    fn generate(&self, tokens: usize, max_tokens: u32) -> Result<Finished, CliError> {
        let request = GenerateRequest {
            prompt: Some(generate_request::Prompt::Ids(self.prompt(tokens))),
            max_tokens,
            ignore_eos: true,
            ..GenerateRequest::default()
        };
        let mut client = self.client.clone();
        self.runtime.block_on(async move {
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
        })
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
fn rested(measure: &mut dyn FnMut() -> Result<Parts, CliError>) -> Result<Parts, CliError> {
    let measured = (0..ROUNDS).map(|_| {
        std::thread::sleep(REST);
        measure()
    });
    let parts = measured.collect::<Result<Vec<_>, _>>()?;
    Ok(Parts {
        rest: median(parts.iter().map(|parts| parts.rest).collect()),
        experts: median(parts.iter().map(|parts| parts.experts).collect()),
    })
}

/// The mean of measurements without rests over several periods of the quota, in each of which a function
/// runs freely at first and then waits.
fn sustained(measure: &mut dyn FnMut() -> Result<Parts, CliError>) -> Result<Parts, CliError> {
    let started = Instant::now();
    let (mut sum, mut count) = (Parts { rest: 0.0, experts: 0.0 }, 0.0);
    while count < 2.0 || started.elapsed() < SUSTAINED {
        let parts = measure()?;
        sum = Parts { rest: sum.rest + parts.rest, experts: sum.experts + parts.experts };
        count += 1.0;
    }
    Ok(Parts { rest: sum.rest / count, experts: sum.experts / count })
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

/// The least-squares line through points, neither part below zero.
fn line(x: &[f64], y: &[f64]) -> Affine {
    let count = x.len().max(1) as f64;
    let (mean_x, mean_y) = (x.iter().sum::<f64>() / count, y.iter().sum::<f64>() / count);
    let covariance: f64 = x.iter().zip(y).map(|(x, y)| (x - mean_x) * (y - mean_y)).sum();
    let variance: f64 = x.iter().map(|x| (x - mean_x).powi(2)).sum();
    let per_token = if variance > 0.0 { (covariance / variance).max(0.0) } else { 0.0 };
    Affine { base: (mean_y - per_token * mean_x).max(0.0), per_token }
}
