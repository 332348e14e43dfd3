//! The connection to one remote function: connect, check, stream, and come back after a failure.
//!
//! A link's tasks run on the engine's own current-thread runtime, so that a message leaves and an
//! answer arrives without waking another thread.

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

/// How long one step of connecting (TCP, `Describe`, `Forward`) may take; links stand still while
/// LibTorch computes a layer.
const STEP_LIMIT: Duration = Duration::from_secs(3);
/// Largest HTTP/2 frame of an answer.
const FRAME_BYTES: u32 = 64 << 10;
/// Messages of a link that need no answer any more and may get one nevertheless: as many as a function has in flight.
const MOST_CANCELLED: usize = 1024;
/// Longest text of a refusal in bytes.
const LONGEST_REFUSAL: usize = 4096;
/// A replica that drains is done by then, or hangs.
const DRAIN_LIMIT: Duration = Duration::from_secs(30);
/// A sick replica is out for at least this long ..
const FIRST_PAUSE: Duration = Duration::from_secs(1);
/// .. and, failing again and again, for at most this long.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Properties that a remote function must agree on before it is trusted.
#[derive(Debug, Clone)]
pub(crate) struct RemoteRequirements {
    pub(crate) checkpoint: String,
    pub(crate) dtype: String,
    pub(crate) numerics_class: String,
    pub(crate) hidden_size: usize,
    /// Part of the remote sets that this endpoint is to serve.
    pub(crate) sets: Vec<LayerExperts>,
    /// Identity that the function must have; any if absent.
    pub(crate) trust: Option<Trust>,
}

/// Event that a link reports to the engine.
#[derive(Debug)]
pub(crate) enum LinkEvent {
    /// An answer from link `link`; its id may be long forgotten.
    Reply { link: u64, reply: ForwardReply },
    /// The stream of link `link` broke: nothing that was sent on it will be answered.
    Broken { link: u64, message: String },
    /// The first attempt to connect has ended, one way or the other.
    Settled,
}

/// Readiness of a link for work.
#[derive(Debug, Clone)]
pub(crate) enum LinkState {
    Connecting,
    Ready(OpenStream),
    /// Takes no work; answers to come still count.
    Resting,
    Sick {
        message: String,
    },
}

/// An open stream.
#[derive(Debug, Clone)]
pub(crate) struct OpenStream {
    outbound: mpsc::UnboundedSender<ForwardRequest>,
    asked: Arc<Mutex<InFlightMessages>>,
    /// The engine has lost its patience with this replica, or leaves it alone.
    changed: Arc<Notify>,
}

/// Messages that were sent over a stream and not answered: nothing else is taken from it.
#[derive(Debug, Default)]
struct InFlightMessages {
    /// Largest answer in bytes by id.
    open: HashMap<u64, usize>,
    /// Largest answer in bytes of each cancelled id, the oldest first.
    cancelled: VecDeque<(u64, usize)>,
}

impl InFlightMessages {
    /// Takes note of what leaves.
    fn send(&mut self, request: &ForwardRequest) {
        match &request.body {
            Some(Body::Work(work)) => {
                let row = work.rows.len().checked_div(work.counts.len()).unwrap_or(0);
                self.open.insert(work.id, row.saturating_mul(work.experts.len()));
            }
            Some(Body::Cancel(cancel)) => {
                let Some(most) = self.open.remove(&cancel.id) else { return };
                if self.cancelled.len() == MOST_CANCELLED {
                    self.cancelled.pop_front();
                }
                self.cancelled.push_back((cancel.id, most));
            }
            None => (),
        }
    }

    /// Takes an answer.
    ///
    /// # Errors
    /// Nothing was asked for that, or not so much: why the function is not to be trusted.
    fn take(&mut self, reply: &ForwardReply) -> Result<(), String> {
        let most = self.open.remove(&reply.id).or_else(|| {
            let at = self.cancelled.iter().position(|(id, _)| *id == reply.id)?;
            self.cancelled.remove(at).map(|(_, most)| most)
        });
        let most = most.ok_or_else(|| format!("reply to a message that was not sent: id {}", reply.id))?;
        match &reply.outcome {
            Some(Outcome::Rows(rows)) if rows.rows.len() > most => {
                Err(format!("wrong answer size: expected at most {most} bytes, got {}", rows.rows.len()))
            }
            Some(Outcome::Failure(failure)) if failure.message.len() > LONGEST_REFUSAL => Err(format!(
                "refusal too long: expected at most {LONGEST_REFUSAL} bytes, got {}",
                failure.message.len()
            )),
            _ => Ok(()),
        }
    }
}

struct LinkShared {
    id: u64,
    address: String,
    expected: RemoteRequirements,
    state: Mutex<LinkState>,
    /// Bytes handed to the operating system on this link's connections.
    written: Arc<AtomicU64>,
    events: mpsc::UnboundedSender<LinkEvent>,
}

/// The engine's end of a link. Dropping it closes the connection.
pub(crate) struct Link {
    shared: Arc<LinkShared>,
    task: tokio::task::JoinHandle<()>,
}

impl Link {
    /// Starts connecting to `address` on `runtime`. `id` names the link in events.
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

    /// Returns the part of the remote sets that this endpoint is to serve.
    pub(crate) fn sets(&self) -> &[LayerExperts] {
        &self.shared.expected.sets
    }

    /// Queues `request`; false when the link is not ready.
    pub(crate) fn send(&self, request: ForwardRequest) -> bool {
        match &*self.shared.state() {
            LinkState::Ready(conversation) => {
                locked(&conversation.asked).send(&request);
                conversation.outbound.send(request).is_ok()
            }
            _ => false,
        }
    }

    /// Bytes written to the connection so far.
    pub(crate) fn written(&self) -> u64 {
        self.shared.written.load(Ordering::Relaxed)
    }

    /// Takes the replica out and ends its stream: it hangs, or does not answer well.
    pub(crate) fn give_up(&self, message: &str) {
        self.leave(LinkState::Sick { message: message.to_owned() });
    }

    /// Takes the replica out without calling it sick: it drains, its answers to come still count.
    pub(crate) fn rest(&self) {
        self.leave(LinkState::Resting);
    }

    /// From ready to `next`; any other state stays.
    fn leave(&self, next: LinkState) {
        let mut state = self.shared.state();
        if let LinkState::Ready(conversation) = &*state {
            conversation.changed.notify_one();
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
        locked(&self.state)
    }

    fn set(&self, state: LinkState) {
        *self.state() = state;
    }
}

/// Way in which a stream ended.
enum StreamEnd {
    /// The function closed it, as one does that drains.
    Closed,
    /// It broke, or never began.
    Failed(String),
}

async fn run(shared: Arc<LinkShared>) {
    let mut pause = FIRST_PAUSE;
    let mut settled = false;
    loop {
        let outcome = connect(&shared).await;
        let connected = outcome.is_ok();
        let ended = match outcome {
            Ok(client) => {
                let mut answered = false;
                let since = Instant::now();
                let ended = converse(&shared, client, &mut settled, &mut answered).await;
                // A function that only connects and never answers must not be tried every second.
                if answered || since.elapsed() > LONGEST_PAUSE {
                    pause = FIRST_PAUSE;
                }
                ended
            }
            Err(message) => StreamEnd::Failed(message),
        };
        let message = match ended {
            // It falls asleep, or is replaced. Where it should still be there, the next attempt to connect fails.
            StreamEnd::Closed => {
                tracing::info!(address = %shared.address, "remote function ended");
                "the function closed the stream".to_owned()
            }
            StreamEnd::Failed(message) => {
                tracing::warn!(address = %shared.address, %message, connected, pause_s = pause.as_secs(), "remote function unavailable (circuit open)");
                message
            }
        };
        shared.set(LinkState::Sick { message: message.clone() });
        settle(&shared, &mut settled);
        let _engine_gone = shared.events.send(LinkEvent::Broken { link: shared.id, message });
        sleep(pause).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Every change of what is locked is whole: a panic elsewhere cannot have left it half-done.
fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn settle(shared: &LinkShared, settled: &mut bool) {
    if !std::mem::replace(settled, true) {
        let _engine_gone = shared.events.send(LinkEvent::Settled);
    }
}

/// Connects and makes sure that the function at the other end is the one that the placement means.
async fn connect(shared: &LinkShared) -> Result<ExpertFunctionClient<Channel>, String> {
    let endpoint = Endpoint::from_shared(format!("http://{}", shared.address))
        .map_err(|error| format!("invalid address {}: {error}", shared.address))?
        .connect_timeout(STEP_LIMIT)
        // An answer of one token is one frame, not several that are read one after the other.
        .max_frame_size(FRAME_BYTES)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(STREAM_WINDOW);
    let connector = CountingConnector::new(shared.written.clone(), shared.expected.trust.clone());
    let channel = timeout(STEP_LIMIT, endpoint.connect_with_connector(connector))
        .await
        .map_err(|_| "connect timeout".to_owned())?
        .map_err(|error| with_sources(&error))?;
    let mut client = ExpertFunctionClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE)
        .max_encoding_message_size(MAX_MESSAGE);
    let description = timeout(STEP_LIMIT, client.describe(DescribeRequest {}))
        .await
        .map_err(|_| "Describe timeout".to_owned())?
        .map_err(|status| format!("Describe failed: {}", status.message()))?
        .into_inner();
    check(&shared.expected, &description)?;
    Ok(client)
}

/// Refuses a function of another checkpoint, dtype or numerics class, one that lacks an expert which it is
/// to serve, and one that drains. What it hosts beside those does not matter.
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

/// Opens the stream and passes messages until it ends; returns how it did, and through `answered`
/// whether any answer came.
async fn converse(
    shared: &LinkShared,
    mut client: ExpertFunctionClient<Channel>,
    settled: &mut bool,
    answered: &mut bool,
) -> StreamEnd {
    // Unbounded in type only: the engine has one layer's messages in flight at most, and nothing is taken but answers
    // to them.
    let (outbound, requests) = mpsc::unbounded_channel();
    let requests = tokio_stream::wrappers::UnboundedReceiverStream::new(requests);
    let mut replies = match timeout(STEP_LIMIT, client.forward(requests)).await {
        Ok(Ok(response)) => response.into_inner(),
        Ok(Err(status)) => return StreamEnd::Failed(format!("Forward failed: {}", status.message())),
        Err(_) => return StreamEnd::Failed("Forward timeout".to_owned()),
    };
    let (changed, asked) = (Arc::new(Notify::new()), Arc::new(Mutex::new(InFlightMessages::default())));
    let open = OpenStream { outbound, asked: asked.clone(), changed: changed.clone() };
    shared.set(LinkState::Ready(open));
    settle(shared, settled);
    let drained = sleep(Duration::MAX);
    tokio::pin!(drained);
    loop {
        let reply = tokio::select! {
            reply = replies.message() => reply,
            () = changed.notified() => match &*shared.state() {
                LinkState::Sick { message } => {
                    // It answers, but not well: each time it is left alone for longer.
                    *answered = false;
                    return StreamEnd::Failed(message.clone());
                }
                _ => {
                    drained.as_mut().reset(tokio::time::Instant::now() + DRAIN_LIMIT);
                    continue;
                }
            },
            () = &mut drained => return StreamEnd::Failed("drain timeout".to_owned()),
        };
        match reply {
            Ok(Some(reply)) => {
                if let Err(message) = locked(&asked).take(&reply) {
                    // Left alone for longer each time.
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

/// An error with its causes: tonic's own text is only "transport error".
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
