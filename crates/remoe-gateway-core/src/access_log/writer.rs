//! Writer of the access log.

use super::line::{AccessLogFormat, AccessRecord};
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

/// Lines that wait for the disk; further ones are left out and counted.
const WAITING: usize = 4096;

/// Destination of lines. A thread writes them, so that no answer waits for a disk.
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
    /// The file cannot be opened, or no thread be started.
    pub fn open(path: &Path) -> io::Result<Self> {
        let mut file = OpenOptions::new().create(true).append(true).open(path)?;
        Self::to(AccessLogFormat::Json, move |line| file.write_all(format!("{line}\n").as_bytes()))
    }

    /// Gives lines to `write`, without their ends, on a thread of their own.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn to(
        format: AccessLogFormat,
        mut write: impl FnMut(&str) -> io::Result<()> + Send + 'static,
    ) -> io::Result<Self> {
        let (lines, waiting) = sync_channel::<String>(WAITING);
        std::thread::Builder::new().name("access log".to_owned()).spawn(move || {
            for line in waiting {
                if let Err(error) = write(&line) {
                    tracing::warn!(%error, "access log write failed");
                }
            }
        })?;
        Ok(Self { format, lines, left_out: Arc::default() })
    }

    /// Writes the line that `line` makes of the number of lines that were left out before it.
    pub(super) fn write<'a>(&self, line: impl FnOnce(u64) -> AccessRecord<'a>) {
        let left_out = self.left_out.swap(0, Ordering::Relaxed);
        let sent = match line(left_out).render(self.format) {
            None => return,
            Some(text) => self.lines.try_send(text),
        };
        if sent.is_err() {
            self.left_out.fetch_add(left_out + 1, Ordering::Relaxed);
        }
    }
}
