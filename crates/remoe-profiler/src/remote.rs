//! Experts in a remote function: their time over tokens and vCPUs, the way there and back, start and
//! memory.

use crate::error::ProfileError;
use crate::functions::ListeningFunction;
use crate::gate::Gate;
use crate::grid::median;
use crate::machine::own_cpu_seconds;
use crate::{ProfiledModel, WARMING};
use remoe_hardware::{Start, Transport};
use remoe_planner::{Contention, CpuProfile};
use remoe_process::Role;
use remoe_proto::v1::{FunctionDescription, LayerExperts, Work};
use remoe_proto::{ForwardClient, MAX_PAYLOAD, PollSettings, format_listing};
use std::time::{Duration, Instant};

/// Experts under measurement, in bytes at least where the model has them: beyond any cache, as in use.
const HOSTED_BYTES: u64 = 256 << 20;
/// Experts that one message asks for.
const ASKED: usize = 4;
/// A function rests before a call, as between the tokens of a sequence ..
const REST: Duration = Duration::from_millis(5);
/// .. and below one vCPU so long that its quota is whole: more than a period.
const LONG_REST: Duration = Duration::from_millis(110);
/// Calls per point of the table.
const CALLS: usize = 7;
/// Calls behind a figure of the transport.
const EXCHANGES: usize = 40;
/// Functions that compute at the same time, at most: each has a copy of the experts under measurement.
const BESIDE: u32 = 8;
/// Bytes of all those copies beyond the weights of the model.
pub(crate) const COPIES_BYTES: f64 = 1e9;
/// Calls of each of them, and of one alone, one behind the other ..
const CALLS_BESIDE: usize = 8;
/// .. in turn so many times, as far as time allows.
const ROUNDS_BESIDE: usize = 5;
const BESIDE_LIMIT: Duration = Duration::from_secs(10);

/// Figures of a remote function.
pub(crate) struct RemoteFigures {
    pub(crate) expert_seconds: CpuProfile,
    pub(crate) transport: Transport,
    pub(crate) contention: Option<Contention>,
    pub(crate) start: Start,
    pub(crate) function_bytes: f64,
    pub(crate) instruction_path: String,
    pub(crate) numerics_class: String,
}

/// Times of a function with some number of threads.
struct OfThreads {
    /// Seconds of an expert with each number of vCPUs.
    columns: Vec<Vec<f64>>,
    function_bytes: f64,
    description: FunctionDescription,
    /// With one thread only.
    cpu: Option<CallCpu>,
    /// With all threads only.
    transport: Option<Transport>,
}

/// Setup of the measurement of remote functions.
pub(crate) struct RemoteSetup<'a> {
    pub(crate) subject: &'a ProfiledModel<'a>,
    /// A function elsewhere over which the transport is measured; loopback otherwise.
    pub(crate) address: Option<&'a str>,
}

impl RemoteSetup<'_> {
    /// Measures everything. `step` is told what is being measured.
    pub(crate) fn measure(&self, step: &dyn Fn(String)) -> Result<RemoteFigures, ProfileError> {
        let hosted = self.hosted();
        let mut columns: Vec<Vec<f64>> = Vec::new();
        let mut function_bytes = 0.0;
        let mut transport = None;
        let mut description = None;
        let mut cpu = CallCpu::default();
        // A function's threads are fixed when it starts, its quota is not.
        let below_one = self.subject.below_one(Role::Remote);
        for (threads, vcpus) in self.subject.grid.by_threads(below_one) {
            let of_threads = self.gate().piece(|| self.with_threads(&hosted, threads, &vcpus, step))?;
            columns.extend(of_threads.columns);
            function_bytes = f64::max(function_bytes, of_threads.function_bytes);
            description = Some(of_threads.description);
            cpu = of_threads.cpu.unwrap_or(cpu);
            transport = of_threads.transport.or(transport);
        }
        if let Some(address) = self.address {
            step(format!("network to {address}"));
            transport = Some(ProbeClient::open(address, &hosted, self)?.transport(address)?);
        }
        let described = description.ok_or_else(|| ProfileError::NoVcpus { function: "remote function" })?;
        let tokens = self.subject.grid.tokens.clone();
        let expert_seconds = self.subject.grid.table(tokens, &columns, below_one);
        let transport = transport.ok_or_else(|| ProfileError::NoTransport)?;
        // Plans do without it, and a machine that cannot hold so many functions is no reason to do without all the rest.
        let contention = self.gate().piece(|| self.contention(&hosted, step)).unwrap_or_else(|error| {
            self.subject.functions.tell(&format!("cannot measure concurrent functions: {error}"));
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
            start: self.gate().piece(|| self.start_times(&hosted, step))?,
            function_bytes,
            instruction_path: described.instruction_path,
            numerics_class: described.numerics_class,
        })
    }

    fn gate(&self) -> &Gate {
        &self.subject.functions.gate
    }

    /// Measures a function of so many threads with each of `vcpus`.
    fn with_threads(
        &self,
        hosted: &[LayerExperts],
        threads: usize,
        vcpus: &[f64],
        step: &dyn Fn(String),
    ) -> Result<OfThreads, ProfileError> {
        step(format!("starting a remote function: threads {threads}"));
        let function = self.start(hosted, threads)?;
        let mut client = ProbeClient::open(&function.grpc.to_string(), hosted, self)?;
        let began = Instant::now();
        let mut calls = 0;
        while calls < client.calls_for_all() || began.elapsed() < WARMING {
            self.gate().undisturbed(|| client.ask(1, PollSettings::ENGINE))?;
            calls += 1;
        }
        let mut columns = Vec::new();
        for &vcpus in vcpus {
            function.limit(vcpus)?;
            step(format!("one expert: vCPUs {vcpus}, threads {threads}"));
            let rest = if self.subject.functions.quotas && vcpus < 1.0 { LONG_REST } else { REST };
            columns.push(client.column(&self.subject.grid.tokens, rest)?);
        }
        let peak = function.peak_bytes().unwrap_or(0.0);
        // The largest message and its answer are the planner's to count.
        let rows = self.subject.grid.tokens.last().copied().unwrap_or(1.0) * (1 + ASKED) as f64;
        let messages = rows * self.subject.resident(self.subject.inspection.token_bytes);
        let function_bytes = peak - self.weights(hosted) - messages;
        let description = function.describe_remote()?;
        function.limit(f64::from(self.subject.grid.cores))?;
        let cpu = (threads == 1).then(|| {
            step("overhead of a call".to_owned());
            self.gate().undisturbed(|| client.computing_beside_experts(&function))
        });
        let cpu = cpu.transpose()?;
        let transport = (threads == self.subject.grid.threads()).then(|| {
            step("network to a remote function".to_owned());
            client.transport("loopback")
        });
        Ok(OfThreads { columns, function_bytes, description, cpu, transport: transport.transpose()? })
    }

    /// The first MoE layers, as many as make up [`HOSTED_BYTES`].
    fn hosted(&self) -> Vec<LayerExperts> {
        let facts = self.subject.inspection;
        let expert_bytes = facts.resident_expert_bytes(self.subject.dtype).max(1);
        let layer_bytes = (expert_bytes * facts.experts as u64).max(1);
        let layers = usize::try_from(HOSTED_BYTES.div_ceil(layer_bytes)).unwrap_or(usize::MAX);
        let experts = (HOSTED_BYTES / expert_bytes).max(2 * ASKED as u64).min(facts.experts as u64);
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

    /// How many times longer an expert takes while as many functions as there are cores, [`BESIDE`] at most, compute, each
    /// with one vCPU. On one core none does beside another, and not where so many copies of `hosted` would be far more than the model.
    fn contention(
        &self,
        hosted: &[LayerExperts],
        step: &dyn Fn(String),
    ) -> Result<Option<Contention>, ProfileError> {
        step("concurrent remote functions".to_owned());
        let weights = self.subject.inspection.resident_total_bytes(self.subject.dtype) as f64;
        let room = (weights + COPIES_BYTES) / self.weights(hosted).max(1.0);
        let functions = self.subject.grid.cores.min(BESIDE).min(room as u32);
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
        while warming.elapsed() < WARMING {
            self.gate().undisturbed(|| together(&mut clients, 1, all))?;
        }
        let mut slowed = |tokens: f64| -> Result<f64, ProfileError> {
            let (mut alone, mut beside) = (Vec::new(), Vec::new());
            let began = Instant::now();
            // In turn: memory is not as quick in one minute as in the next.
            for round in 0..ROUNDS_BESIDE {
                if round > 0 && began.elapsed() > BESIDE_LIMIT {
                    break;
                }
                let mut called = |count: usize| {
                    let called = &mut clients[..count];
                    self.gate().undisturbed(|| together(called, tokens as usize, CALLS_BESIDE))
                };
                alone.extend(called(1)?);
                beside.extend(called(functions as usize)?);
            }
            let times = median(beside) / median(alone);
            Ok(if times.is_finite() { times.max(1.0) } else { 1.0 })
        };
        let tokens = &self.subject.grid.tokens;
        let of = |tokens: Option<&f64>| tokens.copied().unwrap_or(1.0);
        let (step, prefill) = (slowed(of(tokens.first()))?, slowed(of(tokens.last()))?);
        Ok(Some(Contention { functions, step, prefill }))
    }

    fn start(&self, hosted: &[LayerExperts], threads: usize) -> Result<ListeningFunction<'_>, ProfileError> {
        start(self.subject, hosted, threads)
    }

    /// Starts with one expert and with all of them: what grows with bytes, and what does not.
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
        // Planned functions have one layer each, and do not poll.
        "--poll-us".into(),
        "0".into(),
    ]);
    subject.functions.start(Role::Remote, arguments, f64::from(subject.grid.cores))
}

/// Has each of `clients` ask for `rows` rows so many times at the same time, one call right behind the other; seconds of an expert
/// of each call but the first and the last, which others do not all compute beside.
fn together(clients: &mut [ProbeClient<'_>], rows: usize, calls: usize) -> Result<Vec<f64>, ProfileError> {
    let asking = |client: &mut ProbeClient<'_>| -> Result<Vec<f64>, ProfileError> {
        // What is sent is written down before: only then do functions hardly rest.
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
            let asked = std::thread::Builder::new().spawn_scoped(scope, || asking(client));
            asked.map_err(|error| lost(&error.to_string()))
        });
        // All begin before any is waited for, and all end before any answer counts.
        let begun: Vec<_> = begun.collect();
        let ended = begun
            .into_iter()
            .map(|asked| asked?.join().unwrap_or_else(|_panic| Err(lost("a thread panicked"))));
        ended.collect::<Vec<_>>()
    });
    answers.into_iter().collect::<Result<Vec<_>, _>>().map(|answers| answers.concat())
}

/// CPU seconds of a call at both ends besides experts; 0 where the kernel does not count them.
#[derive(Default)]
struct CallCpu {
    caller: f64,
    function: f64,
}

/// Asks a function for rows of its experts, other ones each time.
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
        let row_bytes = setup.subject.resident(setup.subject.inspection.token_bytes);
        Ok(Self {
            forward_client: ForwardClient::open(address, None)?,
            hosted,
            row_bytes: row_bytes as usize,
            asked: 0,
            gate: setup.gate(),
        })
    }

    /// Calls until every hosted expert has been asked.
    fn calls_for_all(&self) -> usize {
        self.hosted.iter().map(|set| set.experts.len().div_ceil(ASKED)).sum()
    }

    /// Sends `rows` rows to the next few experts; seconds of the round trip and of the computation,
    /// and how many experts there were.
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
        let groups = set.experts.len().div_ceil(ASKED);
        let first = (self.asked / self.hosted.len()) % groups * ASKED;
        // A message and its answer are bounded.
        let most = (MAX_PAYLOAD / (rows * self.row_bytes).max(1)).clamp(1, ASKED);
        let experts: Vec<u32> = set.experts.iter().copied().skip(first).take(most).collect();
        self.asked += 1;
        Work {
            id: self.asked as u64,
            generation: 1,
            layer: set.layer,
            budget_us: 0,
            // Small numbers of either sign in bfloat16 and in float32.
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

    /// Seconds of one expert for each number of tokens, called after a rest.
    fn column(&mut self, tokens: &[f64], rest: Duration) -> Result<Vec<f64>, ProfileError> {
        let mut column = Vec::with_capacity(tokens.len());
        for &tokens in tokens {
            let rows = tokens as usize;
            let mut seconds = Vec::with_capacity(CALLS);
            for _ in 0..CALLS {
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

    /// Measures the CPU time of a call besides experts, with a caller that drives its connection as the engine does and, as one below
    /// one vCPU, never polls.
    fn computing_beside_experts(
        &mut self,
        function: &ListeningFunction<'_>,
    ) -> Result<CallCpu, ProfileError> {
        let counters = || own_cpu_seconds().zip(function.cpu_seconds());
        let before = counters();
        let mut experts = 0.0;
        for _ in 0..EXCHANGES {
            std::thread::sleep(REST);
            experts += self.ask(1, PollSettings::SLEEP)?.1;
        }
        let Some((before, after)) = before.zip(counters()) else { return Ok(CallCpu::default()) };
        let calls = EXCHANGES as f64;
        Ok(CallCpu {
            caller: (after.0 - before.0) / calls,
            function: (after.1 - before.1 - experts).max(0.0) / calls,
        })
    }

    /// Measures the time of a call besides its computation: for one row, and per further byte.
    fn transport(&mut self, over: &str) -> Result<Transport, ProfileError> {
        let rows = (MAX_PAYLOAD / 2 / (self.row_bytes * ASKED)).max(2);
        let mut added = |rows: usize| -> Result<(f64, f64), ProfileError> {
            let mut seconds = Vec::with_capacity(EXCHANGES);
            let mut bytes = 0.0;
            for _ in 0..EXCHANGES {
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
            // Seen in the main function only.
            send_seconds: 0.0,
            // Seen with a function of one thread only.
            main_cpu_seconds: 0.0,
            function_cpu_seconds: 0.0,
        })
    }
}
