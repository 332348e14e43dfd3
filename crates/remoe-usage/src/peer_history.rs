//! Reader of the training history of other gateways.
//!
//! Every gateway appends its own requests to its own file. It reads the files of all other gateways beside it,
//! including those that have ended. Gateways neither send messages to each other nor wait for each other; a gateway
//! that starts late reads everything that is stored.
//!
//! For each file, the reader remembers its position. If a file was rewritten, it starts again and skips the numbers
//! that it has read. Each pass over a file is bounded in requests and bytes. A record that is not a request of this
//! model is skipped.

use crate::frame::{self, FrameRead, HEADER_BYTES};
use crate::history_store::{HistoryStore, HistoryStoreError, StoreHeader, StoredRequest};
use crate::opted_out::OptedOutTenants;
use crate::record_numbers::is_possible;
use crate::tenant::Tenant;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Largest number of files of other gateways.
const MAX_FILES: usize = 256;
/// Largest number of requests that one pass reads from a file.
const MAX_REQUESTS_PER_PASS: usize = 1024;
/// Largest batch of requests. It bounds the time that other events of the predictor wait.
const BATCH_REQUESTS: usize = 64;
/// Size of one read in bytes, unless a request is larger.
const READ_BYTES: u64 = 1 << 20;

/// Reader of the history files of other gateways for one model.
#[derive(Debug)]
pub struct PeerHistoryReader {
    header: StoreHeader,
    limit: u64,
    readers: HashMap<PathBuf, FileCursor>,
    opted_out: OptedOutTenants,
    /// State of each ended gateway's file after the last erasure.
    erased: HashMap<PathBuf, ErasedFile>,
}

/// Version of a file, by which a change is detected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct FileVersion {
    modified: SystemTime,
    bytes: u64,
}

/// State of a file from which tenants were erased.
#[derive(Debug)]
struct ErasedFile {
    version: FileVersion,
    /// Tenants without requests in the file.
    tenants: BTreeSet<Tenant>,
}

/// Read position in one file.
#[derive(Debug, Default)]
struct FileCursor {
    position: u64,
    /// Position and first bytes of the last frame. They detect a rewritten file.
    last: Option<(u64, [u8; HEADER_BYTES])>,
    /// Largest request number read so far.
    newest_number: u64,
    /// Position of a frame with a wrong checksum, which its writer may not have finished.
    suspect_frame: Option<u64>,
    /// True if this pass stops at the suspect frame; the next pass skips the frame if it is still damaged.
    is_paused: bool,
    /// Error of the previous pass, which is not logged again.
    problem: Option<String>,
}

/// Reason that a file is skipped.
#[derive(Debug, thiserror::Error)]
enum UnreadFile {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error("expected a training history of this model and version")]
    Other,
}

impl PeerHistoryReader {
    /// Creates a reader for the model of `own`, with the same size limit per file.
    pub(crate) fn beside(own: &HistoryStore, opted_out: OptedOutTenants) -> Self {
        let (header, limit) = own.header_and_limit();
        Self { header: header.clone(), limit, readers: HashMap::new(), opted_out, erased: HashMap::new() }
    }

    /// Reads the new requests of `files` and passes them to `take` in batches, until `take` returns false. An
    /// unreadable file is logged once and tried again in the next pass.
    pub fn read_new(&mut self, files: &[PathBuf], mut take: impl FnMut(Vec<StoredRequest>) -> bool) {
        let files = files.get(..MAX_FILES.min(files.len())).unwrap_or_default();
        self.readers.retain(|path, _| files.contains(path));
        for path in files {
            let reader = self.readers.entry(path.clone()).or_default();
            reader.is_paused = false;
            let mut taken_requests = 0;
            let outcome = loop {
                match reader.read(path, &self.header, self.limit) {
                    Ok(records) if records.is_empty() => break Ok(()),
                    Ok(records) => {
                        taken_requests += records.len();
                        if !take(records) {
                            return;
                        }
                        if taken_requests >= MAX_REQUESTS_PER_PASS {
                            break Ok(());
                        }
                    }
                    Err(error) => break Err(error.to_string()),
                }
            };
            let problem = outcome.err();
            if let Some(problem) = problem.as_ref().filter(|_| problem != reader.problem) {
                let path = path.display();
                tracing::warn!(%path, problem, "cannot read the training history of another gateway");
            }
            reader.problem = problem;
        }
    }

    /// Erases the requests of tenants that opted out from `file`, the file of an ended gateway. The file must have no
    /// writer. A file of another model is left unchanged.
    ///
    /// # Errors
    /// Writing fails. The file is unchanged.
    pub fn erase_opted_out(&mut self, file: &Path) -> Result<(), HistoryStoreError> {
        let tenants = self.opted_out.all();
        let version_of = |path: &Path| -> io::Result<Option<FileVersion>> {
            match std::fs::symlink_metadata(path) {
                Ok(metadata) if metadata.is_file() => {
                    Ok(Some(FileVersion { modified: metadata.modified()?, bytes: metadata.len() }))
                }
                Ok(_) => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        };
        let failed = |source| HistoryStoreError::File { path: file.to_owned(), source };
        let Some(version) = version_of(file).map_err(failed)?.filter(|_| !tenants.is_empty()) else {
            return Ok(());
        };
        let is_unchanged = |known: &ErasedFile| known.version == version && tenants.is_subset(&known.tenants);
        let Some(folder) = file.parent().filter(|_| !self.erased.get(file).is_some_and(is_unchanged)) else {
            return Ok(());
        };
        match HistoryStore::open_of(folder, self.header.clone(), self.limit, |_| ()) {
            Ok(mut store) => store.forget_all(&tenants)?,
            // A file of another model holds no requests to this one.
            Err(HistoryStoreError::Other { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.erased.len() >= MAX_FILES {
            self.erased.clear();
        }
        if let Some(version) = version_of(file).map_err(failed)? {
            self.erased.insert(file.to_owned(), ErasedFile { version, tenants });
        }
        Ok(())
    }
}

impl FileCursor {
    /// Reads the next batch of requests. Returns an empty batch at the end of the file.
    fn read(
        &mut self,
        path: &Path,
        store_header: &StoreHeader,
        limit: u64,
    ) -> Result<Vec<StoredRequest>, UnreadFile> {
        // Opening another kind of file, such as a pipe, could block.
        match std::fs::symlink_metadata(path) {
            Ok(metadata) if metadata.is_file() => {}
            Ok(_) => return Err(UnreadFile::Other),
            // The gateway has stored nothing yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        let file = File::open(path)?;
        let end = file.metadata()?.len().min(limit);
        if let Some((position, header)) = self.last {
            let mut found = [0; HEADER_BYTES];
            let is_same = position + HEADER_BYTES as u64 <= end && {
                file.read_exact_at(&mut found, position)?;
                found == header
            };
            if !is_same {
                (self.position, self.last, self.suspect_frame) = (0, None, None);
            }
        }
        let mut records = Vec::new();
        while records.is_empty() && !self.is_paused {
            let length = READ_BYTES.max(store_header.frame_bytes()).min(end.saturating_sub(self.position));
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
            file.read_exact_at(&mut bytes, self.position)?;
            if self.decode_frames(&bytes, store_header, &mut records)? == 0 {
                break;
            }
        }
        Ok(records)
    }

    /// Decodes the frames in `bytes`, which start at the cursor's position, into `records`. Returns the length of the
    /// decoded frames in bytes.
    fn decode_frames(
        &mut self,
        bytes: &[u8],
        header: &StoreHeader,
        records: &mut Vec<StoredRequest>,
    ) -> Result<usize, UnreadFile> {
        let mut decoded_bytes = 0;
        while records.len() < BATCH_REQUESTS {
            let rest = bytes.get(decoded_bytes..).unwrap_or_default();
            let frame_bytes = match frame::decode_frame(rest) {
                FrameRead::Whole(frame_bytes, content) if self.position == 0 => {
                    if !header.is_in(content) {
                        return Err(UnreadFile::Other);
                    }
                    frame_bytes
                }
                FrameRead::Whole(frame_bytes, content) => {
                    let found = header.decode(content);
                    // Skips numbers that were read before, and impossible numbers, which would hide all further
                    // requests.
                    let is_new = |request: &StoredRequest| {
                        request.number > self.newest_number && is_possible(request.number)
                    };
                    if let Some(request) = found.filter(is_new) {
                        self.newest_number = request.number;
                        records.push(request);
                    }
                    frame_bytes
                }
                FrameRead::Damaged(_) if self.position == 0 => return Err(UnreadFile::Other),
                FrameRead::Damaged(frame_bytes) if self.suspect_frame == Some(self.position) => frame_bytes,
                FrameRead::Damaged(_) => {
                    (self.suspect_frame, self.is_paused) = (Some(self.position), true);
                    break;
                }
                FrameRead::End => break,
            };
            if let Some(first_bytes) = rest.first_chunk::<HEADER_BYTES>() {
                self.last = Some((self.position, *first_bytes));
            }
            self.position += frame_bytes as u64;
            decoded_bytes += frame_bytes;
        }
        Ok(decoded_bytes)
    }
}
