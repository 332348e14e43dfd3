//! Activation records: which experts each request used, written as requests end.
//!
//! The engine counts and hands finished records over; a thread of its own writes them. Where the disk
//! does not keep up, records are dropped and counted: requests never wait for it.

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

/// Records that wait to be written.
const QUEUE: usize = 256;

/// Why a record file cannot be written to.
#[derive(Debug, thiserror::Error)]
pub enum RecordFileError {
    /// It cannot be opened or cut.
    #[error("cannot write {path}: {source}")]
    File {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// It is no record file of this model.
    #[error("{path}: {source}")]
    Form {
        /// The file.
        path: String,
        /// Why.
        source: RecordError,
    },
    /// A metric is registered twice.
    #[error(transparent)]
    Metrics(#[from] prometheus::Error),
}

/// Takes the records of finished requests. Dropping it writes what was taken and ends the thread.
pub(crate) struct Recorder {
    header: RecordHeader,
    queue: Option<SyncSender<ActivationRecord>>,
    thread: Option<JoinHandle<()>>,
    outcomes: IntCounterVec,
}

/// The record of a request that runs.
pub(crate) struct Recording {
    record: ActivationRecord,
    /// Where the header asks for them: ids per layer, token after token.
    experts: Vec<Vec<u16>>,
    experts_per_layer: usize,
}

/// Which half of a request a row belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Prefill,
    Decode,
}

impl Step {
    /// As predictions call it.
    pub(crate) fn phase(self) -> Phase {
        match self {
            Self::Prefill => Phase::Prefill,
            Self::Decode => Phase::Decode,
        }
    }
}

impl Recorder {
    /// Opens or creates the file at `path`. What a crash left half written at its end is cut off.
    ///
    /// # Errors
    /// The file cannot be written, or holds something else than records of this model.
    pub(crate) fn open(
        path: &Path,
        header: RecordHeader,
        registry: &Registry,
    ) -> Result<Self, RecordFileError> {
        let name = || path.display().to_string();
        let of_file = |source| RecordFileError::File { path: name(), source };
        let of_form = |source| RecordFileError::Form { path: name(), source };
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .map_err(of_file)?;
        let position = resume_position(BufReader::new(&file), &header).map_err(of_form)?;
        file.set_len(position).map_err(of_file)?;
        file.seek(SeekFrom::Start(position)).map_err(of_file)?;
        let writer =
            RecordWriter::new(file, header.clone(), position, DEFAULT_FILE_BYTES).map_err(of_form)?;
        let outcomes = IntCounterVec::new(
            Opts::new(
                "remoe_activation_records_total",
                "Activation records of finished requests by outcome: written, dropped (the disk was too slow), failed.",
            ),
            &["outcome"],
        )?;
        registry.register(Box::new(outcomes.clone()))?;
        let (queue, records) = sync_channel(QUEUE);
        let counted = outcomes.clone();
        let thread = std::thread::Builder::new()
            .name("recorder".to_owned())
            .spawn(move || write_all(writer, &records, &counted))
            .map_err(of_file)?;
        Ok(Self { header, queue: Some(queue), thread: Some(thread), outcomes })
    }

    /// Begins the record of a request with this prompt.
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

    /// Hands the record of a request that has ended to the writer.
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
        // Closes the queue; the thread writes what is in it.
        self.queue = None;
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("activation record thread panicked");
        }
    }
}

impl Recording {
    /// Counts row `row` of an iteration whose routing is `routing`, one entry per layer with experts.
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
                // A layer has fewer than 65,536 experts: the header was checked.
                ids.extend(selected.iter().map(|&(expert, _)| expert as u16));
            }
        }
        if step == Step::Decode {
            self.record.steps += 1;
        }
    }

    /// Forgets what was counted: the request starts over.
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

fn write_all(mut writer: RecordWriter<File>, records: &Receiver<ActivationRecord>, outcomes: &IntCounterVec) {
    let mut failing = false;
    for record in records {
        let outcome = match writer.append(&record) {
            Ok(()) => "written",
            Err(error) => {
                // Once: a full disk fails every record.
                if !std::mem::replace(&mut failing, true) {
                    tracing::error!(%error, "cannot write activation records");
                }
                "failed"
            }
        };
        outcomes.with_label_values(&[outcome]).inc();
    }
}
