//! Access to main functions that accept gateways alone, with a gateway's identity.

use crate::cluster::Cluster;
use crate::release;
use k8s_openapi::ByteString;
use k8s_openapi::api::core::v1::Secret;
use kube::api::Api;
use remoe_proto::identity::{
    CERTIFICATE, CERTIFICATES_OF_AUTHORITIES, Counterpart, Credentials, Identity, KEY, Keyring, Protocol,
    Trust,
};
use std::net::{Ipv4Addr, SocketAddr};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

/// Returns the trust with which gateways of the release connect to `main`.
pub async fn gateway_trust(cluster: &Cluster, main: Identity) -> Trust {
    let secrets = Api::<Secret>::namespaced(cluster.client.clone(), release::NAMESPACE);
    let secret = secrets.get(&format!("{}-gateway-identity", release::NAME)).await;
    let data = secret.expect("gateways have a certificate").data.unwrap_or_default();
    let file = |name: &str| data.get(name).map_or(&[][..], |ByteString(bytes)| bytes);
    let credentials = Credentials::from_pem(file(CERTIFICATE), file(KEY), file(CERTIFICATES_OF_AUTHORITIES));
    let keyring = Keyring::with_credentials(credentials.expect("the certificate of gateways can be used"));
    Trust { keyring, peer: Counterpart::Named(main) }
}

/// Starts a proxy on this host to the HTTP port `main` with `trust`, for the duration of the test, and returns its
/// address.
pub async fn start_proxy(main: SocketAddr, trust: Trust) -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("there is a free port");
    let address = listener.local_addr().expect("a listener has an address");
    tokio::spawn(async move {
        while let Ok((mut here, _)) = listener.accept().await {
            let trust = trust.clone();
            tokio::spawn(async move {
                let there = TcpStream::connect(main).await?;
                there.set_nodelay(true)?;
                let mut there = trust.connect_for(Protocol::Http, there).await?;
                copy_bidirectional(&mut here, &mut there).await
            });
        }
    });
    address
}
