use crate::error::{BenchError, Result, While};
use remoe_wire::v1::expert_function_client::ExpertFunctionClient;
use remoe_wire::v1::forward_reply::Outcome;
use remoe_wire::v1::forward_request::Body;
use remoe_wire::v1::{ForwardReply, ForwardRequest, Work};
use remoe_wire::{MAX_MESSAGE, STREAM_WINDOW};
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Endpoint;

/// An answer that stays away for so long never comes.
const LIMIT: Duration = Duration::from_secs(30);

/// How to wait for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Wait {
    /// How long to poll before sleeping.
    pub(crate) poll: Duration,
}

impl Wait {
    /// As the engine waits: `POLL` in main-model-fn/src/experts/exchange.rs.
    pub(crate) const ENGINE: Self = Self { poll: Duration::from_micros(100) };
    /// Polls until the answer is there.
    pub(crate) const SPIN: Self = Self { poll: LIMIT };
}

/// A `Forward` stream on a current-thread runtime that this thread drives, as the engine's links are:
/// a task passes answers on, the caller polls the runtime for a bounded time and then sleeps.
#[derive(Debug)]
pub(crate) struct Conversation {
    runtime: Runtime,
    requests: mpsc::UnboundedSender<ForwardRequest>,
    replies: mpsc::UnboundedReceiver<std::result::Result<ForwardReply, String>>,
}

/// An answer and the time that it took.
#[derive(Debug, Clone)]
pub(crate) struct Answer {
    pub(crate) rows: Vec<u8>,
    pub(crate) round_trip: Duration,
    /// As the function reports it.
    pub(crate) compute: Duration,
}

impl Conversation {
    pub(crate) fn open(address: SocketAddr) -> Result<Self> {
        let opening = || format!("opening a stream to {address}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().doing(opening)?;
        let (requests, outbound) = mpsc::unbounded_channel();
        let (passed, replies) = mpsc::unbounded_channel();
        let mut stream = runtime.block_on(async {
            let channel = Endpoint::from_shared(format!("http://{address}"))
                .doing(opening)?
                .tcp_nodelay(true)
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(STREAM_WINDOW)
                .connect()
                .await
                .doing(opening)?;
            let mut client = ExpertFunctionClient::new(channel)
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE);
            let response = client.forward(UnboundedReceiverStream::new(outbound)).await.doing(opening)?;
            Ok(response.into_inner())
        })?;
        runtime.spawn(async move {
            loop {
                let reply = match stream.message().await {
                    Ok(Some(reply)) => Ok(reply),
                    Ok(None) => Err("the function closed the stream".to_owned()),
                    Err(status) => Err(status.message().to_owned()),
                };
                let last = reply.is_err();
                if passed.send(reply).is_err() || last {
                    return;
                }
            }
        });
        Ok(Self { runtime, requests, replies })
    }

    /// Sends `work` and waits for its answer.
    pub(crate) fn ask(&mut self, work: Work, wait: Wait) -> Result<Answer> {
        let asking = || "asking a remote function";
        let started = Instant::now();
        self.requests.send(ForwardRequest { body: Some(Body::Work(work)) }).doing(asking)?;
        let replies = &mut self.replies;
        let reply = self.runtime.block_on(async {
            while started.elapsed() < wait.poll {
                if let Ok(reply) = replies.try_recv() {
                    return Some(reply);
                }
                tokio::task::yield_now().await;
            }
            tokio::time::timeout(LIMIT, replies.recv()).await.ok().flatten()
        });
        let round_trip = started.elapsed();
        let reply = reply.ok_or_else(|| BenchError::new(asking(), "no answer"))?.doing(asking)?;
        match reply.outcome {
            Some(Outcome::Rows(rows)) => Ok(Answer {
                rows: rows.rows.to_vec(),
                round_trip,
                compute: Duration::from_micros(rows.compute_us.into()),
            }),
            Some(Outcome::Failure(failure)) => Err(BenchError::new(asking(), failure.message)),
            None => Err(BenchError::new(asking(), "an answer without an outcome")),
        }
    }
}
