//! Functions with identities: correct identities work as without any, all others are rejected, and certificates
//! rotate during requests.

use remoe_proto::identity::{Counterpart, Identity, Keyring, Trust};
use remoe_proto::v1::{DescribeMainRequest, DescribeRequest, LayerExperts};
use remoe_test_support::control::{Control, greedy};
use remoe_test_support::deadline::{SOON, until, within};
use remoe_test_support::expert_stream::client_within;
use remoe_test_support::fixture::ModelFixture;
use remoe_test_support::function::{MainFunction, RemoteFunction, StartOptions};
use remoe_test_support::metrics::MetricsPage;
use remoe_test_support::placement::{all_experts, remote_sets};
use remoe_test_support::realm::{
    DEPLOYMENT, LIFE, TestAuthority, main_of, operator, remote_of, with_identity,
};
use remoe_test_support::stranger::{control_answers, expert_answers};
use rustix::process::Signal;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::sleep;
use tonic::Code;

/// Main function and remote function of one deployment, with half of the experts remote.
struct TlsDeployment {
    realm: TestAuthority,
    main: MainFunction,
    remote: RemoteFunction,
    sets: Vec<LayerExperts>,
}

impl TlsDeployment {
    async fn start(model: &ModelFixture, options: StartOptions) -> Self {
        let realm = TestAuthority::default();
        let trust = realm.trust(&operator(), &main_of(DEPLOYMENT));
        let main = MainFunction::start_within(&model.folder, realm.main(options.clone()), trust).await;
        let experts = all_experts(&model.checkpoint());
        let remote = RemoteFunction::start(&model.folder, &experts, realm.remote(options)).await;
        let sets = remote_sets(&model.checkpoint(), 0.5);
        main.control.route(&[remote.address()], &sets).await;
        Self { realm, main, remote, sets }
    }

    async fn refused(&self, reason: &str) -> (u64, u64) {
        let series = format!("remoe_connections_refused_total{{reason=\"{reason}\"}}");
        let main = MetricsPage::read(self.main.http()).await.value(&series);
        let remote = MetricsPage::read(self.remote.announcement.metrics.unwrap()).await.value(&series);
        (main, remote)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn functions_answer_only_authorised_peers() {
    let model = ModelFixture::fixture("mixtral-basic");
    let deployment = TlsDeployment::start(&model, StartOptions::dtype("float32")).await;
    let TlsDeployment { realm, main, remote, .. } = &deployment;
    let (control, experts) = (main.announcement.grpc, remote.address());
    let prompt = &model.expected().unwrap().prompts[0];
    let tokens = prompt.greedy.len() as u32;
    // The answers equal those of transformers and of functions without identities.
    let works = async || {
        let answer = main.control.generate(greedy(&prompt.ids, tokens)).await.finished;
        assert_eq!(answer.tokens, prompt.greedy);
        let calls = answer.experts.unwrap();
        assert!(calls.remote > 0 && (calls.fallback, calls.retries) == (0, 0), "{calls:?}");
    };
    works().await;
    let by_main = realm.trust(&main_of(DEPLOYMENT), &remote_of(DEPLOYMENT));
    let mut right = client_within(experts, Some(by_main));
    right.describe(DescribeRequest {}).await.unwrap();

    let (ours, other) = (realm, TestAuthority::default());
    // Certificates of the correct authority with other names.
    for own in [main_of(DEPLOYMENT), remote_of(DEPLOYMENT), main_of("other"), remote_of("other")] {
        let trust = ours.trust(&own, &main_of(DEPLOYMENT));
        for (call, answer) in control_answers(control, Some(trust)).await {
            assert_eq!(answer, Some(Code::PermissionDenied), "{call} as {own}");
        }
    }
    for own in [operator(), remote_of(DEPLOYMENT), main_of("other"), remote_of("other")] {
        let trust = ours.trust(&own, &remote_of(DEPLOYMENT));
        for (call, answer) in expert_answers(experts, Some(trust)).await {
            assert_eq!(answer, Some(Code::PermissionDenied), "{call} as {own}");
        }
    }
    let identity = deployment.refused("identity").await;
    assert!(identity.0 >= 16 && identity.1 >= 8, "{identity:?}");

    // Correct names from another authority, or expired; no TLS at all.
    let before = deployment.refused("handshake").await;
    let mut tried = 0;
    let (to_main, to_remote) = (main_of(DEPLOYMENT), remote_of(DEPLOYMENT));
    for (as_operator, as_main) in [
        (Some(other.trust(&operator(), &to_main)), Some(other.trust(&to_main, &to_remote))),
        (Some(mixed(&other, ours, &operator(), &to_main)), Some(mixed(&other, ours, &to_main, &to_remote))),
        (Some(expired(ours, &operator(), &to_main).await), Some(expired(ours, &to_main, &to_remote).await)),
        (None, None),
    ] {
        let answers = control_answers(control, as_operator).await;
        let answers = answers.into_iter().chain(expert_answers(experts, as_main).await);
        for (call, answer) in answers {
            tried += 1;
            let answer = answer.unwrap_or_else(|| panic!("{call} was answered"));
            assert_ne!(answer, Code::PermissionDenied, "{call} does not get as far");
        }
    }
    assert_eq!(tried, 24);
    no_certificate(control).await;
    no_certificate(experts).await;
    let after = deployment.refused("handshake").await;
    assert!(after.0 >= before.0 + 17 && after.1 >= before.1 + 9, "{before:?} {after:?}");
    assert!(!right.describe(DescribeRequest {}).await.unwrap().into_inner().draining);
    assert_eq!(
        main.control.client().describe(DescribeMainRequest::default()).await.unwrap().into_inner().generation,
        1
    );
    works().await;
}

/// Certificate of one authority, from a peer that trusts another authority.
fn mixed(signs: &TestAuthority, believed: &TestAuthority, own: &Identity, peer: &Identity) -> Trust {
    let folder = signs.write("mixed", &signs.sign(own, LIFE), believed.certificate());
    Trust { keyring: Keyring::from_folder(folder).unwrap(), peer: Counterpart::Named(peer.clone()) }
}

/// Expired certificate.
async fn expired(realm: &TestAuthority, own: &Identity, peer: &Identity) -> Trust {
    let trust = realm.trust_for(own, peer, Duration::ZERO);
    until(SOON, "the end of a certificate", async || {
        (!trust.keyring.current().are_valid_in(Duration::ZERO)).then_some(())
    })
    .await;
    trust
}

/// TLS without a client certificate ends with an alert, not with an answer.
async fn no_certificate(address: SocketAddr) {
    let ended = tokio::task::spawn_blocking(move || {
        use std::io::{Read, Write};
        let provider = std::sync::Arc::new(rustls::crypto::ring::default_provider());
        let config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .dangerous()
            .with_custom_certificate_verifier(std::sync::Arc::new(anyone::AcceptAny))
            .with_no_client_auth();
        let name = "remoe".try_into().unwrap();
        let session = rustls::ClientConnection::new(std::sync::Arc::new(config), name).unwrap();
        let stream = std::net::TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(SOON)).unwrap();
        let mut stream = rustls::StreamOwned::new(session, stream);
        let written = stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n");
        written.and_then(|()| stream.read(&mut [0; 1])).err().map(|error| error.to_string())
    });
    let error = ended.await.unwrap().unwrap();
    assert!(error.contains("CertificateRequired"), "{error}");
}

/// Client that accepts every certificate.
mod anyone {
    use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
    use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
    use rustls::{DigitallySignedStruct, Error, SignatureScheme};

    #[derive(Debug)]
    pub(super) struct AcceptAny;

    impl ServerCertVerifier for AcceptAny {
        fn verify_server_cert(
            &self,
            _: &CertificateDer<'_>,
            _: &[CertificateDer<'_>],
            _: &ServerName<'_>,
            _: &[u8],
            _: UnixTime,
        ) -> Result<ServerCertVerified, Error> {
            Ok(ServerCertVerified::assertion())
        }

        fn verify_tls12_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn verify_tls13_signature(
            &self,
            _: &[u8],
            _: &CertificateDer<'_>,
            _: &DigitallySignedStruct,
        ) -> Result<HandshakeSignatureValid, Error> {
            Ok(HandshakeSignatureValid::assertion())
        }

        fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
            vec![SignatureScheme::ECDSA_NISTP256_SHA256]
        }
    }
}

/// A main function sends hidden states only to remote functions of its own deployment.
#[tokio::test(flavor = "multi_thread")]
async fn main_function_trusts_remotes_of_its_own_deployment_only() {
    let model = ModelFixture::fixture("mixtral-basic");
    let deployment = TlsDeployment::start(&model, StartOptions::dtype("float32")).await;
    let TlsDeployment { realm, main, sets, .. } = &deployment;
    let experts = all_experts(&model.checkpoint());
    let pair = realm.sign(&remote_of("other"), LIFE);
    let folder = realm.write("other", &pair, realm.certificate());
    let options = with_identity(StartOptions::dtype("float32"), &folder);
    let other = RemoteFunction::start(&model.folder, &experts, options).await;
    let open = RemoteFunction::start(&model.folder, &experts, StartOptions::dtype("float32")).await;
    let ack = main.control.try_route(&[other.address(), open.address()], sets).await;
    let problem = |address: SocketAddr| {
        let found = ack.problems.iter().find(|problem| problem.address == address.to_string());
        found.map(|problem| problem.message.clone()).unwrap()
    };
    assert!(problem(other.address()).contains("spiffe://remoe/models/other/remote"), "{ack:?}");
    problem(open.address());
    let prompt = &model.expected().unwrap().prompts[0];
    let answer = main.control.generate(greedy(&prompt.ids, prompt.greedy.len() as u32)).await.finished;
    assert_eq!(answer.tokens, prompt.greedy, "served by itself meanwhile");
    assert_eq!(answer.experts.unwrap().remote, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn certificate_of_other_role_or_without_key_is_refused_at_start() {
    let model = ModelFixture::fixture("mixtral-basic");
    let realm = TestAuthority::default();
    let root = realm.certificate();
    let (main, remote) = (realm.sign(&main_of(DEPLOYMENT), LIFE), realm.sign(&remote_of(DEPLOYMENT), LIFE));
    let torn = remoe_identity::CertifiedKey { key: main.key.clone(), ..remote.clone() };
    for (pair, words) in [(&main, "that of a remote function"), (&torn, "cannot use the certificate")] {
        let folder = realm.write("wrong", pair, root);
        let options = with_identity(StartOptions::default(), &folder);
        let (status, log) = RemoteFunction::refuse(&model.folder, "0:0", options).await;
        assert_eq!(status.code(), Some(1), "{log:?}");
        assert!(log.iter().any(|line| line.contains(words)), "{log:?}");
    }
    let folder = realm.write("wrong", &remote, root);
    let options = with_identity(StartOptions::default(), &folder).with("--operator-identity", operator());
    let (status, log) = MainFunction::refuse(&model.folder, options).await;
    assert!(!status.success() && log.iter().any(|line| line.contains("that of a main function")), "{log:?}");
}

/// Certificates that are valid for seconds are rotated, finally to another authority, during 50 requests.
#[tokio::test(flavor = "multi_thread")]
async fn certificates_change_under_running_requests() {
    const STREAMS: usize = 50;
    const LIVES: Duration = Duration::from_secs(3);
    let model = ModelFixture::demo();
    let realm = TestAuthority::default();
    let next = TestAuthority::default();
    let both = format!("{}{}", realm.certificate(), next.certificate());
    let (to_main, to_remote) = (main_of(DEPLOYMENT), remote_of(DEPLOYMENT));
    let renew = |signs: &TestAuthority, authorities: &str| {
        (
            realm.write("operator", &signs.sign(&operator(), LIVES), authorities),
            realm.write("main", &signs.sign(&to_main, LIVES), authorities),
            realm.write("remote", &signs.sign(&to_remote, LIVES), authorities),
        )
    };
    let (as_operator, as_main, as_remote) = renew(&realm, realm.certificate());
    let trust =
        |peer| Trust { keyring: Keyring::from_folder(&as_operator).unwrap(), peer: Counterpart::Named(peer) };
    let options = with_identity(StartOptions::default(), &as_main).with("--operator-identity", operator());
    let options = options.with("--max-batch", STREAMS);
    let main = MainFunction::start_within(&model.folder, options, trust(to_main.clone())).await;
    let experts = all_experts(&model.checkpoint());
    let options = with_identity(StartOptions::default(), &as_remote);
    // Loading may take longer than the validity of the certificates.
    renew(&realm, realm.certificate());
    let remote = RemoteFunction::start(&model.folder, &experts, options).await;
    let sets = remote_sets(&model.checkpoint(), 0.5);
    renew(&realm, realm.certificate());
    until(SOON, "a routing without problems", async || {
        renew(&realm, realm.certificate());
        let ack = main.control.try_route(&[remote.address()], &sets).await;
        ack.problems.is_empty().then_some(())
    })
    .await;
    let prompt = model.prompts().pop().unwrap();
    let alone = main.control.generate(greedy(&prompt, 20)).await.finished;

    let begun: Vec<_> =
        futures_util::future::try_join_all((0..STREAMS).map(|_| main.control.begin(greedy(&prompt, 100))))
            .await
            .unwrap();
    let running = tokio::spawn(futures_util::future::try_join_all(begun.into_iter().map(|it| it.finish())));
    // Twice the validity of the first certificates, then another authority.
    for (signs, authorities) in
        [(&realm, realm.certificate()), (&realm, &both), (&next, &both), (&next, next.certificate())]
    {
        renew(signs, authorities);
        sleep(LIVES / 2).await;
        // A new client uses the present files.
        let client = Control::within(main.announcement.grpc, Some(trust(to_main.clone())));
        let described =
            within(SOON, "Describe", client.client().describe(DescribeMainRequest::default())).await;
        assert!(described.unwrap().into_inner().generation > 0);
    }
    let answers = within(SOON, "the end of the running requests", running).await.unwrap().unwrap();
    assert_eq!(answers.len(), STREAMS);
    for answer in answers {
        assert_eq!(answer.finished.tokens[..20], alone.tokens);
        assert_eq!(answer.finished.experts.unwrap().fallback, 0);
    }
    // The engine makes new connections as well.
    renew(&next, next.certificate());
    let client = Control::within(main.announcement.grpc, Some(trust(to_main)));
    sleep(Duration::from_millis(600)).await;
    let again = main.control.try_route(&[remote.address()], &sets).await;
    assert_eq!(again.problems, []);
    assert_eq!(client.generate(greedy(&prompt, 20)).await.finished.tokens, alone.tokens);
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_remote_function_loses_no_token() {
    let model = ModelFixture::demo();
    let mut deployment = TlsDeployment::start(&model, StartOptions::default()).await;
    let prompt = model.prompts().pop().unwrap();
    let peace = deployment.main.control.generate(greedy(&prompt, 200)).await.finished;
    assert!(peace.experts.unwrap().remote > 0);
    let mut generation = deployment.main.control.begin(greedy(&prompt, 200)).await.unwrap();
    generation.tokens(20).await.unwrap();
    deployment.remote.process.signal(Signal::KILL);
    let disturbed = generation.finish().await.unwrap().finished;
    assert_eq!(disturbed.tokens, peace.tokens);
    assert!(disturbed.experts.unwrap().fallback > 0);
    deployment.remote.process.end(SOON).await;
}

/// Idle connections, half handshakes and noise do not keep allowed peers out.
#[tokio::test(flavor = "multi_thread")]
async fn strangers_keep_no_peer_out() {
    const EACH: usize = 500;
    /// Start of a ClientHello of 512 bytes.
    const HALF: [u8; 11] = [22, 3, 1, 2, 0, 1, 0, 1, 252, 3, 3];
    let model = ModelFixture::fixture("mixtral-basic");
    let deployment = TlsDeployment::start(&model, StartOptions::dtype("float32")).await;
    let TlsDeployment { realm, main, remote, sets } = &deployment;
    let mut held = Vec::new();
    for number in 0..3 * EACH {
        for address in [main.announcement.grpc, remote.address()] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let said: &[u8] = match number % 3 {
                0 => &[],
                1 => &HALF,
                _ => &[0xa5; 2000],
            };
            // The server may have closed it already.
            let _closed = stream.write_all(said).await;
            // The limit of descriptors is not tested here.
            if number % 3 < 2 {
                held.push(stream);
            }
            if held.len() > 2 * EACH {
                held.remove(0);
            }
        }
    }
    let fresh = Control::within(main.announcement.grpc, Some(realm.trust(&operator(), &main_of(DEPLOYMENT))));
    let described = within(SOON, "Describe", fresh.client().describe(DescribeMainRequest::default())).await;
    assert_eq!(described.unwrap().into_inner().generation, 1);
    // Connected clients stay connected, and new connections are accepted.
    main.control.route(&[remote.address()], sets).await;
    let prompt = &model.expected().unwrap().prompts[0];
    let answer = main.control.generate(greedy(&prompt.ids, prompt.greedy.len() as u32)).await.finished;
    assert_eq!(answer.tokens, prompt.greedy);
    assert_eq!(answer.experts.unwrap().fallback, 0);
    // The latest unidentified connections are closed after the handshake timeout.
    let mut last = held.pop().unwrap();
    let end = within(SOON, "the end of half a handshake", last.read(&mut [0; 1])).await;
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    let (main, remote) = deployment.refused("timeout").await;
    assert!(main > 0 && remote > 0);
}
