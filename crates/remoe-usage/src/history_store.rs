//! Stored training history: one file per model, append-only, checksummed and bounded.
//!
//! The file starts with a frame for the header. Each further frame is one request: its number, the tenant, a flag for
//! decode steps, the prompt's vector in float16 and the shares of both phases in 65535ths. The text of the prompt is
//! not stored.
//!
//! A killed writer loses only the frame that it was writing; the next writer truncates it. Frames with a wrong
//! checksum are skipped and counted. When the file reaches its limit, the writer copies the wanted requests to a
//! second file, which then replaces the first. Only the owner can read the file.

use crate::frame::{self, FrameRead};
use crate::tenant::Tenant;
use half::f16;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{PredictError, UsageSample, UsageShares};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const FORMAT: &str = "remoe-experience";
const VERSION: u32 = 1;
/// Name of the history file in its folder.
const FILE: &str = "experience";
/// Name of the rewritten file until it replaces the history file.
const NEXT: &str = "experience.next";

/// Permissions of the file: words of a short prompt could be guessed from its vector.
const OWNER: u32 = 0o600;

/// Reason that a history store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HistoryStoreError {
    /// Reading or writing the folder or the file failed.
    #[error("cannot use the training history {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Error of the file system.
        source: io::Error,
    },
    /// The file has another format or belongs to another model.
    #[error("cannot read the training history {}: {what}; use another folder, or delete it", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// Difference from what was expected.
        what: String,
    },
    /// The limit is too small for four requests.
    #[error("invalid limit of the training history {}: expected at least {} bytes, got {limit}; one request takes {one} bytes", path.display(), 4 * one)]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Size limit, in bytes.
        limit: u64,
        /// Size of one request, in bytes.
        one: u64,
    },
    /// Another process holds the lock of the file.
    #[error("cannot open the training history {}: another process uses it; use a separate folder", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
}

/// Content of the first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoreHeader {
    format: String,
    version: u32,
    model: String,
    dtype: String,
    layers: Vec<u32>,
    experts: u32,
    hidden: usize,
}

/// Stored request: the expert usage of one past request.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRequest {
    /// Number of the request, unique among all gateways and ascending for each gateway.
    pub number: u64,
    /// Tenant that sent the request.
    pub tenant: Tenant,
    /// Prompt vector and expert usage of the request.
    pub usage: UsageSample,
}

/// History file of one model. This process is its only writer.
#[derive(Debug)]
pub struct HistoryStore {
    path: PathBuf,
    file: File,
    header: StoreHeader,
    bytes: u64,
    limit: u64,
    damaged: u64,
}

impl HistoryStore {
    /// Returns the path of the history file in `folder`.
    #[must_use]
    pub fn file_in(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Opens or creates the store in `folder` for the model of `header` with prompt vectors of `hidden` elements.
    /// Passes each stored request to `each`, in the order of writing. The file never exceeds `limit` bytes.
    ///
    /// # Errors
    /// Access to the file fails, another process uses it, it belongs to another model, or the limit is too small.
    pub fn open(
        folder: &Path,
        header: &RecordHeader,
        hidden: usize,
        limit: u64,
        each: impl FnMut(StoredRequest),
    ) -> Result<Self, HistoryStoreError> {
        let header = StoreHeader {
            format: FORMAT.to_owned(),
            version: VERSION,
            model: header.model.clone(),
            dtype: header.dtype.clone(),
            layers: header.layers.clone(),
            experts: header.experts,
            hidden,
        };
        Self::open_of(folder, header, limit, each)
    }

    /// Opens or creates the store for `header`, as [`Self::open`] does.
    pub(crate) fn open_of(
        folder: &Path,
        header: StoreHeader,
        limit: u64,
        mut each: impl FnMut(StoredRequest),
    ) -> Result<Self, HistoryStoreError> {
        let path = folder.join(FILE);
        let failed = |source| HistoryStoreError::File { path: path.clone(), source };
        std::fs::create_dir_all(folder).map_err(failed)?;
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(OWNER)
            .open(&path)
            .map_err(failed)?;
        file.set_permissions(Permissions::from_mode(OWNER)).map_err(failed)?;
        match file.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Err(HistoryStoreError::Taken { path }),
            Err(std::fs::TryLockError::Error(source)) => {
                return Err(HistoryStoreError::File { path, source });
            }
        }
        let request_bytes = header.frame_bytes();
        if limit < 4 * request_bytes {
            return Err(HistoryStoreError::TooSmall { path, limit, one: request_bytes });
        }
        let mut store = Self { path, file, header, bytes: 0, limit, damaged: 0 };
        let wrong_content = |store: &Self, what: &str| HistoryStoreError::Other {
            path: store.path.clone(),
            what: what.to_owned(),
        };
        let mut has_header = false;
        let scanned = store.scan(|header, content| {
            if !std::mem::replace(&mut has_header, true) {
                return match serde_json::from_slice::<StoreHeader>(content) {
                    Ok(found) if found == *header => Ok(()),
                    Ok(found) if found.format == FORMAT => {
                        Err("it belongs to another model or version".to_owned())
                    }
                    _ => Err("unknown format".to_owned()),
                };
            }
            if let Some(stored) = header.decode(content) {
                each(stored);
            }
            Ok(())
        });
        let FrameExtent { frames_end, file_end } = scanned.map_err(|error| store.scan_error(error))?;
        // Rewrites an incomplete header. Any other content belongs to another program.
        let header_frame = store.header.frame().map_err(|what| wrong_content(&store, &what))?;
        if !has_header && frames_end != file_end && !store.is_partial_header(&header_frame, file_end)? {
            return Err(wrong_content(&store, "unknown format"));
        }
        store.truncate(if has_header { frames_end } else { 0 })?;
        if !has_header {
            store.write(&header_frame)?;
        }
        Ok(store)
    }

    /// Returns the size of the file, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of frames that were skipped because of a wrong checksum.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Returns the number of requests to keep in memory. The file has room for twice as many, so that it is rarely
    /// rewritten.
    #[must_use]
    pub fn capacity(&self) -> usize {
        usize::try_from(self.limit / (2 * self.header.frame_bytes())).unwrap_or(usize::MAX).max(1)
    }

    /// Appends a request. If the file would exceed the limit, first rewrites it with only the requests whose numbers
    /// `wanted` returns, at most [`Self::capacity`].
    ///
    /// # Errors
    /// Writing fails. The stored requests stay readable.
    pub fn append(
        &mut self,
        stored: &StoredRequest,
        wanted: impl FnOnce() -> HashSet<u64>,
    ) -> Result<(), HistoryStoreError> {
        let Some(frame) = frame::encode_frame(&self.header.encode(stored)) else { return Ok(()) };
        if self.bytes + frame.len() as u64 > self.limit {
            let wanted = wanted();
            self.keep(|number, _| wanted.contains(&number))?;
        }
        if self.bytes + frame.len() as u64 <= self.limit {
            self.write(&frame)?;
        }
        Ok(())
    }

    /// Removes all requests of `tenant` from the file.
    ///
    /// # Errors
    /// Writing fails. The file is unchanged.
    pub fn forget(&mut self, tenant: Tenant) -> Result<(), HistoryStoreError> {
        self.forget_all(&BTreeSet::from([tenant]))
    }

    /// Removes all requests of `tenants` from the file.
    pub(crate) fn forget_all(&mut self, tenants: &BTreeSet<Tenant>) -> Result<(), HistoryStoreError> {
        let mut has_requests = false;
        let scanned = self.scan(|_, content| {
            has_requests |= request_key(content).is_some_and(|(_, tenant)| tenants.contains(&tenant));
            Ok(())
        });
        // The scan moved the file position: go back to the end for the next append.
        self.truncate(self.bytes)?;
        scanned.map_err(|error| self.scan_error(error))?;
        if has_requests { self.keep(|_, tenant| !tenants.contains(&tenant)) } else { Ok(()) }
    }

    /// Rewrites the file with only the requests that `wanted` accepts by number and tenant. If that fails, continues
    /// with the old file.
    fn keep(&mut self, wanted: impl Fn(u64, Tenant) -> bool) -> Result<(), HistoryStoreError> {
        let rewritten = self.rewrite(wanted);
        if rewritten.is_err() {
            self.truncate(self.bytes)?;
        }
        rewritten
    }

    /// Returns the header of the file and its limit in bytes.
    pub(crate) fn header_and_limit(&self) -> (&StoreHeader, u64) {
        (&self.header, self.limit)
    }

    /// Passes the content of each complete frame with a correct checksum to `each`.
    fn scan(
        &mut self,
        mut each: impl FnMut(&StoreHeader, &[u8]) -> Result<(), String>,
    ) -> Result<FrameExtent, ScanError> {
        self.file.seek(SeekFrom::Start(0))?;
        let (mut buffer, mut position, mut damaged) = (Vec::new(), 0, 0);
        let mut reader = io::BufReader::with_capacity(1 << 20, &self.file);
        loop {
            // Buffers at least one frame or the rest of the file.
            let missing =
                (frame::HEADER_BYTES + frame::MAX_CONTENT_BYTES).saturating_sub(buffer.len()) as u64;
            reader.by_ref().take(missing).read_to_end(&mut buffer)?;
            let mut passed = 0;
            loop {
                match frame::decode_frame(buffer.get(passed..).unwrap_or_default()) {
                    FrameRead::Whole(bytes, content) => {
                        each(&self.header, content).map_err(ScanError::Content)?;
                        passed += bytes;
                    }
                    FrameRead::Damaged(bytes) => {
                        // A file without its header is unusable.
                        if position + passed as u64 == 0 {
                            return Err(ScanError::Content("damaged header".to_owned()));
                        }
                        damaged += 1;
                        passed += bytes;
                    }
                    FrameRead::End => break,
                }
            }
            position += passed as u64;
            buffer.drain(..passed);
            if passed == 0 {
                break;
            }
        }
        self.damaged = damaged;
        let rest = io::copy(&mut reader, &mut io::sink())?;
        Ok(FrameExtent { frames_end: position, file_end: position + buffer.len() as u64 + rest })
    }

    /// Returns true if the file of `length` bytes is an incomplete `header`.
    fn is_partial_header(&mut self, header: &[u8], length: u64) -> Result<bool, HistoryStoreError> {
        let mut content = Vec::new();
        let read = self.file.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| (&self.file).take(header.len() as u64).read_to_end(&mut content));
        read.map_err(|source| self.file_error(source))?;
        Ok(length < header.len() as u64 && header.starts_with(&content))
    }

    /// Truncates the file to `end` bytes and moves its position there.
    fn truncate(&mut self, end: u64) -> Result<(), HistoryStoreError> {
        let truncated = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end)));
        truncated.map_err(|source| self.file_error(source))?;
        self.bytes = end;
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), HistoryStoreError> {
        match self.file.write_all(frame) {
            Ok(()) => {
                self.bytes += frame.len() as u64;
                Ok(())
            }
            Err(source) => {
                // A partial frame would precede the next append.
                let error = self.file_error(source);
                self.truncate(self.bytes)?;
                Err(error)
            }
        }
    }

    /// Writes the requests that `wanted` accepts to a new file and replaces the old one with it.
    fn rewrite(&mut self, wanted: impl Fn(u64, Tenant) -> bool) -> Result<(), HistoryStoreError> {
        let next = self.path.with_file_name(NEXT);
        let in_next = |source| HistoryStoreError::File { path: next.clone(), source };
        let header_frame =
            self.header.frame().map_err(|what| HistoryStoreError::Other { path: self.path.clone(), what })?;
        let options =
            || OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(OWNER).open(&next);
        let file = options().map_err(in_next)?;
        let mut writer = io::BufWriter::new(&file);
        writer.write_all(&header_frame).map_err(in_next)?;
        let (mut bytes, mut has_header) = (header_frame.len() as u64, false);
        let scanned = self.scan(|_, content| {
            let is_wanted = request_key(content).is_some_and(|(number, tenant)| wanted(number, tenant));
            if std::mem::replace(&mut has_header, true)
                && is_wanted
                && let Some(frame) = frame::encode_frame(content)
            {
                writer.write_all(&frame).map_err(|error| error.to_string())?;
                bytes += frame.len() as u64;
            }
            Ok(())
        });
        scanned.map_err(|error| match error {
            ScanError::Content(what) => in_next(io::Error::other(what)),
            error @ ScanError::File(_) => self.scan_error(error),
        })?;
        writer.flush().map_err(in_next)?;
        drop(writer);
        file.sync_all().map_err(in_next)?;
        // Takes the lock before the rename: no other process knows the new file yet.
        file.try_lock().map_err(|error| in_next(io::Error::other(error.to_string())))?;
        std::fs::rename(&next, &self.path).map_err(in_next)?;
        self.file = file;
        self.truncate(bytes)
    }

    fn scan_error(&self, error: ScanError) -> HistoryStoreError {
        match error {
            ScanError::File(source) => self.file_error(source),
            ScanError::Content(what) => HistoryStoreError::Other { path: self.path.clone(), what },
        }
    }

    fn file_error(&self, source: io::Error) -> HistoryStoreError {
        HistoryStoreError::File { path: self.path.clone(), source }
    }
}

impl Drop for HistoryStore {
    fn drop(&mut self) {
        // Closing is not enough: a child process that was just forked also holds the lock until it executes another
        // program.
        let _ = self.file.unlock();
    }
}

/// Returns the number and the tenant of the request in a frame.
fn request_key(content: &[u8]) -> Option<(u64, Tenant)> {
    let (number, rest) = content.split_first_chunk()?;
    let tenant = rest.first_chunk()?;
    Some((u64::from_le_bytes(*number), Tenant(u64::from_le_bytes(*tenant))))
}

/// End positions of a scanned file, in bytes.
struct FrameExtent {
    /// End of the last complete frame.
    frames_end: u64,
    /// End of the file.
    file_end: u64,
}

enum ScanError {
    File(io::Error),
    Content(String),
}

impl From<io::Error> for ScanError {
    fn from(error: io::Error) -> Self {
        Self::File(error)
    }
}

impl StoreHeader {
    fn cells(&self) -> usize {
        self.layers.len() * self.experts as usize
    }

    /// Returns true if `content`, the first frame of a file, equals this header.
    pub(crate) fn is_in(&self, content: &[u8]) -> bool {
        serde_json::from_slice::<Self>(content).is_ok_and(|found| found == *self)
    }

    /// Returns the largest size of a request's frame, in bytes.
    pub(crate) fn frame_bytes(&self) -> u64 {
        (frame::HEADER_BYTES + 8 + 8 + 1 + 2 * self.hidden + 2 * 2 * self.cells()) as u64
    }

    fn frame(&self) -> Result<Vec<u8>, String> {
        let json = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        frame::encode_frame(&json).ok_or_else(|| "the model has too many layers".to_owned())
    }

    fn encode(&self, stored: &StoredRequest) -> Vec<u8> {
        let UsageSample { vector, prefill, decode } = &stored.usage;
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&stored.number.to_le_bytes());
        bytes.extend_from_slice(&stored.tenant.0.to_le_bytes());
        bytes.push(u8::from(decode.is_some()));
        bytes.extend(vector.iter().flat_map(|value| f16::from_f32(*value).to_le_bytes()));
        for shares in [Some(prefill), decode.as_ref()].into_iter().flatten() {
            let parts = shares.values().iter().map(|share| (share.clamp(0.0, 1.0) * 65535.0).round() as u16);
            bytes.extend(parts.flat_map(u16::to_le_bytes));
        }
        bytes
    }

    /// Decodes the request in `content`. Returns `None` if it does not match the shape of this model.
    pub(crate) fn decode(&self, content: &[u8]) -> Option<StoredRequest> {
        let (number, rest) = content.split_first_chunk::<8>()?;
        let (tenant, rest) = rest.split_first_chunk::<8>()?;
        let (has_decode, rest) = rest.split_first()?;
        let (vector, rest) = rest.split_at_checked(2 * self.hidden)?;
        let (prefill, decode) = rest.split_at_checked(2 * self.cells())?;
        let vector: Vec<f32> =
            vector.as_chunks().0.iter().map(|value| f16::from_le_bytes(*value).to_f32()).collect();
        if vector.iter().any(|value| !value.is_finite()) {
            return None;
        }
        let shares = |bytes: &[u8]| -> Result<UsageShares, PredictError> {
            let values = bytes.as_chunks().0.iter().map(|value| f32::from(u16::from_le_bytes(*value)));
            UsageShares::from_weights(self.experts as usize, values.collect())
        };
        let decode = match (*has_decode, decode.len() == 2 * self.cells(), decode.is_empty()) {
            (1, true, _) => Some(shares(decode).ok()?),
            (0, _, true) => None,
            _ => return None,
        };
        Some(StoredRequest {
            number: u64::from_le_bytes(*number),
            tenant: Tenant(u64::from_le_bytes(*tenant)),
            usage: UsageSample { vector, prefill: shares(prefill).ok()?, decode },
        })
    }
}
