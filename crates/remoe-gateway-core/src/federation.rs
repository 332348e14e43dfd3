//! `/metrics`: the gateway's own, then those of the functions that answer for its models.

use crate::body_budget::Holder;
use crate::caller::Caller;
use crate::endpoint_picker;
use crate::exposition::{merged, of_tenant, without_spending};
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

/// Functions that are asked at the same time for one page, and how long all of them have.
const ASKED: usize = 32;
const LONGEST: Duration = Duration::from_secs(6);

/// The address of a scraper, as a client's name.
type Scraper = Option<Extension<ConnectInfo<SocketAddr>>>;

fn name(scraper: Scraper) -> Arc<str> {
    scraper.map_or_else(String::new, |Extension(ConnectInfo(address))| address.ip().to_string()).into()
}

/// Returns the metrics that the caller may see: all of them, or those about its own models and itself.
pub(crate) async fn metrics(
    State(gateway): State<Arc<Gateway>>,
    Extension(caller): Extension<Caller>,
) -> Result<Response, ApiError> {
    let _turn = gateway.scrapes.turn(&caller.client).await?;
    Ok(match own(&gateway).await {
        Ok((head, own)) => with_head(&head, page_for(&gateway, &caller, own).await),
        Err(failure) => failure,
    })
}

/// All of it, for an address of its own.
pub(crate) async fn all_metrics(
    State(gateway): State<Arc<Gateway>>,
    scraper: Scraper,
) -> Result<Response, ApiError> {
    let _turn = gateway.own_scrapes.turn(&name(scraper)).await?;
    Ok(match own(&gateway).await {
        Ok((head, own)) => {
            let page = page_for(&gateway, &Caller::anybody(), own).await;
            with_head(&head, page + &endpoint_picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// Returns the gateway's own metrics, without those of functions. Where there are keys, what was spent and which tenant
/// used how much is shown to an admin's key alone.
pub(crate) async fn own_metrics(
    State(gateway): State<Arc<Gateway>>,
    headers: HeaderMap,
    scraper: Scraper,
) -> Result<Response, ApiError> {
    let keys = gateway.keys();
    let sees_all = match presented_key(&headers) {
        _ if keys.is_empty() => true,
        None => false,
        Some(presented) => match keys.tenant(presented) {
            Some(tenant) => tenant.sees_all(),
            None => return Err(ServiceError::new(ErrorCode::Unauthenticated, "invalid API key").into()),
        },
    };
    let _turn = gateway.own_scrapes.turn(&name(scraper)).await?;
    Ok(match own(&gateway).await {
        Ok((head, own)) => {
            let own = if sees_all { own } else { without_spending(&own) };
            // What endpoint pickers read are sums over all models, which no tenant is shown.
            with_head(&head, own + &endpoint_picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// The gateway's own, as they are now, and their head; or why there are none.
async fn own(gateway: &Gateway) -> Result<(Parts, String), Response> {
    gateway.forget_gone();
    if let Some(cost_accounting) = gateway.cost_accounting() {
        cost_accounting.refresh(gateway.keys().budgets(&gateway.models(), &gateway.options().short_names));
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

/// The gateway's `own` and those of the functions, as far as the caller may know them.
async fn page_for(gateway: &Arc<Gateway>, caller: &Caller, own: String) -> String {
    let models = gateway.models_of(caller);
    let asked: Vec<_> = models
        .iter()
        .flat_map(|model| {
            let backends = model.backends().into_iter();
            backends.map(|backend| (Arc::<str>::from(model.name()), backend)).collect::<Vec<_>>()
        })
        .collect();
    let until = Instant::now() + LONGEST;
    let pages = stream::iter(asked).map(|(model, backend)| async move {
        let holder = Holder::answer(&caller.client, &model);
        let page = timeout_at(until, fetch(gateway, holder, &backend, "/metrics")).await;
        Some((model, page.ok()??))
    });
    let pages: Vec<_> = pages.buffered(ASKED).filter_map(std::future::ready).collect().await;
    let text = merged(&own, &pages);
    let text = own + &text;
    match caller.tenant.as_ref().filter(|tenant| !tenant.sees_all()) {
        Some(tenant) => of_tenant(&text, tenant),
        None => text,
    }
}
