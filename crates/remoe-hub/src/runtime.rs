//! Async runtime of the fetcher, for callers that block.

use crate::error::FetchError;
use std::sync::mpsc;
use tokio::runtime::Runtime;

/// Threads that receive bytes and write them to the cache.
const THREADS: usize = 4;

/// Runtime of the fetcher. Dropping it does not wait, so that async threads may drop it too.
pub(crate) struct FetchRuntime(Option<Runtime>);

impl Drop for FetchRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

impl FetchRuntime {
    /// Starts the threads.
    pub(crate) fn start() -> Result<Self, FetchError> {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("fetch")
            .enable_all()
            .build();
        let runtime = runtime.map_err(|error| FetchError::Settings {
            what: "cannot start threads to fetch".to_owned(),
            problem: error.to_string(),
        })?;
        Ok(Self(Some(runtime)))
    }

    /// Runs `work` and blocks until it ends.
    pub(crate) fn run<T: Send + 'static>(
        &self,
        work: impl Future<Output = Result<T, FetchError>> + Send + 'static,
    ) -> Result<T, FetchError> {
        let ended = || FetchError::Settings {
            what: "cannot fetch".to_owned(),
            problem: "the threads that fetch crashed".to_owned(),
        };
        let runtime = self.0.as_ref().ok_or_else(ended)?;
        let (sender, result) = mpsc::sync_channel(1);
        runtime.spawn(async move {
            let outcome = work.await;
            // The receiver is gone only if the process is ending.
            let _gone = sender.send(outcome);
        });
        result.recv().map_err(|_| ended())?
    }
}
