//! Activation records: the experts that each request used, written when requests end.
//!
//! The engine counts, and a separate thread writes finished records. If the disk is too slow, records are dropped and
//! counted, so requests never wait for it.

use crate::transformer::LayerRouting;
use prometheus::{IntCounterVec, Opts, Registry};
use remoe_predictor::Phase;
use remoe_predictor::record::{
    ActivationRecord, DEFAULT_FILE_BYTES, RecordError, RecordHeader, RecordWriter, resume_position,
};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, Seek, SeekFrom};
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::thread::JoinHandle;

/// Most records that wait to be written.
const QUEUE_LENGTH: usize = 256;

/// Failure to write to a record file.
#[derive(Debug, thiserror::Error)]
pub enum RecordFileError {
    /// The file cannot be opened or truncated.
    #[error("cannot write {path}: {source}")]
    File {
        /// Path of the file.
        path: String,
        /// Error of the operation.
        source: io::Error,
    },
    /// The file holds no records of this model.
    #[error("{path}: {source}")]
    Form {
        /// Path of the file.
        path: String,
        /// Error of the format.
        source: RecordError,
    },
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Accepts the records of finished requests. Dropping it writes the accepted records and ends the thread.
pub(crate) struct Recorder {
    header: RecordHeader,
    queue: Option<SyncSender<ActivationRecord>>,
    thread: Option<JoinHandle<()>>,
    outcomes: IntCounterVec,
}

/// Record of a running request.
pub(crate) struct Recording {
    record: ActivationRecord,
    /// Expert ids per layer, token by token, if the header asks for them.
    experts: Vec<Vec<u16>>,
    experts_per_layer: usize,
}

/// Phase of a request that a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Prefill,
    Decode,
}

impl Step {
    /// Returns the phase as the predictor names it.
    pub(crate) fn phase(self) -> Phase {
        match self {
            Self::Prefill => Phase::Prefill,
            Self::Decode => Phase::Decode,
        }
    }
}

impl Recorder {
    /// Opens or creates the file at `path`. Cuts off an incomplete record at its end, which a crash may leave.
    ///
    /// # Errors
    /// Fails if the file cannot be written, or holds something other than records of this model.
    pub(crate) fn open(
        path: &Path,
        header: RecordHeader,
        registry: &Registry,
    ) -> Result<Self, RecordFileError> {
        let name = || path.display().to_string();
        let file_error = |source| RecordFileError::File { path: name(), source };
        let format_error = |source| RecordFileError::Form { path: name(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(file_error)?;
        let position = resume_position(BufReader::new(&file), &header).map_err(format_error)?;
        file.set_len(position).map_err(file_error)?;
        file.seek(SeekFrom::Start(position)).map_err(file_error)?;
        let writer =
            RecordWriter::new(file, header.clone(), position, DEFAULT_FILE_BYTES).map_err(format_error)?;
        let outcomes = IntCounterVec::new(
            Opts::new(
                "remoe_activation_records_total",
                "Activation records of finished requests by outcome: written, dropped (the disk was too slow), failed.",
            ),
            &["outcome"],
        )?;
        registry.register(Box::new(outcomes.clone()))?;
        let (queue, records) = sync_channel(QUEUE_LENGTH);
        let thread_outcomes = outcomes.clone();
        let thread = std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || write_all(writer, &records, &thread_outcomes))
            .map_err(file_error)?;
        Ok(Self { header, queue: Some(queue), thread: Some(thread), outcomes })
    }

    /// Begins the record of a request with this `prompt`.
    pub(crate) fn begin(&self, prompt: &[u32]) -> Recording {
        let layers = match self.header.tokens {
            true => self.header.layers.len(),
            false => 0,
        };
        Recording {
            record: ActivationRecord {
                prompt: prompt.to_vec(),
                prefill: vec![0; self.header.cells()],
                decode: vec![0; self.header.cells()],
                steps: 0,
                experts: None,
            },
            experts: vec![Vec::new(); layers],
            experts_per_layer: self.header.experts as usize,
        }
    }

    /// Sends the record of a finished request to the writer.
    pub(crate) fn finish(&self, recording: Recording) {
        let Some(queue) = &self.queue else {
            return;
        };
        if queue.try_send(recording.complete()).is_err() {
            self.outcomes.with_label_values(&["dropped"]).inc();
        }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        // Closes the queue; the thread writes the remaining records.
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("activation record thread panicked");
        }
    }
}

impl Recording {
    /// Counts row `row` of an iteration. `routing` has one entry per MoE layer.
    pub(crate) fn count(&mut self, routing: &[LayerRouting], row: usize, step: Step) {
        let counts = match step {
            Step::Prefill => &mut self.record.prefill,
            Step::Decode => &mut self.record.decode,
        };
        for (position, layer) in routing.iter().enumerate() {
            let Some(selected) = layer.tokens.get(row) else {
                continue;
            };
            let cells = &mut counts[position * self.experts_per_layer..];
            for &(expert, _) in selected {
                cells[expert as usize] += 1;
            }
            if let Some(ids) = self.experts.get_mut(position) {
                // Ids fit: the header limits layers to fewer than 65,536 experts.
                ids.extend(selected.iter().map(|&(expert, _)| expert as u16));
            }
        }
        if step == Step::Decode {
            self.record.steps += 1;
        }
    }

    /// Resets the counts, because the request starts over.
    pub(crate) fn restart(&mut self) {
        self.record.prefill.fill(0);
        self.record.decode.fill(0);
        self.record.steps = 0;
        self.experts.iter_mut().for_each(Vec::clear);
    }

    fn complete(mut self) -> ActivationRecord {
        if !self.experts.is_empty() {
            self.record.experts = Some(self.experts.concat());
        }
        self.record
    }
}

/// Writes records until the queue is closed.
fn write_all(mut writer: RecordWriter<File>, records: &Receiver<ActivationRecord>, outcomes: &IntCounterVec) {
    let mut has_failed = false;
    for record in records {
        let outcome = match writer.append(&record) {
            Ok(()) => "written",
            Err(error) => {
                // Logged once: a full disk fails every record.
                if !std::mem::replace(&mut has_failed, true) {
                    tracing::error!(%error, "cannot write activation records");
                }
                "failed"
            }
        };
        outcomes.with_label_values(&[outcome]).inc();
    }
}
