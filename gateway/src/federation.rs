//! `/metrics`: the gateway's own, then those of the functions that answer for its models.

use crate::gateway::{Gateway, Upstream};
use crate::model::Backend;
use axum::extract::State;
use axum::http::{HeaderValue, Request, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::future::join_all;
use http_body_util::{BodyExt, Full, Limited};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;
use std::time::Duration;

/// A function that is busier than this shows no metrics this time.
const WAIT: Duration = Duration::from_secs(2);
/// Largest page of metrics of a function.
const PAGE: usize = 4 << 20;

pub(crate) async fn metrics(State(gateway): State<Arc<Gateway>>) -> Response {
    if let Some(books) = gateway.books() {
        books.refresh();
    }
    let own = remoe_function::render_metrics(gateway.metrics().registry());
    let asked = gateway.models().iter().flat_map(|model| {
        let backends = model.backends().into_iter();
        backends.map(|backend| (model.name().to_owned(), backend)).collect::<Vec<_>>()
    });
    let pages = asked.map(|(model, backend)| {
        let upstream = gateway.upstream().clone();
        async move { Some((model, tokio::time::timeout(WAIT, page(&upstream, &backend)).await.ok()??)) }
    });
    let pages: Vec<_> = join_all(pages).await.into_iter().flatten().collect();
    let (head, body) = own.into_parts();
    let Ok(body) = body.collect().await else { return (head, Bytes::new()).into_response() };
    let mut text = String::from_utf8_lossy(&body.to_bytes()).into_owned();
    text.push_str(&merged(&text, &pages, gateway.models().len() > 1));
    let mut response = text.into_response();
    if let Some(kind) = head.headers.get(header::CONTENT_TYPE) {
        response.headers_mut().insert(header::CONTENT_TYPE, kind.clone());
    }
    response
}

async fn page(upstream: &Upstream, backend: &Backend) -> Option<String> {
    let mut request =
        Request::get(format!("http://{}/metrics", backend.address)).body(Full::default()).ok()?;
    if let Some(authorization) = &backend.authorization {
        request.headers_mut().insert(header::AUTHORIZATION, HeaderValue::clone(authorization));
    }
    let response = upstream.request(request).await.ok().filter(|response| response.status().is_success())?;
    let body = Limited::new(response.into_body(), PAGE).collect().await.ok()?;
    String::from_utf8(body.to_bytes().into()).ok()
}

/// The pages of all models as one, where they are several every sample with the name of its model. Names that `own` has are left
/// out: they mean something else there.
fn merged(own: &str, pages: &[(String, String)], named: bool) -> String {
    let described = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        lines.map(str::to_owned).collect()
    };
    let own = described(own);
    // A name's samples stand together, after its description.
    let mut families: BTreeMap<&str, (String, String)> = BTreeMap::new();
    for (model, page) in pages {
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
                _ if !named => writeln!(samples, "{line}"),
                Some(labels) => writeln!(samples, "{name}{{{label},{labels}"),
                None => writeln!(samples, "{name}{{{label}}}{rest}"),
            };
        }
    }
    let shown = families.iter().filter(|(name, _)| !own.contains(**name));
    shown.fold(String::new(), |text, (_, (description, samples))| text + description + samples)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn samples_of_models_stand_together_with_their_names() {
        let page = "# HELP a_total A.\n# TYPE a_total counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb{x=\"1\"} 2\n# HELP c C.\n# TYPE c gauge\nc 3\n";
        let pages = [("m".to_owned(), page.to_owned()), ("n\"".to_owned(), page.to_owned())];
        assert_eq!(
            merged("# TYPE c gauge\nc 9\n", &pages, true),
            "# HELP a_total A.\n# TYPE a_total counter\na_total{model=\"m\"} 1\na_total{model=\"n\\\"\"} 1\n\
             # HELP b B.\n# TYPE b gauge\nb{model=\"m\",x=\"1\"} 2\nb{model=\"n\\\"\",x=\"1\"} 2\n"
        );
        let alone = merged("", &pages[..1], false);
        assert!(alone.contains("\na_total 1\n") && alone.contains("\nb{x=\"1\"} 2\n"), "{alone}");
    }
}
