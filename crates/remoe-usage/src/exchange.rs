//! Training history of other gateways, read where they store it.
//!
//! Every gateway appends what its own requests used to a file of its own, and reads the files of the others beside it,
//! those of gateways that have ended as well. Gateways neither send anything to nor wait for each other; one that
//! starts late or was away reads what there is. For each file the position of the last read is remembered. Reading goes
//! on behind it, or from the beginning if the file was rewritten, without the numbers that were read before. Both the
//! requests taken at a time and the bytes read for them are bounded for each file. A record that is not a request of
//! this model is skipped, as in the gateway's own file.

use crate::frame::{self, FrameRead, HEAD};
use crate::numbers::is_possible;
use crate::opted_out::OptedOutTenants;
use crate::store::{Header, Store, StoreError, StoredRequest};
use crate::tenant::Tenant;
use std::collections::{BTreeSet, HashMap};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Other gateways, at most.
const MOST_FILES: usize = 256;
/// Requests of one file that are taken in a look.
const MOST_REQUESTS: usize = 1024;
/// Requests that are handed over together: the requests that come meanwhile wait for no more than these.
const TOGETHER: usize = 64;
/// Bytes that are read at once, where one request takes less.
const BLOCK: u64 = 1 << 20;

/// Reads the files of other gateways.
#[derive(Debug)]
pub struct Exchange {
    header: Header,
    limit: u64,
    readers: HashMap<PathBuf, FileCursor>,
    opted_out: OptedOutTenants,
    /// How files of gateways that have ended were when nothing was left in them of these tenants.
    rid: HashMap<PathBuf, (SystemTime, u64, BTreeSet<Tenant>)>,
}

/// How far one file was read.
#[derive(Debug, Default)]
struct FileCursor {
    position: u64,
    /// Where the frame that was read last is, and what it begins with: the file is still the same one.
    last: Option<(u64, [u8; HEAD])>,
    /// The largest number so far.
    newest: u64,
    /// Where a frame seemed damaged that may be being written.
    doubted: Option<u64>,
    /// In this look: it goes on in the next one.
    is_doubted_now: bool,
    /// Why it was not read in the look before.
    problem: Option<String>,
}

/// Why a file is not read.
#[derive(Debug, thiserror::Error)]
enum UnreadFile {
    #[error(transparent)]
    File(#[from] io::Error),
    #[error("expected a training history of this model and version")]
    Other,
}

impl Exchange {
    /// For the same model as `own`, with files as long as its own may be.
    pub(crate) fn beside(own: &Store, opted_out: OptedOutTenants) -> Self {
        let (header, limit) = own.form();
        Self { header: header.clone(), limit, readers: HashMap::new(), opted_out, rid: HashMap::new() }
    }

    /// Hands what is new in `files` to `take`, until that says false. What cannot be read is said once and looked at again the
    /// next time.
    pub fn look(&mut self, files: &[PathBuf], mut take: impl FnMut(Vec<StoredRequest>) -> bool) {
        let files = files.get(..MOST_FILES.min(files.len())).unwrap_or_default();
        self.readers.retain(|path, _| files.contains(path));
        for path in files {
            let reader = self.readers.entry(path.clone()).or_default();
            reader.is_doubted_now = false;
            let mut taken = 0;
            let outcome = loop {
                match reader.read(path, &self.header, self.limit) {
                    Ok(records) if records.is_empty() => break Ok(()),
                    Ok(records) => {
                        taken += records.len();
                        if !take(records) {
                            return;
                        }
                        if taken >= MOST_REQUESTS {
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

    /// Removes requests of unremembered tenants from `file`, which must have no writer: the file of a gateway that has
    /// ended. A file that is not of this model is left as it is.
    ///
    /// # Errors
    /// The disk refuses. What was there still is.
    pub fn rid(&mut self, file: &Path) -> Result<(), StoreError> {
        let tenants = self.opted_out.all();
        let stand = |path: &Path| -> io::Result<Option<(SystemTime, u64)>> {
            match std::fs::symlink_metadata(path) {
                Ok(about) if about.is_file() => Ok(Some((about.modified()?, about.len()))),
                Ok(_) => Ok(None),
                Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
                Err(error) => Err(error),
            }
        };
        let failed = |source| StoreError::File { path: file.to_owned(), source };
        let Some((modified, bytes)) = stand(file).map_err(failed)?.filter(|_| !tenants.is_empty()) else {
            return Ok(());
        };
        let is_as_it_was = |(then, length, of): &(SystemTime, u64, BTreeSet<Tenant>)| {
            (*then, *length) == (modified, bytes) && tenants.is_subset(of)
        };
        let Some(folder) = file.parent().filter(|_| !self.rid.get(file).is_some_and(is_as_it_was)) else {
            return Ok(());
        };
        match Store::open_of(folder, self.header.clone(), self.limit, |_| ()) {
            Ok(mut store) => store.forget_all(&tenants)?,
            // Another model's is no file that requests to this one are in.
            Err(StoreError::Other { .. }) => {}
            Err(error) => return Err(error),
        }
        if self.rid.len() >= MOST_FILES {
            self.rid.clear();
        }
        if let Some((modified, bytes)) = stand(file).map_err(failed)? {
            self.rid.insert(file.to_owned(), (modified, bytes, tenants));
        }
        Ok(())
    }
}

impl FileCursor {
    /// The next requests; none where there are no more by now.
    fn read(&mut self, path: &Path, header: &Header, limit: u64) -> Result<Vec<StoredRequest>, UnreadFile> {
        // Whatever else has that name could keep its reader waiting.
        match std::fs::symlink_metadata(path) {
            Ok(about) if about.is_file() => {}
            Ok(_) => return Err(UnreadFile::Other),
            // It has learned nothing yet.
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(error.into()),
        }
        let file = File::open(path)?;
        let end = file.metadata()?.len().min(limit);
        if let Some((at, head)) = self.last {
            let mut there = [0; HEAD];
            let is_same = at + HEAD as u64 <= end && {
                file.read_exact_at(&mut there, at)?;
                there == head
            };
            if !is_same {
                (self.position, self.last, self.doubted) = (0, None, None);
            }
        }
        let mut records = Vec::new();
        while records.is_empty() && !self.is_doubted_now {
            let length = BLOCK.max(header.frame_bytes()).min(end.saturating_sub(self.position));
            let mut bytes = vec![0; usize::try_from(length).unwrap_or(0)];
            file.read_exact_at(&mut bytes, self.position)?;
            if self.pass(&bytes, header, &mut records)? == 0 {
                break;
            }
        }
        Ok(records)
    }

    /// Passes over the frames in `bytes`, which begin where it stands, and says how many bytes those take.
    fn pass(
        &mut self,
        bytes: &[u8],
        header: &Header,
        records: &mut Vec<StoredRequest>,
    ) -> Result<usize, UnreadFile> {
        let mut passed = 0;
        while records.len() < TOGETHER {
            let rest = bytes.get(passed..).unwrap_or_default();
            let step = match frame::read(rest) {
                FrameRead::Whole(step, content) if self.position == 0 => {
                    if !header.is_in(content) {
                        return Err(UnreadFile::Other);
                    }
                    step
                }
                FrameRead::Whole(step, content) => {
                    let found = header.decode(content);
                    // What is read for the second time, and what would keep everything behind it from being read.
                    let is_next = |one: &StoredRequest| one.number > self.newest && is_possible(one.number);
                    if let Some(one) = found.filter(is_next) {
                        self.newest = one.number;
                        records.push(one);
                    }
                    step
                }
                FrameRead::Damaged(_) if self.position == 0 => return Err(UnreadFile::Other),
                FrameRead::Damaged(step) if self.doubted == Some(self.position) => step,
                FrameRead::Damaged(_) => {
                    (self.doubted, self.is_doubted_now) = (Some(self.position), true);
                    break;
                }
                FrameRead::End => break,
            };
            if let Some(head) = rest.first_chunk::<HEAD>() {
                self.last = Some((self.position, *head));
            }
            self.position += step as u64;
            passed += step;
        }
        Ok(passed)
    }
}
