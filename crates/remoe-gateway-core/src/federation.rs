//! `/metrics`: the gateway's own, then those of the functions that answer for its models.

use crate::caller::Caller;
use crate::gateway::Gateway;
use crate::model::Backend;
use crate::picker;
use crate::room::{Holder, Room};
use crate::tenant::Tenant;
use axum::Extension;
use axum::extract::{ConnectInfo, State};
use axum::http::response::Parts;
use axum::http::{HeaderMap, HeaderValue, Request, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream::{self, StreamExt};
use http_body_util::{BodyExt, Full};
use remoe_http::{ApiError, presented_key};
use remoe_proto::{ErrorCode, ServiceError};
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, SemaphorePermit};
use tokio::time::{Instant, timeout, timeout_at};

/// A function that is busier than this shows no metrics this time.
const WAIT: Duration = Duration::from_secs(2);
/// Functions that are asked at the same time for one page, and how long all of them have.
const ASKED: usize = 32;
const LONGEST: Duration = Duration::from_secs(6);
/// Largest page of metrics of a function.
const PAGE: usize = 4 << 20;

/// Requests for a page of metrics that are answered at the same time, and those that wait.
const TURNS: usize = 2;
const WAITING: usize = 14;
/// Requests of one client that are taken at the same time; one of them is answered.
const OF_ONE: usize = 3;
/// A request for a page waits this long: scrapers give up after 10 s, of which a page takes up to [`LONGEST`].
const TURN: Duration = Duration::from_secs(4);

/// Limits the requests for pages of metrics: each asks all functions.
pub(crate) struct Scrapes {
    places: Semaphore,
    turns: Semaphore,
    clients: Mutex<HashMap<Arc<str>, Places>>,
    patience: Duration,
}

/// Places of one client.
#[derive(Clone)]
struct Places {
    taken: usize,
    turn: Arc<Semaphore>,
}

/// A turn, which lasts as long as this.
struct Turn<'a> {
    _place: Place<'a>,
    _turns: (OwnedSemaphorePermit, SemaphorePermit<'a>),
}

/// A place of a client in the queue.
struct Place<'a> {
    scrapes: &'a Scrapes,
    client: Arc<str>,
    _of_all: SemaphorePermit<'a>,
}

impl Default for Scrapes {
    fn default() -> Self {
        Self {
            places: Semaphore::new(TURNS + WAITING),
            turns: Semaphore::new(TURNS),
            clients: Mutex::default(),
            patience: TURN,
        }
    }
}

impl Scrapes {
    /// Waits for a turn of `client`.
    ///
    /// # Errors
    /// Too many wait, or it takes too long.
    async fn turn(&self, client: &Arc<str>) -> Result<Turn<'_>, ApiError> {
        let refused = |message: String| {
            ApiError::from(ServiceError::new(ErrorCode::ResourceExhausted, message)).retry_after(WAIT)
        };
        let place = self.places.try_acquire().ok().and_then(|place| self.place(client, place));
        let (place, own) = place.ok_or_else(|| {
            refused(format!(
                "too many requests for /metrics: expected at most {} at the same time, {OF_ONE} of one client; \
                 retry later",
                TURNS + WAITING
            ))
        })?;
        let turns = async { Some((own.acquire_owned().await.ok()?, self.turns.acquire().await.ok()?)) };
        let turns = timeout(self.patience, turns).await.ok().flatten();
        let turns = turns.ok_or_else(|| {
            refused(format!("cannot show metrics: no turn within {:?}; retry later", self.patience))
        })?;
        Ok(Turn { _place: place, _turns: turns })
    }

    /// Takes a place of `client` beside its one of all, with its turn; none where it has as many as one may.
    fn place<'a>(
        &'a self,
        client: &Arc<str>,
        of_all: SemaphorePermit<'a>,
    ) -> Option<(Place<'a>, Arc<Semaphore>)> {
        let mut clients = self.clients();
        let places = clients
            .entry(client.clone())
            .or_insert_with(|| Places { taken: 0, turn: Arc::new(Semaphore::new(1)) });
        if places.taken == OF_ONE {
            return None;
        }
        places.taken += 1;
        Some((Place { scrapes: self, client: client.clone(), _of_all: of_all }, places.turn.clone()))
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<Arc<str>, Places>> {
        // Each change of it is whole.
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut clients = self.scrapes.clients();
        if let Some(places) = clients.get_mut(&self.client) {
            places.taken -= 1;
            if places.taken == 0 {
                clients.remove(&self.client);
            }
        }
    }
}

/// The address of a scraper, as a client's name.
type Scraper = Option<Extension<ConnectInfo<SocketAddr>>>;

fn name(scraper: Scraper) -> Arc<str> {
    scraper.map_or_else(String::new, |Extension(ConnectInfo(address))| address.ip().to_string()).into()
}

/// What the caller may know: all of it, or what is about its own models and itself.
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
            with_head(&head, page + &picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// Returns the gateway's own metrics, without those of functions. Where there are keys, what was spent and which tenant used how
/// much is shown to an admin's key alone.
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
            with_head(&head, own + &picker::gauges(&gateway.models()))
        }
        Err(failure) => failure,
    })
}

/// The gateway's own, as they are now, and their head; or why there are none.
async fn own(gateway: &Gateway) -> Result<(Parts, String), Response> {
    gateway.forget_gone();
    if let Some(books) = gateway.books() {
        books.refresh(gateway.keys().budgets(&gateway.models(), &gateway.options().short_names));
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
        let page = timeout_at(until, page(gateway, holder, &backend, "/metrics")).await;
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

/// Page of a function, with its part of what a gateway holds of answers.
pub(crate) struct Page {
    pub(crate) text: String,
    _room: Room,
}

/// Returns the answer of `backend` at `path`; `None` where it does not, takes too long, or `holder` has no room for it.
pub(crate) async fn page(gateway: &Gateway, holder: Holder, backend: &Backend, path: &str) -> Option<Page> {
    let mut request = Request::get(backend.uri(path).ok()?).body(Full::default()).ok()?;
    if let Some(authorization) = &backend.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::clone(authorization));
    }
    let answer = async {
        let response = gateway.upstream().request(request).await.ok();
        let mut body = response.filter(|response| response.status().is_success())?.into_body();
        let (mut page, mut room) = (Vec::new(), gateway.answers.empty(holder.clone()));
        while let Some(frame) = body.frame().await {
            let Ok(data) = frame.ok()?.into_data() else { continue };
            let bytes = page.len() + data.len();
            if bytes > PAGE || room.resize(bytes).is_err() {
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
        Some(Page { text: String::from_utf8(page).ok()?, _room: room })
    };
    timeout(WAIT, answer).await.ok()?
}

/// What all tenants together have spent, which `/status` does not tell a tenant either.
const SPENT_BY_ALL: [&str; 6] = [
    "remoe_cost_paid_",
    "remoe_cost_spent_",
    "remoe_cost_residual_",
    "remoe_cost_estimated_",
    "remoe_cost_rival_",
    "remoe_cost_compared_",
];

/// The samples that are about nobody else than `tenant`, and about no model that it may not use.
fn of_tenant(text: &str, tenant: &Tenant) -> String {
    let is_own = |line: &&str| {
        line.starts_with('#')
            || (label(line, "tenant").is_none_or(|name| name == **tenant.name())
                && label(line, "model").is_none_or(|model| tenant.may_use(&model))
                && !SPENT_BY_ALL.iter().any(|family| line.starts_with(family)))
    };
    text.lines().filter(is_own).fold(String::new(), |text, line| text + line + "\n")
}

/// Families of what is spent, in money.
const SPENDING: [&str; 2] = ["remoe_cost_", "remoe_budget_"];

/// Returns `text` without what was spent, and without samples of single tenants.
fn without_spending(text: &str) -> String {
    let is_spending = |line: &str| {
        let described = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        let name = described.unwrap_or(line);
        SPENDING.iter().any(|family| name.starts_with(family))
            || (described.is_none() && label(line, "tenant").is_some())
    };
    let shown = text.lines().filter(|line| !is_spending(line));
    shown.fold(String::new(), |text, line| text + line + "\n")
}

/// The value of a sample's label.
fn label(line: &str, name: &str) -> Option<String> {
    let (_, labels) = line.split_once('{')?;
    let mut rest = labels;
    loop {
        let (key, value, behind) = first_label(rest)?;
        if key.trim_start_matches(',') == name {
            return Some(value);
        }
        rest = behind;
    }
}

/// Parses the first label of a sample's labels in Prometheus' text format: its key, its value without escapes, and the text
/// behind it.
#[must_use]
pub fn first_label(labels: &str) -> Option<(&str, String, &str)> {
    let (key, behind) = labels.split_once("=\"")?;
    let mut value = String::new();
    let mut letters = behind.char_indices();
    let end = loop {
        match letters.next()? {
            (at, '"') => break at + 1,
            (_, '\\') => value.push(match letters.next()?.1 {
                'n' => '\n',
                letter => letter,
            }),
            (_, letter) => value.push(letter),
        }
    };
    Some((key, value, behind.get(end..)?))
}

/// The pages of all models as one, every sample with the name of its model. Names that `own` has are left out: they mean
/// something else there.
fn merged(own: &str, pages: &[(Arc<str>, Page)]) -> String {
    let described = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        lines.map(str::to_owned).collect()
    };
    let own = described(own);
    // A name's samples stand together, after its description.
    let mut families: BTreeMap<&str, (String, String)> = BTreeMap::new();
    for (model, Page { text: page, .. }) in pages {
        let label =
            format!("model=\"{}\"", model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
        let mut family = "";
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                family = rest.split(' ').nth(1).unwrap_or_default();
                let (description, _) = families.entry(family).or_default();
                if !description.contains(line) {
                    // Writing to a string does not fail.
                    let _written = writeln!(description, "{line}");
                }
                continue;
            }
            let Some((name, rest)) = line.split_at_checked(line.find(['{', ' ']).unwrap_or(0)) else {
                continue;
            };
            let (_, samples) = families.entry(family).or_default();
            let _written = match rest.strip_prefix('{') {
                // It says so itself.
                _ if self::label(line, "model").is_some() => writeln!(samples, "{line}"),
                Some(labels) => writeln!(samples, "{name}{{{label},{labels}"),
                None => writeln!(samples, "{name}{{{label}}}{rest}"),
            };
        }
    }
    let shown = families.iter().filter(|(name, _)| !own.contains(**name));
    shown.fold(String::new(), |text, (_, (description, samples))| text + description + samples)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::room::Rooms;
    use futures_util::FutureExt;

    #[test]
    fn labels_are_read_as_they_are_written() {
        let line = r#"a_total{model="n\"{,}",tenant="a=\\b"} 3"#;
        assert_eq!(label(line, "model").as_deref(), Some("n\"{,}"));
        assert_eq!(label(line, "tenant").as_deref(), Some("a=\\b"));
        assert_eq!(label(line, "nant"), None);
        assert_eq!(label("a_total 3", "model"), None);
        assert_eq!(label("a_total{model=\"", "model"), None);
    }

    #[test]
    fn samples_of_models_stand_together_with_their_names() {
        let page = "# HELP a_total A.\n# TYPE a_total counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb{x=\"1\"} 2\n# HELP c C.\n# TYPE c gauge\nc 3\n";
        let page_of = |model: &str, text: &str| {
            let model = Arc::from(model);
            let room = Arc::new(Rooms::new(0, 0)).empty(Holder::answer(&"".into(), &model));
            (model, Page { text: text.to_owned(), _room: room })
        };
        let pages = [page_of("m", page), page_of("n\"", page)];
        assert_eq!(
            merged("# TYPE c gauge\nc 9\n", &pages),
            "# HELP a_total A.\n# TYPE a_total counter\na_total{model=\"m\"} 1\na_total{model=\"n\\\"\"} 1\n\
             # HELP b B.\n# TYPE b gauge\nb{model=\"m\",x=\"1\"} 2\nb{model=\"n\\\"\",x=\"1\"} 2\n"
        );
        let said = [page_of("m", "# TYPE d gauge\nd{model=\"p\",x=\"1\"} 2\n")];
        assert_eq!(merged("", &said), said[0].1.text);
    }

    #[tokio::test]
    async fn pages_beyond_the_queue_are_refused() {
        let scrapes = Scrapes::default();
        let client = |number: usize| Arc::from(format!("client-{number}"));
        let names: Vec<Arc<str>> = (0..TURNS + WAITING).map(client).collect();
        let mut turns: Vec<_> = names.iter().map(|name| Box::pin(scrapes.turn(name))).collect();
        let running: Vec<_> = turns.iter_mut().map(|turn| turn.now_or_never()).collect();
        assert_eq!(running.iter().flatten().count(), TURNS);
        let refused = scrapes.turn(&client(99)).now_or_never().unwrap().err().unwrap().into_response();
        assert_eq!(refused.status(), 429);
        assert!(refused.headers().contains_key(header::RETRY_AFTER));
        drop(running);
        // The next ones in the queue.
        let next = turns.iter_mut().skip(TURNS).filter_map(|turn| turn.now_or_never());
        assert!(next.collect::<Vec<_>>().len() >= TURNS);
        drop(turns);
        assert!(scrapes.turn(&client(0)).await.is_ok());
        assert!(scrapes.clients().is_empty());
    }

    #[tokio::test]
    async fn client_that_keeps_its_places_blocks_no_scraper() {
        let scrapes = Scrapes { patience: Duration::from_millis(50), ..Scrapes::default() };
        let (greedy, scraper) = (Arc::from("greedy"), Arc::from("scraper"));
        let _held = scrapes.turn(&greedy).await.unwrap();
        let mut waiting: Vec<_> = (1..OF_ONE).map(|_| Box::pin(scrapes.turn(&greedy))).collect();
        assert!(waiting.iter_mut().all(|turn| turn.now_or_never().is_none()));
        assert!(scrapes.turn(&greedy).now_or_never().unwrap().is_err(), "it has all its places");
        for _ in 0..2 * (TURNS + WAITING) {
            assert!(scrapes.turn(&scraper).now_or_never().unwrap().is_ok());
        }
        // Those that wait are told so in time.
        let late = waiting.remove(0).await.err().unwrap().into_response();
        assert_eq!(late.status(), 429);
    }
}
