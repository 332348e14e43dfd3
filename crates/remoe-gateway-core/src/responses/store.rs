//! Store of responses in memory, with its bounds, and the thread that writes them to a folder.

use super::folder::{FolderContents, ResponseFolder, ResponseFolderError};
use super::stored::{ResponseLimits, StoredResponse};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::Path;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Pause after a failed write.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Stored responses of all tenants. A tenant sees only its own.
pub struct ResponseStore {
    shared: Arc<ResponseStoreShared>,
    writer: Option<JoinHandle<()>>,
    unread: Vec<String>,
}

/// State that the store shares with its writer thread.
struct ResponseStoreShared {
    limits: ResponseLimits,
    has_folder: bool,
    contents: Mutex<StoredResponses>,
    /// Signals that a response is to be written, that all are written, or that the store is closed.
    changed: Condvar,
}

/// Number and size of a tenant's responses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct TenantHoldings {
    responses: usize,
    bytes: usize,
}

#[derive(Default)]
struct StoredResponses {
    responses: HashMap<Arc<str>, StoredResponse>,
    /// Ids by the time of storing, oldest first.
    by_age: BTreeMap<u64, Arc<str>>,
    by_tenant: HashMap<Arc<str>, TenantHoldings>,
    bytes: usize,
    latest: u64,
    /// Set if a writer thread writes the responses of `unwritten`.
    has_folder: bool,
    /// Ids of responses whose files must be written or removed.
    unwritten: HashSet<Arc<str>>,
    is_writing: bool,
    is_closed: bool,
}

impl ResponseStore {
    /// Makes a store without files, which is lost with the process.
    #[must_use]
    pub fn in_memory(limits: ResponseLimits) -> Arc<Self> {
        Arc::new(Self { shared: ResponseStoreShared::new(limits, false), writer: None, unread: Vec::new() })
    }

    /// Opens a store with the files in the folder at `path`, which is created if it is missing. Unreadable files are
    /// skipped.
    ///
    /// # Errors
    /// The folder cannot be created or read, or the writer thread cannot be started.
    pub fn open(path: &Path, limits: ResponseLimits) -> Result<Arc<Self>, ResponseFolderError> {
        let folder = ResponseFolder::open(path)?;
        let shared = ResponseStoreShared::new(limits, true);
        let FolderContents { mut found, unread } = folder.read(limits)?;
        found.sort_by_key(|(_, stored)| stored.at);
        for (id, stored) in found {
            shared.contents().put(id, stored, &limits);
        }
        // Responses that were just read need no write; files of evicted ones must be removed.
        let mut contents = shared.contents();
        let StoredResponses { responses, unwritten, .. } = &mut *contents;
        unwritten.retain(|id| !responses.contains_key(id));
        drop(contents);
        let writing = shared.clone();
        let writer = std::thread::Builder::new()
            .name("responses".to_owned())
            .spawn(move || writing.run_writer(&folder));
        let writer = writer.map_err(|error| ResponseFolderError::new(path, "start the writer of", &error))?;
        Ok(Arc::new(Self { shared, writer: Some(writer), unread }))
    }

    /// Stores a response of `tenant`. If the store is full, evicts the oldest ones of the tenant that has the most.
    pub(super) fn put(&self, id: &str, tenant: Arc<str>, items: String, response: String) {
        let mut contents = self.shared.contents();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
        let at = u64::try_from(now).unwrap_or(u64::MAX).max(contents.latest.saturating_add(1));
        let stored = StoredResponse { tenant, at, items: items.into(), response: response.into() };
        contents.put(id.into(), stored, &self.shared.limits);
        drop(contents);
        self.shared.changed.notify_all();
    }

    /// Returns the response `id` if it is one of `tenant`.
    pub(crate) fn get(&self, id: &str, tenant: &str) -> Option<StoredResponse> {
        self.shared.contents().responses.get(id).filter(|stored| &*stored.tenant == tenant).cloned()
    }

    /// Removes the response `id` if it is one of `tenant`. Returns whether it was.
    pub(crate) fn remove(&self, id: &str, tenant: &str) -> bool {
        let mut contents = self.shared.contents();
        let is_found = contents.responses.get(id).is_some_and(|stored| &*stored.tenant == tenant);
        if is_found {
            contents.remove(id);
        }
        drop(contents);
        self.shared.changed.notify_all();
        is_found
    }

    /// Returns the errors of the first few files that were skipped when the store was opened.
    pub fn unread(&self) -> &[String] {
        &self.unread
    }

    /// Waits until all responses are written, for at most `limit`.
    pub fn flush(&self, limit: Duration) {
        if !self.shared.has_folder {
            return;
        }
        let busy = |contents: &mut StoredResponses| contents.is_writing || !contents.unwritten.is_empty();
        let waited = self.shared.changed.wait_timeout_while(self.shared.contents(), limit, busy);
        if waited.is_ok_and(|(_, timeout)| timeout.timed_out()) {
            tracing::warn!(?limit, "stored responses not written in time");
        }
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.shared.contents().responses.len()
    }
}

impl Drop for ResponseStore {
    fn drop(&mut self) {
        self.shared.contents().is_closed = true;
        self.shared.changed.notify_all();
        if let Some(writer) = self.writer.take() {
            // A panic of the writer has been reported by the panic hook.
            let _crashed = writer.join();
        }
    }
}

impl std::fmt::Debug for ResponseStore {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.debug_tuple("ResponseStore").field(&self.shared.contents().responses.len()).finish()
    }
}

impl ResponseStoreShared {
    fn new(limits: ResponseLimits, has_folder: bool) -> Arc<Self> {
        let contents = Mutex::new(StoredResponses { has_folder, ..StoredResponses::default() });
        Arc::new(Self { limits, has_folder, contents, changed: Condvar::new() })
    }

    fn contents(&self) -> MutexGuard<'_, StoredResponses> {
        // A panic cannot leave it half changed, so a poisoned lock is used as it is.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes changed responses to `folder` until the store is closed.
    fn run_writer(&self, folder: &ResponseFolder) {
        loop {
            let idle = |contents: &mut StoredResponses| contents.unwritten.is_empty() && !contents.is_closed;
            let mut contents =
                self.changed.wait_while(self.contents(), idle).unwrap_or_else(PoisonError::into_inner);
            let Some(id) = contents.unwritten.iter().next().cloned() else { return };
            contents.unwritten.remove(&id);
            contents.is_writing = true;
            let stored = contents.responses.get(&id).cloned();
            drop(contents);
            let written = match &stored {
                Some(stored) => folder.write(&id, stored),
                None => folder.remove(&id),
            };
            let mut contents = self.contents();
            contents.is_writing = false;
            if let Err(error) = written {
                tracing::warn!(%error, "stored response not written");
                // The disk may have space again later. A store that is being closed does not retry.
                if !contents.is_closed {
                    contents.unwritten.insert(id);
                    let is_open = |contents: &mut StoredResponses| !contents.is_closed;
                    drop(self.changed.wait_timeout_while(contents, RETRY_PAUSE, is_open));
                    continue;
                }
            }
            drop(contents);
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
        let holdings = self.by_tenant.entry(stored.tenant.clone()).or_default();
        (holdings.responses, holdings.bytes) = (holdings.responses + 1, holdings.bytes + bytes);
        self.by_age.insert(stored.at, id.clone());
        self.responses.insert(id.clone(), stored);
        self.mark_unwritten(id);
        while self.bytes > limits.bytes || self.responses.len() > limits.responses {
            let by_bytes = self.bytes > limits.bytes;
            let Some(oldest) = self.oldest_of_the_largest(by_bytes) else { return };
            self.remove(&oldest);
        }
    }

    /// Returns the oldest response of the tenant with the most bytes, or with the most responses.
    fn oldest_of_the_largest(&self, by_bytes: bool) -> Option<Arc<str>> {
        let size = |holdings: &TenantHoldings| if by_bytes { holdings.bytes } else { holdings.responses };
        let (largest, _) = self.by_tenant.iter().max_by_key(|(_, holdings)| size(holdings))?;
        let is_of_largest =
            |id: &&Arc<str>| self.responses.get(*id).is_some_and(|stored| stored.tenant == *largest);
        self.by_age.values().find(is_of_largest).cloned()
    }

    fn remove(&mut self, id: &str) {
        let Some((id, stored)) = self.responses.remove_entry(id) else { return };
        self.by_age.remove(&stored.at);
        self.bytes -= stored.bytes();
        if let Some(holdings) = self.by_tenant.get_mut(&stored.tenant) {
            (holdings.responses, holdings.bytes) = (holdings.responses - 1, holdings.bytes - stored.bytes());
            if holdings.responses == 0 {
                self.by_tenant.remove(&stored.tenant);
            }
        }
        self.mark_unwritten(id);
    }

    /// Marks the file of `id` to be written or removed, if there is a folder.
    fn mark_unwritten(&mut self, id: Arc<str>) {
        if self.has_folder {
            self.unwritten.insert(id);
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
    fn oldest_response_of_largest_tenant_is_evicted() {
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
        // Storing the same id again replaces the response.
        put(&store, 5, "small", 60);
        assert_eq!(store.get("resp_5", "small").unwrap().items.len(), 58);
        let contents = store.shared.contents();
        let sum: usize = contents.responses.values().map(StoredResponse::bytes).sum();
        assert_eq!(
            (
                contents.bytes,
                contents.by_tenant.values().map(|holdings| holdings.bytes).sum::<usize>(),
                contents.by_age.len()
            ),
            (sum, sum, contents.responses.len())
        );
        assert!(contents.unwritten.is_empty(), "a store without a folder has no writer");
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
        // Files of responses that are evicted at the start are removed.
        drop(store);
        let store = ResponseStore::open(&path, ResponseLimits { responses: 1, ..LIMITS }).unwrap();
        store.flush(LONG);
        assert!(has(&store, 2, "t"));
        let names: Vec<_> = fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["resp_2.json"]);
    }

    #[test]
    fn incomplete_and_foreign_files_are_skipped() {
        let folder = tempfile::tempdir().unwrap();
        let store = ResponseStore::open(folder.path(), LIMITS).unwrap();
        put(&store, 1, "t", 20);
        drop(store);
        let content = fs::read(folder.path().join("resp_1.json")).unwrap();
        let file = |name: &str, text: &[u8]| fs::write(folder.path().join(name), text).unwrap();
        for end in 0..content.len() {
            file("resp_2.json", &content[..end]);
            assert_eq!(ResponseStore::open(folder.path(), LIMITS).unwrap().len(), 1, "{end}");
        }
        file("resp_2.json", &vec![b' '; 1 << 20]);
        file("resp_3.tmp", &content);
        file("notes.json", &content);
        file("resp_a b.json", &content);
        // The id in the file must match its name.
        file("resp_4.json", &content);
        let store = ResponseStore::open(folder.path(), LIMITS).unwrap();
        assert!(store.len() == 1 && has(&store, 1, "t"));
        assert_eq!(store.unread().len(), 2, "{:?}", store.unread());
        assert!(!folder.path().join("resp_3.tmp").exists(), "temporary files of a crash are removed");
    }
}
