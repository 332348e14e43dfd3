//! Tests of egress rules in a network namespace with a metadata service, an API server, another tenant's Service
//! and the host itself. Sources, redirects and DNS answers lead to these forbidden addresses.

use crate::network::{self, Network};
use crate::support::{CopyProcess, files, model, start_copy_with};
use remoe_test_sources::{Content, S3, S3Options, Web};
use std::net::SocketAddr;

const METADATA: &str = "169.254.169.254";
const METADATA_V6: &str = "fd00:ec2::254";
const API_SERVER: &str = "10.96.0.1";
const TENANT: &str = "10.43.0.7";
/// Addresses that the fetcher must never connect to.
const FORBIDDEN: [&str; 5] = [METADATA, METADATA_V6, API_SERVER, TENANT, "127.0.0.1"];
const SOURCE: &str = "93.184.215.14";
const REDIRECTING: &str = "93.184.215.15";
/// Server that closes every connection without a response.
const BROKEN: &str = "93.184.215.16";
/// Model store inside the cluster.
const STORE: &str = "10.43.0.9";

/// Default rules of pods: public addresses only.
const POD_RULES: [&str; 2] = ["--allow-source", "*"];

fn socket_address(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// Network with servers, in which tests run the fetcher.
struct EgressFixture {
    network: Network,
    model: tempfile::TempDir,
    work: tempfile::TempDir,
    runs: usize,
}

impl EgressFixture {
    async fn new() -> Self {
        let mut network =
            Network::new(&[SOURCE, REDIRECTING, BROKEN, STORE, METADATA, API_SERVER, TENANT, METADATA_V6]);
        for address in FORBIDDEN {
            network.add_counting_server(socket_address(address, 80));
        }
        network.add_redirecting_server(socket_address(REDIRECTING, 80));
        network.add_closing_server(socket_address(BROKEN, 80));
        for (name, addresses) in [
            ("models.example", &[SOURCE][..]),
            ("redirect.example", &[REDIRECTING]),
            ("store.example", &[STORE]),
            ("metadata.example", &[METADATA]),
            ("metadata6.example", &[METADATA_V6]),
            ("kubernetes.example", &[API_SERVER]),
            ("tenant.example", &[TENANT]),
        ] {
            network.set_dns(name, addresses);
        }
        Self { network, model: model(), work: tempfile::tempdir().unwrap(), runs: 0 }
    }

    /// Starts a copy of `model` with an empty cache.
    fn start(&mut self, model: &str, flags: &[&str], environment: &[(&str, &str)]) -> CopyProcess {
        self.runs += 1;
        let folder = self.work.path().join(self.runs.to_string());
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        start_copy_with(model, &folder.join("cache"), &folder.join("copy"), &environment, flags)
    }

    /// Asserts that the fetcher refuses `model`, and connects to no forbidden address.
    async fn assert_refused(&mut self, model: &str, flags: &[&str], environment: &[(&str, &str)]) {
        let stderr = self.start(model, flags, environment).expect_failure().await;
        assert!(stderr.contains("is not an allowed source"), "{model} {flags:?} {environment:?}: {stderr}");
        self.assert_forbidden_untouched(model);
    }

    async fn assert_fetched(&mut self, model: &str, flags: &[&str]) {
        let copy = self.start(model, flags, &[]).expect_files().await;
        assert_eq!(copy, files(self.model.path()), "{model} {flags:?}");
        self.assert_forbidden_untouched(model);
    }

    fn assert_forbidden_untouched(&self, model: &str) {
        for address in FORBIDDEN {
            assert_eq!(self.network.connections(address), 0, "{model} reached {address}");
        }
    }

    async fn serve(&self, address: &str) -> Web {
        Web::start(socket_address(address, 80), Content::new(self.model.path())).await.unwrap()
    }
}

#[test]
fn fetcher_connects_to_allowed_sources_alone() {
    network::run_in_namespaces("egress::fetcher_connects_to_allowed_sources_alone", async || {
        let mut fixture = EgressFixture::new().await;
        let _source = fixture.serve(SOURCE).await;
        let _store = fixture.serve(STORE).await;
        test_allowed_sources(&mut fixture).await;
        test_forbidden_urls(&mut fixture).await;
        test_redirects(&mut fixture).await;
        test_dns_rebinding(&mut fixture).await;
        test_environment(&mut fixture).await;
        test_ambient_credentials(&mut fixture).await;
    });
}

async fn test_allowed_sources(fixture: &mut EgressFixture) {
    let model = "http://models.example/models";
    for flags in
        [&[][..], &POD_RULES, &["--allow-source", "models.example"], &["--allow-source", "*.example:80"]]
    {
        fixture.assert_fetched(model, flags).await;
    }
    for flags in [["--allow-source", "hub.example"], ["--allow-source", "models.example:443"]] {
        fixture.assert_refused(model, &flags, &[]).await;
    }
    for store in ["http://store.example/models", "http://10.43.0.9/models"] {
        fixture.assert_fetched(store, &[]).await;
        fixture.assert_fetched(store, &["--allow-source", "store.example,10.43.0.8/30"]).await;
        fixture.assert_refused(store, &POD_RULES, &[]).await;
    }
}

async fn test_forbidden_urls(fixture: &mut EgressFixture) {
    for host in [
        METADATA,
        "2852039166",
        "[::ffff:169.254.169.254]",
        "[64:ff9b::169.254.169.254]",
        "[fd00:ec2::254]",
        "metadata.example",
        "metadata6.example",
    ] {
        let url = format!("http://{host}/latest");
        fixture.assert_refused(&url, &[], &[]).await;
        fixture.assert_refused(&url, &POD_RULES, &[]).await;
        // A range with all addresses does not include metadata services.
        fixture.assert_refused(&url, &["--allow-source", "*,0.0.0.0/0,::/0"], &[]).await;
    }
    for host in
        [API_SERVER, TENANT, "127.0.0.1", "0.0.0.0", "localhost", "kubernetes.example", "tenant.example"]
    {
        fixture.assert_refused(&format!("http://{host}/models"), &POD_RULES, &[]).await;
    }
}

async fn test_redirects(fixture: &mut EgressFixture) {
    let model = "http://redirect.example/models";
    for host in [
        METADATA,
        API_SERVER,
        TENANT,
        "127.0.0.1",
        "[fd00:ec2::254]",
        "metadata.example",
        "kubernetes.example",
        "tenant.example",
    ] {
        fixture.network.set_redirect_target(&format!("http://{host}/models"));
        fixture.assert_refused(model, &POD_RULES, &[]).await;
        let environment = [("HF_ENDPOINT", "http://redirect.example")];
        let stderr = fixture.start("hf://org/model", &POD_RULES, &environment).expect_failure().await;
        assert!(stderr.contains("redirect to another server"), "{stderr}");
        fixture.assert_forbidden_untouched(host);
    }
    fixture.network.set_redirect_target("http://models.example/models");
    // The target lacks the file, so that the redirect counts as expired.
    let stderr = fixture.start(model, &POD_RULES, &[]).expect_failure().await;
    assert!(stderr.contains("404 Not Found after a redirect"), "{stderr}");
    fixture.assert_forbidden_untouched(model);
    fixture.assert_refused(model, &["--allow-source", "redirect.example"], &[]).await;
    // A redirect to itself.
    fixture.network.set_redirect_target(model);
    let stderr = fixture.start(model, &POD_RULES, &[]).expect_failure().await;
    assert!(stderr.contains("redirects"), "{stderr}");
}

/// Tests DNS rebinding: the first answer is a public address, the next one a forbidden address.
async fn test_dns_rebinding(fixture: &mut EgressFixture) {
    for (index, forbidden) in [METADATA, API_SERVER, TENANT].into_iter().enumerate() {
        let name = format!("rebind{index}.example");
        fixture.network.set_dns(&name, &[BROKEN, forbidden]);
        fixture.assert_refused(&format!("http://{name}/models"), &POD_RULES, &[]).await;
        assert!(fixture.network.dns_queries(&name) >= 2, "{name} was resolved once");
    }
}

async fn test_environment(fixture: &mut EgressFixture) {
    for endpoint in ["http://169.254.169.254", "http://metadata.example", "http://tenant.example"] {
        fixture.assert_refused("hf://org/model", &POD_RULES, &[("HF_ENDPOINT", endpoint)]).await;
        for name in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
            fixture.assert_refused("s3://bucket/model", &POD_RULES, &[(name, endpoint)]).await;
        }
        for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY"] {
            fixture.assert_refused("http://models.example/models", &POD_RULES, &[(name, endpoint)]).await;
        }
    }
}

/// Tests that ambient credentials require the flag, and that requests for them obey the rules.
async fn test_ambient_credentials(fixture: &mut EgressFixture) {
    let content = Content::new(fixture.model.path());
    let s3 = S3::start(socket_address(SOURCE, 9000), content, S3Options::default()).await.unwrap();
    let model = s3.model();
    let endpoint = ("AWS_ENDPOINT_URL", "http://models.example:9000");
    let stderr = fixture.start(&model, &POD_RULES, &[endpoint]).expect_failure().await;
    assert!(stderr.contains("--ambient-credentials"), "{stderr}");
    fixture.assert_forbidden_untouched("unsigned requests");
    let half = [endpoint, ("AWS_ACCESS_KEY_ID", "half")];
    let stderr = fixture.start(&model, &POD_RULES, &half).expect_failure().await;
    assert!(stderr.contains("AWS_SECRET_ACCESS_KEY"), "{stderr}");
    let flags = [&POD_RULES[..], &["--ambient-credentials"]].concat();
    for (name, url) in [
        ("AWS_METADATA_ENDPOINT", "http://10.43.0.7"),
        ("AWS_METADATA_ENDPOINT", "http://tenant.example"),
        ("AWS_ENDPOINT_URL_STS", "http://10.96.0.1"),
    ] {
        let stderr = fixture.start(&model, &flags, &[endpoint, (name, url)]).expect_failure().await;
        assert!(stderr.contains("s3") || stderr.contains(name), "{stderr}");
        assert_eq!(
            fixture.network.connections(TENANT) + fixture.network.connections(API_SERVER),
            0,
            "{name}={url}"
        );
    }
    let stderr = fixture.start(&model, &flags, &[endpoint]).expect_failure().await;
    assert!(stderr.contains("no credentials"), "{stderr}");
    assert!(fixture.network.connections(METADATA) > 0, "{stderr}");
    assert_eq!(fixture.network.connections(TENANT), 0);
}
