//! HTTP client of the fetcher, which connects only to addresses that the egress rules allow.

use crate::egress::{Egress, NotAllowed, parse_host_address};
use crate::error::FetchError;
use crate::response::{causes, no_response};
use crate::timeouts::{FailedAttempt, FetchTimeouts};
use http::{HeaderMap, HeaderValue, header};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, Request, Response, Url};
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

/// Environment variables that name a proxy.
const PROXIES: [&str; 6] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

/// HTTP client under egress rules. It does not follow redirects itself.
#[derive(Debug, Clone)]
pub(crate) struct CheckedClient {
    http: Client,
    egress: Arc<Egress>,
}

impl CheckedClient {
    /// Creates a client with the machine's certificates and proxies.
    pub(crate) fn new(egress: Egress, timeouts: &FetchTimeouts) -> Result<Self, FetchError> {
        // Fails if another part of the program has installed it: every part uses the same provider.
        let _chosen = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        // A range of a compressed body would not be a range of the file.
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let egress = Arc::new(egress);
        check_proxies(&egress)?;
        let http = Client::builder()
            .user_agent(concat!("remoe/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(CheckedResolver(Arc::clone(&egress)))
            .connect_timeout(timeouts.connect)
            .read_timeout(timeouts.idle)
            .build()
            .map_err(|error| FetchError::Settings {
                what: "cannot start the HTTPS client".to_owned(),
                problem: causes(&error),
            })?;
        Ok(Self { http, egress })
    }

    /// Returns the rules.
    pub(crate) fn egress(&self) -> &Egress {
        &self.egress
    }

    /// Returns the client without the check of URLs. It still checks the addresses of resolved names.
    pub(crate) fn resolving(&self) -> Client {
        self.http.clone()
    }

    /// Sends a request. `location` names the requested file in messages.
    pub(crate) async fn execute(
        &self,
        request: Request,
        location: String,
    ) -> Result<Response, FailedAttempt> {
        // Checked here, because the resolver does not see addresses in URLs.
        if let Err(refused) = self.egress.check_url(request.url()) {
            return Err(FetchError::NotAllowed { location, refused }.into());
        }
        self.http.execute(request).await.map_err(|error| match refusal(&error) {
            Some(refused) => FetchError::NotAllowed { location, refused: refused.clone() }.into(),
            None => no_response(location, error),
        })
    }
}

/// DNS resolver that returns the allowed addresses only.
struct CheckedResolver(Arc<Egress>);

impl Resolve for CheckedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let egress = Arc::clone(&self.0);
        Box::pin(async move {
            let resolved = tokio::net::lookup_host((name.as_str(), 0)).await?;
            allowed_addresses(&egress, name.as_str(), resolved)
                .map(|addresses| Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Returns the addresses of `host` that the egress rules allow.
///
/// # Errors
/// No `resolved` address is allowed, or the list is empty.
fn allowed_addresses(
    egress: &Egress,
    host: &str,
    resolved: impl Iterator<Item = SocketAddr>,
) -> Result<Vec<SocketAddr>, Box<dyn Error + Send + Sync>> {
    let mut refused = None;
    let mut allowed = Vec::new();
    for address in resolved {
        match egress.check_address(address.ip()) {
            Ok(()) => allowed.push(address),
            Err(problem) => refused = Some(problem.for_host(host)),
        }
    }
    match (allowed.is_empty(), refused) {
        (false, _) => Ok(allowed),
        (true, Some(refused)) => Err(refused.into()),
        (true, None) => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address").into()),
    }
}

/// Finds the refusal by egress rules among the causes of an error.
fn refusal<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a NotAllowed> {
    let mut next = Some(error);
    while let Some(error) = next {
        if let Some(refused) = error.downcast_ref() {
            return Some(refused);
        }
        next = error.source();
    }
    None
}

/// Checks the literal addresses of proxies. The resolver checks their names.
fn check_proxies(egress: &Egress) -> Result<(), FetchError> {
    for name in PROXIES {
        let Ok(text) = std::env::var(name) else { continue };
        let url = Url::parse(&text)
            .ok()
            .filter(Url::has_host)
            .or_else(|| Url::parse(&format!("http://{text}")).ok());
        let Some((host, address)) =
            url.as_ref().and_then(Url::host_str).and_then(|host| Some((host, parse_host_address(host)?)))
        else {
            continue;
        };
        egress.check_address(address).map_err(|problem| FetchError::NotAllowed {
            location: format!("models through {name}"),
            refused: problem.for_host(host),
        })?;
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn found(addresses: &[&str]) -> impl Iterator<Item = SocketAddr> {
        addresses.iter().map(|address| SocketAddr::new(address.parse().unwrap(), 0))
    }

    #[test]
    fn dns_answer_keeps_allowed_addresses_only() {
        let egress = Egress::from_iter(["*".parse().unwrap()]);
        let mixed =
            allowed_addresses(&egress, "host.example", found(&["10.0.0.1", "8.8.8.8", "::1"])).unwrap();
        assert_eq!(mixed, found(&["8.8.8.8"]).collect::<Vec<_>>());
    }

    #[test]
    fn dns_answer_without_allowed_address_is_refused() {
        let error =
            allowed_addresses(&Egress::default(), "host.example", found(&["169.254.169.254"])).unwrap_err();
        let message = refusal(error.as_ref()).unwrap().to_string();
        assert!(message.contains("host.example") && message.contains("169.254.169.254"), "{message}");
        assert!(allowed_addresses(&Egress::default(), "host.example", found(&[])).is_err());
    }
}
