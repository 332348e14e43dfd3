//! The control service: placements from launchers, inspections from the command line.

use crate::engine::request::{Delta, Event, FinishReason, InspectLevel, Request, Sampling, StopRules};
use crate::engine::{EngineHandle, Events};
use crate::placer::Placer;
use crate::text::TextFront;
use remoe_model::ModelConfig;
use remoe_wire::v1::main_model_server::MainModel;
use remoe_wire::v1::{
    DescribeMainRequest, Endpoint, ExpertCalls, ExpertTime, Finished, GenerateEvent, GenerateRequest,
    InspectReply, InspectRequest, LayerExperts, LayerRouting, MainDescription, Piece, Routing, RoutingAck,
    Started, TokenIds, TokenRouting, generate_event, generate_request, inspect_request,
};
use remoe_wire::{ErrorCode, ServiceError};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Response, Status};

/// Everything the control service needs to know.
pub(crate) struct Control {
    pub(crate) engine: EngineHandle,
    pub(crate) placer: Arc<Placer>,
    pub(crate) text: Option<Arc<TextFront>>,
    pub(crate) description: MainDescription,
}

#[tonic::async_trait]
impl MainModel for Control {
    async fn set_routing(&self, request: tonic::Request<Routing>) -> Result<Response<RoutingAck>, Status> {
        Ok(Response::new(self.placer.place(request.into_inner()).await?))
    }

    async fn describe(
        &self,
        _: tonic::Request<DescribeMainRequest>,
    ) -> Result<Response<MainDescription>, Status> {
        let mut description = self.description.clone();
        description.generation = self.placer.generation();
        description.local = self.placer.local().listing();
        description.in_flight = u32::try_from(self.engine.in_flight()).unwrap_or(u32::MAX);
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
            special_text: false,
            logprobs: None,
            prompt_logprobs: None,
            inspect: None,
        };
        let events = self.engine.submit(request)?;
        let load_s = self.placer.load_seconds();
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
            special_text: false,
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
}

/// The remote experts of each layer.
pub(crate) type RemoteSets = BTreeMap<usize, BTreeSet<u32>>;

/// Every endpoint's address and what it is to serve.
pub(crate) type EndpointSets = Vec<(String, Vec<LayerExperts>)>;

/// The remote sets of a placement and what each endpoint hosts of them, checked against the model.
///
/// # Errors
/// A layer or an expert that the model does not have, or endpoints that host too much together.
#[doc(hidden)]
pub fn check_routing(
    config: &ModelConfig,
    routing: &Routing,
) -> Result<(RemoteSets, EndpointSets), ServiceError> {
    let mut sets = RemoteSets::new();
    for set in &routing.remote {
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
    let endpoints = endpoints(routing, &sets)?;
    Ok((sets, endpoints))
}

/// More (endpoint, expert) pairs than any deployment has: a placement is kept per endpoint, and a short
/// message can name many endpoints and many experts.
const MAX_HOSTED: usize = 1 << 22;

/// Every endpoint's address with the remote sets of the layers that it serves. A layer that none
/// serves is computed from local loads.
fn endpoints(routing: &Routing, remote: &RemoteSets) -> Result<EndpointSets, ServiceError> {
    let mut hosted = 0;
    let sets = |endpoint: &Endpoint| {
        let layers: BTreeSet<usize> = endpoint.layers.iter().map(|&layer| layer as usize).collect();
        let mut sets = Vec::new();
        for (&layer, experts) in remote {
            if layers.is_empty() || layers.contains(&layer) {
                hosted += experts.len();
                if hosted > MAX_HOSTED {
                    let message = format!("the endpoints host more than {MAX_HOSTED} experts together");
                    return Err(ServiceError::invalid("endpoints", message));
                }
                let experts = experts.iter().copied().collect();
                sets.push(LayerExperts { layer: layer as u32, experts });
            }
        }
        Ok((endpoint.address.clone(), sets))
    };
    routing.endpoints.iter().map(sets).collect()
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
                prefill_experts: Some(expert_time(figures.prefill_experts)),
                decode_experts: Some(expert_time(figures.decode_experts)),
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

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::path::Path;

    /// A few kilobytes that name many endpoints and many experts are not gigabytes of sets.
    #[test]
    fn endpoints_and_experts_do_not_multiply_without_bound() {
        let text = br#"{"model_type": "qwen2_moe", "num_experts": 1024}"#;
        let model = ModelConfig::from_json(Path::new("config.json"), text).unwrap();
        let remote: Vec<LayerExperts> =
            (0..8).map(|layer| LayerExperts { layer, experts: (0..1024).collect() }).collect();
        let routing = |endpoints| Routing {
            generation: 1,
            endpoints: vec![Endpoint::default(); endpoints],
            remote: remote.clone(),
            ..Routing::default()
        };
        let (sets, endpoints) = check_routing(&model, &routing(512)).unwrap();
        assert_eq!((sets.len(), endpoints.len()), (8, 512));
        assert!(endpoints.iter().all(|(_, hosted)| *hosted == remote));
        let error = check_routing(&model, &routing(513)).unwrap_err();
        assert_eq!(error.field.as_deref(), Some("endpoints"));
    }
}
