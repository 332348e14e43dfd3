//! The receiving side of an engine handle, played by tests.

use crate::engine::request::{Event, Request};
use crate::engine::{EngineHandle, RequestLimits};
use crate::pages::PageNeeds;
use tokio::sync::{Mutex, mpsc};

/// Requests as they arrive.
pub(in crate::http) struct Engine {
    jobs: Mutex<mpsc::UnboundedReceiver<ReceivedRequest>>,
}

/// One request and the way to answer it. Dropping it gives its slot back.
pub(in crate::http) struct ReceivedRequest {
    pub(in crate::http) request: Request,
    pub(in crate::http) events: mpsc::Sender<Event>,
    _slot: Box<dyn Send>,
}

impl Engine {
    /// Small enough to reach.
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
                let asked = ReceivedRequest {
                    request: job.request.clone(),
                    events: job.events.clone(),
                    _slot: Box::new(job),
                };
                if sender.send(asked).is_err() {
                    return;
                }
            }
        });
        let jobs = Mutex::new(receiver);
        (handle, Self { jobs })
    }

    /// The next request.
    pub(in crate::http) async fn next(&self) -> ReceivedRequest {
        self.jobs.lock().await.recv().await.expect("the front holds a handle")
    }

    /// Answers every request with the events of `script`, for ever.
    pub(in crate::http) async fn serve(&self, mut script: impl FnMut(&Request) -> Vec<Event>) {
        loop {
            let asked = self.next().await;
            for event in script(&asked.request) {
                // Gone clients are what some tests are about.
                let _client_gone = asked.events.try_send(event);
            }
        }
    }
}
