//! Target: messages between functions. Decodes every message of both services, and checks their requests as the services
//! do.
//!
//! Input: a byte that selects the message type, then the message.

use crate::{check_error, fixtures, memory};
use main_model_fn::check_routing;
use prost::Message;
use remoe_model::ModelConfig;
use remoe_proto::MAX_PAYLOAD;
use remoe_proto::v1::{
    Cancel, DescribeMainRequest, DescribeRequest, Endpoint, ExpertCalls, Failure, Finished, ForwardReply,
    ForwardRequest, FunctionDescription, GenerateEvent, GenerateRequest, InspectReply, InspectRequest,
    LayerExperts, LayerRouting, MainDescription, Piece, Routing, RoutingAck, Rows, Started, TokenIds,
    TokenRouting, Work, forward_reply, forward_request, generate_event, generate_request,
};
use remote_expert_fn::check_work;
use std::cell::OnceCell;

/// Memory limit per byte of a message: an empty nested message takes two bytes on the wire, and 48 bytes in a list that
/// doubles.
const BYTES_PER_INPUT_BYTE: usize = 128;
const BASE_BYTES: usize = 64 << 10;
/// Bytes per row of the replica, which hosts experts 0 to 4 of layers 1 and 2.
const ROW_BYTES: usize = 4;

type MessageCheck = fn(&[u8]);

const MESSAGE_CHECKS: [MessageCheck; 13] = [
    forward_request,
    routing,
    check_round_trip::<ForwardReply>,
    check_round_trip::<DescribeRequest>,
    check_round_trip::<FunctionDescription>,
    check_round_trip::<RoutingAck>,
    check_round_trip::<DescribeMainRequest>,
    check_round_trip::<MainDescription>,
    check_round_trip::<GenerateRequest>,
    check_round_trip::<GenerateEvent>,
    check_round_trip::<InspectRequest>,
    check_round_trip::<InspectReply>,
    check_round_trip::<Work>,
];

pub fn run(data: &[u8]) {
    if let Some((&selector, rest)) = data.split_first() {
        MESSAGE_CHECKS[usize::from(selector) % MESSAGE_CHECKS.len()](rest);
    }
}

/// Decodes a message, and asserts that encoding and decoding it again gives an equal message.
fn decode<M: Message + Default>(data: &[u8]) -> Option<M> {
    let message =
        memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || M::decode(data)).ok()?;
    let first = message.encode_to_vec();
    let second = M::decode(first.as_slice()).expect("what was encoded can be decoded").encode_to_vec();
    assert_eq!(first, second);
    Some(message)
}

fn check_round_trip<M: Message + Default>(data: &[u8]) {
    decode::<M>(data);
}

fn forward_request(data: &[u8]) {
    let Some(ForwardRequest { body: Some(forward_request::Body::Work(work)) }) = decode(data) else {
        return;
    };
    let hosted = |layer, expert| matches!(layer, 1 | 2) && expert < 5;
    match memory::with_limit(BASE_BYTES, || check_work(&work, ROW_BYTES, hosted)) {
        Err(refusal) => check_error(&refusal.message),
        Ok(()) => {
            assert!(!work.counts.is_empty() && work.counts.iter().all(|count| *count > 0));
            assert_eq!(work.rows.len(), work.counts.len() * ROW_BYTES);
            let pairs: u64 = work.counts.iter().map(|count| u64::from(*count)).sum();
            assert_eq!(pairs, work.experts.len() as u64);
            assert!(work.experts.len() * ROW_BYTES <= MAX_PAYLOAD);
            assert!(work.experts.iter().all(|expert| hosted(work.layer, *expert)));
        }
    }
}

thread_local! {
    static MODEL: OnceCell<ModelConfig> = const { OnceCell::new() };
}

fn routing(data: &[u8]) {
    let Some(routing) = decode::<Routing>(data) else {
        return;
    };
    MODEL.with(|cell| {
        let model = cell.get_or_init(|| {
            let path = fixtures::root().join("tests/fixtures/qwen2moe-basic/config.json");
            ModelConfig::from_json(&path, &fixtures::read(path.clone())).expect("a fixture is right")
        });
        match memory::with_limit(BASE_BYTES + BYTES_PER_INPUT_BYTE * data.len(), || {
            check_routing(model, &routing)
        }) {
            Err(error) => check_error(tonic::Status::from(error).message()),
            Ok((sets, endpoints)) => {
                assert_eq!(endpoints.len(), routing.endpoints.len());
                for (layer, experts) in &sets {
                    let moe = model.moe(*layer).expect("a layer with experts");
                    assert!(!experts.is_empty() && experts.iter().all(|id| (*id as usize) < moe.experts));
                }
                for set in endpoints.iter().flat_map(|(_, hosted)| hosted) {
                    let remote = &sets[&(set.layer as usize)];
                    assert!(!set.experts.is_empty() && set.experts.is_sorted_by(|a, b| a < b));
                    assert!(set.experts.iter().all(|expert| remote.contains(expert)));
                }
            }
        }
    });
}

pub fn seeds() -> Vec<Vec<u8>> {
    let sets =
        vec![LayerExperts { layer: 1, experts: vec![0, 2, 3] }, LayerExperts { layer: 2, experts: vec![1] }];
    let work = Work {
        id: 7,
        generation: 3,
        layer: 1,
        budget_us: 1000,
        rows: vec![1, 2, 3, 4, 5, 6, 7, 8].into(),
        counts: vec![2, 1],
        experts: vec![0, 4, 3],
        trace: vec![9; 48].into(),
    };
    let figures = ExpertCalls { local: 1, remote: 2, fallback: 3, retries: 4 };
    let finished = Finished {
        reason: "stop".to_owned(),
        text: Some("é".to_owned()),
        tokens: vec![1, 300],
        completion_tokens: 2,
        ttft_s: 0.5,
        experts: Some(figures),
        ..Finished::default()
    };
    let routing = Routing {
        generation: 2,
        endpoints: vec![
            Endpoint { address: "127.0.0.1:50051".to_owned(), layers: vec![1], experts: vec![] },
            Endpoint { address: "h:1".to_owned(), layers: vec![], experts: vec![] },
            Endpoint { address: "h:2".to_owned(), layers: vec![], experts: sets[..1].to_vec() },
        ],
        remote: sets.clone(),
        account: String::new(),
    };
    let description = FunctionDescription {
        wire_version: 1,
        checkpoint: "ab".repeat(32),
        dtype: "bfloat16".to_owned(),
        hidden_size: 32,
        hosted: sets.clone(),
        memory_bytes: 1 << 30,
        draining: true,
        ..FunctionDescription::default()
    };
    let prompt = Some(generate_request::Prompt::Ids(TokenIds { ids: vec![1, 2, 300] }));
    let generate = GenerateRequest {
        prompt,
        max_tokens: 5,
        temperature: Some(0.5),
        stop: vec!["x".to_owned()],
        ..GenerateRequest::default()
    };
    let tokens = vec![TokenRouting { experts: vec![1, 2], weights: vec![0.5, f32::NAN] }];
    let inspection = InspectReply {
        prompt_ids: vec![1],
        last_logits: vec![1.5, -2.0],
        routing: vec![LayerRouting { layer: 1, tokens }],
        hidden: vec![0, 1].into(),
        experts: Some(figures),
        scores: vec![-0.5, f32::NAN],
    };
    let reply = |outcome| ForwardReply { id: 7, outcome: Some(outcome) };
    let failure = Failure { code: 2, message: "no".to_owned(), retryable: true };
    let event = |event| GenerateEvent { event: Some(event) };
    let messages: Vec<(u8, Vec<u8>)> = vec![
        (0, ForwardRequest { body: Some(forward_request::Body::Work(work.clone())) }.encode_to_vec()),
        (0, ForwardRequest { body: Some(forward_request::Body::Cancel(Cancel { id: 9 })) }.encode_to_vec()),
        (1, routing.encode_to_vec()),
        (2, reply(forward_reply::Outcome::Failure(failure)).encode_to_vec()),
        (
            2,
            reply(forward_reply::Outcome::Rows(Rows { rows: vec![1; 8].into(), compute_us: 5 }))
                .encode_to_vec(),
        ),
        (4, description.encode_to_vec()),
        (
            5,
            RoutingAck { generation: 1, problems: vec![Default::default()], ..Default::default() }
                .encode_to_vec(),
        ),
        (7, MainDescription { wire_version: 1, local: sets, ..MainDescription::default() }.encode_to_vec()),
        (8, generate.encode_to_vec()),
        (9, event(generate_event::Event::Started(Started { prompt_ids: vec![4, 5] })).encode_to_vec()),
        (
            9,
            event(generate_event::Event::Piece(Piece { ids: vec![4], text: "t".to_owned() })).encode_to_vec(),
        ),
        (9, event(generate_event::Event::Finished(finished)).encode_to_vec()),
        (10, InspectRequest { prompt: None, hidden: true, scores: false }.encode_to_vec()),
        (11, inspection.encode_to_vec()),
        (12, work.encode_to_vec()),
    ];
    messages.into_iter().map(|(selector, message)| [&[selector], message.as_slice()].concat()).collect()
}
