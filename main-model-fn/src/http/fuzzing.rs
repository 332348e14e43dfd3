//! Checks of request bodies without a socket and an engine: entry point for `fuzz/`.

use super::state::{HttpOptions, HttpState};
use super::{PlacementView, TextFrontend, chat, completions};
use crate::engine::request::Request;
use crate::engine::{EngineHandle, RequestLimits};
use crate::model_text::ModelText;
use prometheus::Registry;
use remoe_proto::ServiceError;
use std::sync::Arc;

/// Returns the checks of an HTTP API with these texts and limits. The model's name is `m`.
pub fn checks(text: Option<ModelText>, limits: RequestLimits) -> impl Fn(bool, &[u8]) -> Checked {
    let text = text.map(|text| Arc::new(text) as Arc<dyn TextFrontend>);
    let (_, ready) = tokio::sync::watch::channel(true);
    let (_, account) = tokio::sync::watch::channel(None);
    let (engine, jobs) = EngineHandle::new(limits);
    let state = HttpState::new(
        engine,
        text,
        HttpOptions::new("m"),
        ready,
        account,
        PlacementView::default(),
        Registry::new(),
    );
    let jobs = std::cell::RefCell::new(jobs);
    move |is_chat, bytes| {
        let state = state.as_ref().map_err(|error| ServiceError::invalid("registry", error.to_string()))?;
        let check = if is_chat { chat::check } else { completions::check };
        let requests = check(state, remoe_http::parse_json(bytes)?)?.requests;
        for request in &requests {
            state.engine.submit(request.clone())?;
        }
        while jobs.borrow_mut().try_recv().is_ok() {}
        Ok(requests)
    }
}

/// Requests that the engine would accept, or the error for the client.
pub type Checked = Result<Vec<Request>, ServiceError>;
