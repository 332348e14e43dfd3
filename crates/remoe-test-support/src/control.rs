//! The control interface of a main function.

use crate::deadline::{LONG, SOON, until, within};
use remoe_proto::identity::{Connector, Trust};
use remoe_proto::v1::generate_event::Event;
use remoe_proto::v1::main_model_client::MainModelClient;
use remoe_proto::v1::{
    DescribeMainRequest, Endpoint, Finished, GenerateEvent, GenerateRequest, InspectReply, InspectRequest,
    LayerExperts, Routing, RoutingAck, TokenIds, generate_request, inspect_request,
};
use remoe_proto::{MAX_CONTROL_MESSAGE, STREAM_WINDOW};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use tonic::transport::{Channel, Endpoint as Address};
use tonic::{Status, Streaming};

/// An endpoint and the experts that it hosts.
pub type Hosted = (SocketAddr, Vec<LayerExperts>);

/// A client of one main function.
pub struct Control {
    client: MainModelClient<Channel>,
    generation: AtomicU64,
}

impl Control {
    /// Connects when it is first used.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self::within(address, None)
    }

    /// As [`Self::new`], within TLS if there is a `trust`.
    #[must_use]
    pub fn within(address: SocketAddr, trust: Option<Trust>) -> Self {
        let channel = Address::from_shared(format!("http://{address}")).expect("an address makes a URI");
        let channel = channel.initial_stream_window_size(STREAM_WINDOW);
        let channel = channel.connect_with_connector_lazy(Connector::new(trust));
        Self {
            client: MainModelClient::new(channel).max_decoding_message_size(MAX_CONTROL_MESSAGE),
            generation: AtomicU64::new(0),
        }
    }

    /// The client itself, for requests that no launcher makes.
    #[must_use]
    pub fn client(&self) -> MainModelClient<Channel> {
        self.client.clone()
    }

    /// Puts the next generation in force, whatever problems its endpoints have.
    pub async fn try_route(&self, endpoints: &[SocketAddr], remote: &[LayerExperts]) -> RoutingAck {
        let whole: Vec<Hosted> = endpoints.iter().map(|&address| (address, vec![])).collect();
        self.try_route_parts(&whole, remote).await
    }

    /// As [`Self::try_route`], with the experts that each endpoint hosts; empty: all that are remote.
    pub async fn try_route_parts(&self, endpoints: &[Hosted], remote: &[LayerExperts]) -> RoutingAck {
        let generation = self.generation.fetch_add(1, Ordering::Relaxed) + 1;
        let endpoints = endpoints.iter().map(|(address, experts)| Endpoint {
            address: address.to_string(),
            layers: vec![],
            experts: experts.clone(),
        });
        let routing = Routing {
            generation,
            endpoints: endpoints.collect(),
            remote: remote.to_vec(),
            ..Routing::default()
        };
        let ack = within(SOON, "SetRouting", self.client.clone().set_routing(routing)).await;
        let ack = ack.expect("the routing is accepted").into_inner();
        assert_eq!(ack.generation, generation, "the generation in force");
        ack
    }

    /// Puts the next generation in force; every endpoint must be usable.
    pub async fn route(&self, endpoints: &[SocketAddr], remote: &[LayerExperts]) {
        let ack = self.try_route(endpoints, remote).await;
        assert_eq!(ack.problems, [], "endpoints that cannot be used");
    }

    /// As [`Self::route`], with the experts that each endpoint hosts; empty: all that are remote.
    pub async fn route_parts(&self, endpoints: &[Hosted], remote: &[LayerExperts]) {
        let ack = self.try_route_parts(endpoints, remote).await;
        assert_eq!(ack.problems, [], "endpoints that cannot be used");
    }

    /// Returns once all local experts have been read, for tests that measure what comes after.
    pub async fn all_experts_read(&self) {
        until(SOON, "the local experts", async || {
            let described = self.client().describe(DescribeMainRequest::default()).await;
            described.ok().filter(|described| described.get_ref().arriving == 0)
        })
        .await;
    }

    /// One prompt through the model, with hidden states.
    pub async fn inspect(&self, prompt: inspect_request::Prompt) -> InspectReply {
        let request = InspectRequest { prompt: Some(prompt), hidden: true, scores: false };
        let reply = within(SOON, "Inspect", self.client.clone().inspect(request)).await;
        reply.expect("the inspection succeeds").into_inner()
    }

    /// As [`Self::inspect`], for token ids.
    pub async fn inspect_ids(&self, ids: &[u32]) -> InspectReply {
        self.inspect(inspect_request::Prompt::Ids(TokenIds { ids: ids.to_vec() })).await
    }

    /// One generation, begun.
    pub async fn begin(&self, request: GenerateRequest) -> Result<GenerationStream, Status> {
        let stream = within(SOON, "the start of Generate", self.client.clone().generate(request)).await?;
        Ok(GenerationStream { stream: stream.into_inner(), prompt_ids: Vec::new(), pieces: Vec::new() })
    }

    /// One generation, to its end.
    pub async fn generate(&self, request: GenerateRequest) -> GenerationResult {
        let generation = self.begin(request).await.expect("the generation is accepted");
        generation.finish().await.expect("the generation succeeds")
    }

    /// Repeats `request` until no function was late, and returns that outcome. On a busy machine a function may be
    /// late: it is asked again or done without.
    pub async fn generate_in_peace(&self, request: &GenerateRequest) -> Finished {
        let in_peace = async || {
            let finished = self.generate(request.clone()).await.finished;
            let calls = finished.experts.as_ref()?;
            ((calls.fallback, calls.retries) == (0, 0)).then_some(finished)
        };
        until(LONG, "a generation in peace", in_peace).await
    }
}

/// A greedy request for exactly `max_tokens` after `ids`.
#[must_use]
pub fn greedy(ids: &[u32], max_tokens: u32) -> GenerateRequest {
    GenerateRequest {
        prompt: Some(generate_request::Prompt::Ids(TokenIds { ids: ids.to_vec() })),
        max_tokens,
        temperature: Some(0.0),
        ignore_eos: true,
        ..GenerateRequest::default()
    }
}

/// As [`greedy`], with tokens drawn at random.
#[must_use]
pub fn seeded(ids: &[u32], max_tokens: u32, seed: u64) -> GenerateRequest {
    GenerateRequest { temperature: Some(0.8), seed, ..greedy(ids, max_tokens) }
}

/// A generation on its way.
pub struct GenerationStream {
    stream: Streaming<GenerateEvent>,
    prompt_ids: Vec<u32>,
    pieces: Vec<u32>,
}

/// Outcome of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationResult {
    /// The prompt as the model saw it.
    pub prompt_ids: Vec<u32>,
    /// Figures and tokens.
    pub finished: Finished,
}

impl GenerationStream {
    /// Waits until `count` tokens have come.
    ///
    /// # Errors
    /// The generation failed before.
    pub async fn tokens(&mut self, count: usize) -> Result<(), Status> {
        while self.pieces.len() < count {
            let finished = self.step().await?;
            assert_eq!(finished, None, "the generation ended before {count} tokens");
        }
        Ok(())
    }

    /// Waits for the end.
    ///
    /// # Errors
    /// The generation failed.
    pub async fn finish(mut self) -> Result<GenerationResult, Status> {
        loop {
            if let Some(finished) = self.step().await? {
                assert_eq!(finished.tokens, self.pieces, "the tokens of the pieces and of the end");
                return Ok(GenerationResult { prompt_ids: self.prompt_ids, finished });
            }
        }
    }

    async fn step(&mut self) -> Result<Option<Finished>, Status> {
        let message = within(LONG, "the next event of a generation", self.stream.message()).await?;
        let event = message.and_then(|message| message.event);
        match event.ok_or_else(|| Status::unavailable("the generation broke off"))? {
            Event::Started(started) => self.prompt_ids = started.prompt_ids,
            Event::Piece(piece) => self.pieces.extend(piece.ids),
            Event::Finished(finished) => return Ok(Some(finished)),
        }
        Ok(None)
    }
}
