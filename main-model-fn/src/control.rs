//! The control service: placements from launchers, inspections from the command line.

use crate::engine::request::{Delta, Event, FinishReason, InspectLevel, Request, Sampling, StopRules};
use crate::engine::{EngineHandle, Events, Switch};
use crate::experts::LocalExperts;
use crate::text::TextFront;
use remoe_experts::load_experts;
use remoe_kernels::Dtype;
use remoe_model::Checkpoint;
use remoe_wire::v1::main_model_server::MainModel;
use remoe_wire::v1::{
    DescribeMainRequest, Endpoint, ExpertCalls, Finished, GenerateEvent, GenerateRequest, InspectReply,
    InspectRequest, LayerExperts, LayerRouting, MainDescription, Piece, Routing, RoutingAck, Started,
    TokenIds, TokenRouting, generate_event, generate_request, inspect_request,
};
use remoe_wire::{ErrorCode, ServiceError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex as Lock, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, mpsc, oneshot, watch};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

/// Everything the control service needs to know.
pub(crate) struct Control {
    pub(crate) engine: EngineHandle,
    pub(crate) switches: mpsc::UnboundedSender<Switch>,
    pub(crate) checkpoint: Arc<Checkpoint>,
    pub(crate) dtype: Dtype,
    pub(crate) threads: usize,
    pub(crate) text: Option<Arc<TextFront>>,
    pub(crate) description: MainDescription,
    /// Held while a placement is brought into force: one at a time.
    pub(crate) placing: Mutex<()>,
    /// Experts packed for the generation in force; the next one reuses them.
    pub(crate) packed: Lock<LocalExperts>,
    /// The generation in force; 0 before the first.
    pub(crate) generation: AtomicU64,
    /// Whether a generation is in force: the function is ready for requests.
    pub(crate) placed: watch::Sender<bool>,
    /// From the start of the process to the first generation in force.
    pub(crate) load_time: Lock<Option<Duration>>,
    pub(crate) started: Instant,
}

#[tonic::async_trait]
impl MainModel for Control {
    async fn set_routing(&self, request: tonic::Request<Routing>) -> Result<Response<RoutingAck>, Status> {
        let routing = request.into_inner();
        let remote = self.remote_sets(&routing.remote)?;
        let endpoints = endpoints(&routing, &remote);
        let _placing = self.placing.lock().await;
        let current = self.generation.load(Ordering::Acquire);
        if routing.generation <= current {
            return Ok(Response::new(RoutingAck { generation: current, problems: Vec::new() }));
        }
        let local = self.pack_local(&remote, self.packed()).await?;
        let (done, outcome) = oneshot::channel();
        let switch = Switch { generation: routing.generation, local: local.clone(), remote, endpoints, done };
        let stopped = || ServiceError::new(ErrorCode::Unavailable, "the engine has stopped");
        self.switches.send(switch).map_err(|_| stopped())?;
        let outcome = outcome.await.map_err(|_| stopped())?;
        *self.packed.lock().unwrap_or_else(PoisonError::into_inner) = local;
        if let Ok(mut load_time) = self.load_time.lock() {
            load_time.get_or_insert_with(|| self.started.elapsed());
        }
        self.generation.store(outcome.generation, Ordering::Release);
        self.placed.send_replace(true);
        Ok(Response::new(RoutingAck { generation: outcome.generation, problems: outcome.problems }))
    }

    async fn describe(
        &self,
        _: tonic::Request<DescribeMainRequest>,
    ) -> Result<Response<MainDescription>, Status> {
        let mut description = self.description.clone();
        description.generation = self.generation.load(Ordering::Acquire);
        description.local = self.packed().listing();
        Ok(Response::new(description))
    }

    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;

    async fn generate(
        &self,
        request: tonic::Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let wanted = request.into_inner();
        let prompt = match wanted.prompt {
            Some(generate_request::Prompt::Ids(TokenIds { ids })) => ids,
            Some(generate_request::Prompt::Text(text)) => self.text()?.encode(&text, true)?,
            Some(generate_request::Prompt::Chat(text)) => self.chat(&text)?,
            None => return Err(ServiceError::invalid("prompt", "no prompt given").into()),
        };
        if !wanted.stop.is_empty() {
            // Stop strings are text; without a tokenizer they could never be found.
            self.text()?;
        }
        let request = Request {
            prompt: prompt.clone(),
            choices: 1,
            max_tokens: wanted.max_tokens as usize,
            sampling: Sampling {
                temperature: wanted.temperature.unwrap_or(0.0),
                top_p: wanted.top_p.unwrap_or(1.0),
                top_k: wanted.top_k.unwrap_or(0) as usize,
                seed: wanted.seed,
                ..Sampling::default()
            },
            stop: StopRules { strings: wanted.stop, ignore_eos: wanted.ignore_eos, ..StopRules::default() },
            logprobs: None,
            prompt_logprobs: None,
            inspect: None,
        };
        let events = self.engine.submit(request)?;
        let load_s = self.load_seconds();
        let has_text = self.text.is_some();
        // As deep as the engine's own channel is long would do; a reader that stops only stops this
        // task.
        let (sender, stream) = mpsc::channel(64);
        tokio::spawn(async move {
            let started = Started { prompt_ids: prompt };
            let first = generate_event::Event::Started(started);
            if sender.send(Ok(event(first))).await.is_ok() {
                relay(events, &sender, load_s, has_text).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn inspect(
        &self,
        request: tonic::Request<InspectRequest>,
    ) -> Result<Response<InspectReply>, Status> {
        let wanted = request.into_inner();
        let prompt = match wanted.prompt {
            Some(inspect_request::Prompt::Ids(TokenIds { ids })) => ids,
            Some(inspect_request::Prompt::Text(text)) => self.text()?.encode(&text, true)?,
            Some(inspect_request::Prompt::Chat(text)) => self.chat(&text)?,
            None => return Err(ServiceError::invalid("prompt", "no prompt given").into()),
        };
        let level = if wanted.hidden { InspectLevel::Hidden } else { InspectLevel::Routing };
        let mut events = self.engine.submit(Request {
            prompt: prompt.clone(),
            choices: 1,
            max_tokens: 0,
            sampling: Sampling::default(),
            stop: StopRules::default(),
            logprobs: None,
            prompt_logprobs: None,
            inspect: Some(level),
        })?;
        let mut reply = InspectReply { prompt_ids: prompt, ..InspectReply::default() };
        while let Some(event) = events.recv().await {
            match event {
                Event::Inspection(inspection) => {
                    reply.last_logits = inspection.last_logits;
                    reply.hidden = inspection.hidden.into();
                    reply.routing = inspection.routing.into_iter().map(layer_routing).collect();
                }
                Event::Done(figures) => {
                    reply.experts = Some(expert_calls(figures.experts));
                    return Ok(Response::new(reply));
                }
                Event::Failed(error) => return Err(error.into()),
                Event::Prompt(_) | Event::Delta(_) | Event::Finished { .. } => (),
            }
        }
        Err(ServiceError::new(ErrorCode::Unavailable, "the engine has stopped").into())
    }
}

impl Control {
    fn packed(&self) -> LocalExperts {
        // Replaced as a whole, so a panic elsewhere cannot have left it half-written.
        self.packed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn text(&self) -> Result<&TextFront, ServiceError> {
        self.text.as_deref().ok_or_else(|| {
            ServiceError::invalid(
                "prompt",
                "the checkpoint has no tokenizer.json; give token ids instead of text",
            )
        })
    }

    fn chat(&self, text: &str) -> Result<Vec<u32>, ServiceError> {
        let front = self.text()?;
        let messages = [serde_json::json!({"role": "user", "content": text})];
        let prompt = front.render_chat(&messages, true)?;
        // The template writes special tokens itself.
        front.encode(&prompt, false)
    }

    fn load_seconds(&self) -> f64 {
        let load_time = self.load_time.lock().ok().and_then(|load_time| *load_time);
        load_time.unwrap_or_default().as_secs_f64()
    }

    /// The remote sets by layer, checked against the model.
    fn remote_sets(&self, remote: &[LayerExperts]) -> Result<BTreeMap<usize, BTreeSet<u32>>, ServiceError> {
        let config = self.checkpoint.config();
        let mut sets: BTreeMap<usize, BTreeSet<u32>> = BTreeMap::new();
        for set in remote {
            let layer = set.layer as usize;
            let Some(moe) = config.moe(layer) else {
                return Err(ServiceError::invalid("remote", format!("layer {layer} has no routed experts")));
            };
            if let Some(expert) = set.experts.iter().find(|&&expert| expert as usize >= moe.experts) {
                return Err(ServiceError::invalid(
                    "remote",
                    format!("expert {expert} of layer {layer} does not exist: the layer has {}", moe.experts),
                ));
            }
            sets.entry(layer).or_default().extend(&set.experts);
        }
        sets.retain(|_, experts| !experts.is_empty());
        Ok(sets)
    }

    /// Packs the experts that are not remote, those of the last generation excepted.
    async fn pack_local(
        &self,
        remote: &BTreeMap<usize, BTreeSet<u32>>,
        known: LocalExperts,
    ) -> Result<LocalExperts, ServiceError> {
        let mut local = LocalExperts::default();
        let mut missing = Vec::new();
        let config = self.checkpoint.config();
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
        let (checkpoint, dtype, threads) = (self.checkpoint.clone(), self.dtype, self.threads);
        let internal =
            |error: &dyn std::error::Error| ServiceError::new(ErrorCode::Internal, error.to_string());
        let load = move || load_experts(&checkpoint, &missing, dtype, threads);
        let packed = tokio::task::spawn_blocking(load)
            .await
            .map_err(|error| internal(&error))?
            .map_err(|error| internal(&error))?;
        for (layer, expert, packed) in packed {
            local.insert(layer, expert, Arc::new(packed));
        }
        Ok(local)
    }
}

/// Every endpoint's address with the remote sets of the layers that it serves. A layer that none
/// serves is computed from local loads.
fn endpoints(routing: &Routing, remote: &BTreeMap<usize, BTreeSet<u32>>) -> Vec<(String, Vec<LayerExperts>)> {
    let sets = |endpoint: &Endpoint| {
        let serves = |layer: usize| endpoint.layers.is_empty() || endpoint.layers.contains(&(layer as u32));
        remote
            .iter()
            .filter(|&(&layer, _)| serves(layer))
            .map(|(&layer, experts)| LayerExperts {
                layer: layer as u32,
                experts: experts.iter().copied().collect(),
            })
            .collect()
    };
    routing.endpoints.iter().map(|endpoint| (endpoint.address.clone(), sets(endpoint))).collect()
}

/// Passes a request's events on until it ends or nobody reads any more.
async fn relay(
    mut events: Events,
    sender: &mpsc::Sender<Result<GenerateEvent, Status>>,
    load_s: f64,
    has_text: bool,
) {
    let mut tokens = Vec::new();
    let mut text = String::new();
    let mut reason = FinishReason::Length;
    loop {
        let next = tokio::select! {
            next = events.recv() => next,
            // Dropping the events ends the request's work.
            () = sender.closed() => return,
        };
        let Some(next) = next else {
            let stopped = ServiceError::new(ErrorCode::Unavailable, "the engine has stopped");
            let _client_gone = sender.send(Err(stopped.into())).await;
            return;
        };
        let ends = matches!(next, Event::Done(_) | Event::Failed(_));
        let message = match next {
            Event::Delta(Delta { token, text: piece, .. }) => {
                tokens.extend(token);
                text.push_str(&piece);
                Ok(event(generate_event::Event::Piece(Piece {
                    ids: token.into_iter().collect(),
                    text: piece,
                })))
            }
            Event::Finished { reason: why, .. } => {
                reason = why;
                continue;
            }
            Event::Done(figures) => Ok(event(generate_event::Event::Finished(Finished {
                reason: reason.as_str().to_owned(),
                text: has_text.then(|| std::mem::take(&mut text)),
                tokens: std::mem::take(&mut tokens),
                completion_tokens: figures.completion_tokens as u32,
                ttft_s: figures.ttft.as_secs_f64(),
                prefill_s: figures.prefill.as_secs_f64(),
                decode_s: figures.decode.as_secs_f64(),
                load_s,
                forwarded_positions: figures.forwarded_positions,
                experts: Some(expert_calls(figures.experts)),
            }))),
            Event::Failed(error) => Err(error.into()),
            Event::Prompt(_) | Event::Inspection(_) => continue,
        };
        if sender.send(message).await.is_err() || ends {
            return;
        }
    }
}

fn event(event: generate_event::Event) -> GenerateEvent {
    GenerateEvent { event: Some(event) }
}

fn expert_calls(tally: crate::engine::request::ExpertTally) -> ExpertCalls {
    ExpertCalls { local: tally.local, remote: tally.remote, fallback: tally.fallback, retries: tally.retries }
}

fn layer_routing(routing: crate::engine::request::LayerRouting) -> LayerRouting {
    LayerRouting {
        layer: routing.layer as u32,
        tokens: routing
            .tokens
            .into_iter()
            .map(|token| {
                let (experts, weights) = token.into_iter().unzip();
                TokenRouting { experts, weights }
            })
            .collect(),
    }
}
