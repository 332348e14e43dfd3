//! Script of one request, derived from its number alone.

/// Pseudorandom choices from a seed (SplitMix64).
#[derive(Clone)]
pub(super) struct SeededChoices(u64);

impl SeededChoices {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Returns a number in `0..end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// Returns true in `percent` of all cases.
    pub(super) fn with_probability(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// API of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Api {
    Completions,
    Chat,
    Responses,
    Messages,
    Embeddings,
}

impl Api {
    pub(super) fn path(self) -> &'static str {
        match self {
            Self::Completions => "/v1/completions",
            Self::Chat => "/v1/chat/completions",
            Self::Responses => "/v1/responses",
            Self::Messages => "/v1/messages",
            Self::Embeddings => "/v1/embeddings",
        }
    }

    /// Reports if the usage has figures when the request asks for them.
    pub(super) fn has_figures(self) -> bool {
        matches!(self, Self::Completions | Self::Chat)
    }

    /// Returns the text that marks the end of a complete stream.
    pub(super) fn end(self) -> &'static str {
        match self {
            Self::Completions | Self::Chat | Self::Embeddings => "data: [DONE]\n\n",
            Self::Responses => "event: response.completed\n",
            Self::Messages => "event: message_stop\n",
        }
    }
}

/// Fault of a main function that gets the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The process ends before it answers.
    Dies,
    /// The process ends when this many thousandths of its answer were sent.
    DiesMidway(u64),
    /// It answers 503, as during shutdown.
    ShutsDown,
    /// It answers 400.
    Refuses,
    /// It reports tokens and no cost.
    OmitsCost,
    SendsInvalidCost,
    /// It reports more than is possible.
    OverstatesCost,
}

/// Behaviour of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientBehaviour {
    Reads,
    ReadsSlowly,
    /// It disconnects after reading this many bytes.
    Leaves(usize),
}

/// Behaviour of client and main functions for one request.
#[derive(Debug, Clone)]
pub(super) struct Script {
    pub(super) api: Api,
    pub(super) is_stream: bool,
    pub(super) has_figures: bool,
    pub(super) has_header: bool,
    pub(super) takes_trailers: bool,
    pub(super) client: ClientBehaviour,
    /// Fault of each attempt.
    pub(super) faults: [Fault; 3],
    /// Number of events with text in a stream, or of choices.
    pub(super) parts: u64,
    /// Size of the first of them in bytes.
    pub(super) text: usize,
    /// Delay of the answer in milliseconds.
    pub(super) delay_ms: u64,
    /// Seed of the main function's other choices.
    pub(super) seed: u64,
}

impl Script {
    pub(super) fn for_request(number: u64) -> Self {
        let mut choices = SeededChoices::new(number);
        let api = match choices.below(10) {
            0..=3 => Api::Completions,
            4..=6 => Api::Chat,
            7 => Api::Responses,
            8 => Api::Messages,
            _ => Api::Embeddings,
        };
        let client = match choices.below(100) {
            0..=7 => ClientBehaviour::Leaves(0),
            8..=24 => ClientBehaviour::Leaves(choices.below(1800) as usize),
            25..=29 => ClientBehaviour::ReadsSlowly,
            _ => ClientBehaviour::Reads,
        };
        let mut fault = |_| match choices.below(100) {
            0 => Fault::Dies,
            1..=7 => Fault::DiesMidway(choices.below(1000)),
            8 => Fault::ShutsDown,
            9..=10 => Fault::Refuses,
            11..=12 => Fault::OmitsCost,
            13 => Fault::SendsInvalidCost,
            14 => Fault::OverstatesCost,
            _ => Fault::None,
        };
        let faults = [0, 1, 2].map(&mut fault);
        // Some exceed the size up to which the gateway reads an answer before it sends any of it.
        let text = if choices.below(200) == 0 { 1_100_000 } else { choices.below(300) as usize };
        Self {
            api,
            is_stream: api != Api::Embeddings && choices.with_probability(50),
            has_figures: choices.with_probability(75),
            has_header: choices.with_probability(75),
            takes_trailers: choices.with_probability(75),
            client,
            faults,
            parts: 1 + choices.below(4),
            text,
            delay_ms: if choices.with_probability(10) { 1 + choices.below(20) } else { 0 },
            seed: choices.next(),
        }
    }

    /// Returns the HTTP request number `number`.
    pub(super) fn request(&self, number: u64) -> String {
        let (stream, figures) = (self.is_stream, self.has_figures);
        let body = format!(
            r#"{{"model":"m","input":"x","prompt":"x","stream":{stream},"include_figures":{figures}}}"#
        );
        let cost = if self.has_header { "x-remoe-cost: yes\r\n" } else { "" };
        let trailers = if self.takes_trailers { "TE: trailers\r\n" } else { "" };
        // The gateway must drop a client's internal headers.
        format!(
            "POST {} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\nX-Request-Id: \
             {number}\r\nx-remoe-cost-placeholder: mine\r\n{cost}{trailers}Content-Length: {}\r\n\r\n{body}",
            self.api.path(),
            body.len()
        )
    }
}
