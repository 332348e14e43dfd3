//! Training history of past requests, in one file per model: appended, checksummed, bounded.
//!
//! A frame for the header, then one for each request: a number, the tenant, whether it decoded, the prompt's vector in
//! float16, the shares of both phases in 65535ths. The prompt's text is not stored. A writer that is killed loses the
//! frame that was being written and no other; the next writer cuts off the incomplete frame. Frames whose checksum is
//! wrong are skipped and counted. When the file has grown to its limit, it is rewritten with the requests that are
//! still wanted, beside the old one, which it replaces when it is whole. Only its owner can read it.

use crate::frame::{self, FrameRead};
use crate::tenant::Tenant;
use half::f16;
use remoe_predictor::record::RecordHeader;
use remoe_predictor::{Experience, PredictError, Shares};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeSet, HashSet};
use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

const FORMAT: &str = "remoe-experience";
const VERSION: u32 = 1;
/// Name of the file in its folder.
const FILE: &str = "experience";
/// Name of the rewritten file, until it replaces the file.
const NEXT: &str = "experience.next";

/// The file's permissions: words of a short prompt can be guessed from its vector.
const OWNER: u32 = 0o600;

/// Why a store cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The folder or the file cannot be read or written.
    #[error("cannot use the training history {}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It holds something else.
    #[error("cannot read the training history {}: {what}; use another folder, or delete it", path.display())]
    Other {
        /// The file.
        path: PathBuf,
        /// Difference from what was expected.
        what: String,
    },
    /// A limit that holds nothing.
    #[error("invalid limit of the training history {}: expected at least {} bytes, got {limit}; one request takes {one} bytes", path.display(), 4 * one)]
    TooSmall {
        /// The file.
        path: PathBuf,
        /// Bytes that were allowed.
        limit: u64,
        /// Bytes of a request.
        one: u64,
    },
    /// Another program writes it.
    #[error("cannot open the training history {}: another process uses it; use a separate folder", path.display())]
    Taken {
        /// The file.
        path: PathBuf,
    },
}

/// The content of the first frame.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Header {
    format: String,
    version: u32,
    model: String,
    dtype: String,
    layers: Vec<u32>,
    experts: u32,
    hidden: usize,
}

/// A request in a store.
#[derive(Debug, Clone, PartialEq)]
pub struct StoredRequest {
    /// Grows with every request of a gateway, and is another for each of all gateways' requests.
    pub number: u64,
    /// Whose it was.
    pub tenant: Tenant,
    /// Expert usage of the request.
    pub experience: Experience,
}

/// The file of one model, to which this program alone appends.
#[derive(Debug)]
pub struct Store {
    path: PathBuf,
    file: File,
    header: Header,
    bytes: u64,
    limit: u64,
    damaged: u64,
}

impl Store {
    /// The file of a store in `folder`.
    #[must_use]
    pub fn file_in(folder: &Path) -> PathBuf {
        folder.join(FILE)
    }

    /// Opens or creates the store of the model of `header` with vectors of `hidden` elements in `folder`, and hands what
    /// it holds to `each`, in the order of writing. The file never exceeds `limit` bytes.
    ///
    /// # Errors
    /// It cannot be read or written, is another program's or another model's, or the limit is too small.
    pub fn open(
        folder: &Path,
        header: &RecordHeader,
        hidden: usize,
        limit: u64,
        each: impl FnMut(StoredRequest),
    ) -> Result<Self, StoreError> {
        let header = Header {
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

    /// As [`Self::open`], of requests to what `header` says.
    pub(crate) fn open_of(
        folder: &Path,
        header: Header,
        limit: u64,
        mut each: impl FnMut(StoredRequest),
    ) -> Result<Self, StoreError> {
        let path = folder.join(FILE);
        let failed = |source| StoreError::File { path: path.clone(), source };
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
            Err(std::fs::TryLockError::WouldBlock) => return Err(StoreError::Taken { path }),
            Err(std::fs::TryLockError::Error(source)) => return Err(StoreError::File { path, source }),
        }
        let one = header.frame_bytes();
        if limit < 4 * one {
            return Err(StoreError::TooSmall { path, limit, one });
        }
        let mut store = Self { path, file, header, bytes: 0, limit, damaged: 0 };
        let other =
            |store: &Self, what: &str| StoreError::Other { path: store.path.clone(), what: what.to_owned() };
        let mut is_headed = false;
        let end = store.scan(|header, content| {
            if !std::mem::replace(&mut is_headed, true) {
                return match serde_json::from_slice::<Header>(content) {
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
        let end = end.map_err(|error| store.unread(error))?;
        // An unfinished header is rewritten; any other content belongs to another program.
        let begun = store.header.frame().map_err(|what| other(&store, &what))?;
        if !is_headed && end.0 != end.1 && !store.begins(&begun, end.1)? {
            return Err(other(&store, "unknown format"));
        }
        store.cut(if is_headed { end.0 } else { 0 })?;
        if !is_headed {
            store.write(&begun)?;
        }
        Ok(store)
    }

    /// Bytes of the file.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Frames that were passed over because of their checksums.
    #[must_use]
    pub fn damaged(&self) -> u64 {
        self.damaged
    }

    /// Requests that the file has room for twice over, so that it is rarely rewritten.
    #[must_use]
    pub fn capacity(&self) -> usize {
        usize::try_from(self.limit / (2 * self.header.frame_bytes())).unwrap_or(usize::MAX).max(1)
    }

    /// Appends a request. Where that would pass the limit, only those whose numbers are `wanted` gives are kept; no more
    /// than [`Self::capacity`] should be.
    ///
    /// # Errors
    /// The disk refuses. What is there can still be read.
    pub fn append(
        &mut self,
        stored: &StoredRequest,
        wanted: impl FnOnce() -> HashSet<u64>,
    ) -> Result<(), StoreError> {
        let Some(frame) = frame::framed(&self.header.encode(stored)) else { return Ok(()) };
        if self.bytes + frame.len() as u64 > self.limit {
            let wanted = wanted();
            self.keep(|number, _| wanted.contains(&number))?;
        }
        if self.bytes + frame.len() as u64 <= self.limit {
            self.write(&frame)?;
        }
        Ok(())
    }

    /// Takes the requests of `tenant` out of the file.
    ///
    /// # Errors
    /// The disk refuses. What was there still is.
    pub fn forget(&mut self, tenant: Tenant) -> Result<(), StoreError> {
        self.forget_all(&BTreeSet::from([tenant]))
    }

    /// As [`Self::forget`], of several.
    pub(crate) fn forget_all(&mut self, tenants: &BTreeSet<Tenant>) -> Result<(), StoreError> {
        let mut is_there = false;
        let scanned = self.scan(|_, content| {
            is_there |= whose(content).is_some_and(|(_, of)| tenants.contains(&of));
            Ok(())
        });
        // The next request is written where the file ends, whatever was read.
        self.cut(self.bytes)?;
        scanned.map_err(|error| self.unread(error))?;
        if is_there { self.keep(|_, of| !tenants.contains(&of)) } else { Ok(()) }
    }

    /// Rewrites the file with only the requests whose number and tenant are `wanted`.
    fn keep(&mut self, wanted: impl Fn(u64, Tenant) -> bool) -> Result<(), StoreError> {
        let rewritten = self.rewrite(wanted);
        if rewritten.is_err() {
            // The old file goes on where it ended.
            self.cut(self.bytes)?;
        }
        rewritten
    }

    /// Header of the file, and its limit in bytes.
    pub(crate) fn form(&self) -> (&Header, u64) {
        (&self.header, self.limit)
    }

    /// Passes over all whole frames. Where the last of them ends, and where the file does.
    fn scan(
        &mut self,
        mut each: impl FnMut(&Header, &[u8]) -> Result<(), String>,
    ) -> Result<(u64, u64), ScanError> {
        self.file.seek(SeekFrom::Start(0))?;
        let (mut buffer, mut position, mut damaged) = (Vec::new(), 0, 0);
        let mut reader = io::BufReader::with_capacity(1 << 20, &self.file);
        loop {
            // A frame at least, or what is left.
            let missing = (frame::HEAD + frame::MOST).saturating_sub(buffer.len()) as u64;
            reader.by_ref().take(missing).read_to_end(&mut buffer)?;
            let mut passed = 0;
            loop {
                match frame::read(buffer.get(passed..).unwrap_or_default()) {
                    FrameRead::Whole(bytes, content) => {
                        each(&self.header, content).map_err(ScanError::Content)?;
                        passed += bytes;
                    }
                    FrameRead::Damaged(bytes) => {
                        // The header cannot be done without.
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
        Ok((position, position + buffer.len() as u64 + rest))
    }

    /// Reports if the file's `length` bytes are a beginning of `header`.
    fn begins(&mut self, header: &[u8], length: u64) -> Result<bool, StoreError> {
        let mut there = Vec::new();
        let read = self.file.seek(SeekFrom::Start(0));
        let read = read.and_then(|_| (&self.file).take(header.len() as u64).read_to_end(&mut there));
        read.map_err(|source| self.failed(source))?;
        Ok(length < header.len() as u64 && header.starts_with(&there))
    }

    /// Cuts off what is behind `end`.
    fn cut(&mut self, end: u64) -> Result<(), StoreError> {
        let cut = self.file.set_len(end).and_then(|()| self.file.seek(SeekFrom::Start(end)));
        cut.map_err(|source| self.failed(source))?;
        self.bytes = end;
        Ok(())
    }

    fn write(&mut self, frame: &[u8]) -> Result<(), StoreError> {
        match self.file.write_all(frame) {
            Ok(()) => {
                self.bytes += frame.len() as u64;
                Ok(())
            }
            Err(source) => {
                // What was written of it would stand before the next one.
                let error = self.failed(source);
                self.cut(self.bytes)?;
                Err(error)
            }
        }
    }

    /// Rewrites the file with the requests that are `wanted`.
    fn rewrite(&mut self, wanted: impl Fn(u64, Tenant) -> bool) -> Result<(), StoreError> {
        let next = self.path.with_file_name(NEXT);
        let in_next = |source| StoreError::File { path: next.clone(), source };
        let begun =
            self.header.frame().map_err(|what| StoreError::Other { path: self.path.clone(), what })?;
        let options =
            || OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(OWNER).open(&next);
        let file = options().map_err(in_next)?;
        let mut writer = io::BufWriter::new(&file);
        writer.write_all(&begun).map_err(in_next)?;
        let (mut bytes, mut is_headed) = (begun.len() as u64, false);
        let scanned = self.scan(|_, content| {
            let is_wanted = whose(content).is_some_and(|(number, tenant)| wanted(number, tenant));
            if std::mem::replace(&mut is_headed, true)
                && is_wanted
                && let Some(frame) = frame::framed(content)
            {
                writer.write_all(&frame).map_err(|error| error.to_string())?;
                bytes += frame.len() as u64;
            }
            Ok(())
        });
        scanned.map_err(|error| match error {
            ScanError::Content(what) => in_next(io::Error::other(what)),
            error @ ScanError::File(_) => self.unread(error),
        })?;
        writer.flush().map_err(in_next)?;
        drop(writer);
        file.sync_all().map_err(in_next)?;
        // No other program has it open: its name is new.
        file.try_lock().map_err(|error| in_next(io::Error::other(error.to_string())))?;
        std::fs::rename(&next, &self.path).map_err(in_next)?;
        self.file = file;
        self.cut(bytes)
    }

    fn unread(&self, error: ScanError) -> StoreError {
        match error {
            ScanError::File(source) => self.failed(source),
            ScanError::Content(what) => StoreError::Other { path: self.path.clone(), what },
        }
    }

    fn failed(&self, source: io::Error) -> StoreError {
        StoreError::File { path: self.path.clone(), source }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        // Closing alone is not enough: a child that this process has just forked holds the file, and with it the lock,
        // until it becomes another program.
        let _ = self.file.unlock();
    }
}

/// The number of the request in a frame's content, and its tenant.
fn whose(content: &[u8]) -> Option<(u64, Tenant)> {
    let (number, rest) = content.split_first_chunk()?;
    let tenant = rest.first_chunk()?;
    Some((u64::from_le_bytes(*number), Tenant(u64::from_le_bytes(*tenant))))
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

impl Header {
    fn cells(&self) -> usize {
        self.layers.len() * self.experts as usize
    }

    /// Reports if the first frame of a file, with `content`, is this header.
    pub(crate) fn is_in(&self, content: &[u8]) -> bool {
        serde_json::from_slice::<Self>(content).is_ok_and(|found| found == *self)
    }

    /// Bytes of a request's frame, at most.
    pub(crate) fn frame_bytes(&self) -> u64 {
        (frame::HEAD + 8 + 8 + 1 + 2 * self.hidden + 2 * 2 * self.cells()) as u64
    }

    fn frame(&self) -> Result<Vec<u8>, String> {
        let json = serde_json::to_vec(self).map_err(|error| error.to_string())?;
        frame::framed(&json).ok_or_else(|| "the model has too many layers".to_owned())
    }

    fn encode(&self, stored: &StoredRequest) -> Vec<u8> {
        let Experience { vector, prefill, decode } = &stored.experience;
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

    /// The request in `content`; `None` where it has another form.
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
        let shares = |bytes: &[u8]| -> Result<Shares, PredictError> {
            let values = bytes.as_chunks().0.iter().map(|value| f32::from(u16::from_le_bytes(*value)));
            Shares::from_weights(self.experts as usize, values.collect())
        };
        let decode = match (*has_decode, decode.len() == 2 * self.cells(), decode.is_empty()) {
            (1, true, _) => Some(shares(decode).ok()?),
            (0, _, true) => None,
            _ => return None,
        };
        Some(StoredRequest {
            number: u64::from_le_bytes(*number),
            tenant: Tenant(u64::from_le_bytes(*tenant)),
            experience: Experience { vector, prefill: shares(prefill).ok()?, decode },
        })
    }
}
