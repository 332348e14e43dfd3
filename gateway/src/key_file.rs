//! A file of keys that is read again when it changes: keys come and go without a restart.

use crate::gateway::Gateway;
use crate::keys::{Keys, KeysError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Between two looks at the file. A kubelet takes up to a minute to bring a Secret to it.
const LOOK: Duration = Duration::from_secs(1);

/// A file of keys, as it was read last.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    text: String,
}

impl KeyFile {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// It cannot be read, is not of the form, or names something twice.
    pub fn open(path: PathBuf) -> Result<(Self, Keys), KeysError> {
        let text = Keys::text(&path)?;
        let keys = Keys::parse(&text, &path)?;
        Ok((Self { path, text }, keys))
    }

    /// Has `gateway` ask for what `checked` makes of the file's keys, whenever those change; never ends. While newer keys
    /// cannot be used the ones before stay in force, which is logged once and shown by a metric.
    pub async fn follow(
        mut self,
        gateway: Arc<Gateway>,
        checked: impl Fn(Keys) -> Result<Keys, String> + Send,
    ) {
        loop {
            sleep(LOOK).await;
            let path = self.path.clone();
            // One that is not there for a moment is being replaced; one that is gone for good has no newer keys.
            let read = tokio::task::spawn_blocking(move || Keys::text(&path)).await;
            let Some(text) = read.ok().and_then(Result::ok).filter(|text| *text != self.text) else {
                continue;
            };
            self.text = text;
            let keys = Keys::parse(&self.text, &self.path).map_err(|error| error.to_string());
            match keys.and_then(&checked) {
                Ok(keys) => {
                    tracing::info!(path = %self.path.display(), "other keys are in force");
                    gateway.replace_keys(keys);
                }
                Err(error) => {
                    tracing::error!(%error, "newer keys cannot be used: the ones before stay in force");
                    gateway.metrics().keys_are_outdated(true);
                }
            }
        }
    }
}
