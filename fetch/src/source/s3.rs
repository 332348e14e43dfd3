//! Objects of an S3 bucket, at Amazon or at a server that speaks its protocol.

use super::{below, encoded, url_variable, variable};
use crate::error::FetchError;
use http::{HeaderMap, Method};
use object_store::aws::{AmazonS3Builder, AwsAuthorizer, AwsCredentialProvider};
use object_store::client::{HttpRequest, HttpRequestBody};
use reqwest::Url;

/// The region of servers that have none of their own.
const DEFAULT_REGION: &str = "us-east-1";

#[derive(Debug)]
pub(crate) struct S3 {
    /// Of the bucket.
    base: Url,
    prefix: String,
    region: String,
    /// None where requests are not signed.
    credentials: Option<AwsCredentialProvider>,
}

impl S3 {
    /// The bucket at AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL or Amazon's server for AWS_REGION, with the
    /// credentials that the environment offers: keys, a web identity or the machine's role.
    pub(crate) fn from_environment(bucket: &str, prefix: &str) -> Result<Self, FetchError> {
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
            // A dot in the name of a bucket would need a certificate that Amazon does not have.
            None if bucket.contains('.') => {
                parse(&format!("https://s3.{region}.amazonaws.com/{bucket}")).map_err(settings)?
            }
            None => parse(&format!("https://{bucket}.s3.{region}.amazonaws.com/")).map_err(settings)?,
        };
        let unsigned = variable("AWS_SKIP_SIGNATURE").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let credentials = if unsigned {
            None
        } else {
            let store = AmazonS3Builder::from_env().with_bucket_name(bucket).with_region(region.as_str());
            let store = store.build().map_err(|error| settings(error.to_string()))?;
            Some(store.credentials().clone())
        };
        Ok(Self { base, prefix: prefix.to_owned(), region, credentials })
    }

    /// The server's part of an object's identity.
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
        let failed = |error: &dyn std::fmt::Display| {
            FetchError::Refused {
            place: format!("s3 at {}", self.base.host_str().unwrap_or_default()),
            answer: format!("no credentials: {error}"),
            advice: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
                .to_owned(),
        }
        };
        let credential = provider.get_credential().await.map_err(|error| failed(&error))?;
        let mut request = HttpRequest::new(HttpRequestBody::empty());
        *request.method_mut() = method.clone();
        *request.uri_mut() = url.as_str().parse().map_err(|error: http::uri::InvalidUri| failed(&error))?;
        // Amazon states checksums only where it is asked to, and this header must be signed.
        request.headers_mut().insert(CHECKSUM_MODE.0, http::HeaderValue::from_static(CHECKSUM_MODE.1));
        AwsAuthorizer::new(&credential, "s3", &self.region)
            .try_authorize(&mut request, None)
            .map_err(|error| failed(&error))?;
        Ok(std::mem::take(request.headers_mut()))
    }
}

const CHECKSUM_MODE: (&str, &str) = ("x-amz-checksum-mode", "ENABLED");

fn parse(text: &str) -> Result<Url, String> {
    Url::parse(text).map_err(|error| error.to_string())
}
