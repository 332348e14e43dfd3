//! Measures remote functions: time of experts over tokens and vCPUs, network, start and memory.

use crate::error::ProfileError;
use crate::functions::ListeningFunction;
use crate::gate::Gate;
use crate::grid::median;
use crate::machine::own_cpu_seconds;
use crate::{MIN_WARM_UP, ProfiledModel};
use remoe_hardware::{Start, Transport};
use remoe_planner::{Contention, CpuProfile};
use remoe_process::Role;
use remoe_proto::v1::{FunctionDescription, LayerExperts, Work};
use remoe_proto::{ForwardClient, MAX_PAYLOAD, PollSettings, format_listing};
use std::time::{Duration, Instant};

/// Minimum bytes of measured experts, if the model has them: larger than any cache, as in use.
const HOSTED_BYTES: u64 = 256 << 20;
/// Experts per message.
const EXPERTS_PER_CALL: usize = 4;
/// Pause before a call, as between the tokens of a sequence.
const PAUSE: Duration = Duration::from_millis(5);
/// Pause below one vCPU: longer than a quota period, so that the quota is full.
const QUOTA_PAUSE: Duration = Duration::from_millis(110);
/// Calls per point of the table.
const CALLS_PER_POINT: usize = 7;
/// Calls per figure of the transport.
const TRANSPORT_CALLS: usize = 40;
/// Maximum number of concurrent functions; each has a copy of the measured experts.
const MAX_CONCURRENT_FUNCTIONS: u32 = 8;
/// Maximum bytes of all these copies beyond the model's weights.
pub(crate) const COPIES_BYTES: f64 = 1e9;
/// Back-to-back calls of each concurrent function, and of a single one.
const CONCURRENT_CALLS: usize = 8;
/// Rounds that alternate between both, within the time limit.
const CONCURRENT_ROUNDS: usize = 5;
const CONCURRENT_TIME_LIMIT: Duration = Duration::from_secs(10);

/// Measured figures of remote functions.
pub(crate) struct RemoteFigures {
    pub(crate) expert_seconds: CpuProfile,
    pub(crate) transport: Transport,
    pub(crate) contention: Option<Contention>,
    pub(crate) start: Start,
    pub(crate) function_bytes: f64,
    pub(crate) instruction_path: String,
    pub(crate) numerics_class: String,
}

/// Times of a function with one number of threads.
struct ThreadFigures {
    /// Seconds of an expert for each number of vCPUs.
    columns: Vec<Vec<f64>>,
    function_bytes: f64,
    description: FunctionDescription,
    /// Only measured with one thread.
    cpu: Option<CallCpu>,
    /// Only measured with all threads.
    transport: Option<Transport>,
}

/// Setup of the measurement of remote functions.
pub(crate) struct RemoteSetup<'a> {
    pub(crate) subject: &'a ProfiledModel<'a>,
    /// Address of a function on another machine for measuring the transport; absent for loopback.
    pub(crate) address: Option<&'a str>,
}

impl RemoteSetup<'_> {
    /// Measures everything. `step` receives a description of each step.
    pub(crate) fn measure(&self, step: &dyn Fn(String)) -> Result<RemoteFigures, ProfileError> {
        let hosted = self.hosted();
        let mut columns: Vec<Vec<f64>> = Vec::new();
        let mut function_bytes = 0.0;
        let mut transport = None;
        let mut description = None;
        let mut cpu = CallCpu::default();
        // Threads are fixed at the start of a function, unlike its quota.
        let below_one = self.subject.below_one(Role::Remote);
        for (threads, vcpus) in self.subject.grid.by_threads(below_one) {
            let figures =
                self.gate().retry_if_disturbed(|| self.with_threads(&hosted, threads, &vcpus, step))?;
            columns.extend(figures.columns);
            function_bytes = f64::max(function_bytes, figures.function_bytes);
            description = Some(figures.description);
            cpu = figures.cpu.unwrap_or(cpu);
            transport = figures.transport.or(transport);
        }
        if let Some(address) = self.address {
            step(format!("network to {address}"));
            transport = Some(ProbeClient::open(address, &hosted, self)?.transport(address)?);
        }
        let described = description.ok_or_else(|| ProfileError::NoVcpus { function: "remote function" })?;
        let tokens = self.subject.grid.tokens.clone();
        let expert_seconds = self.subject.grid.table(tokens, &columns, below_one);
        let transport = transport.ok_or_else(|| ProfileError::NoTransport)?;
        // Plans do not require it, so a machine that cannot hold as many functions still gets a profile.
        let contention =
            self.gate().retry_if_disturbed(|| self.contention(&hosted, step)).unwrap_or_else(|error| {
                self.subject.functions.report(&format!("cannot measure concurrent functions: {error}"));
                None
            });
        Ok(RemoteFigures {
            expert_seconds,
            transport: Transport {
                main_cpu_seconds: cpu.caller,
                function_cpu_seconds: cpu.function,
                ..transport
            },
            contention,
            start: self.gate().retry_if_disturbed(|| self.start_times(&hosted, step))?,
            function_bytes,
            instruction_path: described.instruction_path,
            numerics_class: described.numerics_class,
        })
    }

    fn gate(&self) -> &Gate {
        &self.subject.functions.gate
    }

    /// Measures a function with this number of threads and each of `vcpus`.
    fn with_threads(
        &self,
        hosted: &[LayerExperts],
        threads: usize,
        vcpus: &[f64],
        step: &dyn Fn(String),
    ) -> Result<ThreadFigures, ProfileError> {
        step(format!("starting a remote function: threads {threads}"));
        let function = self.start(hosted, threads)?;
        let mut client = ProbeClient::open(&function.grpc.to_string(), hosted, self)?;
        let began = Instant::now();
        let mut calls = 0;
        while calls < client.calls_for_all() || began.elapsed() < MIN_WARM_UP {
            self.gate().undisturbed(|| client.ask(1, PollSettings::ENGINE))?;
            calls += 1;
        }
        let mut columns = Vec::new();
        for &vcpus in vcpus {
            function.limit(vcpus)?;
            step(format!("one expert: vCPUs {vcpus}, threads {threads}"));
            let rest = if self.subject.functions.quotas && vcpus < 1.0 { QUOTA_PAUSE } else { PAUSE };
            columns.push(client.column(&self.subject.grid.tokens, rest)?);
        }
        let peak = function.peak_bytes().unwrap_or(0.0);
        // The planner counts the largest message and its answer separately.
        let rows = self.subject.grid.tokens.last().copied().unwrap_or(1.0) * (1 + EXPERTS_PER_CALL) as f64;
        let messages = rows * self.subject.resident_bytes(self.subject.inspection.token_bytes);
        let function_bytes = peak - self.weights(hosted) - messages;
        let description = function.describe_remote()?;
        function.limit(f64::from(self.subject.grid.cores))?;
        let cpu = (threads == 1).then(|| {
            step("overhead of a call".to_owned());
            self.gate().undisturbed(|| client.call_cpu_seconds(&function))
        });
        let cpu = cpu.transpose()?;
        let transport = (threads == self.subject.grid.threads()).then(|| {
            step("network to a remote function".to_owned());
            client.transport("loopback")
        });
        Ok(ThreadFigures { columns, function_bytes, description, cpu, transport: transport.transpose()? })
    }

    /// Returns the experts of the first MoE layers, up to [`HOSTED_BYTES`].
    fn hosted(&self) -> Vec<LayerExperts> {
        let facts = self.subject.inspection;
        let expert_bytes = facts.resident_expert_bytes(self.subject.dtype).max(1);
        let layer_bytes = (expert_bytes * facts.experts as u64).max(1);
        let layers = usize::try_from(HOSTED_BYTES.div_ceil(layer_bytes)).unwrap_or(usize::MAX);
        let experts =
            (HOSTED_BYTES / expert_bytes).max(2 * EXPERTS_PER_CALL as u64).min(facts.experts as u64);
        let sets = facts.moe_layers.iter().take(layers);
        sets.map(|&layer| LayerExperts {
            layer: u32::try_from(layer).unwrap_or(u32::MAX),
            experts: (0..u32::try_from(experts).unwrap_or(u32::MAX)).collect(),
        })
        .collect()
    }

    fn weights(&self, hosted: &[LayerExperts]) -> f64 {
        let experts: usize = hosted.iter().map(|set| set.experts.len()).sum();
        self.subject.resident_experts(experts)
    }

    /// Returns the slowdown of an expert while as many functions as cores compute, at most
    /// [`MAX_CONCURRENT_FUNCTIONS`], each with one vCPU. Absent on one core, or if that many copies of `hosted` would
    /// be far larger than the model.
    fn contention(
        &self,
        hosted: &[LayerExperts],
        step: &dyn Fn(String),
    ) -> Result<Option<Contention>, ProfileError> {
        step("concurrent remote functions".to_owned());
        let weights = self.subject.inspection.resident_total_bytes(self.subject.dtype) as f64;
        let room = (weights + COPIES_BYTES) / self.weights(hosted).max(1.0);
        let functions = self.subject.grid.cores.min(MAX_CONCURRENT_FUNCTIONS).min(room as u32);
        if functions < 2 {
            return Ok(None);
        }
        let running = (0..functions).map(|_| self.start(hosted, 1)).collect::<Result<Vec<_>, _>>()?;
        let clients = running.iter().map(|function| {
            function.limit(1.0)?;
            ProbeClient::open(&function.grpc.to_string(), hosted, self)
        });
        let mut clients = clients.collect::<Result<Vec<_>, _>>()?;
        let all = clients.first().map_or(0, ProbeClient::calls_for_all);
        let warming = Instant::now();
        while warming.elapsed() < MIN_WARM_UP {
            self.gate().undisturbed(|| call_concurrently(&mut clients, 1, all))?;
        }
        let mut slowdown = |tokens: f64| -> Result<f64, ProfileError> {
            let (mut alone, mut concurrent) = (Vec::new(), Vec::new());
            let began = Instant::now();
            // Alternating rounds, since memory speed varies over time.
            for round in 0..CONCURRENT_ROUNDS {
                if round > 0 && began.elapsed() > CONCURRENT_TIME_LIMIT {
                    break;
                }
                let mut called = |count: usize| {
                    let called = &mut clients[..count];
                    self.gate().undisturbed(|| call_concurrently(called, tokens as usize, CONCURRENT_CALLS))
                };
                alone.extend(called(1)?);
                concurrent.extend(called(functions as usize)?);
            }
            let times = median(concurrent) / median(alone);
            Ok(if times.is_finite() { times.max(1.0) } else { 1.0 })
        };
        let tokens = &self.subject.grid.tokens;
        let of = |tokens: Option<&f64>| tokens.copied().unwrap_or(1.0);
        let (step, prefill) = (slowdown(of(tokens.first()))?, slowdown(of(tokens.last()))?);
        Ok(Some(Contention { functions, step, prefill }))
    }

    fn start(&self, hosted: &[LayerExperts], threads: usize) -> Result<ListeningFunction<'_>, ProfileError> {
        start(self.subject, hosted, threads)
    }

    /// Measures start times with one expert and with all of them, to separate the part that grows with bytes.
    fn start_times(&self, hosted: &[LayerExperts], step: &dyn Fn(String)) -> Result<Start, ProfileError> {
        step("start times of a remote function".to_owned());
        let one = vec![LayerExperts { layer: hosted.first().map_or(0, |set| set.layer), experts: vec![0] }];
        let time = |hosted: &[LayerExperts]| -> Result<f64, ProfileError> {
            let mut times = Vec::new();
            for _ in 0..3 {
                times.push(self.start(hosted, self.subject.grid.threads())?.start.as_secs_f64());
            }
            Ok(median(times))
        };
        let (little, much) = (time(&one)?, time(hosted)?);
        let bytes = self.weights(hosted) - self.weights(&one);
        let rate = if much > little && bytes > 0.0 { bytes / (much - little) } else { 1e12 };
        Ok(Start {
            process_seconds: (little - self.weights(&one) / rate).max(0.0),
            load_bytes_per_second: rate.clamp(1.0, 1e12),
        })
    }
}

/// Starts a remote function that hosts `hosted`.
pub(crate) fn start<'f>(
    subject: &'f ProfiledModel<'_>,
    hosted: &[LayerExperts],
    threads: usize,
) -> Result<ListeningFunction<'f>, ProfileError> {
    let mut arguments = subject.source.arguments();
    arguments.extend(subject.precision());
    arguments.extend([
        "--threads".into(),
        threads.to_string().into(),
        "--experts".into(),
        format_listing(hosted).into(),
        // Planned functions have one layer each, and do not busy-poll.
        "--poll-us".into(),
        "0".into(),
    ]);
    subject.functions.start(Role::Remote, arguments, f64::from(subject.grid.cores))
}

/// Sends `calls` back-to-back calls of `rows` rows from each of `clients` concurrently. Returns the seconds per
/// expert of all calls except each first and last one, which do not overlap with all others.
fn call_concurrently(
    clients: &mut [ProbeClient<'_>],
    rows: usize,
    calls: usize,
) -> Result<Vec<f64>, ProfileError> {
    let call_sequence = |client: &mut ProbeClient<'_>| -> Result<Vec<f64>, ProfileError> {
        // Messages are prepared in advance, so that functions hardly idle.
        let works: Vec<Work> = (0..calls).map(|_| client.work(rows)).collect();
        let mut seconds = Vec::with_capacity(calls);
        for work in works {
            let (_, compute, experts) = client.send(work, PollSettings::SLEEP)?;
            seconds.push(compute / experts as f64);
        }
        let last = seconds.len().saturating_sub(1);
        Ok(seconds.get(1..last).unwrap_or_default().to_vec())
    };
    let lost = |why: &str| ProfileError::Concurrent { why: why.to_owned() };
    let answers = std::thread::scope(|scope| {
        let begun = clients.iter_mut().map(|client| {
            let asked = std::thread::Builder::new().spawn_scoped(scope, || call_sequence(client));
            asked.map_err(|error| lost(&error.to_string()))
        });
        // All threads start before any is joined, and all end before any result counts.
        let begun: Vec<_> = begun.collect();
        let ended = begun
            .into_iter()
            .map(|asked| asked?.join().unwrap_or_else(|_panic| Err(lost("a thread panicked"))));
        ended.collect::<Vec<_>>()
    });
    answers.into_iter().collect::<Result<Vec<_>, _>>().map(|answers| answers.concat())
}

/// CPU seconds of a call without experts, at both ends; 0 if the kernel does not count them.
#[derive(Default)]
struct CallCpu {
    caller: f64,
    function: f64,
}

/// Client that calls a function for different experts each time.
struct ProbeClient<'a> {
    forward_client: ForwardClient,
    hosted: &'a [LayerExperts],
    row_bytes: usize,
    asked: usize,
    gate: &'a Gate,
}

impl<'a> ProbeClient<'a> {
    fn open(
        address: &str,
        hosted: &'a [LayerExperts],
        setup: &'a RemoteSetup<'_>,
    ) -> Result<Self, ProfileError> {
        let row_bytes = setup.subject.resident_bytes(setup.subject.inspection.token_bytes);
        Ok(Self {
            forward_client: ForwardClient::open(address, None)?,
            hosted,
            row_bytes: row_bytes as usize,
            asked: 0,
            gate: setup.gate(),
        })
    }

    /// Returns the number of calls that cover every hosted expert.
    fn calls_for_all(&self) -> usize {
        self.hosted.iter().map(|set| set.experts.len().div_ceil(EXPERTS_PER_CALL)).sum()
    }

    /// Sends `rows` rows to the next experts. Returns the seconds of the round trip and of the computation, and the
    /// number of experts.
    fn ask(&mut self, rows: usize, wait: PollSettings) -> Result<(f64, f64, usize), ProfileError> {
        let work = self.work(rows);
        self.send(work, wait)
    }

    /// Sends `work`. Returns the seconds of the round trip and of the computation, and the number of experts.
    fn send(&mut self, work: Work, wait: PollSettings) -> Result<(f64, f64, usize), ProfileError> {
        let experts = work.counts.first().copied().unwrap_or(1) as usize;
        let answer = self.forward_client.forward(work, wait)?;
        Ok((answer.round_trip.as_secs_f64(), answer.compute.as_secs_f64(), experts))
    }

    fn work(&mut self, rows: usize) -> Work {
        let set = &self.hosted[self.asked % self.hosted.len()];
        let groups = set.experts.len().div_ceil(EXPERTS_PER_CALL);
        let first = (self.asked / self.hosted.len()) % groups * EXPERTS_PER_CALL;
        // The size of a message and its answer is bounded.
        let most = (MAX_PAYLOAD / (rows * self.row_bytes).max(1)).clamp(1, EXPERTS_PER_CALL);
        let experts: Vec<u32> = set.experts.iter().copied().skip(first).take(most).collect();
        self.asked += 1;
        Work {
            id: self.asked as u64,
            generation: 1,
            layer: set.layer,
            budget_us: 0,
            // Small positive and negative numbers in both bfloat16 and float32.
            rows: (0..rows * self.row_bytes / 2)
                .flat_map(|i| {
                    (((i as u32).wrapping_mul(0x9e37_79b9) >> 16) as u16 & 0x81ff | 0x3c00).to_le_bytes()
                })
                .collect(),
            counts: vec![experts.len() as u32; rows],
            experts: experts.repeat(rows),
            ..Work::default()
        }
    }

    /// Measures the seconds of one expert for each number of tokens, with a pause before each call.
    fn column(&mut self, tokens: &[f64], rest: Duration) -> Result<Vec<f64>, ProfileError> {
        let mut column = Vec::with_capacity(tokens.len());
        for &tokens in tokens {
            let rows = tokens as usize;
            let mut seconds = Vec::with_capacity(CALLS_PER_POINT);
            for _ in 0..CALLS_PER_POINT {
                let gate = self.gate;
                let (_, compute, experts) = gate.undisturbed(|| {
                    std::thread::sleep(rest);
                    self.ask(rows, PollSettings::ENGINE)
                })?;
                seconds.push(compute / experts as f64);
            }
            column.push(median(seconds));
        }
        Ok(column)
    }

    /// Measures the CPU time of a call without experts. The caller drives its connection like the engine, and never
    /// busy-polls, like one below one vCPU.
    fn call_cpu_seconds(&mut self, function: &ListeningFunction<'_>) -> Result<CallCpu, ProfileError> {
        let counters = || own_cpu_seconds().zip(function.cpu_seconds());
        let before = counters();
        let mut experts = 0.0;
        for _ in 0..TRANSPORT_CALLS {
            std::thread::sleep(PAUSE);
            experts += self.ask(1, PollSettings::SLEEP)?.1;
        }
        let Some((before, after)) = before.zip(counters()) else { return Ok(CallCpu::default()) };
        let calls = TRANSPORT_CALLS as f64;
        Ok(CallCpu {
            caller: (after.0 - before.0) / calls,
            function: (after.1 - before.1 - experts).max(0.0) / calls,
        })
    }

    /// Measures the time of a call without its computation: for one row, and per additional byte.
    fn transport(&mut self, over: &str) -> Result<Transport, ProfileError> {
        let rows = (MAX_PAYLOAD / 2 / (self.row_bytes * EXPERTS_PER_CALL)).max(2);
        let mut added = |rows: usize| -> Result<(f64, f64), ProfileError> {
            let mut seconds = Vec::with_capacity(TRANSPORT_CALLS);
            let mut bytes = 0.0;
            for _ in 0..TRANSPORT_CALLS {
                let gate = self.gate;
                let (round_trip, compute, experts) =
                    gate.undisturbed(|| self.ask(rows, PollSettings::ENGINE))?;
                seconds.push((round_trip - compute).max(0.0));
                bytes = (rows * self.row_bytes * (1 + experts)) as f64;
            }
            Ok((median(seconds), bytes))
        };
        let (one, one_bytes) = added(1)?;
        let (many, many_bytes) = added(rows)?;
        let rate = if many > one { (many_bytes - one_bytes) / (many - one) } else { 1e12 };
        Ok(Transport {
            over: over.to_owned(),
            bytes_per_second: rate.clamp(1.0, 1e12),
            invoke_seconds: (one - one_bytes / rate).max(0.0),
            // Measured in the main function.
            send_seconds: 0.0,
            // Measured with a function of one thread.
            main_cpu_seconds: 0.0,
            function_cpu_seconds: 0.0,
        })
    }
}
