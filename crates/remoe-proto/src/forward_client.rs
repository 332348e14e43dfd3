//! Client that sends a remote-expert function one request at a time, as the engine does: for measurements.

use crate::identity::{Connector, Trust};
use crate::v1::expert_function_client::ExpertFunctionClient;
use crate::v1::forward_reply::Outcome;
use crate::v1::forward_request::Body;
use crate::v1::{ForwardReply, ForwardRequest, Work};
use crate::{ErrorCode, MAX_MESSAGE, STREAM_WINDOW, ServiceError};
use bytes::Bytes;
use std::fmt::Display;
use std::time::{Duration, Instant};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::transport::Endpoint;

/// Timeout of an answer.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(30);

/// Wait strategy for an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PollSettings {
    /// Polling time before the thread sleeps.
    pub poll: Duration,
}

impl PollSettings {
    /// Default of the engine: `poll_us` in main-model-fn/src/settings.rs.
    pub const ENGINE: Self = Self { poll: Duration::from_micros(100) };
    /// Sleeps until the answer arrives.
    pub const SLEEP: Self = Self { poll: Duration::ZERO };
    /// Polls until the answer arrives.
    pub const SPIN: Self = Self { poll: ANSWER_TIMEOUT };
}

/// `Forward` stream on a current-thread runtime that the calling thread drives, as the engine's connections are. A
/// task forwards replies. The caller polls the runtime for a bounded time and then sleeps.
#[derive(Debug)]
pub struct ForwardClient {
    runtime: Runtime,
    requests: mpsc::UnboundedSender<ForwardRequest>,
    replies: mpsc::UnboundedReceiver<Result<ForwardReply, String>>,
}

/// Rows of an answer with their timing.
#[derive(Debug, Clone)]
pub struct TimedRows {
    /// Output rows, one per (token, expert), as in the message.
    pub rows: Bytes,
    /// Time from the request to the answer.
    pub round_trip: Duration,
    /// Compute time that the function reports.
    pub compute: Duration,
}

impl ForwardClient {
    /// Connects to the function at `address` (host:port), with TLS if there is a `trust`.
    ///
    /// # Errors
    /// The function cannot be reached.
    pub fn open(address: &str, trust: Option<Trust>) -> Result<Self, ServiceError> {
        let unreachable = |error: &dyn Display| {
            ServiceError::new(ErrorCode::Unavailable, format!("cannot open a stream to {address}: {error}"))
        };
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| unreachable(&error))?;
        let (requests, outbound) = mpsc::unbounded_channel();
        let (reply_sender, replies) = mpsc::unbounded_channel();
        let opened = async {
            let channel = Endpoint::from_shared(format!("http://{address}"))
                .map_err(|error| unreachable(&error))?
                .initial_stream_window_size(STREAM_WINDOW)
                .initial_connection_window_size(STREAM_WINDOW)
                .connect_with_connector(Connector::new(trust))
                .await
                .map_err(|error| unreachable(&error))?;
            let mut client = ExpertFunctionClient::new(channel)
                .max_decoding_message_size(MAX_MESSAGE)
                .max_encoding_message_size(MAX_MESSAGE);
            let response = client.forward(UnboundedReceiverStream::new(outbound)).await?;
            Ok::<_, ServiceError>(response.into_inner())
        };
        let mut stream = runtime
            .block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, opened).await })
            .map_err(|elapsed| unreachable(&elapsed))??;
        runtime.spawn(async move {
            loop {
                let reply = match stream.message().await {
                    Ok(Some(reply)) => Ok(reply),
                    Ok(None) => Err("the function closed the stream".to_owned()),
                    Err(status) => Err(status.message().to_owned()),
                };
                let is_last = reply.is_err();
                if reply_sender.send(reply).is_err() || is_last {
                    return;
                }
            }
        });
        Ok(Self { runtime, requests, replies })
    }

    /// Sends `work` and waits for its answer.
    ///
    /// # Errors
    /// The function rejects the request, ends, or does not answer within 30 seconds.
    pub fn forward(&mut self, work: Work, wait: PollSettings) -> Result<TimedRows, ServiceError> {
        let unanswered = |why: &str| ServiceError::new(ErrorCode::Unavailable, format!("no answer: {why}"));
        let started = Instant::now();
        let request = ForwardRequest { body: Some(Body::Work(work)) };
        self.requests.send(request).map_err(|_closed| unanswered("the stream is closed"))?;
        let replies = &mut self.replies;
        let reply = self.runtime.block_on(async {
            while started.elapsed() < wait.poll {
                if let Ok(reply) = replies.try_recv() {
                    return Some(reply);
                }
                tokio::task::yield_now().await;
            }
            tokio::time::timeout(ANSWER_TIMEOUT, replies.recv()).await.ok().flatten()
        });
        let round_trip = started.elapsed();
        let reply = reply.ok_or_else(|| unanswered("timeout"))?.map_err(|why| unanswered(&why))?;
        match reply.outcome {
            Some(Outcome::Rows(rows)) => Ok(TimedRows {
                rows: rows.rows,
                round_trip,
                compute: Duration::from_micros(rows.compute_us.into()),
            }),
            Some(Outcome::Failure(failure)) => Err(ServiceError::new(ErrorCode::Internal, failure.message)),
            None => Err(ServiceError::new(ErrorCode::Internal, "invalid answer: missing outcome")),
        }
    }
}
