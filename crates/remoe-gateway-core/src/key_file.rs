//! Keys file that is reloaded when it changes, so that keys can be added and removed without a restart.

use crate::gateway::Gateway;
use crate::keys::{Keys, KeysError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Time between two reads of the file. A kubelet takes up to a minute to update a mounted Secret.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Number of failed reads in a row after which the file counts as gone. Fewer may be a replacement in progress.
const MAX_MISSES: u32 = 10;

/// Keys file, as it was read last.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    /// Text that was accepted last, valid or not.
    text: String,
    /// Set if `text` is valid.
    is_valid: bool,
    /// New text that the last read found. It is accepted if the next read finds it, too: a file that is being written
    /// may be read in part.
    candidate: Option<String>,
    /// Number of failed reads since the last successful one.
    failed_reads: u32,
}

/// Result of a check of the file.
#[derive(Debug)]
enum FileCheck {
    /// No change to act on.
    Unchanged,
    /// New text was found twice.
    Changed,
    /// The file has been unreadable for [`MAX_MISSES`] checks.
    Gone(KeysError),
    /// The file is readable again, with the text that was accepted.
    Back,
}

impl KeyFile {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// The file cannot be read, is invalid, or has an entry twice.
    pub fn open(path: PathBuf) -> Result<(Self, Keys), KeysError> {
        let text = Keys::read_text(&path)?;
        let keys = Keys::parse(&text, &path)?;
        Ok((Self { path, text, is_valid: true, candidate: None, failed_reads: 0 }, keys))
    }

    /// Replaces the keys of `gateway` whenever the file changes, after `validate` has accepted them. Never returns.
    /// While the file is invalid or unreadable, the previous keys stay in force; that is logged once, and a metric
    /// shows it.
    pub async fn follow(
        mut self,
        gateway: Arc<Gateway>,
        validate: impl Fn(Keys) -> Result<Keys, String> + Send,
    ) {
        loop {
            sleep(CHECK_INTERVAL).await;
            let path = self.path.clone();
            let Ok(read) = tokio::task::spawn_blocking(move || Keys::read_text(&path)).await else {
                continue;
            };
            match self.check(read) {
                FileCheck::Unchanged => {}
                FileCheck::Changed => {
                    let keys = Keys::parse(&self.text, &self.path).map_err(|error| error.to_string());
                    let keys = keys.and_then(&validate);
                    self.is_valid = keys.is_ok();
                    match keys {
                        Ok(keys) => {
                            tracing::info!(path = %self.path.display(), "keys file reloaded");
                            gateway.replace_keys(keys);
                        }
                        Err(error) => {
                            tracing::error!(%error, "keys file invalid: keeping the previous keys");
                            gateway.metrics().set_keys_outdated(true);
                        }
                    }
                }
                FileCheck::Gone(error) => {
                    tracing::error!(%error, "keys file unreadable: keeping the previous keys");
                    gateway.metrics().set_keys_outdated(true);
                }
                FileCheck::Back => {
                    tracing::info!(path = %self.path.display(), "keys file readable again, unchanged");
                    gateway.metrics().set_keys_outdated(!self.is_valid);
                }
            }
        }
    }

    /// Evaluates a read of the file.
    fn check(&mut self, read: Result<String, KeysError>) -> FileCheck {
        let text = match read {
            Ok(text) => text,
            Err(error) => {
                self.candidate = None;
                self.failed_reads = self.failed_reads.saturating_add(1);
                return if self.failed_reads == MAX_MISSES {
                    FileCheck::Gone(error)
                } else {
                    FileCheck::Unchanged
                };
            }
        };
        let candidate = self.candidate.take();
        if text == self.text {
            return if std::mem::take(&mut self.failed_reads) >= MAX_MISSES {
                FileCheck::Back
            } else {
                FileCheck::Unchanged
            };
        }
        if candidate.as_ref() != Some(&text) {
            self.candidate = Some(text);
            return FileCheck::Unchanged;
        }
        self.failed_reads = 0;
        self.text = text;
        FileCheck::Changed
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const FIRST: &str = "tenants: [{name: a, keys: [first]}]";
    const SECOND: &str = "tenants: [{name: a, keys: [second]}]";

    fn file(folder: &tempfile::TempDir) -> (KeyFile, PathBuf) {
        let path = folder.path().join("keys.yaml");
        std::fs::write(&path, FIRST).unwrap();
        (KeyFile::open(path.clone()).unwrap().0, path)
    }

    #[test]
    fn file_written_in_place_is_accepted_when_read_twice_alike() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, path) = file(&folder);
        let mut check = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let check = file.check(Keys::read_text(&path));
            (matches!(check, FileCheck::Changed), file.text.clone())
        };
        assert_eq!(check(&SECOND[..20]), (false, FIRST.to_owned()));
        assert_eq!(check(SECOND), (false, FIRST.to_owned()), "found once");
        assert_eq!(check(SECOND), (true, SECOND.to_owned()));
        assert_eq!(check(SECOND), (false, SECOND.to_owned()), "once");
    }

    #[test]
    fn missing_file_is_reported_once_and_when_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, path) = file(&folder);
        let mut check = || file.check(Keys::read_text(&path));
        std::fs::remove_file(&path).unwrap();
        let reports: Vec<bool> = (0..3 * MAX_MISSES).map(|_| matches!(check(), FileCheck::Gone(_))).collect();
        assert_eq!(reports.iter().position(|is_reported| *is_reported), Some(MAX_MISSES as usize - 1));
        assert_eq!(reports.iter().filter(|is_reported| **is_reported).count(), 1);
        std::fs::write(&path, FIRST).unwrap();
        assert!(matches!(check(), FileCheck::Back));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(check(), FileCheck::Unchanged), "it may be in replacement");
        std::fs::write(&path, FIRST).unwrap();
        assert!(matches!(check(), FileCheck::Unchanged));
        (0..MAX_MISSES).for_each(|_| drop(file.check(Err(Keys::read_text(folder.path()).unwrap_err()))));
        std::fs::write(&path, SECOND).unwrap();
        assert!(matches!(file.check(Keys::read_text(&path)), FileCheck::Unchanged));
        std::fs::write(&path, FIRST).unwrap();
        assert!(
            matches!(file.check(Keys::read_text(&path)), FileCheck::Back),
            "after a moment with other text"
        );
    }
}
