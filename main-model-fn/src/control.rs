//! gRPC control service: placements from launchers, generation and inspection for the command line.

use crate::dispatch::Activity;
use crate::engine::request::{Delta, Event, FinishReason, InspectLevel, Request, Sampling, StopRules};
use crate::engine::{EngineHandle, Events};
use crate::model_text::ModelText;
use crate::placer::Placer;
use crate::routing_check::RemoteSets;
use remoe_model::text::Rendering;
use remoe_proto::v1::main_model_server::MainModel;
use remoe_proto::v1::{
    DescribeMainRequest, EndpointWork, ExpertCalls, ExpertTime, Finished, GenerateEvent, GenerateRequest,
    InspectReply, InspectRequest, LayerPairs, LayerRouting, MainDescription, Piece, Routing, RoutingAck,
    Started, TokenIds, TokenRouting, generate_event, generate_request, inspect_request,
};
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

/// Implementation of the control service.
pub(crate) struct Control {
    pub(crate) engine: EngineHandle,
    pub(crate) placer: Arc<Placer>,
    pub(crate) text: Option<Arc<ModelText>>,
    pub(crate) description: MainDescription,
    pub(crate) activity: Arc<Activity>,
    /// Start of the process.
    pub(crate) started: Instant,
}

#[tonic::async_trait]
impl MainModel for Control {
    async fn set_routing(&self, request: tonic::Request<Routing>) -> Result<Response<RoutingAck>, Status> {
        Ok(Response::new(self.placer.place(request.into_inner()).await?))
    }

    async fn describe(
        &self,
        request: tonic::Request<DescribeMainRequest>,
    ) -> Result<Response<MainDescription>, Status> {
        let mut description = self.description.clone();
        (description.generation, description.placement) = self.placer.generation_and_digest();
        let local = self.placer.local();
        description.local = local.listing();
        description.arriving = u32::try_from(self.placer.loading_count()).unwrap_or(u32::MAX);
        description.in_flight = u32::try_from(self.engine.in_flight()).unwrap_or(u32::MAX);
        let work = self.activity.remote_compute_times().into_iter();
        description.work = work
            .map(|(address, computed)| EndpointWork { address, computed_us: microseconds(computed) })
            .collect();
        description.age_us = microseconds(self.started.elapsed());
        if request.get_ref().pairs {
            description.pairs = remote_pairs(&self.activity, &self.placer.remote());
        }
        Ok(Response::new(description))
    }

    type GenerateStream = ReceiverStream<Result<GenerateEvent, Status>>;

    async fn generate(
        &self,
        request: tonic::Request<GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let body = request.into_inner();
        let prompt = match body.prompt {
            Some(generate_request::Prompt::Ids(TokenIds { ids })) => ids,
            Some(generate_request::Prompt::Text(text)) => self.text()?.encode(&text, true)?,
            Some(generate_request::Prompt::Chat(text)) => self.chat(&text)?,
            None => {
                return Err(ServiceError::invalid(
                    "prompt",
                    "missing prompt: expected token ids, text or a chat",
                )
                .into());
            }
        };
        if !body.stop.is_empty() {
            // Stop strings need a tokenizer.
            self.text()?;
        }
        let request = Request {
            max_tokens: body.max_tokens as usize,
            sampling: Sampling {
                temperature: body.temperature.unwrap_or(0.0),
                top_p: body.top_p.unwrap_or(1.0),
                top_k: body.top_k.unwrap_or(0) as usize,
                seed: body.seed,
                min_p: body.min_p.unwrap_or(0.0),
                repetition_penalty: body.repetition_penalty.unwrap_or(1.0),
                ..Sampling::default()
            },
            stop: StopRules { strings: body.stop, ignore_eos: body.ignore_eos, ..StopRules::default() },
            ..Request::prompt_only(prompt.clone())
        };
        let events = self.engine.submit(request)?;
        let load_s = self.placer.load_seconds();
        let has_text = self.text.is_some();
        // Of any depth, since the engine's own channel holds all events: a slow reader blocks only this task.
        let (sender, stream) = mpsc::channel(64);
        tokio::spawn(async move {
            let started = Started { prompt_ids: prompt };
            let first = generate_event::Event::Started(started);
            if sender.send(Ok(event(first))).await.is_ok() {
                forward_events(events, &sender, load_s, has_text).await;
            }
        });
        Ok(Response::new(ReceiverStream::new(stream)))
    }

    async fn inspect(
        &self,
        request: tonic::Request<InspectRequest>,
    ) -> Result<Response<InspectReply>, Status> {
        let body = request.into_inner();
        let prompt = match body.prompt {
            Some(inspect_request::Prompt::Ids(TokenIds { ids })) => ids,
            Some(inspect_request::Prompt::Text(text)) => self.text()?.encode(&text, true)?,
            Some(inspect_request::Prompt::Chat(text)) => self.chat(&text)?,
            None => {
                return Err(ServiceError::invalid(
                    "prompt",
                    "missing prompt: expected token ids, text or a chat",
                )
                .into());
            }
        };
        let level = if body.hidden { InspectLevel::Hidden } else { InspectLevel::Routing };
        let mut events = self.engine.submit(Request {
            inspect: Some(level),
            prompt_logprobs: body.scores.then_some(0),
            ..Request::prompt_only(prompt.clone())
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
                Event::Prompt(scored) => {
                    reply.scores = scored.iter().flatten().map(|score| score.logprob).collect();
                }
                Event::Embedding(_) | Event::Delta(_) | Event::Finished { .. } => (),
            }
        }
        Err(ServiceError::new(ErrorCode::Unavailable, "the engine has stopped").into())
    }
}

/// Returns the numbers of pairs of the `remote` experts that were used.
fn remote_pairs(activity: &Activity, remote: &RemoteSets) -> Vec<LayerPairs> {
    let layer_pairs = |(&layer, experts): (&usize, &BTreeSet<u32>)| {
        let counted = activity.pairs(layer);
        let used = experts.iter().filter_map(|&expert| Some((expert, *counted.get(expert as usize)?)));
        let (experts, pairs) = used.filter(|(_, pairs)| *pairs > 0).unzip();
        LayerPairs { layer: u32::try_from(layer).unwrap_or(u32::MAX), experts, pairs }
    };
    remote.iter().map(layer_pairs).filter(|layer| !layer.experts.is_empty()).collect()
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

impl Control {
    /// Returns the tokenizer.
    ///
    /// # Errors
    /// Fails if the checkpoint has none.
    fn text(&self) -> Result<&ModelText, ServiceError> {
        self.text.as_deref().ok_or_else(|| {
            ServiceError::invalid(
                "prompt",
                "the checkpoint has no tokenizer.json; use token ids instead of text",
            )
        })
    }

    /// Renders `text` as a user message, and encodes it.
    fn chat(&self, text: &str) -> Result<Vec<u32>, ServiceError> {
        let model_text = self.text()?;
        let messages = [serde_json::json!({"role": "user", "content": text})];
        let rendering = Rendering { add_generation_prompt: true, ..Rendering::default() };
        let prompt = model_text.render_chat(&messages, rendering)?;
        // The template contains the special tokens already.
        model_text.encode(&prompt, false)
    }
}

/// Forwards a request's events until it ends or the receiver is closed.
async fn forward_events(
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
            // Dropping the events cancels the request.
            () = sender.closed() => return,
        };
        let Some(next) = next else {
            let stopped = ServiceError::new(ErrorCode::Unavailable, "the engine has stopped");
            let _client_gone = sender.send(Err(stopped.into())).await;
            return;
        };
        let is_last = matches!(next, Event::Done(_) | Event::Failed(_));
        let message = match next {
            Event::Delta(Delta { token, text: new_text, .. }) => {
                tokens.extend(token);
                text.push_str(&new_text);
                Ok(event(generate_event::Event::Piece(Piece {
                    ids: token.into_iter().collect(),
                    text: new_text,
                })))
            }
            Event::Finished { reason: finish_reason, .. } => {
                reason = finish_reason;
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
                prefill_experts: Some(expert_time(figures.prefill_experts)),
                decode_experts: Some(expert_time(figures.decode_experts)),
            }))),
            Event::Failed(error) => Err(error.into()),
            Event::Prompt(_) | Event::Inspection(_) | Event::Embedding(_) => continue,
        };
        if sender.send(message).await.is_err() || is_last {
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

fn expert_time(time: crate::engine::request::ExpertTime) -> ExpertTime {
    ExpertTime {
        local_s: time.local.as_secs_f64(),
        waited_s: time.waited.as_secs_f64(),
        remote_s: time.remote.as_secs_f64(),
        remote_calls: time.calls,
    }
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
