//! Calls of an unauthorised client: tries every call of an interface.

use crate::control::{Control, greedy};
use crate::deadline::{SOON, within};
use crate::expert_stream::client_within;
use crate::raw::{self, Connection};
use remoe_proto::identity::Trust;
use remoe_proto::v1::{
    DescribeMainRequest, DescribeRequest, InspectRequest, Routing, TokenIds, inspect_request,
};
use std::net::SocketAddr;
use tonic::Code;

/// Name of a call with the code of its refusal, or `None` if it was answered.
pub type CallOutcome = (&'static str, Option<Code>);

/// Tries every call of the control port at `address` as a client with `trust`, each on a new connection.
pub async fn control_answers(address: SocketAddr, trust: Option<Trust>) -> Vec<CallOutcome> {
    let client = || Control::within(address, trust.clone()).client();
    let prompt = Some(inspect_request::Prompt::Ids(TokenIds { ids: vec![1] }));
    let routing = Routing { generation: 1 << 20, ..Routing::default() };
    let all = async {
        vec![
            ("SetRouting", client().set_routing(routing).await.err()),
            ("Generate", client().generate(greedy(&[1], 1)).await.err()),
            ("Inspect", client().inspect(InspectRequest { prompt, hidden: true, scores: false }).await.err()),
            ("Describe", client().describe(DescribeMainRequest::default()).await.err()),
        ]
    };
    let answers = within(SOON, "answers of the control port", all).await;
    answers.into_iter().map(|(call, refused)| (call, refused.map(|status| status.code()))).collect()
}

/// Tries every call of a remote function's port, as [`control_answers`] does.
pub async fn expert_answers(address: SocketAddr, trust: Option<Trust>) -> Vec<CallOutcome> {
    let client = || client_within(address, trust.clone());
    let all = async {
        vec![
            ("Forward", client().forward(tokio_stream::pending()).await.err()),
            ("Describe", client().describe(DescribeRequest {}).await.err()),
        ]
    };
    let answers = within(SOON, "answers of the expert port", all).await;
    answers.into_iter().map(|(call, refused)| (call, refused.map(|status| status.code()))).collect()
}

/// Tries the HTTP port of a main function, as [`control_answers`] does. The connection of a refused client is closed
/// without a reason; PERMISSION_DENIED stands for the refusal of a trusted certificate.
pub async fn http_answer(address: SocketAddr, trust: Option<Trust>) -> CallOutcome {
    let (connection, refusal) = match &trust {
        Some(trust) => (Connection::secured(address, trust).await, Code::PermissionDenied),
        None => (Connection::reach(address).await, Code::Unavailable),
    };
    let Ok(mut connection) = connection else { return ("HTTP", Some(Code::Unavailable)) };
    // A failed write has no answer either.
    let _closed = connection.write(raw::get("/health")).await;
    ("HTTP", connection.answer().await.err().map(|_| refusal))
}
