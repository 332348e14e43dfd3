//! Query parameters of a target.

use axum::http::Uri;

/// Returns the first value of the parameter `name`, decoded.
#[must_use]
pub fn query_parameter(uri: &Uri, name: &str) -> Option<String> {
    let pairs = form_urlencoded::parse(uri.query().unwrap_or_default().as_bytes());
    pairs.into_iter().find(|(key, _)| key == name).map(|(_, value)| value.into_owned())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn values_are_decoded() {
        let uri: Uri = "/v1/placement?a=1&model=org%2Fa+b&model=c".parse().unwrap();
        assert_eq!(query_parameter(&uri, "model").as_deref(), Some("org/a b"));
        assert_eq!(query_parameter(&uri, "b"), None);
        assert_eq!(query_parameter(&"/".parse().unwrap(), "a"), None);
    }
}
