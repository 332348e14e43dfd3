//! The HTTP client of the fetcher: every connection is made to an address that was checked.

use crate::answer::{causes, unanswered};
use crate::egress::{Egress, NotAllowed, address_in};
use crate::error::FetchError;
use crate::timeouts::{Failed, FetchTimeouts};
use http::{HeaderMap, HeaderValue, header};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use reqwest::{Client, Request, Response, Url};
use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;

/// Variables that name a proxy.
const PROXIES: [&str; 6] =
    ["HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];

/// A client that connects where egress rules allow it. It follows no redirect by itself.
#[derive(Debug, Clone)]
pub(crate) struct CheckedClient {
    http: Client,
    egress: Arc<Egress>,
}

impl CheckedClient {
    /// A client with the machine's certificates and proxies.
    pub(crate) fn new(egress: Egress, patience: &FetchTimeouts) -> Result<Self, FetchError> {
        // Where another part of the program has chosen a provider, it is the same one.
        let _chosen = rustls::crypto::ring::default_provider().install_default();
        let mut headers = HeaderMap::new();
        // Ranges of a compressed form would be ranges of something else.
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let egress = Arc::new(egress);
        check_proxies(&egress)?;
        let http = Client::builder()
            .user_agent(concat!("remoe/", env!("CARGO_PKG_VERSION")))
            .default_headers(headers)
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(CheckedResolver(Arc::clone(&egress)))
            .connect_timeout(patience.connect)
            .read_timeout(patience.idle)
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

    /// Returns the client without the check of URLs: of names alone are the addresses checked.
    pub(crate) fn resolving(&self) -> Client {
        self.http.clone()
    }

    /// Sends a request. `place` is what messages call what it asks for.
    pub(crate) async fn execute(&self, request: Request, place: String) -> Result<Response, Failed> {
        // The resolver is not asked for addresses that stand in URLs.
        if let Err(refused) = self.egress.check_url(request.url()) {
            return Err(FetchError::NotAllowed { place, refused }.into());
        }
        self.http.execute(request).await.map_err(|error| match refusal(&error) {
            Some(refused) => FetchError::NotAllowed { place, refused: refused.clone() }.into(),
            None => unanswered(place, error),
        })
    }
}

/// Resolves names to those of their addresses that may be connected to.
struct CheckedResolver(Arc<Egress>);

impl Resolve for CheckedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let egress = Arc::clone(&self.0);
        Box::pin(async move {
            let found = tokio::net::lookup_host((name.as_str(), 0)).await?;
            allowed(&egress, name.as_str(), found).map(|addresses| Box::new(addresses.into_iter()) as Addrs)
        })
    }
}

/// Returns those of the addresses `found` for `host` that may be connected to.
///
/// # Errors
/// There are none.
fn allowed(
    egress: &Egress,
    host: &str,
    found: impl Iterator<Item = SocketAddr>,
) -> Result<Vec<SocketAddr>, Box<dyn Error + Send + Sync>> {
    let mut refused = None;
    let mut allowed = Vec::new();
    for address in found {
        match egress.check_address(address.ip()) {
            Ok(()) => allowed.push(address),
            Err(problem) => refused = Some(problem.of(host)),
        }
    }
    match (allowed.is_empty(), refused) {
        (false, _) => Ok(allowed),
        (true, Some(refused)) => Err(refused.into()),
        (true, None) => Err(io::Error::new(io::ErrorKind::NotFound, "the name has no address").into()),
    }
}

/// Returns the refusal among the causes of an error.
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

/// Checks the addresses of proxies; their names are checked where they are resolved.
fn check_proxies(egress: &Egress) -> Result<(), FetchError> {
    for name in PROXIES {
        let Ok(text) = std::env::var(name) else { continue };
        let url = Url::parse(&text)
            .ok()
            .filter(Url::has_host)
            .or_else(|| Url::parse(&format!("http://{text}")).ok());
        let Some((host, address)) =
            url.as_ref().and_then(Url::host_str).and_then(|host| Some((host, address_in(host)?)))
        else {
            continue;
        };
        egress.check_address(address).map_err(|problem| FetchError::NotAllowed {
            place: format!("models through {name}"),
            refused: problem.of(host),
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
        let mixed = allowed(&egress, "host.example", found(&["10.0.0.1", "8.8.8.8", "::1"])).unwrap();
        assert_eq!(mixed, found(&["8.8.8.8"]).collect::<Vec<_>>());
    }

    #[test]
    fn dns_answer_without_allowed_address_is_refused() {
        let error = allowed(&Egress::default(), "host.example", found(&["169.254.169.254"])).unwrap_err();
        let said = refusal(error.as_ref()).unwrap().to_string();
        assert!(said.contains("host.example") && said.contains("169.254.169.254"), "{said}");
        assert!(allowed(&Egress::default(), "host.example", found(&[])).is_err());
    }
}
