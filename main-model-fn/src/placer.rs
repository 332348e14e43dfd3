//! Brings placements into force, one at a time, whatever becomes of those that asked.
//!
//! A placement is worked on by a task of its own: a caller that times out finds it done, or still
//! going on, when it asks again, and what the engine has in force is what is reported.
//!
//! The first placement comes into force before its local experts have been read: a request waits for what its answer
//! uses, which is read before the rest, and the next placement waits for all of it. Later ones are read first, so
//! that answers go on meanwhile.
//!
//! Experts that both placements hold are shared. Where the others do not fit into memory beside those that
//! leave, layers go over one after the other, each served as one of the two placements says: until all
//! have, the earlier generation counts as the one in force.

use crate::backend::DeferredWeights;
use crate::dispatch::{Arrivals, LocalExperts, patiently};
use crate::engine::Switch;
use crate::http::ActiveGeneration as Shown;
use crate::memory;
use crate::routing_check::{EndpointSets, RemoteSets, check_routing};
use crate::transition::{LayerChange, Shortage, steps};
use prometheus::IntGauge;
use remoe_kernels::NumericsClass;
use remoe_model::Checkpoint;
use remoe_plan::PlanAccount;
use remoe_proto::v1::{EndpointProblem, LayerExperts, Routing, RoutingAck};
use remoe_proto::{ErrorCode, GENERATION_STEP, ServiceError, largest_generation, placement_digest};
use remoe_weights::{LoadError, expert_shape, load_experts, prefetch_experts};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex as Lock, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

/// Placements that wait or are worked on; further ones are refused.
const MAX_OPEN: usize = 8;

/// Parts that the placer works with.
pub(crate) struct PlacerParts {
    pub(crate) switches: mpsc::UnboundedSender<Switch>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) class: NumericsClass,
    pub(crate) threads: usize,
    /// Bytes that the process may take; `None` if unknown.
    pub(crate) memory_bytes: Option<u64>,
    /// Set if a generation is in force: the function is ready for requests.
    pub(crate) placed: watch::Sender<bool>,
    /// Expectation of the plan for requests under the generation in force; `None` if it was not planned.
    pub(crate) account: watch::Sender<Option<Arc<PlanAccount>>>,
    /// Placement in force, for people.
    pub(crate) shown: watch::Sender<Arc<Shown>>,
    /// No placement comes into force once this is cancelled.
    pub(crate) shutdown: CancellationToken,
    /// How many local experts, and tables after them, are still to be read.
    pub(crate) arriving: IntGauge,
    /// Weights that are read once the local experts are there.
    pub(crate) rest: Vec<Arc<dyn DeferredWeights>>,
    /// Told why local experts of a placement in force, or the rest, cannot be read: the function cannot go on.
    pub(crate) lost: mpsc::UnboundedSender<LoadError>,
    /// When the process was started.
    pub(crate) started: Instant,
}

/// Brings placements into force.
pub(crate) struct Placer {
    parts: PlacerParts,
    /// Held while a placement is brought into force: one at a time.
    placing: Mutex<()>,
    in_force: Lock<CurrentGeneration>,
    /// Placements that are worked on, and the one in force.
    attempts: Lock<Vec<Attempt>>,
}

/// Generation in force.
#[derive(Clone, Default)]
struct CurrentGeneration {
    /// 0 before the first.
    generation: u64,
    /// Placement of the generation by content; empty before the first.
    placement: String,
    /// Experts packed for the generation; the next one reuses them.
    local: LocalExperts,
    remote: RemoteSets,
    endpoints: EndpointSets,
    /// From the start of the process to the first generation in force.
    load_time: Option<Duration>,
}

type PlacementOutcome = Result<RoutingAck, ServiceError>;

/// A placement that was asked for.
struct Attempt {
    routing: Routing,
    outcome: watch::Receiver<Option<PlacementOutcome>>,
}

impl Attempt {
    fn is_open(&self) -> bool {
        self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok()
    }

    /// Reports if it came to nothing, be it by a panic.
    fn failed(&self) -> bool {
        match &*self.outcome.borrow() {
            Some(outcome) => outcome.is_err(),
            None => self.outcome.has_changed().is_err(),
        }
    }
}

impl Placer {
    pub(crate) fn new(parts: PlacerParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            placing: Mutex::default(),
            in_force: Lock::default(),
            attempts: Lock::default(),
        })
    }

    /// Has `routing` brought into force and waits for it. Asking again for the same placement joins
    /// the attempt that goes on, or returns what came of it; a failed one is tried again.
    ///
    /// # Errors
    /// The placement contradicts itself, the model or an earlier one, or cannot be brought into force.
    pub(crate) async fn place(self: &Arc<Self>, routing: Routing) -> PlacementOutcome {
        let mut outcome = self.attempt(routing)?;
        let ended = |_| ServiceError::new(ErrorCode::Internal, "the placement task crashed");
        let outcome = outcome.wait_for(Option::is_some).await.map_err(ended)?.clone();
        outcome.unwrap_or_else(|| {
            Err(ServiceError::new(ErrorCode::Internal, "missing outcome of the placement"))
        })
    }

    /// The generation in force; 0 before the first.
    pub(crate) fn generation(&self) -> u64 {
        self.in_force().generation
    }

    /// The generation in force and its placement by content; 0 and nothing before the first.
    pub(crate) fn named(&self) -> (u64, String) {
        let in_force = self.in_force();
        (in_force.generation, in_force.placement.clone())
    }

    /// The experts in the function's own memory.
    pub(crate) fn local(&self) -> LocalExperts {
        self.in_force().local.clone()
    }

    /// The experts of each layer that are remote.
    pub(crate) fn remote(&self) -> RemoteSets {
        self.in_force().remote.clone()
    }

    /// Seconds from the start of the process to the first generation in force; 0 before.
    pub(crate) fn load_seconds(&self) -> f64 {
        self.in_force().load_time.unwrap_or_default().as_secs_f64()
    }

    fn in_force(&self) -> MutexGuard<'_, CurrentGeneration> {
        // Changed as a whole, so a panic elsewhere cannot have left it half-written.
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The attempt at `routing` that is known, or a new one.
    fn attempt(
        self: &Arc<Self>,
        routing: Routing,
    ) -> Result<watch::Receiver<Option<PlacementOutcome>>, ServiceError> {
        let generation = routing.generation;
        if generation == 0 {
            return Err(ServiceError::invalid("generation", "expected 1 or more, got 0"));
        }
        let (remote, endpoints) = check_routing(self.parts.checkpoint.config(), &routing)?;
        let account = account(&routing.account)?;
        let current = self.generation();
        if generation > largest_generation(current) {
            let message = format!(
                "expected at most {GENERATION_STEP} above the generation in force ({current}), got {generation}"
            );
            return Err(ServiceError::invalid("generation", message));
        }
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        attempts.retain(|attempt| attempt.is_open() || attempt.routing.generation == current);
        attempts.retain(|attempt| attempt.routing.generation != generation || !attempt.failed());
        if let Some(known) = attempts.iter().find(|attempt| attempt.routing.generation == generation) {
            if known.routing == routing {
                return Ok(known.outcome.clone());
            }
            let message = format!("generation {generation} already has another placement");
            return Err(ServiceError::invalid("generation", message));
        }
        if attempts.iter().filter(|attempt| attempt.is_open()).count() >= MAX_OPEN {
            return Err(ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!("{MAX_OPEN} placements in progress; retry later"),
            ));
        }
        let (sender, outcome) = watch::channel(None);
        let placement = placement_digest(&routing);
        attempts.push(Attempt { routing, outcome: outcome.clone() });
        let placer = self.clone();
        tokio::spawn(async move {
            let wanted = DesiredPlacement { remote, endpoints };
            let shutdown = &placer.parts.shutdown;
            let (outcome, _placing) = tokio::select! {
                placing = placer.placing.lock() => tokio::select! {
                    outcome = placer.bring_into_force(generation, placement, wanted, account) => (outcome, Some(placing)),
                    () = shutdown.cancelled() => (Err(shutting_down()), None),
                },
                () = shutdown.cancelled() => (Err(shutting_down()), None),
            };
            if let Err(error) = &outcome {
                tracing::error!(generation, %error, "placement failed");
            }
            let arrivals = outcome.as_ref().ok().and_then(|(_, arrivals)| arrivals.clone());
            sender.send_replace(Some(outcome.map(|(ack, _)| ack)));
            if let Some(arrivals) = arrivals {
                placer.receive(&arrivals).await;
            }
        });
        Ok(outcome)
    }

    /// Weights outside of experts that are still to be read.
    fn missing_rest(&self) -> Vec<Arc<dyn DeferredWeights>> {
        self.parts.rest.iter().filter(|part| part.missing_bytes() > 0).cloned().collect()
    }

    /// How many experts of the placement in force, and tables beside them, are still to be read.
    pub(crate) fn arriving(&self) -> usize {
        self.local().arriving() + self.missing_rest().len()
    }

    /// Reads the local experts of the placement in force, and what answers could do without longer than any of them.
    async fn receive(&self, arrivals: &Arc<Arrivals>) {
        let parts = &self.parts;
        let (checkpoint, class, threads) = (parts.checkpoint.clone(), parts.class, parts.threads);
        let begun = Instant::now();
        let (these, rest) = (arrivals.clone(), self.missing_rest());
        let (shown, shutdown) = (parts.arriving.clone(), parts.shutdown.clone());
        let mut read = tokio::task::spawn_blocking(move || {
            these.read(&checkpoint, class, threads)?;
            for part in rest {
                if shutdown.is_cancelled() {
                    break;
                }
                patiently("non-expert weights", || Ok(part.read()?))?;
                shown.dec();
            }
            Ok(())
        });
        let read = tokio::select! {
            read = &mut read => read.unwrap_or(Err(LoadError::Panicked)),
            () = parts.shutdown.cancelled() => return arrivals.stop(),
        };
        match read {
            Ok(()) => {
                let (bytes, seconds) = (self.local().bytes(), begun.elapsed().as_secs_f64());
                tracing::info!(local_experts_bytes = bytes, seconds, "all weights loaded");
            }
            // If nothing receives this, the receiver has ended.
            Err(error) => drop(parts.lost.send(error)),
        }
    }

    async fn bring_into_force(
        &self,
        generation: u64,
        placement: String,
        wanted: DesiredPlacement,
        account: Option<Arc<PlanAccount>>,
    ) -> Result<(RoutingAck, Option<Arc<Arrivals>>), ServiceError> {
        let (current, in_force) = self.named();
        if generation <= current {
            return Ok((RoutingAck { generation: current, placement: in_force, problems: Vec::new() }, None));
        }
        let mut steps = self.steps(&wanted.remote)?;
        // The last one goes to the placement as a whole.
        steps.pop();
        let mut changed = BTreeSet::new();
        for step in steps {
            changed.extend(step);
            tracing::info!(generation, layers = changed.len(), "applying the placement in steps");
            let between = self.in_force().between(&wanted, &changed);
            let local = self.pack(&between.remote).await?;
            self.go_over(current, local, between).await?;
        }
        let (local, arrivals) = match current {
            0 => {
                let (local, arrivals) = self.expect(&wanted.remote).await?;
                (local, Some(arrivals))
            }
            _ => (self.pack(&wanted.remote).await?, None),
        };
        let problems = self.go_over(generation, local, wanted).await?;
        self.parts.account.send_replace(account);
        {
            let mut in_force = self.in_force();
            in_force.generation = generation;
            in_force.placement.clone_from(&placement);
            in_force.load_time.get_or_insert_with(|| self.parts.started.elapsed());
            self.parts.shown.send_replace(Arc::new(Shown {
                generation,
                local: in_force.local.listing(),
                endpoints: in_force.endpoints.clone(),
            }));
        }
        // A function that shuts down has said that it is not ready, and stays so.
        self.parts.placed.send_if_modified(|placed| {
            let ready = !self.parts.shutdown.is_cancelled();
            *placed |= ready;
            ready
        });
        Ok((RoutingAck { generation, placement, problems }, arrivals))
    }

    /// The layers of the steps in which the local experts can become those that `remote` leaves.
    fn steps(&self, remote: &RemoteSets) -> Result<Vec<Vec<usize>>, ServiceError> {
        let Some(limit) = self.parts.memory_bytes else { return Ok(Vec::new()) };
        let known = self.local();
        let config = self.parts.checkpoint.config();
        let mut changes = Vec::new();
        for layer in config.moe_layers() {
            let is_remote = |expert| remote.get(&layer).is_some_and(|set| set.contains(&expert));
            let mut change = LayerChange { layer, enters: 0, leaves: 0 };
            for (_, packed) in known.of(layer).filter(|&(expert, _)| is_remote(expert)) {
                change.leaves += packed.bytes() as u64;
            }
            let experts = 0..config.moe(layer).map_or(0, |moe| moe.experts as u32);
            for expert in experts.filter(|&it| !is_remote(it) && known.get(layer, it).is_none()) {
                let shape = expert_shape(&self.parts.checkpoint, layer, expert, self.parts.class);
                change.enters += shape.map_err(|error| internal(&error))?.packed_bytes() as u64;
            }
            changes.push(change);
        }
        let missing = self.parts.rest.iter().map(|part| part.missing_bytes() as u64);
        let used = memory::used() + missing.sum::<u64>();
        steps(&changes, limit.saturating_sub(used)).map_err(|Shortage { layer, needed, room }| {
            let message = format!(
                "cannot load the local experts: layer {layer} needs {needed} bytes, {room} available ({used} of \
                 {limit} used); make more experts remote, or raise the memory limit"
            );
            // Before the first placement nothing is in use that could be free later.
            match self.generation() {
                0 => ServiceError::invalid("remote", message),
                _ => ServiceError::new(ErrorCode::ResourceExhausted, message),
            }
        })
    }

    /// Has the engine go over to `wanted` with the experts `local` and forgets what is local no more.
    async fn go_over(
        &self,
        generation: u64,
        local: LocalExperts,
        wanted: DesiredPlacement,
    ) -> Result<Vec<EndpointProblem>, ServiceError> {
        let DesiredPlacement { remote, endpoints } = wanted;
        let problems = self.switch(generation, local.clone(), remote.clone(), endpoints.clone()).await?;
        let mut in_force = self.in_force();
        (in_force.local, in_force.remote, in_force.endpoints) = (local, remote, endpoints);
        Ok(problems)
    }

    /// Splits the experts that are not remote into those that are there, and the others.
    fn known(&self, remote: &RemoteSets) -> (LocalExperts, Vec<(usize, u32)>) {
        let known = self.local();
        let (mut local, mut missing) = (LocalExperts::default(), Vec::new());
        let config = self.parts.checkpoint.config();
        for layer in config.moe_layers() {
            let experts = config.moe(layer).map_or(0, |moe| moe.experts as u32);
            for expert in 0..experts {
                if remote.get(&layer).is_some_and(|set| set.contains(&expert)) {
                    continue;
                }
                match known.get(layer, expert) {
                    Some(packed) => local.insert(layer, expert, packed.clone()),
                    None => missing.push((layer, expert)),
                }
            }
        }
        (local, missing)
    }

    /// The experts that are not remote, to be read later. Bytes from afar come near now: an answer is not to wait for
    /// a network.
    async fn expect(&self, remote: &RemoteSets) -> Result<(LocalExperts, Arc<Arrivals>), ServiceError> {
        let (mut local, missing) = self.known(remote);
        let checkpoint = self.parts.checkpoint.clone();
        let near = move || prefetch_experts(&checkpoint, &missing).map(|()| missing);
        let missing = blocking(near).await?;
        let arrivals = local.expect(&missing, self.parts.arriving.clone());
        self.parts.arriving.add(i64::try_from(self.missing_rest().len()).unwrap_or(i64::MAX));
        Ok((local, arrivals))
    }

    /// Packs the experts that are not remote, those of the generation in force excepted.
    async fn pack(&self, remote: &RemoteSets) -> Result<LocalExperts, ServiceError> {
        let (mut local, missing) = self.known(remote);
        let (checkpoint, class, threads) =
            (self.parts.checkpoint.clone(), self.parts.class, self.parts.threads);
        let packed = blocking(move || load_experts(&checkpoint, &missing, class, threads)).await?;
        for (layer, expert, packed) in packed {
            local.insert(layer, expert, Arc::new(packed));
        }
        Ok(local)
    }

    /// Has the engine go over to the placement.
    async fn switch(
        &self,
        generation: u64,
        local: LocalExperts,
        remote: RemoteSets,
        endpoints: EndpointSets,
    ) -> Result<Vec<EndpointProblem>, ServiceError> {
        let (done, problems) = oneshot::channel();
        let stopped = || ServiceError::new(ErrorCode::Unavailable, "the engine has stopped");
        let switch = Switch { generation, local, remote, endpoints, done };
        self.parts.switches.send(switch).map_err(|_| stopped())?;
        problems.await.map_err(|_| stopped())
    }
}

/// Placement to bring into force.
struct DesiredPlacement {
    remote: RemoteSets,
    endpoints: EndpointSets,
}

impl CurrentGeneration {
    /// The placement in which the layers `changed` are as `wanted` and the others as they are.
    fn between(&self, wanted: &DesiredPlacement, changed: &BTreeSet<usize>) -> DesiredPlacement {
        let part = |sets: &RemoteSets, new: bool| -> Vec<(usize, BTreeSet<u32>)> {
            let these = sets.iter().filter(|(layer, _)| changed.contains(layer) == new);
            these.map(|(&layer, experts)| (layer, experts.clone())).collect()
        };
        let remote = part(&self.remote, false).into_iter().chain(part(&wanted.remote, true)).collect();
        let mut endpoints: BTreeMap<String, Vec<LayerExperts>> = BTreeMap::new();
        for (source, new) in [(&self.endpoints, false), (&wanted.endpoints, true)] {
            for (address, sets) in source {
                let these = sets.iter().filter(|set| changed.contains(&(set.layer as usize)) == new);
                endpoints.entry(address.clone()).or_default().extend(these.cloned());
            }
        }
        endpoints.retain(|_, sets| !sets.is_empty());
        DesiredPlacement { remote, endpoints: endpoints.into_iter().collect() }
    }
}

/// The account that a routing carries, where it does.
fn account(json: &str) -> Result<Option<Arc<PlanAccount>>, ServiceError> {
    if json.is_empty() {
        return Ok(None);
    }
    let account = PlanAccount::from_json(json);
    account.map(|account| Some(Arc::new(account))).map_err(|error| {
        ServiceError::invalid("account", format!("expected a problem and its plan: {error}"))
    })
}

/// Does what reads files away from the threads that answer.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, ServiceError> {
    let done = tokio::task::spawn_blocking(work).await.map_err(|error| internal(&error))?;
    done.map_err(|error| internal(&error))
}

fn internal(error: &dyn std::error::Error) -> ServiceError {
    ServiceError::new(ErrorCode::Internal, error.to_string())
}

fn shutting_down() -> ServiceError {
    ServiceError::new(ErrorCode::Unavailable, "the function is shutting down")
}
