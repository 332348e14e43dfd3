//! Connections of the fetcher in a network of its own: a metadata service, an API server, the Service of another
//! tenant and this host, which sources, redirects and DNS answers lead to.

use crate::network::{self, Network};
use crate::support::{Copying, files, model, start_copy_with};
use remoe_test_sources::{Content, S3, S3Options, Web};
use std::net::SocketAddr;

const METADATA: &str = "169.254.169.254";
const METADATA_V6: &str = "fd00:ec2::254";
const API_SERVER: &str = "10.96.0.1";
const TENANT: &str = "10.43.0.7";
/// Where a request reaches what it must not reach.
const FORBIDDEN: [&str; 5] = [METADATA, METADATA_V6, API_SERVER, TENANT, "127.0.0.1"];
const SOURCE: &str = "93.184.215.14";
const REDIRECTING: &str = "93.184.215.15";
/// Ends every connection without an answer.
const BROKEN: &str = "93.184.215.16";
/// A store of the cluster.
const STORE: &str = "10.43.0.9";

/// Rules of pods.
const CLOSED: [&str; 2] = ["--allow-source", "*"];

fn at(address: &str, port: u16) -> SocketAddr {
    SocketAddr::new(address.parse().unwrap(), port)
}

/// The network, and the programs that fetch in it.
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
            network.count(at(address, 80));
        }
        network.redirect(at(REDIRECTING, 80));
        network.hang_up(at(BROKEN, 80));
        for (name, addresses) in [
            ("models.example", &[SOURCE][..]),
            ("redirect.example", &[REDIRECTING]),
            ("store.example", &[STORE]),
            ("metadata.example", &[METADATA]),
            ("metadata6.example", &[METADATA_V6]),
            ("kubernetes.example", &[API_SERVER]),
            ("tenant.example", &[TENANT]),
        ] {
            network.name(name, addresses);
        }
        Self { network, model: model(), work: tempfile::tempdir().unwrap(), runs: 0 }
    }

    /// Starts to copy `model` with an empty cache.
    fn start(&mut self, model: &str, flags: &[&str], environment: &[(&str, &str)]) -> Copying {
        self.runs += 1;
        let folder = self.work.path().join(self.runs.to_string());
        let environment: Vec<_> =
            environment.iter().map(|(name, value)| (*name, (*value).to_owned())).collect();
        start_copy_with(model, &folder.join("cache"), &folder.join("copy"), &environment, flags)
    }

    /// The fetcher refuses, and no server that it must not reach is connected to.
    async fn refuses(&mut self, model: &str, flags: &[&str], environment: &[(&str, &str)]) {
        let said = self.start(model, flags, environment).refusal().await;
        assert!(said.contains("is not an allowed source"), "{model} {flags:?} {environment:?}: {said}");
        self.untouched(model);
    }

    async fn fetches(&mut self, model: &str, flags: &[&str]) {
        let copy = self.start(model, flags, &[]).done().await;
        assert_eq!(copy, files(self.model.path()), "{model} {flags:?}");
        self.untouched(model);
    }

    fn untouched(&self, model: &str) {
        for address in FORBIDDEN {
            assert_eq!(self.network.counted(address), 0, "{model} reached {address}");
        }
    }

    async fn serve(&self, address: &str) -> Web {
        Web::start(at(address, 80), Content::new(self.model.path())).await.unwrap()
    }
}

#[test]
fn fetcher_connects_to_allowed_sources_alone() {
    network::inside("egress::fetcher_connects_to_allowed_sources_alone", async || {
        let mut scene = EgressFixture::new().await;
        let _source = scene.serve(SOURCE).await;
        let _store = scene.serve(STORE).await;
        allowed(&mut scene).await;
        named(&mut scene).await;
        redirected(&mut scene).await;
        rebound(&mut scene).await;
        by_environment(&mut scene).await;
        ambient(&mut scene).await;
    });
}

async fn allowed(scene: &mut EgressFixture) {
    let model = "http://models.example/models";
    for flags in
        [&[][..], &CLOSED, &["--allow-source", "models.example"], &["--allow-source", "*.example:80"]]
    {
        scene.fetches(model, flags).await;
    }
    for flags in [["--allow-source", "hub.example"], ["--allow-source", "models.example:443"]] {
        scene.refuses(model, &flags, &[]).await;
    }
    for store in ["http://store.example/models", "http://10.43.0.9/models"] {
        scene.fetches(store, &[]).await;
        scene.fetches(store, &["--allow-source", "store.example,10.43.0.8/30"]).await;
        scene.refuses(store, &CLOSED, &[]).await;
    }
}

async fn named(scene: &mut EgressFixture) {
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
        scene.refuses(&url, &[], &[]).await;
        scene.refuses(&url, &CLOSED, &[]).await;
        // A range that holds everything does not name it.
        scene.refuses(&url, &["--allow-source", "*,0.0.0.0/0,::/0"], &[]).await;
    }
    for host in
        [API_SERVER, TENANT, "127.0.0.1", "0.0.0.0", "localhost", "kubernetes.example", "tenant.example"]
    {
        scene.refuses(&format!("http://{host}/models"), &CLOSED, &[]).await;
    }
}

async fn redirected(scene: &mut EgressFixture) {
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
        scene.network.redirects_to(&format!("http://{host}/models"));
        scene.refuses(model, &CLOSED, &[]).await;
        let environment = [("HF_ENDPOINT", "http://redirect.example")];
        let said = scene.start("hf://org/model", &CLOSED, &environment).refusal().await;
        assert!(said.contains("redirect to another server"), "{said}");
        scene.untouched(host);
    }
    scene.network.redirects_to("http://models.example/models");
    // A file that is absent there, the first of which is an optional one, counts as a redirect that no longer holds.
    let said = scene.start(model, &CLOSED, &[]).refusal().await;
    assert!(said.contains("404 Not Found after a redirect"), "{said}");
    scene.untouched(model);
    scene.refuses(model, &["--allow-source", "redirect.example"], &[]).await;
    // In a circle.
    scene.network.redirects_to(model);
    let said = scene.start(model, &CLOSED, &[]).refusal().await;
    assert!(said.contains("redirects"), "{said}");
}

/// The first answer of DNS is a public address, where the connection ends. The next one is not.
async fn rebound(scene: &mut EgressFixture) {
    for (at, forbidden) in [METADATA, API_SERVER, TENANT].into_iter().enumerate() {
        let name = format!("rebind{at}.example");
        scene.network.name(&name, &[BROKEN, forbidden]);
        scene.refuses(&format!("http://{name}/models"), &CLOSED, &[]).await;
        assert!(scene.network.asked(&name) >= 2, "{name} was resolved once");
    }
}

async fn by_environment(scene: &mut EgressFixture) {
    for endpoint in ["http://169.254.169.254", "http://metadata.example", "http://tenant.example"] {
        scene.refuses("hf://org/model", &CLOSED, &[("HF_ENDPOINT", endpoint)]).await;
        for name in ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"] {
            scene.refuses("s3://bucket/model", &CLOSED, &[(name, endpoint)]).await;
        }
        for name in ["HTTP_PROXY", "http_proxy", "ALL_PROXY"] {
            scene.refuses("http://models.example/models", &CLOSED, &[(name, endpoint)]).await;
        }
    }
}

/// The role of a machine is asked for where that is said, and under the rules.
async fn ambient(scene: &mut EgressFixture) {
    let content = Content::new(scene.model.path());
    let s3 = S3::start(at(SOURCE, 9000), content, S3Options::default()).await.unwrap();
    let model = s3.model();
    let endpoint = ("AWS_ENDPOINT_URL", "http://models.example:9000");
    let said = scene.start(&model, &CLOSED, &[endpoint]).refusal().await;
    assert!(said.contains("--ambient-credentials"), "{said}");
    scene.untouched("unsigned requests");
    let half = [endpoint, ("AWS_ACCESS_KEY_ID", "half")];
    let said = scene.start(&model, &CLOSED, &half).refusal().await;
    assert!(said.contains("AWS_SECRET_ACCESS_KEY"), "{said}");
    let flags = [&CLOSED[..], &["--ambient-credentials"]].concat();
    for (name, url) in [
        ("AWS_METADATA_ENDPOINT", "http://10.43.0.7"),
        ("AWS_METADATA_ENDPOINT", "http://tenant.example"),
        ("AWS_ENDPOINT_URL_STS", "http://10.96.0.1"),
    ] {
        let said = scene.start(&model, &flags, &[endpoint, (name, url)]).refusal().await;
        assert!(said.contains("s3") || said.contains(name), "{said}");
        assert_eq!(scene.network.counted(TENANT) + scene.network.counted(API_SERVER), 0, "{name}={url}");
    }
    let said = scene.start(&model, &flags, &[endpoint]).refusal().await;
    assert!(said.contains("no credentials"), "{said}");
    assert!(scene.network.counted(METADATA) > 0, "{said}");
    assert_eq!(scene.network.counted(TENANT), 0);
}
