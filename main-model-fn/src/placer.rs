//! Brings placements into force, one at a time.
//!
//! A task works on each placement, independently of the caller. A caller that timed out asks again and joins the attempt,
//! or gets its outcome. Reports always state the generation that the engine has in force.
//!
//! The first placement becomes active before its local experts are loaded, which shortens cold starts: the experts that
//! a request uses are loaded first, and the next placement waits for all of them. Later placements are loaded before they
//! come into force, and requests continue meanwhile.
//!
//! Experts that two successive placements have in common are shared. If the new experts do not fit into memory next to the
//! old ones, layers change one after the other, each served by one of the two placements. Until the last layer, the
//! earlier generation counts as the one in force.
//! have, the earlier generation counts as the one in force.

use crate::backend::DeferredWeights;
use crate::dispatch::{BackgroundLoads, LocalExperts, with_retries};
use crate::engine::Switch;
use crate::http::PublishedGeneration;
use crate::memory;
use crate::routing_check::{EndpointSets, RemoteSets, check_routing};
use crate::transition::{LayerChange, Shortage, transition_steps};
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

/// Most placements that wait or are in progress; further ones are refused.
const MAX_OPEN_ATTEMPTS: usize = 8;

/// Parts of a [`Placer`].
pub(crate) struct PlacerParts {
    pub(crate) switches: mpsc::UnboundedSender<Switch>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) class: NumericsClass,
    pub(crate) threads: usize,
    /// Memory limit of the process in bytes; `None` if unknown.
    pub(crate) memory_bytes: Option<u64>,
    /// True if a generation is in force, so that the function is ready for requests.
    pub(crate) is_placed: watch::Sender<bool>,
    /// Plan of the generation in force, with its expected costs; `None` if it was not planned.
    pub(crate) account: watch::Sender<Option<Arc<PlanAccount>>>,
    /// Generation in force, for the placement page.
    pub(crate) published: watch::Sender<Arc<PublishedGeneration>>,
    /// Cancelled at shutdown: then no placement becomes active.
    pub(crate) shutdown: CancellationToken,
    /// Metric: local experts, and tables after them, that are still to be loaded.
    pub(crate) loading: IntGauge,
    /// Weights that are loaded after the local experts.
    pub(crate) deferred_weights: Vec<Arc<dyn DeferredWeights>>,
    /// Receives the error if weights of a placement in force cannot be loaded: the function must end.
    pub(crate) failed_loads: mpsc::UnboundedSender<LoadError>,
    /// Start of the process.
    pub(crate) started: Instant,
}

/// Brings placements into force.
pub(crate) struct Placer {
    parts: PlacerParts,
    /// Held while a placement is brought into force.
    placing: Mutex<()>,
    in_force: Lock<CurrentGeneration>,
    /// Attempts in progress, and the one in force.
    attempts: Lock<Vec<Attempt>>,
}

/// Generation in force.
#[derive(Clone, Default)]
struct CurrentGeneration {
    /// 0 before the first placement.
    generation: u64,
    /// Digest of the placement; empty before the first.
    placement: String,
    /// Experts packed for the generation; the next generation reuses them.
    local: LocalExperts,
    remote: RemoteSets,
    endpoints: EndpointSets,
    /// Time from the start of the process to the first generation in force.
    load_time: Option<Duration>,
}

type PlacementOutcome = Result<RoutingAck, ServiceError>;

/// A placement that a caller asked for.
struct Attempt {
    routing: Routing,
    outcome: watch::Receiver<Option<PlacementOutcome>>,
}

impl Attempt {
    fn is_open(&self) -> bool {
        self.outcome.borrow().is_none() && self.outcome.has_changed().is_ok()
    }

    /// Reports if the attempt failed or panicked.
    fn has_failed(&self) -> bool {
        match &*self.outcome.borrow() {
            Some(outcome) => outcome.is_err(),
            None => self.outcome.has_changed().is_err(),
        }
    }
}

impl Placer {
    /// Creates a placer without a generation in force.
    pub(crate) fn new(parts: PlacerParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            placing: Mutex::default(),
            in_force: Lock::default(),
            attempts: Lock::default(),
        })
    }

    /// Brings `routing` into force. If the same placement is in progress, joins the attempt; if it is in force, returns its
    /// outcome; if it failed, tries again.
    ///
    /// # Errors
    /// Fails if the placement contradicts itself, the model or an earlier placement, or cannot be brought into force.
    pub(crate) async fn place(self: &Arc<Self>, routing: Routing) -> PlacementOutcome {
        let mut outcome = self.attempt(routing)?;
        let crashed = |_| ServiceError::new(ErrorCode::Internal, "the placement task crashed");
        let outcome = outcome.wait_for(Option::is_some).await.map_err(crashed)?.clone();
        outcome.unwrap_or_else(|| {
            Err(ServiceError::new(ErrorCode::Internal, "missing outcome of the placement"))
        })
    }

    /// Returns the generation in force; 0 before the first.
    pub(crate) fn generation(&self) -> u64 {
        self.in_force().generation
    }

    /// Returns the generation in force and the digest of its placement; 0 and empty before the first.
    pub(crate) fn generation_and_digest(&self) -> (u64, String) {
        let in_force = self.in_force();
        (in_force.generation, in_force.placement.clone())
    }

    /// Returns the local experts.
    pub(crate) fn local(&self) -> LocalExperts {
        self.in_force().local.clone()
    }

    /// Returns the remote experts of each layer.
    pub(crate) fn remote(&self) -> RemoteSets {
        self.in_force().remote.clone()
    }

    /// Returns the seconds from the start of the process to the first generation in force; 0 before.
    pub(crate) fn load_seconds(&self) -> f64 {
        self.in_force().load_time.unwrap_or_default().as_secs_f64()
    }

    fn in_force(&self) -> MutexGuard<'_, CurrentGeneration> {
        // Each change is complete, so a panic elsewhere leaves consistent data.
        self.in_force.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Finds the attempt at `routing`, or starts one. Returns its outcome, once it has ended.
    fn attempt(
        self: &Arc<Self>,
        routing: Routing,
    ) -> Result<watch::Receiver<Option<PlacementOutcome>>, ServiceError> {
        let generation = routing.generation;
        if generation == 0 {
            return Err(ServiceError::invalid("generation", "expected 1 or more, got 0"));
        }
        let (remote, endpoints) = check_routing(self.parts.checkpoint.config(), &routing)?;
        let account = parse_account(&routing.account)?;
        let current = self.generation();
        if generation > largest_generation(current) {
            let message = format!(
                "expected at most {GENERATION_STEP} above the generation in force ({current}), got {generation}"
            );
            return Err(ServiceError::invalid("generation", message));
        }
        let mut attempts = self.attempts.lock().unwrap_or_else(PoisonError::into_inner);
        attempts.retain(|attempt| attempt.is_open() || attempt.routing.generation == current);
        attempts.retain(|attempt| attempt.routing.generation != generation || !attempt.has_failed());
        if let Some(known) = attempts.iter().find(|attempt| attempt.routing.generation == generation) {
            if known.routing == routing {
                return Ok(known.outcome.clone());
            }
            let message = format!("generation {generation} already has another placement");
            return Err(ServiceError::invalid("generation", message));
        }
        if attempts.iter().filter(|attempt| attempt.is_open()).count() >= MAX_OPEN_ATTEMPTS {
            return Err(ServiceError::new(
                ErrorCode::ResourceExhausted,
                format!("{MAX_OPEN_ATTEMPTS} placements in progress; retry later"),
            ));
        }
        let (sender, outcome) = watch::channel(None);
        let placement = placement_digest(&routing);
        attempts.push(Attempt { routing, outcome: outcome.clone() });
        let placer = self.clone();
        tokio::spawn(async move {
            let desired = DesiredPlacement { remote, endpoints };
            let shutdown = &placer.parts.shutdown;
            let (outcome, _placing) = tokio::select! {
                placing = placer.placing.lock() => tokio::select! {
                    outcome = placer.bring_into_force(generation, placement, desired, account) => (outcome, Some(placing)),
                    () = shutdown.cancelled() => (Err(shutting_down()), None),
                },
                () = shutdown.cancelled() => (Err(shutting_down()), None),
            };
            if let Err(error) = &outcome {
                tracing::error!(generation, %error, "placement failed");
            }
            let loads = outcome.as_ref().ok().and_then(|(_, loads)| loads.clone());
            sender.send_replace(Some(outcome.map(|(ack, _)| ack)));
            if let Some(loads) = loads {
                placer.load_in_background(&loads).await;
            }
        });
        Ok(outcome)
    }

    /// Returns the deferred weights that are not loaded yet.
    fn missing_deferred_weights(&self) -> Vec<Arc<dyn DeferredWeights>> {
        self.parts.deferred_weights.iter().filter(|part| part.missing_bytes() > 0).cloned().collect()
    }

    /// Returns the number of local experts and tables that are not loaded yet.
    pub(crate) fn loading_count(&self) -> usize {
        self.local().loading_count() + self.missing_deferred_weights().len()
    }

    /// Loads the local experts of the placement in force, then the deferred weights.
    async fn load_in_background(&self, loads: &Arc<BackgroundLoads>) {
        let parts = &self.parts;
        let (checkpoint, class, threads) = (parts.checkpoint.clone(), parts.class, parts.threads);
        let started = Instant::now();
        let (task_loads, deferred) = (loads.clone(), self.missing_deferred_weights());
        let (gauge, shutdown) = (parts.loading.clone(), parts.shutdown.clone());
        let mut task = tokio::task::spawn_blocking(move || {
            task_loads.load_all(&checkpoint, class, threads)?;
            for part in deferred {
                if shutdown.is_cancelled() {
                    break;
                }
                with_retries("non-expert weights", || Ok(part.load()?))?;
                gauge.dec();
            }
            Ok(())
        });
        let outcome = tokio::select! {
            outcome = &mut task => outcome.unwrap_or(Err(LoadError::Panicked)),
            () = parts.shutdown.cancelled() => return loads.stop(),
        };
        match outcome {
            Ok(()) => {
                let (bytes, seconds) = (self.local().bytes(), started.elapsed().as_secs_f64());
                tracing::info!(local_experts_bytes = bytes, seconds, "all weights loaded");
            }
            // Sending fails only if the process ends already.
            Err(error) => drop(parts.failed_loads.send(error)),
        }
    }

    /// Brings a placement into force. Returns the loads to run after it, if it is the first.
    async fn bring_into_force(
        &self,
        generation: u64,
        placement: String,
        desired: DesiredPlacement,
        account: Option<Arc<PlanAccount>>,
    ) -> Result<(RoutingAck, Option<Arc<BackgroundLoads>>), ServiceError> {
        let (current, digest) = self.generation_and_digest();
        if generation <= current {
            return Ok((RoutingAck { generation: current, placement: digest, problems: Vec::new() }, None));
        }
        let mut steps = self.transition_steps(&desired.remote)?;
        // The last step is the change to the whole placement.
        steps.pop();
        let mut changed = BTreeSet::new();
        for step in steps {
            changed.extend(step);
            tracing::info!(generation, layers = changed.len(), "applying the placement in steps");
            let intermediate = self.in_force().intermediate(&desired, &changed);
            let local = self.pack(&intermediate.remote).await?;
            self.switch_and_record(current, local, intermediate).await?;
        }
        let (local, loads) = match current {
            0 => {
                let (local, loads) = self.prepare_background_loads(&desired.remote).await?;
                (local, Some(loads))
            }
            _ => (self.pack(&desired.remote).await?, None),
        };
        let problems = self.switch_and_record(generation, local, desired).await?;
        self.parts.account.send_replace(account);
        {
            let mut in_force = self.in_force();
            in_force.generation = generation;
            in_force.placement.clone_from(&placement);
            in_force.load_time.get_or_insert_with(|| self.parts.started.elapsed());
            self.parts.published.send_replace(Arc::new(PublishedGeneration {
                generation,
                local: in_force.local.listing(),
                endpoints: in_force.endpoints.clone(),
            }));
        }
        // A function that shuts down has reported that it is not ready, and must not report otherwise.
        self.parts.is_placed.send_if_modified(|is_placed| {
            let is_ready = !self.parts.shutdown.is_cancelled();
            *is_placed |= is_ready;
            is_ready
        });
        Ok((RoutingAck { generation, placement, problems }, loads))
    }

    /// Returns the steps, as lists of layers, in which the local experts change so that `remote` holds and memory suffices.
    fn transition_steps(&self, remote: &RemoteSets) -> Result<Vec<Vec<usize>>, ServiceError> {
        let Some(limit) = self.parts.memory_bytes else { return Ok(Vec::new()) };
        let known = self.local();
        let config = self.parts.checkpoint.config();
        let mut changes = Vec::new();
        for layer in config.moe_layers() {
            let is_remote = |expert| remote.get(&layer).is_some_and(|set| set.contains(&expert));
            let mut change = LayerChange { layer, enters: 0, leaves: 0 };
            for (_, packed) in known.loaded_in_layer(layer).filter(|&(expert, _)| is_remote(expert)) {
                change.leaves += packed.bytes() as u64;
            }
            let experts = 0..config.moe(layer).map_or(0, |moe| moe.experts as u32);
            for expert in experts.filter(|&expert| !is_remote(expert) && known.get(layer, expert).is_none()) {
                let shape = expert_shape(&self.parts.checkpoint, layer, expert, self.parts.class);
                change.enters += shape.map_err(|error| internal(&error))?.packed_bytes() as u64;
            }
            changes.push(change);
        }
        let missing = self.parts.deferred_weights.iter().map(|part| part.missing_bytes() as u64);
        let used = memory::used() + missing.sum::<u64>();
        let available = limit.saturating_sub(used);
        transition_steps(&changes, available).map_err(|Shortage { layer, needed, available }| {
            let message = format!(
                "cannot load the local experts: layer {layer} needs {needed} bytes, {available} available ({used} of \
                 {limit} used); make more experts remote, or raise the memory limit"
            );
            // Before the first placement, nothing is in use that could be released later.
            match self.generation() {
                0 => ServiceError::invalid("remote", message),
                _ => ServiceError::new(ErrorCode::ResourceExhausted, message),
            }
        })
    }

    /// Switches the engine to `desired` with the experts `local`, then records the change.
    async fn switch_and_record(
        &self,
        generation: u64,
        local: LocalExperts,
        desired: DesiredPlacement,
    ) -> Result<Vec<EndpointProblem>, ServiceError> {
        let DesiredPlacement { remote, endpoints } = desired;
        let problems = self.switch(generation, local.clone(), remote.clone(), endpoints.clone()).await?;
        let mut in_force = self.in_force();
        (in_force.local, in_force.remote, in_force.endpoints) = (local, remote, endpoints);
        Ok(problems)
    }

    /// Splits the experts outside of `remote` into those in memory, and (layer, expert) of the others.
    fn split_by_presence(&self, remote: &RemoteSets) -> (LocalExperts, Vec<(usize, u32)>) {
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

    /// Prepares to load the experts outside of `remote` in the background. Fetches remote files now, so that a request
    /// does not wait for a network.
    async fn prepare_background_loads(
        &self,
        remote: &RemoteSets,
    ) -> Result<(LocalExperts, Arc<BackgroundLoads>), ServiceError> {
        let (mut local, missing) = self.split_by_presence(remote);
        let checkpoint = self.parts.checkpoint.clone();
        let prefetch = move || prefetch_experts(&checkpoint, &missing).map(|()| missing);
        let missing = run_blocking(prefetch).await?;
        let loads = local.add_loading(&missing, self.parts.loading.clone());
        self.parts.loading.add(i64::try_from(self.missing_deferred_weights().len()).unwrap_or(i64::MAX));
        Ok((local, loads))
    }

    /// Loads the experts outside of `remote`, except for those in memory already.
    async fn pack(&self, remote: &RemoteSets) -> Result<LocalExperts, ServiceError> {
        let (mut local, missing) = self.split_by_presence(remote);
        let (checkpoint, class, threads) =
            (self.parts.checkpoint.clone(), self.parts.class, self.parts.threads);
        let packed = run_blocking(move || load_experts(&checkpoint, &missing, class, threads)).await?;
        for (layer, expert, packed) in packed {
            local.insert(layer, expert, Arc::new(packed));
        }
        Ok(local)
    }

    /// Switches the engine to a placement. Returns the problems of its endpoints.
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
    /// Returns the placement in which the layers in `changed` are as in `desired`, and the others as they are.
    fn intermediate(&self, desired: &DesiredPlacement, changed: &BTreeSet<usize>) -> DesiredPlacement {
        let part = |sets: &RemoteSets, is_new: bool| -> Vec<(usize, BTreeSet<u32>)> {
            let layers = sets.iter().filter(|(layer, _)| changed.contains(layer) == is_new);
            layers.map(|(&layer, experts)| (layer, experts.clone())).collect()
        };
        let remote = part(&self.remote, false).into_iter().chain(part(&desired.remote, true)).collect();
        let mut endpoints: BTreeMap<String, Vec<LayerExperts>> = BTreeMap::new();
        for (source, is_new) in [(&self.endpoints, false), (&desired.endpoints, true)] {
            for (address, sets) in source {
                let sets = sets.iter().filter(|set| changed.contains(&(set.layer as usize)) == is_new);
                endpoints.entry(address.clone()).or_default().extend(sets.cloned());
            }
        }
        endpoints.retain(|_, sets| !sets.is_empty());
        DesiredPlacement { remote, endpoints: endpoints.into_iter().collect() }
    }
}

/// Parses the plan account of a routing; `None` if it has none.
fn parse_account(json: &str) -> Result<Option<Arc<PlanAccount>>, ServiceError> {
    if json.is_empty() {
        return Ok(None);
    }
    let account = PlanAccount::from_json(json);
    account.map(|account| Some(Arc::new(account))).map_err(|error| {
        ServiceError::invalid("account", format!("expected a problem and its plan: {error}"))
    })
}

/// Runs `work`, which reads files, on a blocking thread.
async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LoadError> + Send + 'static,
) -> Result<T, ServiceError> {
    let outcome = tokio::task::spawn_blocking(work).await.map_err(|error| internal(&error))?;
    outcome.map_err(|error| internal(&error))
}

fn internal(error: &dyn std::error::Error) -> ServiceError {
    ServiceError::new(ErrorCode::Internal, error.to_string())
}

fn shutting_down() -> ServiceError {
    ServiceError::new(ErrorCode::Unavailable, "the function is shutting down")
}
