//! `/metrics`: the gateway's own metrics, then those of the main functions of its models.

use crate::body_budget::BudgetHolder;
use crate::caller::Caller;
use crate::endpoint_picker;
use crate::exposition::{merge_pages, visible_to_tenant, without_spending};
use crate::function_page::fetch;
use crate::gateway::Gateway;
use axum::Extension;
use axum::extract::{ConnectInfo, State};
use axum::http::response::Parts;
use axum::http::{HeaderMap, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::BodyExt;
use remoe_http::{ApiError, presented_key};
use remoe_proto::{ErrorCode, ServiceError};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};

/// Largest number of functions that are asked for their metrics at the same time.
const MAX_CONCURRENT_FETCHES: usize = 32;
/// Time within which all functions must answer.
const FETCH_TIMEOUT: Duration = Duration::from_secs(6);

/// Address of a scraper.
type Scraper = Option<Extension<ConnectInfo<SocketAddr>>>;

fn scraper_name(scraper: Scraper) -> Arc<str> {
    scraper.map_or_else(String::new, |Extension(ConnectInfo(address))| address.ip().to_string()).into()
}

/// Returns the metrics that the caller may see: all of them, or those about its own models and itself.
pub(crate) async fn metrics(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    let _permit = gateway.client_scrapes.acquire(&caller.client).await?;
    Ok(match render_own_metrics(&gateway).await {
        Ok((head, own)) => with_head(&head, federated_page(&gateway, &caller, own).await),
        Err(failure) => failure,
    })
}

/// Returns all metrics, at the metrics' own address, for which no key is needed.
pub(crate) async fn all_metrics(
    State(gateway): State<Arc<Gateway>>,
    scraper: Scraper,
) -> Result<Response, ApiError> {
    let _permit = gateway.metrics_scrapes.acquire(&scraper_name(scraper)).await?;
    Ok(match render_own_metrics(&gateway).await {
        Ok((head, own)) => {
            let page = federated_page(&gateway, &Caller::unrestricted(), own).await;
            with_head(&head, page + &endpoint_picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// Returns the gateway's own metrics, without those of functions. If there are keys, spending and usage by tenant are
/// shown only to an admin's key.
pub(crate) async fn own_metrics(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    scraper: Scraper,
) -> Result<Response, ApiError> {
    let keys = gateway.keys();
    let is_unrestricted = match presented_key(&headers) {
        _ if keys.is_empty() => true,
        None => false,
        Some(presented) => match keys.tenant(presented) {
            Some(tenant) => tenant.is_admin(),
            None => return Err(ServiceError::new(ErrorCode::Unauthenticated, "invalid API key").into()),
        },
    };
    let _permit = gateway.metrics_scrapes.acquire(&scraper_name(scraper)).await?;
    Ok(match render_own_metrics(&gateway).await {
        Ok((head, own)) => {
            let own = if is_unrestricted { own } else { without_spending(&own) };
            // Only this address has the gauges for endpoint pickers: they are sums over all models.
            with_head(&head, own + &endpoint_picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// Renders the gateway's own metrics. Returns the head of the response and the text.
///
/// # Errors
/// The response to send if rendering failed.
async fn render_own_metrics(gateway: &Gateway) -> Result<(Parts, String), Response> {
    gateway.remove_gone_models();
    if let Some(cost_accounting) = gateway.cost_accounting() {
        cost_accounting
            .refresh_metrics(gateway.keys().budgets(&gateway.models(), &gateway.options().short_names));
    }
    let page = remoe_process::render_metrics(gateway.metrics().registry());
    if !page.status().is_success() {
        return Err(page);
    }
    let (head, body) = page.into_parts();
    match body.collect().await {
        Ok(body) => Ok((head, String::from_utf8_lossy(&body.to_bytes()).into_owned())),
        Err(_broken) => Err((head, Bytes::new()).into_response()),
    }
}

fn with_head(head: &Parts, text: String) -> Response {
    let mut response = text.into_response();
    if let Some(kind) = head.headers.get(header::CONTENT_TYPE) {
        response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
    }
    response
}

/// Appends the metrics of functions to the gateway's `own`. Keeps only what the caller may see.
async fn federated_page(gateway: &Arc<Gateway>, caller: &Caller, own: String) -> String {
    let models = gateway.models_of(caller);
    let targets: Vec<_> = models
        .iter()
        .flat_map(|model| {
            let backends = model.backends().into_iter();
            backends.map(|backend| (Arc::<str>::from(model.name()), backend)).collect::<Vec<_>>()
        })
        .collect();
    let deadline = Instant::now() + FETCH_TIMEOUT;
    let pages = stream::iter(targets).map(|(model, backend)| async move {
        let holder = BudgetHolder::answer(&caller.client, &model);
        let page = timeout_at(deadline, fetch(gateway, holder, &backend, "/metrics")).await;
        Some((model, page.ok()??))
    });
    let pages: Vec<_> = pages.buffered(MAX_CONCURRENT_FETCHES).filter_map(std::future::ready).collect().await;
    let text = merge_pages(&own, &pages);
    let text = own + &text;
    match caller.tenant.as_ref().filter(|tenant| !tenant.is_admin()) {
        Some(tenant) => visible_to_tenant(&text, tenant),
        None => text,
    }
}
