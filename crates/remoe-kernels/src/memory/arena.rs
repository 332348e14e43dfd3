//! Room on huge pages for buffers that are no multiple of one.
//!
//! Were each buffer a mapping of its own, what it has beyond whole huge pages would lie on small ones: of an expert of
//! 3.5 MB that is 1.4 MB, and of one below 2 MB all, which a core reads more slowly because it looks up four hundred
//! addresses where one would do. So buffers lie side by side in large mappings. What is free goes back to the operating
//! system, which breaks up the huge page that it shares with a neighbour: memory that is limited is worth more. Only
//! the huge page where those that are in use end takes more memory than was asked for.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::{ALIGN, HUGE};

/// Least size of a mapping.
const REGION: usize = 16 * HUGE;

/// Large mappings and which of their bytes are free. Free bytes are zero.
#[derive(Debug)]
pub(super) struct Arena {
    regions: Vec<Region>,
}

impl Arena {
    pub(super) const fn new() -> Self {
        Self { regions: Vec::new() }
    }

    /// `len` zero bytes, aligned to [`ALIGN`]; `None` when the operating system gives no memory.
    pub(super) fn take(&mut self, len: usize) -> Option<NonNull<u8>> {
        let len = len.checked_next_multiple_of(ALIGN)?;
        let taken = self.regions.iter_mut().find_map(|region| region.take(len));
        taken.or_else(|| {
            // As many of that length as fill it to the end; where address space is short, no more than is needed.
            let together = len.checked_mul(REGION.div_ceil(len))?;
            self.regions.push(Region::map(together).or_else(|| Region::map(len))?);
            self.regions.last_mut()?.take(len)
        })
    }

    /// Frees what [`take`](Self::take) has given for the same `len`.
    ///
    /// # Safety
    /// `start` is from `take` of this arena with this `len`, is given back once, and is no longer used.
    pub(super) unsafe fn give(&mut self, start: NonNull<u8>, len: usize) {
        let Some(index) = self.regions.iter().position(|region| region.offset(start).is_some()) else {
            return;
        };
        let region = &mut self.regions[index];
        let Some(from) = region.offset(start) else { return };
        // SAFETY: the caller's promise.
        unsafe { region.give(from, len.next_multiple_of(ALIGN)) };
        if region.free.get(&0) == Some(&region.len) {
            self.regions.swap_remove(index);
        }
    }
}

/// A mapping, unmapped when dropped.
#[derive(Debug)]
struct Region {
    /// The first boundary of a huge page in the mapping.
    start: NonNull<u8>,
    len: usize,
    mapping: (NonNull<u8>, usize),
    /// Offsets of free bytes with how many there are; no two touch each other.
    free: BTreeMap<usize, usize>,
}

// SAFETY: a region owns its mapping, which no thread is tied to.
unsafe impl Send for Region {}

impl Region {
    /// `len` bytes. Those beyond the last whole huge page lie on small ones.
    fn map(len: usize) -> Option<Self> {
        // Room to move the start to a huge page's boundary; what is left over is never touched and so never resident.
        let total = len.checked_add(HUGE)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches no other memory.
        let mapping = unsafe {
            mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mapping = NonNull::new(mapping.ok()?.cast::<u8>())?;
        let skip = mapping.as_ptr().align_offset(HUGE).min(HUGE);
        // SAFETY: `skip <= HUGE`, and the mapping is `len + HUGE` bytes long.
        let start = unsafe { mapping.add(skip) };
        // Only speed depends on the answer: a kernel without huge pages refuses.
        // SAFETY: the range lies inside the mapping, and the advice does not change contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), len - len % HUGE, Advice::LinuxHugepage) };
        Some(Self { start, len, mapping: (mapping, total), free: BTreeMap::from([(0, len)]) })
    }

    /// Where `address` lies in here.
    fn offset(&self, address: NonNull<u8>) -> Option<usize> {
        let offset = address.addr().get().checked_sub(self.start.addr().get())?;
        (offset < self.len).then_some(offset)
    }

    fn take(&mut self, len: usize) -> Option<NonNull<u8>> {
        let (&from, &room) = self.free.iter().find(|&(_, &room)| room >= len)?;
        self.free.remove(&from);
        if room > len {
            self.free.insert(from + len, room - len);
        }
        // SAFETY: `from` lies inside the region.
        Some(unsafe { self.start.add(from) })
    }

    /// # Safety
    /// The `len` bytes from `from` on are no longer used, and are not free yet.
    unsafe fn give(&mut self, from: usize, len: usize) {
        let to = from + len;
        let mut free = from..to;
        if let Some((&before, &room)) = self.free.range(..from).next_back()
            && before + room == from
        {
            free.start = before;
        }
        if let Some(room) = self.free.remove(&to) {
            free.end = to + room;
        }
        // Pages that are wholly free now go back to the operating system, which gives zeroed ones for them; what else
        // was given is zeroed.
        let page = rustix::param::page_size();
        let pages = free.start.next_multiple_of(page).max(from - from % page)
            ..(free.end - free.end % page).min(to.next_multiple_of(page));
        // SAFETY: pages inside the region of which every byte is free.
        let returned = !pages.is_empty() && unsafe { self.returned(pages.clone()) };
        let (head, tail) = if returned { (from..pages.start, pages.end..to) } else { (from..to, to..to) };
        for rest in [head, tail] {
            // SAFETY: a part of what is given back.
            unsafe { self.start.add(rest.start).write_bytes(0, rest.len()) };
        }
        self.free.insert(free.start, free.len());
    }

    /// Reports if the operating system has taken `pages` back.
    ///
    /// # Safety
    /// `pages` are whole pages of this region that are not used.
    unsafe fn returned(&self, pages: std::ops::Range<usize>) -> bool {
        // SAFETY: the caller's promise; private anonymous memory reads as zero afterwards.
        unsafe {
            let start = self.start.add(pages.start).as_ptr().cast();
            madvise(start, pages.len(), Advice::LinuxDontNeed).is_ok()
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let (mapping, total) = self.mapping;
        // SAFETY: exactly the mapping made in `map`; regions are dropped once all of their bytes are free. An error
        // would mean that it is gone already.
        let _ = unsafe { munmap(mapping.as_ptr().cast(), total) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::resident;
    use proptest::prelude::*;

    /// Steps: take so many bytes, or give back one of the held blocks.
    fn steps() -> impl Strategy<Value = Vec<(bool, usize)>> {
        let sizes = prop_oneof![1usize..9000, 100_000usize..5_000_000, Just(HUGE), Just(REGION)];
        prop::collection::vec((prop::bool::weighted(0.6), sizes), 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn allocated_memory_is_zero_and_exclusive(steps in steps()) {
            let mut arena = Arena::new();
            let mut held: Vec<(NonNull<u8>, usize, u8)> = Vec::new();
            for (mark, (take, size)) in (1u8..).zip(steps) {
                if take {
                    let start = arena.take(size).unwrap();
                    prop_assert_eq!(start.as_ptr().align_offset(ALIGN), 0);
                    // SAFETY: taken with this size, and not given back.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) };
                    prop_assert!(bytes.iter().all(|&byte| byte == 0));
                    bytes.fill(mark);
                    held.push((start, size, mark));
                } else if !held.is_empty() {
                    let (start, size, mark) = held.swap_remove(size % held.len());
                    // SAFETY: as above; given back once.
                    unsafe {
                        let bytes = std::slice::from_raw_parts(start.as_ptr(), size);
                        prop_assert!(bytes.iter().all(|&byte| byte == mark));
                        arena.give(start, size);
                    }
                }
            }
            for (start, size, mark) in held {
                // SAFETY: as above.
                unsafe {
                    let bytes = std::slice::from_raw_parts(start.as_ptr(), size);
                    prop_assert!(bytes.iter().all(|&byte| byte == mark));
                    arena.give(start, size);
                }
            }
            prop_assert!(arena.regions.is_empty(), "{:?}", arena.regions);
        }
    }

    #[test]
    fn buffers_lie_side_by_side_and_room_is_used_again() {
        let mut arena = Arena::new();
        let expert = 3_538_944;
        let experts: Vec<_> = (0..9).map(|_| arena.take(expert).unwrap()).collect();
        assert_eq!(arena.regions.len(), 1);
        assert!(experts.windows(2).all(|pair| pair[1].addr().get() - pair[0].addr().get() == expert));
        for again in [3, 0, 8] {
            // SAFETY: taken above with this size; what is taken next is the same.
            unsafe { arena.give(experts[again], expert) };
            assert_eq!(arena.take(expert), Some(experts[again]));
        }
        // One that is larger than a mapping has one of its own length; smaller ones fill what is left of others.
        let head = arena.take(REGION + HUGE / 2).unwrap();
        assert_eq!(arena.regions.len(), 2);
        let small = arena.take(HUGE / 2).unwrap();
        assert!(arena.regions[0].offset(small).is_some());
        assert_eq!(arena.regions.len(), 2);
        // SAFETY: as above.
        unsafe { arena.give(head, REGION + HUGE / 2) };
    }

    #[test]
    fn what_is_free_goes_back_to_the_operating_system() {
        let mut arena = Arena::new();
        let kept = arena.take(HUGE / 2).unwrap();
        let (size, huge_kb) = (5 * HUGE, HUGE >> 10);
        let start = arena.take(size).unwrap();
        let at_first = resident(start.addr().get());
        // SAFETY: taken just now with this size.
        unsafe { start.write_bytes(1, size) };
        assert!(resident(start.addr().get()) >= at_first + 4 * huge_kb);
        // SAFETY: given back once; the next two lines read free memory, which no thread writes.
        unsafe {
            arena.give(start, size);
            assert!(std::slice::from_raw_parts(start.as_ptr(), HUGE / 2).iter().all(|&byte| byte == 0));
        }
        // The first and the last huge page are shared with bytes that were not freed: the operating system may keep
        // them whole, or make them whole again at any time.
        assert!(resident(start.addr().get()) <= at_first + 2 * huge_kb);
        // SAFETY: given back once.
        unsafe { arena.give(kept, HUGE / 2) };
        assert!(arena.regions.is_empty());
    }
}
