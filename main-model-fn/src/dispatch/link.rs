//! Connection to one remote function: connects, checks the function, runs the stream, and reconnects after a failure.
//!
//! A link's tasks run on the engine's own single-threaded runtime, so that sending a message or receiving an answer wakes
//! no other thread.

use super::counting::CountingConnector;
use remoe_proto::identity::Trust;
use remoe_proto::v1::expert_function_client::ExpertFunctionClient;
use remoe_proto::v1::forward_reply::Outcome;
use remoe_proto::v1::forward_request::Body;
use remoe_proto::v1::{DescribeRequest, ForwardReply, ForwardRequest, FunctionDescription, LayerExperts};
use remoe_proto::{MAX_MESSAGE, STREAM_WINDOW, WIRE_VERSION};
use std::collections::{BTreeSet, HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc};
use tokio::time::{sleep, timeout};
use tonic::transport::{Channel, Endpoint};

/// Timeout of each step of connecting (TCP, `Describe`, `Forward`). It covers the time in which LibTorch computes a layer
/// and no link makes progress.
const STEP_TIMEOUT: Duration = Duration::from_secs(3);
/// Largest HTTP/2 frame of an answer.
const FRAME_BYTES: u32 = 64 << 10;
/// Most cancelled messages per link whose answers are still accepted: as many as a function has in flight.
const MAX_CANCELLED: usize = 1024;
/// Longest text of a refusal in bytes.
const MAX_REFUSAL_BYTES: usize = 4096;
/// Time that a draining replica has to finish.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(30);
/// First time for which the circuit of a failed replica stays open.
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// Longest time for which it stays open: it doubles with each failure.
const MAX_PAUSE: Duration = Duration::from_secs(30);

/// Properties that a remote function must have before it gets work.
#[derive(Debug, Clone)]
pub(crate) struct RemoteRequirements {
    pub(crate) checkpoint: String,
    pub(crate) dtype: String,
    pub(crate) numerics_class: String,
    pub(crate) hidden_size: usize,
    /// Experts that this endpoint must serve.
    pub(crate) sets: Vec<LayerExperts>,
    /// Identity that the function must have; `None` accepts any.
    pub(crate) trust: Option<Trust>,
}

/// Event that a link reports to the engine.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// Answer over link `link`. The message may have been cancelled.
    Reply { link: u64, reply: ForwardReply },
    /// The stream of link `link` broke; no message sent on it will be answered.
    Broken { link: u64, message: String },
    /// The first attempt to connect has succeeded or failed.
    Settled,
}

/// State of a link.
#[derive(Debug, Clone)]
pub(crate) enum LinkState {
    Connecting,
    Ready(OpenStream),
    /// The replica gets no new work but still answers messages in flight.
    Draining,
    /// The replica failed and gets no work until the link has reconnected.
    CircuitOpen {
        message: String,
    },
}

/// Sending half of an open stream.
#[derive(Debug, Clone)]
pub(crate) struct OpenStream {
    outbound: mpsc::UnboundedSender<ForwardRequest>,
    in_flight: Arc<Mutex<InFlightMessages>>,
    /// Notified when the engine opens the circuit or lets the replica drain.
    state_changed: Arc<Notify>,
}

/// Messages sent over a stream and not answered. Answers to anything else are rejected.
#[derive(Debug, Default)]
struct InFlightMessages {
    /// Largest valid answer in bytes, by message id.
    open: HashMap<u64, usize>,
    /// Id and largest valid answer in bytes of cancelled messages, the oldest first.
    cancelled: VecDeque<(u64, usize)>,
}

impl InFlightMessages {
    /// Records a message that is sent.
    fn record_sent(&mut self, request: &ForwardRequest) {
        match &request.body {
            Some(Body::Work(work)) => {
                let row_bytes = work.rows.len().checked_div(work.counts.len()).unwrap_or(0);
                self.open.insert(work.id, row_bytes.saturating_mul(work.experts.len()));
            }
            Some(Body::Cancel(cancel)) => {
                let Some(max_bytes) = self.open.remove(&cancel.id) else { return };
                if self.cancelled.len() == MAX_CANCELLED {
                    self.cancelled.pop_front();
                }
                self.cancelled.push_back((cancel.id, max_bytes));
            }
            None => (),
        }
    }

    /// Checks a reply and removes its message.
    ///
    /// # Errors
    /// Fails if the reply belongs to no message or is too large.
    fn check_reply(&mut self, reply: &ForwardReply) -> Result<(), String> {
        let max_bytes = self.open.remove(&reply.id).or_else(|| {
            let index = self.cancelled.iter().position(|(id, _)| *id == reply.id)?;
            self.cancelled.remove(index).map(|(_, max_bytes)| max_bytes)
        });
        let max_bytes =
            max_bytes.ok_or_else(|| format!("reply to a message that was not sent: id {}", reply.id))?;
        match &reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() > max_bytes => {
                Err(format!("wrong answer size: expected at most {max_bytes} bytes, got {}", rows.rows.len()))
            }
            Some(Outcome::Failure(failure)) if failure.message.len() > MAX_REFUSAL_BYTES => Err(format!(
                "refusal too long: expected at most {MAX_REFUSAL_BYTES} bytes, got {}",
                failure.message.len()
            )),
            _ => Ok(()),
        }
    }
}

/// State shared by a link and its task.
struct LinkShared {
    id: u64,
    address: String,
    expected: RemoteRequirements,
    state: Mutex<LinkState>,
    /// Bytes handed to the operating system on the link's connections.
    written: Arc<AtomicU64>,
    events: mpsc::UnboundedSender<LinkEvent>,
}

/// Engine's end of a link. Dropping it closes the connection.
pub(crate) struct Link {
    shared: Arc<LinkShared>,
    task: tokio::task::JoinHandle<()>,
}

impl Link {
    /// Opens a link and starts connecting to `address` on `runtime`. Events carry `id`.
    pub(crate) fn open(
        runtime: &tokio::runtime::Runtime,
        id: u64,
        address: String,
        expected: RemoteRequirements,
        events: mpsc::UnboundedSender<LinkEvent>,
    ) -> Self {
        let shared = Arc::new(LinkShared {
            id,
            address,
            expected,
            state: Mutex::new(LinkState::Connecting),
            written: Arc::default(),
            events,
        });
        let task = runtime.spawn(run(shared.clone()));
        Self { shared, task }
    }

    pub(crate) fn id(&self) -> u64 {
        self.shared.id
    }

    pub(crate) fn address(&self) -> &str {
        &self.shared.address
    }

    pub(crate) fn state(&self) -> LinkState {
        self.shared.state().clone()
    }

    pub(crate) fn is_ready(&self) -> bool {
        matches!(*self.shared.state(), LinkState::Ready(_))
    }

    /// Returns the experts that this endpoint must serve.
    pub(crate) fn sets(&self) -> &[LayerExperts] {
        &self.shared.expected.sets
    }

    /// Queues `request`. Returns false if the link is not ready.
    pub(crate) fn send(&self, request: ForwardRequest) -> bool {
        match &*self.shared.state() {
            LinkState::Ready(stream) => {
                lock(&stream.in_flight).record_sent(&request);
                stream.outbound.send(request).is_ok()
            }
            _ => false,
        }
    }

    /// Returns the bytes written to the connection so far.
    pub(crate) fn written(&self) -> u64 {
        self.shared.written.load(Ordering::Relaxed)
    }

    /// Opens the circuit: ends the stream of a replica that hangs or answers wrongly.
    pub(crate) fn open_circuit(&self, message: &str) {
        self.leave_ready(LinkState::CircuitOpen { message: message.to_owned() });
    }

    /// Stops sending work to a replica that drains; answers to messages in flight are still accepted.
    pub(crate) fn drain(&self) {
        self.leave_ready(LinkState::Draining);
    }

    /// Changes from ready to `next`; keeps any other state.
    fn leave_ready(&self, next: LinkState) {
        let mut state = self.shared.state();
        if let LinkState::Ready(stream) = &*state {
            stream.state_changed.notify_one();
            *state = next;
        }
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl LinkShared {
    fn state(&self) -> MutexGuard<'_, LinkState> {
        lock(&self.state)
    }

    fn set_state(&self, state: LinkState) {
        *self.state() = state;
    }
}

/// End of a stream.
enum StreamEnd {
    /// The function closed it, as a draining function does.
    Closed,
    /// It broke, or could not be opened.
    Failed(String),
}

/// Connects and reconnects until the link is dropped.
async fn run(shared: Arc<LinkShared>) {
    let mut pause = FIRST_PAUSE;
    let mut is_settled = false;
    loop {
        let outcome = connect(&shared).await;
        let connected = outcome.is_ok();
        let ended = match outcome {
            Ok(client) => {
                let mut answered = false;
                let started = Instant::now();
                let end = run_stream(&shared, client, &mut is_settled, &mut answered).await;
                // A function that connects but never answers must not be retried every second.
                if answered || started.elapsed() > MAX_PAUSE {
                    pause = FIRST_PAUSE;
                }
                end
            }
            Err(message) => StreamEnd::Failed(message),
        };
        let message = match ended {
            // The function scales to zero or is replaced. If it should still run, the next attempt to connect fails.
            StreamEnd::Closed => {
                tracing::info!(address = %shared.address, "remote function ended");
                "the function closed the stream".to_owned()
            }
            StreamEnd::Failed(message) => {
                tracing::warn!(address = %shared.address, %message, connected, pause_s = pause.as_secs(), "remote function unavailable (circuit open)");
                message
            }
        };
        shared.set_state(LinkState::CircuitOpen { message: message.clone() });
        report_settled(&shared, &mut is_settled);
        let _engine_gone = shared.events.send(LinkEvent::Broken { link: shared.id, message });
        sleep(pause).await;
        pause = (pause * 2).min(MAX_PAUSE);
    }
}

/// Locks `mutex`. Every change under these locks is a single step, so a panic elsewhere leaves consistent data.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reports the end of the first attempt to connect, once.
fn report_settled(shared: &LinkShared, is_settled: &mut bool) {
    if !std::mem::replace(is_settled, true) {
        let _engine_gone = shared.events.send(LinkEvent::Settled);
    }
}

/// Connects and checks that the remote function is the one that the placement requires.
async fn connect(shared: &LinkShared) -> Result<ExpertFunctionClient<Channel>, String> {
    let endpoint = Endpoint::from_shared(format!("http://{}", shared.address))
        .map_err(|error| format!("invalid address {}: {error}", shared.address))?
        .connect_timeout(STEP_TIMEOUT)
        // The answer for one token then fits into a single frame.
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW);
    let connector = CountingConnector::new(shared.written.clone(), shared.expected.trust.clone());
    let channel = timeout(STEP_TIMEOUT, endpoint.connect_with_connector(connector))
        .await
        .map_err(|_| "connect timeout".to_owned())?
        .map_err(|error| with_sources(&error))?;
    let mut client = ExpertFunctionClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let description = timeout(STEP_TIMEOUT, client.describe(DescribeRequest {}))
        .await
        .map_err(|_| "Describe timeout".to_owned())?
        .map_err(|status| format!("Describe failed: {}", status.message()))?
        .into_inner();
    check(&shared.expected, &description)?;
    Ok(client)
}

/// Rejects a function with another checkpoint, dtype or numerics class, one that lacks a required expert, and one that
/// drains. Additional experts do not matter.
fn check(expected: &RemoteRequirements, found: &FunctionDescription) -> Result<(), String> {
    let same = |what: &str, expected: &str, found: &str| match expected == found {
        true => Ok(()),
        false => Err(format!("{what} mismatch: expected {expected:?}, got {found:?}")),
    };
    same("wire version", &WIRE_VERSION.to_string(), &found.wire_version.to_string())?;
    same("checkpoint", &expected.checkpoint, &found.checkpoint)?;
    same("dtype", &expected.dtype, &found.dtype)?;
    same("numerics class", &expected.numerics_class, &found.numerics_class)?;
    same("hidden size", &expected.hidden_size.to_string(), &found.hidden_size.to_string())?;
    if found.draining {
        return Err("the function is draining".to_owned());
    }
    for set in &expected.sets {
        let hosted: BTreeSet<u32> = found
            .hosted
            .iter()
            .filter(|hosted| hosted.layer == set.layer)
            .flat_map(|hosted| hosted.experts.iter().copied())
            .collect();
        if let Some(missing) = set.experts.iter().find(|expert| !hosted.contains(expert)) {
            return Err(format!("expert {missing} of layer {} is not hosted", set.layer));
        }
    }
    Ok(())
}

/// Opens the stream and passes messages until it ends. Sets `answered` to true if the function answered correctly.
async fn run_stream(
    shared: &LinkShared,
    mut client: ExpertFunctionClient<Channel>,
    is_settled: &mut bool,
    answered: &mut bool,
) -> StreamEnd {
    // Unbounded in type only: the engine has the messages of one layer in flight at most, and answers to anything else
    // are rejected.
    let (outbound, requests) = mpsc::unbounded_channel();
    let requests = tokio_stream::wrappers::UnboundedReceiverStream::new(requests);
    let mut replies = match timeout(STEP_TIMEOUT, client.forward(requests)).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return StreamEnd::Failed(format!("Forward failed: {}", status.message())),
        Err(_) => return StreamEnd::Failed("Forward timeout".to_owned()),
    };
    let (state_changed, in_flight) =
        (Arc::new(Notify::new()), Arc::new(Mutex::new(InFlightMessages::default())));
    let stream = OpenStream { outbound, in_flight: in_flight.clone(), state_changed: state_changed.clone() };
    shared.set_state(LinkState::Ready(stream));
    report_settled(shared, is_settled);
    let drain_timeout = sleep(Duration::MAX);
    tokio::pin!(drain_timeout);
    loop {
        let reply = tokio::select! {
            reply = replies.message() => reply,
            () = state_changed.notified() => match &*shared.state() {
                            LinkState::CircuitOpen { message } => {
                                // The function answers wrongly or too late: the next pause is longer.
                                *answered = false;
                                return StreamEnd::Failed(message.clone());
                }
                _ => {
                    drain_timeout.as_mut().reset(tokio::time::Instant::now() + DRAIN_TIMEOUT);
                    continue;
                }
            },
            () = &mut drain_timeout => return StreamEnd::Failed("drain timeout".to_owned()),
        };
        match reply {
            Ok(Some(reply)) => {
                if let Err(message) = lock(&in_flight).check_reply(&reply) {
                    // An invalid answer: the next pause is longer.
                    *answered = false;
                    return StreamEnd::Failed(message);
                }
                *answered = true;
                if shared.events.send(LinkEvent::Reply { link: shared.id, reply }).is_err() {
                    return StreamEnd::Failed("the engine has stopped".to_owned());
                }
            }
            Ok(None) => return StreamEnd::Closed,
            Err(status) => return StreamEnd::Failed(format!("stream failed: {}", status.message())),
        }
    }
}

/// Formats an error with its causes, as tonic's own text is only "transport error".
fn with_sources(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text = format!("{text}: {cause}");
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests;
