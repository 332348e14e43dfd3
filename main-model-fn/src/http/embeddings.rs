//! `/v1/embeddings`: mean of the last hidden states of a text.

use super::completions::ids_of;
use super::fields::{Given, Prompts};
use super::running::RunningGeneration;
use super::state::HttpState;
use super::timing::Timeline;
use super::unsupported::unsupported;
use super::urgency::Urgency;
use super::{body, generate};
use crate::engine::request::{Event, Request};
use axum::Json;
use axum::extract::{self, State};
use axum::response::{IntoResponse, Response};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use remoe_http::ApiError;
use remoe_proto::{ErrorCode, ServiceError};
use serde::{Deserialize, Serialize};
use std::sync::Arc;

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct EmbeddingsBody {
    model: Option<String>,
    input: Option<Prompts>,
    encoding_format: Option<String>,
    add_special_tokens: Option<bool>,
    priority: Option<String>,
    queue_deadline: Option<String>,
    dimensions: Given,
    truncate_prompt_tokens: Given,
}

/// Requests to compute, and the encoding of their answers.
struct EmbeddingRequests {
    requests: Vec<Request>,
    base64: bool,
}

#[derive(Serialize)]
struct Embeddings {
    object: &'static str,
    data: Vec<Embedding>,
    model: String,
    usage: EmbeddingUsage,
}

#[derive(Serialize)]
struct Embedding {
    object: &'static str,
    index: usize,
    embedding: Vector,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Vector {
    Floats(Vec<f32>),
    /// Base64 of little-endian float32.
    Base64(String),
}

#[derive(Serialize)]
struct EmbeddingUsage {
    prompt_tokens: usize,
    total_tokens: usize,
}

pub(super) async fn handle(
    State(state): State<Arc<HttpState>>,
    request: extract::Request,
) -> Result<Response, ApiError> {
    state.check_ready()?;
    let timeline = Timeline::begin(request.headers());
    let tenant = generate::tenant(request.headers());
    let span = generate::span(&state, &request);
    span.set("gen_ai.operation.name", "embeddings");
    let EmbeddingRequests { mut requests, base64 } = body::read(&state, request, check).await?;
    requests.iter_mut().for_each(|request| request.tenant = tenant);
    let mut data: Vec<Option<Embedding>> = requests.iter().map(|_| None).collect();
    let mut running = RunningGeneration::start(&state, requests, "input", timeline, span)?;
    while let Some((index, event)) = running.next().await? {
        let Event::Embedding(mean) = event else { continue };
        if let Some(place) = data.get_mut(index) {
            *place = Some(Embedding { object: "embedding", index, embedding: vector(mean, base64)? });
        }
    }
    let prompt_tokens = running.figures().prompt_tokens;
    let embeddings = Embeddings {
        object: "list",
        data: data.into_iter().flatten().collect(),
        model: state.options.model.clone(),
        usage: EmbeddingUsage { prompt_tokens, total_tokens: prompt_tokens },
    };
    Ok((running.gateway_headers(), Json(embeddings)).into_response())
}

fn check(state: &HttpState, body: EmbeddingsBody) -> Result<EmbeddingRequests, ServiceError> {
    state.check_model(body.model.as_deref())?;
    for (name, given) in
        [("dimensions", &body.dimensions), ("truncate_prompt_tokens", &body.truncate_prompt_tokens)]
    {
        if *given != Given::Nothing {
            return Err(unsupported(name));
        }
    }
    let base64 = match body.encoding_format.as_deref() {
        None | Some("float") => false,
        Some("base64") => true,
        Some(other) => {
            let message = format!("invalid `encoding_format`: expected float or base64, got {other:?}");
            return Err(ServiceError::invalid("encoding_format", message));
        }
    };
    let missing = || ServiceError::invalid("input", "missing `input`");
    let Prompts(inputs) = body.input.ok_or_else(missing)?;
    let most = state.engine.limits().max_requests;
    if inputs.len() > most {
        let message = format!("too many inputs: expected at most {most}, got {}", inputs.len());
        return Err(ServiceError::invalid("input", message));
    }
    let many = inputs.len() > 1;
    let special = body.add_special_tokens.unwrap_or(true);
    let Urgency { priority, queue_deadline } =
        Urgency::read(body.priority.as_deref(), body.queue_deadline.as_deref())?;
    let request = |(index, input)| {
        let field = if many { format!("input[{index}]") } else { "input".to_owned() };
        let ids = ids_of(state, &field, input, special)?;
        Ok(Request { embeds: true, priority, queue_deadline, ..Request::prompt_only(ids) })
    };
    let requests = inputs.into_iter().enumerate().map(request).collect::<Result<_, ServiceError>>()?;
    Ok(EmbeddingRequests { requests, base64 })
}

fn vector(mean: Vec<f32>, base64: bool) -> Result<Vector, ServiceError> {
    if !mean.iter().all(|element| element.is_finite()) {
        // JSON cannot express it.
        let message = "cannot embed the input: its hidden states are not finite";
        return Err(ServiceError::new(ErrorCode::Internal, message));
    }
    Ok(match base64 {
        false => Vector::Floats(mean),
        true => {
            let bytes: Vec<u8> = mean.into_iter().flat_map(f32::to_le_bytes).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
    })
}
