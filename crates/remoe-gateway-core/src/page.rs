//! Web page with a chat, the placement and load of experts, and their cost. Its files are part of the program, and it
//! loads nothing from other servers.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use axum::response::{IntoResponse, Response};
use remoe_http::unknown_route;

/// Content security policy: scripts, styles and requests of this server only; nothing inline and no frames.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

const JAVASCRIPT: &str = "text/javascript; charset=utf-8";

/// Files of the page: name, media type and contents.
const PAGE_FILES: [(&str, &str, &str); 11] = [
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("server.js", JAVASCRIPT, include_str!("page/server.js")),
    ("words.js", JAVASCRIPT, include_str!("page/words.js")),
    ("markdown.js", JAVASCRIPT, include_str!("page/markdown.js")),
    ("chats.js", JAVASCRIPT, include_str!("page/chats.js")),
    ("calls.js", JAVASCRIPT, include_str!("page/calls.js")),
    ("chat.js", JAVASCRIPT, include_str!("page/chat.js")),
    ("map.js", JAVASCRIPT, include_str!("page/map.js")),
    ("plan.js", JAVASCRIPT, include_str!("page/plan.js")),
    ("sleep.js", JAVASCRIPT, include_str!("page/sleep.js")),
    ("placement.js", JAVASCRIPT, include_str!("page/placement.js")),
];

/// Returns the page.
pub(crate) async fn html() -> Response {
    answer("text/html; charset=utf-8", include_str!("page/index.html"))
}

/// Returns a file of the page.
pub(crate) async fn file(name: Result<Path<String>, PathRejection>, method: Method, uri: Uri) -> Response {
    let found = name.ok().and_then(|Path(name)| PAGE_FILES.iter().find(|(known, ..)| *known == name));
    match found {
        Some((_, kind, text)) => answer(kind, text),
        None => unknown_route(method, uri).await.into_response(),
    }
}

fn answer(kind: &'static str, text: &'static str) -> Response {
    let headers = [
        (header::CONTENT_TYPE, kind),
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        // An upgraded gateway has another page.
        (header::CACHE_CONTROL, "no-cache"),
    ]
    .map(|(name, value): (HeaderName, &'static str)| (name, HeaderValue::from_static(value)));
    (headers, text).into_response()
}
