//! The page for people: chat, where the experts live and how busy they are, and what that costs. Its files are part
//! of the program; it asks no other server for anything.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use remoe_http::unknown_route;

/// Nothing but these files and this server: no inline scripts, no styles, no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// Files that the page names, with their types and contents.
const FILES: [(&str, &str, &str); 11] = [
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("server.js", SCRIPT, include_str!("page/server.js")),
    ("words.js", SCRIPT, include_str!("page/words.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("chats.js", SCRIPT, include_str!("page/chats.js")),
    ("calls.js", SCRIPT, include_str!("page/calls.js")),
    ("chat.js", SCRIPT, include_str!("page/chat.js")),
    ("map.js", SCRIPT, include_str!("page/map.js")),
    ("plan.js", SCRIPT, include_str!("page/plan.js")),
    ("sleep.js", SCRIPT, include_str!("page/sleep.js")),
    ("placement.js", SCRIPT, include_str!("page/placement.js")),
];

pub(crate) async fn html() -> Response {
    answer("text/html; charset=utf-8", include_str!("page/index.html"))
}

/// One of the files that the page names.
pub(crate) async fn file(name: Result<Path<String>, PathRejection>, method: Method, uri: Uri) -> Response {
    let named = name.ok().and_then(|Path(name)| FILES.iter().find(|(known, ..)| *known == name));
    match named {
        Some((_, kind, text)) => answer(kind, text),
        None => unknown_route(method, uri).await.into_response(),
    }
}

fn answer(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // With another program comes another page.
        (header::CACHE_CONTROL, "no-cache"),
    ]
    .map(|(name, value): (HeaderName, &'static str)| (name, HeaderValue::from_static(value)));
    (headers, text).into_response()
}
