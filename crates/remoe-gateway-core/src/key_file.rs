//! A file of keys that is read again when it changes: keys come and go without a restart.

use crate::gateway::Gateway;
use crate::keys::{Keys, KeysError};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;

/// Between two looks at the file. A kubelet takes up to a minute to bring a Secret to it.
const LOOK: Duration = Duration::from_secs(1);

/// So many looks in a row that find no file are no replacement any more.
const MISSES: u32 = 10;

/// A file of keys, as it was read last.
#[derive(Debug)]
pub struct KeyFile {
    path: PathBuf,
    /// Text that was taken last, valid or not.
    text: String,
    /// Set if that text is valid.
    usable: bool,
    /// Other text that the last look found. It is taken if the next look finds it too: a file that is written in place
    /// may be read half.
    newer: Option<String>,
    /// Looks since anything was known of it that failed.
    misses: u32,
}

/// Result of a look at the file.
#[derive(Debug)]
enum FileCheck {
    /// Nothing new.
    Nothing,
    /// Other text, twice.
    Newer,
    /// It cannot be read, and has not been for a while.
    Gone(KeysError),
    /// It is there again as it was.
    Back,
}

impl KeyFile {
    /// Reads the file for the first time.
    ///
    /// # Errors
    /// It cannot be read, is not of the form, or names something twice.
    pub fn open(path: PathBuf) -> Result<(Self, Keys), KeysError> {
        let text = Keys::text(&path)?;
        let keys = Keys::parse(&text, &path)?;
        Ok((Self { path, text, usable: true, newer: None, misses: 0 }, keys))
    }

    /// Has `gateway` ask for what `checked` makes of the file's keys, whenever those change; never ends. While newer
    /// keys cannot be used or the file cannot be read, the ones before stay in force, which is logged once and shown by
    /// a metric.
    pub async fn follow(
        mut self,
        gateway: Arc<Gateway>,
        checked: impl Fn(Keys) -> Result<Keys, String> + Send,
    ) {
        loop {
            sleep(LOOK).await;
            let path = self.path.clone();
            let Ok(read) = tokio::task::spawn_blocking(move || Keys::text(&path)).await else { continue };
            match self.look(read) {
                FileCheck::Nothing => {}
                FileCheck::Newer => {
                    let keys = Keys::parse(&self.text, &self.path).map_err(|error| error.to_string());
                    let keys = keys.and_then(&checked);
                    self.usable = keys.is_ok();
                    match keys {
                        Ok(keys) => {
                            tracing::info!(path = %self.path.display(), "keys file reloaded");
                            gateway.replace_keys(keys);
                        }
                        Err(error) => {
                            tracing::error!(%error, "keys file invalid: keeping the previous keys");
                            gateway.metrics().keys_are_outdated(true);
                        }
                    }
                }
                FileCheck::Gone(error) => {
                    tracing::error!(%error, "keys file unreadable: keeping the previous keys");
                    gateway.metrics().keys_are_outdated(true);
                }
                FileCheck::Back => {
                    tracing::info!(path = %self.path.display(), "keys file readable again, unchanged");
                    gateway.metrics().keys_are_outdated(!self.usable);
                }
            }
        }
    }

    /// Returns what follows from what was `read`.
    fn look(&mut self, read: Result<String, KeysError>) -> FileCheck {
        let text = match read {
            Ok(text) => text,
            Err(error) => {
                self.newer = None;
                self.misses = self.misses.saturating_add(1);
                return if self.misses == MISSES { FileCheck::Gone(error) } else { FileCheck::Nothing };
            }
        };
        let newer = self.newer.take();
        if text == self.text {
            return if std::mem::take(&mut self.misses) >= MISSES {
                FileCheck::Back
            } else {
                FileCheck::Nothing
            };
        }
        if newer.as_ref() != Some(&text) {
            self.newer = Some(text);
            return FileCheck::Nothing;
        }
        self.misses = 0;
        self.text = text;
        FileCheck::Newer
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
    fn what_is_written_in_place_is_taken_when_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, path) = file(&folder);
        let mut look = |text: &str| {
            std::fs::write(&path, text).unwrap();
            let look = file.look(Keys::text(&path));
            (matches!(look, FileCheck::Newer), file.text.clone())
        };
        assert_eq!(look(&SECOND[..20]), (false, FIRST.to_owned()));
        assert_eq!(look(SECOND), (false, FIRST.to_owned()), "seen once");
        assert_eq!(look(SECOND), (true, SECOND.to_owned()));
        assert_eq!(look(SECOND), (false, SECOND.to_owned()), "once");
    }

    #[test]
    fn a_file_that_is_gone_is_told_of_once_and_when_it_is_back() {
        let folder = tempfile::tempdir().unwrap();
        let (mut file, path) = file(&folder);
        let mut look = || file.look(Keys::text(&path));
        std::fs::remove_file(&path).unwrap();
        let gone: Vec<bool> = (0..3 * MISSES).map(|_| matches!(look(), FileCheck::Gone(_))).collect();
        assert_eq!(gone.iter().position(|gone| *gone), Some(MISSES as usize - 1));
        assert_eq!(gone.iter().filter(|gone| **gone).count(), 1);
        std::fs::write(&path, FIRST).unwrap();
        assert!(matches!(look(), FileCheck::Back));
        std::fs::remove_file(&path).unwrap();
        assert!(matches!(look(), FileCheck::Nothing), "it may be being replaced");
        std::fs::write(&path, FIRST).unwrap();
        assert!(matches!(look(), FileCheck::Nothing));
        (0..MISSES).for_each(|_| drop(file.look(Err(Keys::text(folder.path()).unwrap_err()))));
        std::fs::write(&path, SECOND).unwrap();
        assert!(matches!(file.look(Keys::text(&path)), FileCheck::Nothing));
        std::fs::write(&path, FIRST).unwrap();
        assert!(matches!(file.look(Keys::text(&path)), FileCheck::Back), "after a moment as another");
    }
}
