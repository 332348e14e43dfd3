//! Sets of pages: held by sequences, kept for later, or free.

use std::cell::RefCell;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::rc::Rc;

/// Pages of one block of positions in the layers of one kind, which are held, kept and evicted together. Clones hold
/// the same pages; with the last of them the pages become idle or free.
pub(crate) struct PageSet {
    pub(super) id: usize,
    /// Ids of the pages, one for each page table of the kind.
    pub(super) pages: Rc<[usize]>,
    table: Rc<RefCell<Table>>,
}

impl Clone for PageSet {
    fn clone(&self) -> Self {
        Table::hold(&self.table, self.id)
    }
}

impl Drop for PageSet {
    fn drop(&mut self) {
        self.table.borrow_mut().release(self.id);
    }
}

/// When a kept set was last used: by which use of a chain, and in which order sets of that use are evicted.
pub(super) type LastUse = (u64, Rank);

/// Order of eviction among sets that were used together, by their block. Sequences that continue need the windows at
/// the end. Of whole pages, ends go before beginnings, without which nothing finds them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Rank {
    Windowed(u32),
    Whole(Reverse<u32>),
}

/// The state of one set.
struct PageSetEntry {
    /// [`PageSet`] values of it.
    holders: u32,
    /// Last use while it is in the prefix cache.
    kept: Option<LastUse>,
    pages: Rc<[usize]>,
}

/// The state of every set. All changes are O(log sets).
pub(super) struct Table {
    entries: Vec<PageSetEntry>,
    /// Entries without pages.
    spare: Vec<usize>,
    free: Vec<usize>,
    /// Pages that were ever used.
    used: usize,
    /// Kept sets that no sequence holds, by their last use.
    idle: BTreeMap<LastUse, usize>,
    idle_pages: usize,
    limit: usize,
}

impl Table {
    /// A table of `limit` free pages.
    pub(super) fn new(limit: usize) -> Self {
        let (entries, spare, free, idle) = (Vec::new(), Vec::new(), Vec::new(), BTreeMap::new());
        Self { entries, spare, free, used: 0, idle, idle_pages: 0, limit }
    }

    pub(super) fn hold(table: &Rc<RefCell<Self>>, id: usize) -> PageSet {
        let mut this = table.borrow_mut();
        let entry = &mut this.entries[id];
        entry.holders += 1;
        let pages = entry.pages.clone();
        if let (1, Some(used)) = (entry.holders, entry.kept) {
            this.idle.remove(&used);
            this.idle_pages -= pages.len();
        }
        drop(this);
        PageSet { id, pages, table: table.clone() }
    }

    fn release(&mut self, id: usize) {
        let entry = &mut self.entries[id];
        entry.holders -= 1;
        if entry.holders == 0 {
            match entry.kept {
                Some(used) => self.rest(id, used),
                None => self.set_free(id),
            }
        }
    }

    /// Marks the set as kept, last used then; `None`: kept no longer.
    pub(super) fn keep(&mut self, id: usize, used: Option<LastUse>) {
        let entry = &mut self.entries[id];
        let before = std::mem::replace(&mut entry.kept, used);
        if entry.holders > 0 {
            return;
        }
        if let Some(before) = before {
            self.idle_pages -= entry.pages.len();
            self.idle.remove(&before);
        }
        match used {
            Some(used) => self.rest(id, used),
            None => self.set_free(id),
        }
    }

    fn rest(&mut self, id: usize, used: LastUse) {
        self.idle_pages += self.entries[id].pages.len();
        self.idle.insert(used, id);
    }

    fn set_free(&mut self, id: usize) {
        let pages = std::mem::take(&mut self.entries[id].pages);
        self.free.extend_from_slice(&pages);
        self.spare.push(id);
    }

    /// A set of `count` pages, those that were used before first; `None` where so many are not free.
    pub(super) fn take(table: &Rc<RefCell<Self>>, count: usize) -> Option<PageSet> {
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
        let entry = PageSetEntry { holders: 0, kept: None, pages };
        let id = match this.spare.pop() {
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

    /// Free pages.
    pub(super) fn free(&self) -> usize {
        self.limit - self.used + self.free.len()
    }

    /// Pages that sequences hold.
    pub(super) fn held(&self) -> usize {
        self.used - self.free.len() - self.idle_pages
    }

    /// The idle set that was used longest ago.
    pub(super) fn oldest(&self) -> Option<usize> {
        self.idle.first_key_value().map(|(_, &id)| id)
    }
}
