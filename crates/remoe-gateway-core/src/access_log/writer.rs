//! Writer of the access log.

use super::line::{AccessLogFormat, AccessRecord};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

/// Largest number of lines that wait to be written. Further ones are dropped and counted.
const MAX_WAITING_LINES: usize = 4096;

/// Access log. A separate thread writes the lines, so that no answer waits for a disk.
#[derive(Debug, Clone)]
pub struct AccessLog {
    format: AccessLogFormat,
    lines: SyncSender<String>,
    left_out: Arc<AtomicU64>,
}

impl AccessLog {
    /// Appends lines of JSON to the file at `path`.
    ///
    /// # Errors
    /// The file cannot be opened, or the writer's thread cannot be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        Self::with_writer(AccessLogFormat::Json, move |line| file.write_all(format!("{line}\n").as_bytes()))
    }

    /// Passes lines, without line breaks, to `write` on a separate thread.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn with_writer(
        format: AccessLogFormat,
        mut write: impl FnMut(&str) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (lines, waiting) = sync_channel::<String>(MAX_WAITING_LINES);
        std::thread::Builder::new().name("access log".to_owned()).spawn(move || {
            for line in waiting {
                if let Err(error) = write(&line) {
                    tracing::warn!(%error, "access log write failed");
                }
            }
        })?;
        Ok(Self { format, lines, left_out: Arc::default() })
    }

    /// Queues the record that `record` makes of the number of lines that were dropped before it.
    pub(super) fn write<'a>(&self, record: impl FnOnce(u64) -> AccessRecord<'a>) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let sent = match record(left_out).render(self.format) {
            None => return,
            Some(text) => self.lines.try_send(text),
        };
        if sent.is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }
}
