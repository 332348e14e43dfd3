//! Client of the control interface of a main function.

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

/// Address of an endpoint with the experts that it hosts.
pub type Hosted = (SocketAddr, Vec<LayerExperts>);

/// Control client of one main function.
pub struct Control {
    client: MainModelClient<Channel>,
    generation: AtomicU64,
}

impl Control {
    /// Creates a client that connects on first use.
    #[must_use]
    pub fn new(address: SocketAddr) -> Self {
        Self::within(address, None)
    }

    /// Creates a client as [`Self::new`] does, with TLS if there is a `trust`.
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

    /// Returns the gRPC client, for requests that launchers never send.
    #[must_use]
    pub fn client(&self) -> MainModelClient<Channel> {
        self.client.clone()
    }

    /// Sets the next routing generation and returns the acknowledgement with any problems of endpoints.
    pub async fn try_route(&self, endpoints: &[SocketAddr], remote: &[LayerExperts]) -> RoutingAck {
        let whole: Vec<Hosted> = endpoints.iter().map(|&address| (address, vec![])).collect();
        self.try_route_parts(&whole, remote).await
    }

    /// Sets the next generation as [`Self::try_route`] does, with the experts of each endpoint; an empty list means
    /// all remote experts.
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

    /// Sets the next routing generation. All endpoints must be usable.
    pub async fn route(&self, endpoints: &[SocketAddr], remote: &[LayerExperts]) {
        let ack = self.try_route(endpoints, remote).await;
        assert_eq!(ack.problems, [], "endpoints that cannot be used");
    }

    /// Sets the next generation as [`Self::route`] does, with the experts of each endpoint; an empty list means all
    /// remote experts.
    pub async fn route_parts(&self, endpoints: &[Hosted], remote: &[LayerExperts]) {
        let ack = self.try_route_parts(endpoints, remote).await;
        assert_eq!(ack.problems, [], "endpoints that cannot be used");
    }

    /// Waits until all local experts are loaded.
    pub async fn all_experts_read(&self) {
        until(SOON, "the local experts", async || {
            let described = self.client().describe(DescribeMainRequest::default()).await;
            described.ok().filter(|described| described.get_ref().arriving == 0)
        })
        .await;
    }

    /// Runs one prompt through the model and returns its hidden states.
    pub async fn inspect(&self, prompt: inspect_request::Prompt) -> InspectReply {
        let request = InspectRequest { prompt: Some(prompt), hidden: true, scores: false };
        let reply = within(SOON, "Inspect", self.client.clone().inspect(request)).await;
        reply.expect("the inspection succeeds").into_inner()
    }

    /// Runs [`Self::inspect`] for token ids.
    pub async fn inspect_ids(&self, ids: &[u32]) -> InspectReply {
        self.inspect(inspect_request::Prompt::Ids(TokenIds { ids: ids.to_vec() })).await
    }

    /// Starts a generation.
    pub async fn begin(&self, request: GenerateRequest) -> Result<GenerationStream, Status> {
        let stream = within(SOON, "the start of Generate", self.client.clone().generate(request)).await?;
        Ok(GenerationStream { stream: stream.into_inner(), prompt_ids: Vec::new(), pieces: Vec::new() })
    }

    /// Runs a generation to its end.
    pub async fn generate(&self, request: GenerateRequest) -> GenerationResult {
        let generation = self.begin(request).await.expect("the generation is accepted");
        generation.finish().await.expect("the generation succeeds")
    }

    /// Repeats `request` until no remote function was late, as one may be on a busy machine, and returns that
    /// outcome.
    pub async fn generate_in_peace(&self, request: &GenerateRequest) -> Finished {
        let undisturbed = async || {
            let finished = self.generate(request.clone()).await.finished;
            let calls = finished.experts.as_ref()?;
            ((calls.fallback, calls.retries) == (0, 0)).then_some(finished)
        };
        until(LONG, "a generation in peace", undisturbed).await
    }
}

/// Returns a greedy request for exactly `max_tokens` tokens after `ids`.
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

/// Returns a request like [`greedy`] with sampled tokens.
#[must_use]
pub fn seeded(ids: &[u32], max_tokens: u32, seed: u64) -> GenerateRequest {
    GenerateRequest { temperature: Some(0.8), seed, ..greedy(ids, max_tokens) }
}

/// Running generation.
pub struct GenerationStream {
    stream: Streaming<GenerateEvent>,
    prompt_ids: Vec<u32>,
    pieces: Vec<u32>,
}

/// Outcome of a generation.
#[derive(Debug, Clone, PartialEq)]
pub struct GenerationResult {
    /// Token ids of the prompt, as the model received them.
    pub prompt_ids: Vec<u32>,
    /// Tokens and figures.
    pub finished: Finished,
}

impl GenerationStream {
    /// Waits for the first `count` tokens.
    ///
    /// # Errors
    /// The generation failed before that.
    pub async fn tokens(&mut self, count: usize) -> Result<(), Status> {
        while self.pieces.len() < count {
            let finished = self.step().await?;
            assert_eq!(finished, None, "the generation ended before {count} tokens");
        }
        Ok(())
    }

    /// Waits for the end of the generation.
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
