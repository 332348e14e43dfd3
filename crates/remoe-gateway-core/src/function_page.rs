//! Pages that the gateway fetches from main functions: metrics and placements.

use crate::body_budget::{BodyReservation, BudgetHolder};
use crate::gateway::Gateway;
use crate::model::Backend;
use axum::http::{HeaderValue, Request, header};
use http_body_util::{BodyExt, Full};
use std::time::Duration;
use tokio::time::timeout;

/// Time within which a function must answer; else it is left out.
const FETCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest size of a page in bytes.
const MAX_PAGE_BYTES: usize = 4 << 20;

/// Page of a function, and its reservation in the answer budget.
pub(crate) struct FunctionPage {
    pub(crate) text: String,
    _reservation: BodyReservation,
}

impl FunctionPage {
    /// Makes a page that holds `reservation` until it is dropped.
    pub(crate) fn new(text: String, reservation: BodyReservation) -> Self {
        Self { text, _reservation: reservation }
    }
}

/// Fetches the page at `path` from `backend`. Returns `None` if that fails, takes too long, or the budget of `holder`
/// is exhausted.
pub(crate) async fn fetch(
    gateway: &Gateway,
    holder: BudgetHolder,
    backend: &Backend,
    path: &str,
) -> Option<FunctionPage> {
    let mut request = Request::get(backend.uri(path).ok()?).body(Full::default()).ok()?;
    if let Some(authorization) = &backend.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::clone(authorization));
    }
    let answer = async {
        let response = gateway.upstream().request(request).await.ok();
        let mut body = response.filter(|response| response.status().is_success())?.into_body();
        let (mut page, mut reservation) = (Vec::new(), gateway.answer_budget.empty(holder.clone()));
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.ok()?.into_data() else { continue };
            let bytes = page.len() + data.len();
            if bytes > MAX_PAGE_BYTES || reservation.resize(bytes).is_err() {
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
        Some(FunctionPage::new(String::from_utf8(page).ok()?, reservation))
    };
    timeout(FETCH_TIMEOUT, answer).await.ok()?
}
