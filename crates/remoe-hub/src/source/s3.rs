//! Source: a prefix of an S3 bucket, at Amazon or at a server with its API.

use super::{below, encoded, url_variable, variable};
use crate::access::Access;
use crate::egress_client::CheckedClient;
use crate::error::FetchError;
use http::{HeaderMap, Method};
use object_store::aws::{AmazonS3Builder, AwsAuthorizer, AwsCredential, AwsCredentialProvider};
use object_store::client::{HttpClient, HttpConnector, HttpRequest, HttpRequestBody};
use object_store::{ClientOptions, RetryConfig, StaticCredentialProvider};
use reqwest::{Client, Url};
use std::sync::Arc;

/// Region in signatures if none is set. Servers other than Amazon's usually ignore it.
const DEFAULT_REGION: &str = "us-east-1";

#[derive(Debug)]
pub(crate) struct S3 {
    /// URL of the bucket.
    base: Url,
    prefix: String,
    region: String,
    /// Credentials that sign requests. Absent if requests are not signed.
    credentials: Option<AwsCredentialProvider>,
}

impl S3 {
    /// Creates the source at AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or Amazon's server for AWS_REGION, with the keys of the
    /// environment. Without keys, requests are unsigned, unless `access` allows ambient credentials.
    pub(crate) fn from_environment(bucket: &str, prefix: &str, access: &Access) -> Result<Self, FetchError> {
        let settings = |problem: String| FetchError::Settings { what: "AWS credentials".to_owned(), problem };
        let region = variable("AWS_REGION")
            .or_else(|| variable("AWS_DEFAULT_REGION"))
            .unwrap_or_else(|| DEFAULT_REGION.to_owned());
        let endpoint = match url_variable("AWS_ENDPOINT_URL_S3")? {
            Some(endpoint) => Some(endpoint),
            None => url_variable("AWS_ENDPOINT_URL")?,
        };
        let base = match endpoint {
            Some(endpoint) => below(&endpoint, bucket),
            // Amazon's wildcard certificate does not cover bucket names with a dot.
            None if bucket.contains('.') => {
                parse(&format!("https://s3.{region}.amazonaws.com/{bucket}")).map_err(settings)?
            }
            None => parse(&format!("https://{bucket}.s3.{region}.amazonaws.com/")).map_err(settings)?,
        };
        let unsigned = variable("AWS_SKIP_SIGNATURE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let credentials: Option<AwsCredentialProvider> = if unsigned {
            None
        } else if let Some(keys) = keys()? {
            Some(Arc::new(StaticCredentialProvider::new(keys)))
        } else if access.ambient_credentials {
            Some(ambient_credentials(bucket, &region, access)?)
        } else {
            None
        };
        Ok(Self { base, prefix: prefix.to_owned(), region, credentials })
    }

    /// Returns the URL of the bucket, which is part of an object's address in the cache.
    pub(crate) fn base(&self) -> &str {
        self.base.as_str()
    }

    pub(super) fn url(&self, name: &str) -> Url {
        let key = if self.prefix.is_empty() { name.to_owned() } else { format!("{}/{name}", self.prefix) };
        below(&self.base, &encoded(&key))
    }

    pub(super) async fn credentials(&self, method: &Method, url: &Url) -> Result<HeaderMap, FetchError> {
        let Some(provider) = &self.credentials else {
            return Ok(HeaderMap::new());
        };
        let failed = |error: &dyn std::fmt::Display| FetchError::Refused {
            location: format!("s3 at {}", self.base.host_str().unwrap_or_default()),
            answer: format!("no credentials: {error}"),
            advice: "check --ambient-credentials, or set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                .to_owned(),
        };
        let credential = provider.get_credential().await.map_err(|error| failed(&error))?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.as_str().parse().map_err(|error: http::uri::InvalidUri| failed(&error))?;
        // Amazon states checksums only if this header is present, and it must be signed.
        request.headers_mut().insert(CHECKSUM_MODE.0, http::HeaderValue::from_static(CHECKSUM_MODE.1));
        AwsAuthorizer::new(&credential, "s3", &self.region)
            .try_authorize(&mut request, None)
            .map_err(|error| failed(&error))?;
        Ok(std::mem::take(request.headers_mut()))
    }
}

/// Returns the keys in the environment, if any.
fn keys() -> Result<Option<AwsCredential>, FetchError> {
    match (variable(KEY_VARIABLE), variable(SECRET_VARIABLE)) {
        (None, None) => Ok(None),
        (Some(key_id), Some(secret_key)) => {
            Ok(Some(AwsCredential { key_id, secret_key, token: variable("AWS_SESSION_TOKEN") }))
        }
        (Some(_), None) | (None, Some(_)) => Err(FetchError::Settings {
            what: "AWS credentials".to_owned(),
            problem: format!("expected both {KEY_VARIABLE} and {SECRET_VARIABLE}, or neither"),
        }),
    }
}

/// Creates a provider of the machine's or pod's credentials: a web identity, a container's role or the instance's role.
/// Requests for them obey the egress rules of sources, with metadata services allowed in addition.
fn ambient_credentials(
    bucket: &str,
    region: &str,
    access: &Access,
) -> Result<AwsCredentialProvider, FetchError> {
    let client = CheckedClient::new(access.egress.clone().with_credential_services(), &access.timeouts)?;
    for name in CREDENTIAL_URL_VARIABLES {
        if let Some(url) = url_variable(name)? {
            client.egress().check_url(&url).map_err(|refused| FetchError::NotAllowed {
                location: format!("credentials of {name}"),
                refused,
            })?;
        }
    }
    let store = AmazonS3Builder::from_env().with_bucket_name(bucket).with_region(region);
    let retry = RetryConfig { max_retries: CREDENTIAL_RETRIES, ..RetryConfig::default() };
    let store = store.with_http_connector(SharedConnector(client.resolving())).with_retry(retry).build();
    let store = store.map_err(|error| FetchError::Settings {
        what: "AWS credentials".to_owned(),
        problem: error.to_string(),
    })?;
    Ok(store.credentials().clone())
}

/// Makes `object_store` use the fetcher's client for ambient credentials.
#[derive(Debug)]
struct SharedConnector(Client);

impl HttpConnector for SharedConnector {
    fn connect(&self, _: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

/// Retries of a request for ambient credentials. Few, because the metadata service is on the same machine.
const CREDENTIAL_RETRIES: usize = 3;
const KEY_VARIABLE: &str = "AWS_ACCESS_KEY_ID";
const SECRET_VARIABLE: &str = "AWS_SECRET_ACCESS_KEY";
/// Environment variables with the URLs of services of ambient credentials.
const CREDENTIAL_URL_VARIABLES: [&str; 3] =
    ["AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_ENDPOINT_URL_STS", "AWS_METADATA_ENDPOINT"];
const CHECKSUM_MODE: (&str, &str) = ("x-amz-checksum-mode", "ENABLED");

fn parse(text: &str) -> Result<Url, String> {
    Url::parse(text).map_err(|error| error.to_string())
}
