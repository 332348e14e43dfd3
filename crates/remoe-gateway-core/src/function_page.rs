//! Pages that functions show over HTTP: metrics and placements.

use crate::body_budget::{BodyReservation, Holder};
use crate::gateway::Gateway;
use crate::model::Backend;
use axum::http::{HeaderValue, Request, header};
use http_body_util::{BodyExt, Full};
use std::time::Duration;
use tokio::time::timeout;

/// Longest wait for a page; a function that is busier is left out.
const WAIT: Duration = Duration::from_secs(2);
/// Largest page in bytes.
const PAGE: usize = 4 << 20;

/// Page of a function, with its room among the answers that the gateway holds.
pub(crate) struct Page {
    pub(crate) text: String,
    _room: BodyReservation,
}

impl Page {
    /// Returns a page that keeps `reservation` as long as it is there.
    pub(crate) fn new(text: String, reservation: BodyReservation) -> Self {
        Self { text, _room: reservation }
    }
}

/// Asks `backend` for the page at `path`. Returns `None` if it fails, takes too long, or `holder` has no room for the page.
pub(crate) async fn fetch(gateway: &Gateway, holder: Holder, backend: &Backend, path: &str) -> Option<Page> {
    let mut request = Request::get(backend.uri(path).ok()?).body(Full::default()).ok()?;
    if let Some(authorization) = &backend.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::clone(authorization));
    }
    let answer = async {
        let response = gateway.upstream().request(request).await.ok();
        let mut body = response.filter(|response| response.status().is_success())?.into_body();
        let (mut page, mut reservation) = (Vec::new(), gateway.answers.empty(holder.clone()));
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.ok()?.into_data() else { continue };
            let bytes = page.len() + data.len();
            if bytes > PAGE || reservation.resize(bytes).is_err() {
                tracing::warn!(
                    model = holder.model.as_deref(),
                    path,
                    bytes,
                    "page of a function left out: too large, or no room"
                );
                return None;
            }
            page.extend_from_slice(&data);
        }
        Some(Page::new(String::from_utf8(page).ok()?, reservation))
    };
    timeout(WAIT, answer).await.ok()?
}
