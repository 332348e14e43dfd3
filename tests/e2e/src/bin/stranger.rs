//! Tries every call of a main function's control port and of a remote function's port, and the main function's HTTP
//! port, and prints what each was answered: `stranger CONTROL EXPERTS HTTP MAIN [FOLDER]`. MAIN is the identity that
//! the main function has to have; FOLDER has a certificate to show, without one there is no TLS.
#![allow(clippy::expect_used, clippy::panic)]

use remoe_proto::identity::{Counterpart, Identity, Keyring, Trust};
use remoe_test_support::stranger::{control_answers, expert_answers, http_answer};
use std::net::SocketAddr;

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [control, experts, http, main, folder @ ..] = arguments.as_slice() else {
        panic!("stranger CONTROL EXPERTS HTTP MAIN [FOLDER], not {arguments:?}");
    };
    let address = |text: &str| text.parse::<SocketAddr>().expect("an address is IP:PORT");
    let main: Identity = main.parse().expect("a name such as spiffe://remoe/NAMESPACE/UID/main");
    let remote = main.remote().expect("a main function has remote ones");
    let keyring = folder.first().map(|folder| Keyring::from_folder(folder).expect("a certificate"));
    let trust = |peer: &Identity| {
        keyring.clone().map(|keyring| Trust { keyring, peer: Counterpart::Named(peer.clone()) })
    };
    let mut answers = control_answers(address(control), trust(&main)).await;
    answers.extend(expert_answers(address(experts), trust(&remote)).await);
    answers.push(http_answer(address(http), trust(&main)).await);
    for (call, refused) in answers {
        println!("{call}: {}", refused.map_or_else(|| "answered".to_owned(), |code| format!("{code:?}")));
    }
}
