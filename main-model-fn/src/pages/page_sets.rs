//! State of every KV cache page: held by sequences, idle in the prefix cache, or free.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Pages of one block of positions in all layers of one kind (whole or windowed). They are held, cached and evicted
/// together.
///
/// Clones hold the same pages. When the last clone is dropped, the pages become idle if they are cached, else free.
pub(crate) struct PageSet {
    pub(super) id: usize,
    /// Page ids, one per page table of the kind.
    pub(super) pages: Rc<[usize]>,
    table: Rc<RefCell<PageSetTable>>,
}

impl Clone for PageSet {
    fn clone(&self) -> Self {
        PageSetTable::hold(&self.table, self.id)
    }
}

impl Drop for PageSet {
    fn drop(&mut self) {
        self.table.borrow_mut().release(self.id);
    }
}

/// Last use of a cached set: serial number of the use, then the order of eviction among the sets of that use.
pub(super) type LastUse = (u64, EvictionRank);

/// Order of eviction among sets of the same use, by the index of their block; the smallest is evicted first.
///
/// A sequence that continues needs the last windowed pages, so the first go first. A whole page is found only through
/// the blocks before it, so the last go first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EvictionRank {
    Windowed(u32),
    Whole(Reverse<u32>),
}

/// State of one page set.
struct PageSetEntry {
    /// Number of [`PageSet`] values with this id.
    holders: u32,
    /// Last use, if the set is in the prefix cache.
    last_use: Option<LastUse>,
    pages: Rc<[usize]>,
}

/// State of every page set. Changes take O(log sets).
pub(super) struct PageSetTable {
    entries: Vec<PageSetEntry>,
    /// Ids of entries without pages.
    unused_entries: Vec<usize>,
    /// Free pages that were used before.
    free: Vec<usize>,
    /// Pages that were ever used: ids from this one on are free.
    used: usize,
    /// Cached sets that no sequence holds, by last use.
    idle: BTreeMap<LastUse, usize>,
    idle_pages: usize,
    limit: usize,
}

impl PageSetTable {
    /// Creates a table of `limit` free pages.
    pub(super) fn new(limit: usize) -> Self {
        let (entries, unused_entries, free, idle) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        Self { entries, unused_entries, free, used: 0, idle, idle_pages: 0, limit }
    }

    /// Adds a holder to the set `id`.
    pub(super) fn hold(table: &Rc<RefCell<Self>>, id: usize) -> PageSet {
        let mut this = table.borrow_mut();
        let entry = &mut this.entries[id];
        entry.holders += 1;
        let pages = entry.pages.clone();
        if let (1, Some(last_use)) = (entry.holders, entry.last_use) {
            this.idle.remove(&last_use);
            this.idle_pages -= pages.len();
        }
        drop(this);
        PageSet { id, pages, table: table.clone() }
    }

    /// Removes a holder from the set `id`.
    fn release(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        entry.holders -= 1;
        if entry.holders == 0 {
            match entry.last_use {
                Some(last_use) => self.set_idle(id, last_use),
                None => self.set_free(id),
            }
        }
    }

    /// Marks the set `id` as cached with this last use, or as not cached if `None`.
    pub(super) fn set_cached(&mut self, id: usize, last_use: Option<LastUse>) {
        let entry = &mut self.entries[id];
        let before = std::mem::replace(&mut entry.last_use, last_use);
        if entry.holders > 0 {
            return;
        }
        if let Some(before) = before {
            self.idle_pages -= entry.pages.len();
            self.idle.remove(&before);
        }
        match last_use {
            Some(last_use) => self.set_idle(id, last_use),
            None => self.set_free(id),
        }
    }

    fn set_idle(&mut self, id: usize, last_use: LastUse) {
        self.idle_pages += self.entries[id].pages.len();
        self.idle.insert(last_use, id);
    }

    fn set_free(&mut self, id: usize) {
        let pages = std::mem::take(&mut self.entries[id].pages);
        self.free.extend_from_slice(&pages);
        self.unused_entries.push(id);
    }

    /// Takes `count` free pages, those that were used before first. Returns `None` if fewer are free.
    pub(super) fn allocate(table: &Rc<RefCell<Self>>, count: usize) -> Option<PageSet> {
        let mut this = table.borrow_mut();
        if this.free() < count {
            return None;
        }
        let pages: Rc<[usize]> = (0..count)
            .map(|_| {
                this.free.pop().unwrap_or_else(|| {
                    this.used += 1;
                    this.used - 1
                })
            })
            .collect();
        let entry = PageSetEntry { holders: 0, last_use: None, pages };
        let id = match this.unused_entries.pop() {
            Some(id) => {
                this.entries[id] = entry;
                id
            }
            None => {
                this.entries.push(entry);
                this.entries.len() - 1
            }
        };
        drop(this);
        Some(Self::hold(table, id))
    }

    pub(super) fn limit(&self) -> usize {
        self.limit
    }

    /// Returns the number of free pages.
    pub(super) fn free(&self) -> usize {
        self.limit - self.used + self.free.len()
    }

    /// Returns the number of pages that sequences hold.
    pub(super) fn held(&self) -> usize {
        self.used - self.free.len() - self.idle_pages
    }

    /// Returns the least recently used idle set.
    pub(super) fn least_recently_used(&self) -> Option<usize> {
        self.idle.first_key_value().map(|(_, &id)| id)
    }
}
