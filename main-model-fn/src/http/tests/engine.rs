//! Scripted engine: the receiving side of an engine handle.

use crate::engine::request::{Event, Request};
use crate::engine::{EngineHandle, RequestLimits};
use crate::pages::PageNeeds;
use tokio::sync::{Mutex, mpsc};

/// Receives requests.
pub(in crate::http) struct Engine {
    jobs: Mutex<mpsc::UnboundedReceiver<ReceivedRequest>>,
}

/// A request and the sender of its events. Its slot is freed on drop.
pub(in crate::http) struct ReceivedRequest {
    pub(in crate::http) request: Request,
    pub(in crate::http) events: mpsc::Sender<Event>,
    _slot: Box<dyn Send>,
}

impl Engine {
    /// Returns limits that tests can reach.
    pub(in crate::http) fn limits() -> RequestLimits {
        RequestLimits {
            vocab_size: 257,
            context_length: 100,
            cache_pages: 10,
            page_needs: PageNeeds::default(),
            prefill_rows: 2048,
            max_choices: 4,
            max_requests: 5,
            queue_deadline: None,
        }
    }

    pub(in crate::http) fn new(limits: RequestLimits) -> (EngineHandle, Self) {
        let (handle, mut jobs) = EngineHandle::new(limits);
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(job) = jobs.recv().await {
                let request = ReceivedRequest {
                    request: job.request.clone(),
                    events: job.events.clone(),
                    _slot: Box::new(job),
                };
                if sender.send(request).is_err() {
                    return;
                }
            }
        });
        let jobs = Mutex::new(receiver);
        (handle, Self { jobs })
    }

    /// Waits for the next request.
    pub(in crate::http) async fn next(&self) -> ReceivedRequest {
        self.jobs.lock().await.recv().await.expect("the server holds a handle")
    }

    /// Answers every request with the events of `script`; does not return.
    pub(in crate::http) async fn serve(&self, mut script: impl FnMut(&Request) -> Vec<Event>) {
        loop {
            let request = self.next().await;
            for event in script(&request.request) {
                // Some tests drop their clients.
                let _client_gone = request.events.try_send(event);
            }
        }
    }
}
