//! Script of one request, which follows from its number alone.

/// Numbers that follow from a seed (SplitMix64).
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

    /// One of `0..end`.
    pub(super) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True in `percent` of all cases.
    pub(super) fn is(&mut self, percent: u64) -> bool {
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

    /// Returns whether the usage has figures where they are asked for.
    pub(super) fn has_figures(self) -> bool {
        matches!(self, Self::Completions | Self::Chat)
    }

    /// The end of a stream that is whole.
    pub(super) fn end(self) -> &'static str {
        match self {
            Self::Completions | Self::Chat | Self::Embeddings => "data: [DONE]\n\n",
            Self::Responses => "event: response.completed\n",
            Self::Messages => "event: message_stop\n",
        }
    }
}

/// Behaviour of a main function that gets the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fault {
    None,
    /// The process ends before it answers.
    Dies,
    /// The process ends when so many thousandths of its answer have left.
    DiesAt(u64),
    /// It answers that it is about to end.
    SentAway,
    /// It refuses the request.
    Refuses,
    /// It says nothing of what the answer took, or nothing that can be read.
    TellsNothing,
    TellsNonsense,
    /// It says more than can be.
    TellsTooMuch,
}

/// Behaviour of the client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClientBehaviour {
    Reads,
    ReadsSlowly,
    /// It goes when it has read so many bytes.
    Leaves(usize),
}

/// One request.
#[derive(Debug, Clone)]
pub(super) struct Script {
    pub(super) api: Api,
    pub(super) is_stream: bool,
    pub(super) has_figures: bool,
    pub(super) has_header: bool,
    pub(super) takes_trailers: bool,
    pub(super) client: ClientBehaviour,
    /// For each time that a main function gets it.
    pub(super) faults: [Fault; 3],
    /// Events of a stream with text, or choices.
    pub(super) parts: u64,
    /// Bytes of the first of them.
    pub(super) text: usize,
    /// Milliseconds before the answer begins.
    pub(super) late: u64,
    /// For what else the main function decides.
    pub(super) seed: u64,
}

impl Script {
    pub(super) fn of(number: u64) -> Self {
        let mut dice = SeededChoices::new(number);
        let api = match dice.below(10) {
            0..=3 => Api::Completions,
            4..=6 => Api::Chat,
            7 => Api::Responses,
            8 => Api::Messages,
            _ => Api::Embeddings,
        };
        let client = match dice.below(100) {
            0..=7 => ClientBehaviour::Leaves(0),
            8..=24 => ClientBehaviour::Leaves(dice.below(1800) as usize),
            25..=29 => ClientBehaviour::ReadsSlowly,
            _ => ClientBehaviour::Reads,
        };
        let mut fault = |_| match dice.below(100) {
            0 => Fault::Dies,
            1..=7 => Fault::DiesAt(dice.below(1000)),
            8 => Fault::SentAway,
            9..=10 => Fault::Refuses,
            11..=12 => Fault::TellsNothing,
            13 => Fault::TellsNonsense,
            14 => Fault::TellsTooMuch,
            _ => Fault::None,
        };
        let faults = [0, 1, 2].map(&mut fault);
        // Some are more than is read whole before the client gets any of it.
        let text = if dice.below(200) == 0 { 1_100_000 } else { dice.below(300) as usize };
        Self {
            api,
            is_stream: api != Api::Embeddings && dice.is(50),
            has_figures: dice.is(75),
            has_header: dice.is(75),
            takes_trailers: dice.is(75),
            client,
            faults,
            parts: 1 + dice.below(4),
            text,
            late: if dice.is(10) { 1 + dice.below(20) } else { 0 },
            seed: dice.next(),
        }
    }

    /// The request, on a connection of its own.
    pub(super) fn request(&self, number: u64) -> String {
        let (stream, figures) = (self.is_stream, self.has_figures);
        let body = format!(
            r#"{{"model":"m","input":"x","prompt":"x","stream":{stream},"include_figures":{figures}}}"#
        );
        let cost = if self.has_header { "x-remoe-cost: yes\r\n" } else { "" };
        let trailers = if self.takes_trailers { "TE: trailers\r\n" } else { "" };
        // What clients send under the gateway's own names is dropped.
        format!(
            "POST {} HTTP/1.1\r\nHost: test\r\nConnection: close\r\nContent-Type: application/json\r\nX-Request-Id: \
             {number}\r\nx-remoe-cost-placeholder: mine\r\n{cost}{trailers}Content-Length: {}\r\n\r\n{body}",
            self.api.path(),
            body.len()
        )
    }
}
