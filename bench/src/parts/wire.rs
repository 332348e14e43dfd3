//! Overhead of an exchange with a remote function over its computation, against raw TCP.
//!
//! Two widths of expert: 1024, OLMoE's, whose computation outlasts the engine's polling, so that the
//! answer finds it asleep; and 16, whose computation does not, so that only the exchange is left.

use super::{raw_tcp, work};
use crate::certificates::Certificates;
use crate::context::BenchContext;
use crate::error::{ErrorContext, Result};
use crate::pace::TimeShare;
use crate::remote::RemoteFunction;
use crate::report::{Bar, BenchSection};
use crate::series::Series;
use prost::Message;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::forward_request::Body;
use remoe_proto::v1::{ForwardReply, ForwardRequest, Rows};
use remoe_proto::{ForwardClient, PollSettings};
use serde_json::json;
use std::time::Duration;

const NAME: &str = "Added time per remote layer";
const ROUNDS: usize = 20;
/// Exchanges of a round, of each kind.
const EXCHANGES: usize = 100;

/// A remote function that has answered polls for a while before it sleeps.
const PAUSE: Duration = Duration::from_millis(10);

/// Bar for the time that TLS adds to an exchange, in microseconds.
const TLS_BAR: Bar = Bar::AtMost(15.0);

/// Bar for the time that is added per remote layer, in microseconds.
const ADDED_BAR: Bar = Bar::AtMost(60.0);
/// Bar for the added time as a multiple of raw TCP.
const RATIO_BAR: Bar = Bar::AtMost(6.0);

pub(super) fn measure(context: &BenchContext, share: &TimeShare) -> Result<BenchSection> {
    let exchanges = context.rounds(EXCHANGES);
    let hidden = work::shape(16).hidden;
    let (request, answer) = bytes(hidden);
    let mut cases = [
        WireCase::open(context, 16, PollSettings::ENGINE, "exchange alone (width 16)", true, false)?,
        WireCase::open(
            context,
            16,
            PollSettings::ENGINE,
            "exchange alone (width 16), within TLS",
            false,
            true,
        )?,
        WireCase::open(context, 1024, PollSettings::ENGINE, "OLMoE's experts (width 1024)", true, false)?,
        WireCase::open(context, 1024, PollSettings::SPIN, "OLMoE's experts, client spins", false, false)?,
    ];
    let mut raw = Series::default();
    let ending = share.rounds(NAME, context.rounds(ROUNDS), |round| {
        std::thread::sleep(PAUSE);
        let times = micros(raw_tcp::exchange(exchanges, request, answer)?);
        for case in &mut cases {
            std::thread::sleep(PAUSE);
            // The first round warms up.
            case.measure(exchanges, hidden, round > 0)?;
        }
        if round > 0 {
            raw.extend(times.median());
        }
        Ok(())
    });
    let mut part = BenchSection::new(
        NAME,
        json!({"rounds": ending.done, "exchanges": exchanges, "hidden": hidden, "experts": work::EXPERTS,
               "dtype": "bfloat16", "request_bytes": request, "answer_bytes": answer,
               "poll_us": PollSettings::ENGINE.poll.as_micros() as u64}),
    );
    part.add("raw TCP, both sides spin, p50", "µs", &raw);
    for case in &cases {
        case.report(&mut part, &raw);
    }
    let [plain, within_tls, ..] = &cases;
    let more = within_tls.added.minus(&plain.added);
    part.add_with_bar("exchange alone: more within TLS, p50", "µs", &more, TLS_BAR);
    part.note(format!(
        "One token for {} experts: {request} bytes out, {answer} back. Added is the round trip minus the \
         computation that the function reports; median, minimum and maximum are over the rounds' p50s. \
         The client polls for {} µs and then sleeps, as the engine does, unless it is said to spin.",
        work::EXPERTS,
        PollSettings::ENGINE.poll.as_micros(),
    ));
    part.conclude(ending);
    Ok(part)
}

/// A function with experts of one width, and what it took to talk to it.
struct WireCase {
    name: &'static str,
    wait: PollSettings,
    /// Set if the bars apply to this case.
    has_bar: bool,
    forward_client: ForwardClient,
    _function: RemoteFunction,
    asked: u64,
    added: Series,
    tail: Series,
    compute: Series,
}

impl WireCase {
    fn open(
        context: &BenchContext,
        width: usize,
        wait: PollSettings,
        name: &'static str,
        has_bar: bool,
        within_tls: bool,
    ) -> Result<Self> {
        let certificates = within_tls.then(Certificates::new).transpose()?;
        let model = context.model(&format!("one-layer-{width}"), &work::shape(width))?;
        let function = RemoteFunction::start(context, &model, work::LISTING, certificates)?;
        let forward_client = function.forward_client()?;
        Ok(Self {
            name,
            wait,
            has_bar,
            forward_client,
            _function: function,
            asked: 0,
            added: Series::default(),
            tail: Series::default(),
            compute: Series::default(),
        })
    }

    fn measure(&mut self, exchanges: usize, hidden: usize, counts: bool) -> Result<()> {
        let (mut added, mut compute) = (Vec::new(), Vec::new());
        for _ in 0..exchanges {
            self.asked += 1;
            let answer = self
                .forward_client
                .forward(work::one_token(self.asked, hidden), self.wait)
                .doing(|| "asking a remote function")?;
            added.push(answer.round_trip.saturating_sub(answer.compute));
            compute.push(answer.compute);
        }
        if counts {
            let added = micros(added);
            self.added.extend(added.median());
            self.tail.extend(added.quantile(0.99));
            self.compute.extend(micros(compute).median());
        }
        Ok(())
    }

    fn report(&self, part: &mut BenchSection, raw: &Series) {
        let figure = |what: &str| format!("{}: {what}", self.name);
        let ratio = self.added.over(raw);
        if self.has_bar {
            part.add_with_bar(figure("added, p50"), "µs", &self.added, ADDED_BAR);
            part.add_with_bar(figure("added / raw TCP"), "", &ratio, RATIO_BAR);
        } else {
            part.add(figure("added, p50"), "µs", &self.added);
            part.add(figure("added / raw TCP"), "", &ratio);
        }
        part.add(figure("added, p99"), "µs", &self.tail);
        part.add(figure("reported computation, p50"), "µs", &self.compute);
    }
}

fn micros(times: Vec<Duration>) -> Series {
    times.into_iter().map(|time| time.as_secs_f64() * 1e6).collect()
}

/// Bytes of a request and of its answer on the socket: the messages, their gRPC prefixes and the
/// heads of their HTTP/2 frames.
fn bytes(hidden: usize) -> (usize, usize) {
    const PREFIX: usize = 5;
    const FRAME_HEAD: usize = 9;
    const FRAME: usize = 16 << 10;
    let framed = |message: usize| {
        let bytes = PREFIX + message;
        bytes + bytes.div_ceil(FRAME) * FRAME_HEAD
    };
    let work = work::one_token(1, hidden);
    let rows = vec![0; work.rows.len() * work::EXPERTS as usize];
    let reply =
        ForwardReply { id: 1, outcome: Some(Outcome::Rows(Rows { rows: rows.into(), compute_us: 1 })) };
    let request = ForwardRequest { body: Some(Body::Work(work)) };
    (framed(request.encoded_len()), framed(reply.encoded_len()))
}
