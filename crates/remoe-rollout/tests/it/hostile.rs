//! Hostile main functions that return arbitrary answers to their launcher or operator.

use prost::Message;
use prost::bytes::{Buf, BufMut, Bytes};
use remoe_proto::v1::{
    EndpointProblem, EndpointWork, LayerExperts, LayerPairs, MainDescription, Routing, RoutingAck,
};
use remoe_rollout::control;
use remoe_test_support::hostile::{Cases, SeededChoices, chart_limit, has_grown_little, panics, resident};
use std::convert::Infallible;
use std::future::{Future, pending};
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::net::TcpListener;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::{Service, http};
use tonic::server::{Grpc, NamedService, UnaryService};
use tonic::transport::Server;
use tonic::{Request, Response, Status};

/// Number of cases in every change.
const FEW: usize = 300;
/// Timeout of a call.
const DEADLINE: Duration = Duration::from_millis(100);

/// Returns a number of elements: few, or as many as fit into an answer.
fn many(dice: &mut SeededChoices) -> usize {
    *dice.one_of(&[0, 1, 3, 1025, 4097, 8193, 500_000])
}

fn numbers<T: Copy>(dice: &mut SeededChoices, value: T) -> Vec<T> {
    vec![value; many(dice)]
}

fn description(dice: &mut SeededChoices) -> Vec<u8> {
    let text = |dice: &mut SeededChoices| "é".repeat(*dice.one_of(&[0, 16, 32, 40_000]));
    let (id, count) = (dice.draw() as u32, dice.whole());
    let mut answer = MainDescription {
        wire_version: id,
        checkpoint: text(dice),
        placement: text(dice),
        generation: dice.whole(),
        in_flight: dice.whole() as u32,
        age_us: dice.whole(),
        arriving: u32::from(dice.once_in(2)),
        ..MainDescription::default()
    };
    match dice.below(5) {
        0 => answer.local = vec![LayerExperts::default(); many(dice)],
        1 => answer.work = vec![EndpointWork { address: String::new(), computed_us: count }; many(dice)],
        2 => answer.pairs = vec![LayerPairs::default(); many(dice)],
        3 => {
            let pairs = LayerPairs { layer: id, experts: numbers(dice, id), pairs: numbers(dice, count) };
            answer.pairs = vec![pairs; dice.below(3)];
        }
        _ => {
            let work = EndpointWork { address: text(dice), computed_us: count };
            answer.work = vec![work; dice.below(5)];
        }
    }
    answer.encode_to_vec()
}

fn acknowledgement(dice: &mut SeededChoices) -> Vec<u8> {
    let problem = EndpointProblem { address: "x".repeat(dice.below(1000)), message: String::new() };
    let problems = if dice.once_in(2) { EndpointProblem::default() } else { problem };
    let problems = vec![problems; many(dice).min(9000)];
    RoutingAck { generation: dice.whole(), problems, placement: String::new() }.encode_to_vec()
}

/// Returns the bytes of an answer to a call of `method`; absent for no answer.
fn answer(dice: &mut SeededChoices, method: &str) -> Option<Bytes> {
    let mut bytes = match dice.below(12) {
        0 => return None,
        1 => dice.noise(4096),
        // Twice the bytes that are decoded.
        2 => vec![0; 2 << 20],
        _ if method.ends_with("/Describe") => description(dice),
        _ => acknowledgement(dice),
    };
    if dice.once_in(3) {
        dice.spoil(&mut bytes);
    }
    Some(bytes.into())
}

/// Codec of raw bytes.
#[derive(Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, into: &mut EncodeBuf<'_>) -> Result<(), Status> {
        into.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Hostile main function; each call is a case.
#[derive(Clone)]
struct HostileMain {
    cases: Cases,
    next: Arc<AtomicUsize>,
}

impl NamedService for HostileMain {
    const NAME: &'static str = "remoe.v1.MainModel";
}

type Later<T> = Pin<Box<dyn Future<Output = T> + Send>>;

struct Call(HostileMain, String);

impl UnaryService<Bytes> for Call {
    type Response = Bytes;
    type Future = Later<Result<Response<Bytes>, Status>>;

    fn call(&mut self, _request: Request<Bytes>) -> Self::Future {
        let number = self.0.next.fetch_add(1, Ordering::SeqCst);
        let mut dice = self.0.cases.choices(number);
        let answer = answer(&mut dice, &self.1);
        Box::pin(async move {
            match answer {
                Some(bytes) => Ok(Response::new(bytes)),
                None => pending().await,
            }
        })
    }
}

impl Service<http::Request<tonic::body::Body>> for HostileMain {
    type Response = http::Response<tonic::body::Body>;
    type Error = Infallible;
    type Future = Later<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<tonic::body::Body>) -> Self::Future {
        let call = Call(self.clone(), request.uri().path().to_owned());
        Box::pin(async move { Ok(Grpc::new(Raw).unary(call, request).await) })
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn generated_answers_of_main_functions_do_no_harm() {
    let cases = Cases::new("answers to control calls", FEW);
    let panics = panics();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address: SocketAddr = listener.local_addr().unwrap();
    let main = HostileMain { cases, next: Arc::default() };
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    tokio::spawn(Server::builder().add_service(main).serve_with_incoming(incoming));
    let before = resident();
    let (mut taken, mut refused) = (0, 0);
    for number in 0..cases.count() {
        let is_taken = match number % 4 {
            0 => control::set_routing(
                address,
                Routing { generation: u64::MAX, ..Routing::default() },
                DEADLINE,
            )
            .await
            .is_ok(),
            1 => control::all_experts_read(address, DEADLINE).await.is_ok(),
            2 => control::describe_uses(address, DEADLINE).await.is_ok_and(|said| {
                // Accepted answers have no more elements than models have.
                assert!(said.pairs.len() <= 1024 && said.work.len() <= 8192 && said.local.len() <= 1024);
                assert!(said.pairs.iter().all(|pairs| pairs.experts.len().max(pairs.pairs.len()) <= 4096));
                true
            }),
            _ => control::describe(address, DEADLINE).await.is_ok(),
        };
        *(if is_taken { &mut taken } else { &mut refused }) += 1;
    }
    println!("{taken} taken, {refused} refused");
    assert!(taken > 0 && refused > 0);
    assert_eq!(panics.load(Ordering::SeqCst), 0);
    // Client and server are in this process.
    has_grown_little(before, chart_limit("resources"));
}
