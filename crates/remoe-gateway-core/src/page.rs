//! The page for people: chat, where the experts live and how busy they are, and what that costs. Its files are part
//! of the program; it asks no other server for anything.

use axum::http::{HeaderName, HeaderValue, header};
use axum::response::{IntoResponse, Response};

/// Nothing but these files and this server: no inline scripts, no styles, no frames.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(crate) async fn html() -> Response {
    file("text/html; charset=utf-8", include_str!("page/index.html"))
}

pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("page/style.css"))
}

pub(crate) async fn server() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/server.js"))
}

pub(crate) async fn markdown() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/markdown.js"))
}

pub(crate) async fn chats() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/chats.js"))
}

pub(crate) async fn chat() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/chat.js"))
}

pub(crate) async fn placement() -> Response {
    file("text/javascript; charset=utf-8", include_str!("page/placement.js"))
}

fn file(kind: &'static str, text: &'static str) -> Response {
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
