//! The store: what there is in memory, and its bounds.

use super::folder::{Folder, Read, ResponseFolderError};
use super::stored::{ResponseLimits, StoredResponse};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pause after a file that could not be written.
const AGAIN: Duration = Duration::from_secs(1);

/// Responses of all tenants, each tenant's own.
pub struct ResponseStore {
    shared: Arc<ResponseStoreShared>,
    writer: Option<JoinHandle<()>>,
    unread: Vec<String>,
}

/// State that the store and its writer share.
struct ResponseStoreShared {
    limits: ResponseLimits,
    is_written: bool,
    kept: Mutex<StoredResponses>,
    /// There is something to write, or nothing is left of it.
    changed: Condvar,
}

/// Part of the store that a tenant has.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct TenantHoldings {
    responses: usize,
    bytes: usize,
}

#[derive(Default)]
struct StoredResponses {
    responses: HashMap<Arc<str>, StoredResponse>,
    /// Ids, oldest first.
    by_age: BTreeMap<u64, Arc<str>>,
    by_tenant: HashMap<Arc<str>, TenantHoldings>,
    bytes: usize,
    latest: u64,
    /// There is a writer, which empties `dirty`.
    is_written: bool,
    /// Ids whose files are not as they are kept.
    dirty: HashSet<Arc<str>>,
    is_writing: bool,
    is_closed: bool,
}

impl ResponseStore {
    /// Returns a store that ends with the process.
    #[must_use]
    pub fn in_memory(limits: ResponseLimits) -> Arc<Self> {
        Arc::new(Self { shared: ResponseStoreShared::new(limits, false), writer: None, unread: Vec::new() })
    }

    /// Opens the store of the folder at `path`, which is made if it is not there. Files that cannot be read are left out.
    ///
    /// # Errors
    /// The folder cannot be made or read.
    pub fn open(path: &Path, limits: ResponseLimits) -> Result<Arc<Self>, ResponseFolderError> {
        let folder = Folder::open(path)?;
        let shared = ResponseStoreShared::new(limits, true);
        let Read { mut found, unread } = folder.read(limits)?;
        found.sort_by_key(|(_, stored)| stored.at);
        for (id, stored) in found {
            shared.kept().put(id, stored, &limits);
        }
        // What was read is written; what gave way is not.
        let mut kept = shared.kept();
        let StoredResponses { responses, dirty, .. } = &mut *kept;
        dirty.retain(|id| !responses.contains_key(id));
        drop(kept);
        let writing = shared.clone();
        let writer =
            std::thread::Builder::new().name("responses".to_owned()).spawn(move || writing.write(&folder));
        let writer = writer.map_err(|error| ResponseFolderError::new(path, "start the writer of", &error))?;
        Ok(Arc::new(Self { shared, writer: Some(writer), unread }))
    }

    /// Stores a response of `tenant`; the oldest ones of the tenant that has the most give way.
    pub(super) fn put(&self, id: &str, tenant: Arc<str>, items: String, response: String) {
        let mut kept = self.shared.kept();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let at = u64::try_from(now).unwrap_or(u64::MAX).max(kept.latest.saturating_add(1));
        let stored = StoredResponse { tenant, at, items: items.into(), response: response.into() };
        kept.put(id.into(), stored, &self.shared.limits);
        drop(kept);
        self.shared.changed.notify_all();
    }

    /// Returns the response `id` if it is one of `tenant`.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Option<StoredResponse> {
        self.shared.kept().responses.get(id).filter(|stored| &*stored.tenant == tenant).cloned()
    }

    /// Removes the response `id` if it is one of `tenant`; says whether it was.
    pub(crate) fn remove(&self, id: &str, tenant: &str) -> bool {
        let mut kept = self.shared.kept();
        let is_there = kept.responses.get(id).is_some_and(|stored| &*stored.tenant == tenant);
        if is_there {
            kept.remove(id);
        }
        drop(kept);
        self.shared.changed.notify_all();
        is_there
    }

    /// Says why files were left out when the store was opened: the first few of them.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// Waits until everything is written, for `limit` at most.
    pub fn flush(&self, limit: Duration) {
        if !self.shared.is_written {
            return;
        }
        let busy = |kept: &mut StoredResponses| kept.is_writing || !kept.dirty.is_empty();
        let waited = self.shared.changed.wait_timeout_while(self.shared.kept(), limit, busy);
        if waited.is_ok_and(|(_, timeout)| timeout.timed_out()) {
            tracing::warn!(?limit, "stored responses not written in time");
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shared.kept().responses.len()
    }
}

impl Drop for ResponseStore {
    fn drop(&mut self) {
        self.shared.kept().is_closed = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take() {
            // A writer that crashed has said so.
            let _crashed = writer.join();
        }
    }
}

impl std::fmt::Debug for ResponseStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ResponseStore").field(&self.shared.kept().responses.len()).finish()
    }
}

impl ResponseStoreShared {
    fn new(limits: ResponseLimits, is_written: bool) -> Arc<Self> {
        let kept = Mutex::new(StoredResponses { is_written, ..StoredResponses::default() });
        Arc::new(Self { limits, is_written, kept, changed: Condvar::new() })
    }

    fn kept(&self) -> MutexGuard<'_, StoredResponses> {
        // Every change of it is whole.
        self.kept.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the files of `folder` what is kept, until the store is closed.
    fn write(&self, folder: &Folder) {
        loop {
            let idle = |kept: &mut StoredResponses| kept.dirty.is_empty() && !kept.is_closed;
            let mut kept = self.changed.wait_while(self.kept(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(id) = kept.dirty.iter().next().cloned() else { return };
            kept.dirty.remove(&id);
            kept.is_writing = true;
            let stored = kept.responses.get(&id).cloned();
            drop(kept);
            let written = match &stored {
                Some(stored) => folder.write(&id, stored),
                None => folder.remove(&id),
            };
            let mut kept = self.kept();
            kept.is_writing = false;
            if let Err(error) = written {
                tracing::warn!(%error, "stored response not written");
                // The disk may have room again later; at the end there is no later.
                if !kept.is_closed {
                    kept.dirty.insert(id);
                    let closed = |kept: &mut StoredResponses| !kept.is_closed;
                    drop(self.changed.wait_timeout_while(kept, AGAIN, closed));
                    continue;
                }
            }
            drop(kept);
            self.changed.notify_all();
        }
    }
}

impl StoredResponses {
    fn put(&mut self, id: Arc<str>, stored: StoredResponse, limits: &ResponseLimits) {
        self.remove(&id);
        let bytes = stored.bytes();
        if bytes > limits.bytes || limits.responses == 0 {
            tracing::debug!(id = &*id, bytes, "response too large to be stored");
            return;
        }
        self.latest = self.latest.max(stored.at);
        self.bytes += bytes;
        let share = self.by_tenant.entry(stored.tenant.clone()).or_default();
        (share.responses, share.bytes) = (share.responses + 1, share.bytes + bytes);
        self.by_age.insert(stored.at, id.clone());
        self.responses.insert(id.clone(), stored);
        self.changed(id);
        while self.bytes > limits.bytes || self.responses.len() > limits.responses {
            let by_bytes = self.bytes > limits.bytes;
            let Some(oldest) = self.oldest_of_the_largest(by_bytes) else { return };
            self.remove(&oldest);
        }
    }

    /// Returns the oldest response of the tenant that has the most of what there is too much of.
    fn oldest_of_the_largest(&self, by_bytes: bool) -> Option<Arc<str>> {
        let size = |share: &TenantHoldings| if by_bytes { share.bytes } else { share.responses };
        let (largest, _) = self.by_tenant.iter().max_by_key(|(_, share)| size(share))?;
        let is_its = |id: &&Arc<str>| self.responses.get(*id).is_some_and(|stored| stored.tenant == *largest);
        self.by_age.values().find(is_its).cloned()
    }

    fn remove(&mut self, id: &str) {
        let Some((id, stored)) = self.responses.remove_entry(id) else { return };
        self.by_age.remove(&stored.at);
        self.bytes -= stored.bytes();
        if let Some(share) = self.by_tenant.get_mut(&stored.tenant) {
            (share.responses, share.bytes) = (share.responses - 1, share.bytes - stored.bytes());
            if share.responses == 0 {
                self.by_tenant.remove(&stored.tenant);
            }
        }
        self.changed(id);
    }

    /// Has the file of `id` written or removed, where there are files.
    fn changed(&mut self, id: Arc<str>) {
        if self.is_written {
            self.dirty.insert(id);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use std::fs;

    const LIMITS: ResponseLimits = ResponseLimits { responses: 4, bytes: 100 };
    const LONG: Duration = Duration::from_secs(60);

    fn put(store: &ResponseStore, number: usize, tenant: &str, bytes: usize) {
        store.put(&format!("resp_{number}"), tenant.into(), "1".repeat(bytes - 2), "{}".to_owned());
    }

    fn has(store: &ResponseStore, number: usize, tenant: &str) -> bool {
        store.get(&format!("resp_{number}"), tenant).is_some()
    }

    #[test]
    fn oldest_of_largest_tenant_gives_way() {
        let store = ResponseStore::in_memory(LIMITS);
        put(&store, 0, "small", 10);
        (1..4).for_each(|number| put(&store, number, "large", 30));
        assert_eq!(store.len(), 4);
        put(&store, 4, "large", 10);
        assert!(has(&store, 0, "small") && !has(&store, 1, "large") && has(&store, 4, "large"));
        put(&store, 5, "small", 50);
        assert!(has(&store, 5, "small") && !has(&store, 2, "large") && store.len() == 4);
        put(&store, 6, "huge", 101);
        assert!(!has(&store, 6, "huge") && store.len() == 4);
        // Again under the same id, as nothing else.
        put(&store, 5, "small", 60);
        assert_eq!(store.get("resp_5", "small").unwrap().items.len(), 58);
        let kept = store.shared.kept();
        let sum: usize = kept.responses.values().map(StoredResponse::bytes).sum();
        assert_eq!(
            (kept.bytes, kept.by_tenant.values().map(|share| share.bytes).sum::<usize>(), kept.by_age.len()),
            (sum, sum, kept.responses.len())
        );
        assert!(kept.dirty.is_empty(), "nothing writes what is in memory");
    }

    #[test]
    fn full_response_store_evicts_from_largest_tenant() {
        let store = ResponseStore::in_memory(LIMITS);
        put(&store, 0, "few", 50);
        (1..5).for_each(|number| put(&store, number, "many", 4));
        assert!(has(&store, 0, "few") && !has(&store, 1, "many") && store.len() == 4);
    }

    #[test]
    fn restart_finds_what_was_stored() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state/responses");
        let store = ResponseStore::open(&path, LIMITS).unwrap();
        (0..3).for_each(|number| put(&store, number, "t", 20));
        assert!(store.remove("resp_1", "t"));
        store.flush(LONG);
        let before = store.get("resp_2", "t").unwrap();
        drop(store);
        let store = ResponseStore::open(&path, LIMITS).unwrap();
        assert_eq!((has(&store, 0, "t"), has(&store, 1, "t"), store.len()), (true, false, 2));
        assert_eq!(store.get("resp_2", "t").unwrap(), before);
        // What gives way at the start loses its file.
        drop(store);
        let store = ResponseStore::open(&path, ResponseLimits { responses: 1, ..LIMITS }).unwrap();
        store.flush(LONG);
        assert!(has(&store, 2, "t"));
        let names: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["resp_2.json"]);
    }

    #[test]
    fn half_written_and_foreign_files_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let store = ResponseStore::open(folder.path(), LIMITS).unwrap();
        put(&store, 1, "t", 20);
        drop(store);
        let whole = fs::read(folder.path().join("resp_1.json")).unwrap();
        let file = |name: &str, text: &[u8]| fs::write(folder.path().join(name), text).unwrap();
        for end in 0..whole.len() {
            file("resp_2.json", &whole[..end]);
            assert_eq!(ResponseStore::open(folder.path(), LIMITS).unwrap().len(), 1, "{end}");
        }
        file("resp_2.json", &vec![b' '; 1 << 20]);
        file("resp_3.tmp", &whole);
        file("notes.json", &whole);
        file("resp_a b.json", &whole);
        // Its name and what it says must be one.
        file("resp_4.json", &whole);
        let store = ResponseStore::open(folder.path(), LIMITS).unwrap();
        assert!(store.len() == 1 && has(&store, 1, "t"));
        assert_eq!(store.unread().len(), 2, "{:?}", store.unread());
        assert!(!folder.path().join("resp_3.tmp").exists(), "what a crash has left is removed");
    }
}
