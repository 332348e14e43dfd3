//! An arena that places buffers of any size on huge pages.
//!
//! If each buffer were its own mapping, its bytes beyond whole huge pages would lie on small pages: 1.4 MB of an expert
//! of 3.5 MB, and all of an expert below 2 MB. A core reads these more slowly, because it looks up 400 addresses instead
//! of one. So buffers lie side by side in large mappings. Freed memory is returned to the operating system, which breaks
//! up a huge page that is shared with a neighbour: memory is scarcer than huge pages. At most one huge page, at the end
//! of the used memory, takes more memory than was requested.

use std::collections::BTreeMap;
use std::ptr::NonNull;

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use super::{ALIGN, HUGE_PAGE_BYTES};

/// Smallest size of a mapping, in bytes.
const MIN_REGION_BYTES: usize = 16 * HUGE_PAGE_BYTES;

/// Large mappings, and which of their bytes are free. Free bytes are zero.
#[derive(Debug)]
pub(super) struct Arena {
    regions: Vec<Region>,
}

impl Arena {
    pub(super) const fn new() -> Self {
        Self { regions: Vec::new() }
    }

    /// Allocates `len` zero bytes, aligned to [`ALIGN`]. Returns `None` if the operating system has no memory left.
    pub(super) fn allocate(&mut self, len: usize) -> Option<NonNull<u8>> {
        let len = len.checked_next_multiple_of(ALIGN)?;
        let allocated = self.regions.iter_mut().find_map(|region| region.allocate(len));
        allocated.or_else(|| {
            // A region is a multiple of the length, so that it can be filled to its end. If address space is short, it
            // is only as long as needed.
            let region_len = len.checked_mul(MIN_REGION_BYTES.div_ceil(len))?;
            self.regions.push(Region::map(region_len).or_else(|| Region::map(len))?);
            self.regions.last_mut()?.allocate(len)
        })
    }

    /// Frees memory that [`allocate`](Self::allocate) returned for the same `len`.
    ///
    /// # Safety
    /// `start` is from `allocate` of this arena with this `len`, is freed once, and is no longer used.
    pub(super) unsafe fn free(&mut self, start: NonNull<u8>, len: usize) {
        let Some(index) = self.regions.iter().position(|region| region.offset(start).is_some()) else {
            return;
        };
        let region = &mut self.regions[index];
        let Some(from) = region.offset(start) else { return };
        // SAFETY: the caller frees memory that was allocated with this length and is no longer used.
        unsafe { region.free(from, len.next_multiple_of(ALIGN)) };
        if region.free_ranges.get(&0) == Some(&region.len) {
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
    /// Lengths of free ranges by their offsets; no two ranges touch each other.
    free_ranges: BTreeMap<usize, usize>,
}

// SAFETY: a region owns its mapping, which is not tied to a thread.
unsafe impl Send for Region {}

impl Region {
    /// Maps `len` bytes from a huge page's boundary on. Bytes beyond the last whole huge page lie on small pages.
    fn map(len: usize) -> Option<Self> {
        // Slack to align the start to a huge page. The unused part is never touched and so never resident.
        let total = len.checked_add(HUGE_PAGE_BYTES)?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches no other memory.
        let mapping = unsafe {
            mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mapping = NonNull::new(mapping.ok()?.cast::<u8>())?;
        let skip = mapping.as_ptr().align_offset(HUGE_PAGE_BYTES).min(HUGE_PAGE_BYTES);
        // SAFETY: `skip <= HUGE_PAGE_BYTES`, and the mapping is `len + HUGE_PAGE_BYTES` bytes long.
        let start = unsafe { mapping.add(skip) };
        // The result is ignored: a kernel without huge pages refuses, which only costs speed.
        // SAFETY: the range lies inside the mapping, and the advice does not change contents.
        let _ = unsafe { madvise(start.as_ptr().cast(), len - len % HUGE_PAGE_BYTES, Advice::LinuxHugepage) };
        Some(Self { start, len, mapping: (mapping, total), free_ranges: BTreeMap::from([(0, len)]) })
    }

    /// Returns the offset of `address` in the region, if it lies inside.
    fn offset(&self, address: NonNull<u8>) -> Option<usize> {
        let offset = address.addr().get().checked_sub(self.start.addr().get())?;
        (offset < self.len).then_some(offset)
    }

    /// Allocates `len` bytes of the first free range that is long enough.
    fn allocate(&mut self, len: usize) -> Option<NonNull<u8>> {
        let (&from, &available) = self.free_ranges.iter().find(|&(_, &available)| available >= len)?;
        self.free_ranges.remove(&from);
        if available > len {
            self.free_ranges.insert(from + len, available - len);
        }
        // SAFETY: `from` lies inside the region.
        Some(unsafe { self.start.add(from) })
    }

    /// Frees `len` bytes from offset `from` on, zeroes them and merges them with neighbouring free ranges.
    ///
    /// # Safety
    /// The bytes are no longer used, and are not free yet.
    unsafe fn free(&mut self, from: usize, len: usize) {
        let to = from + len;
        let mut free = from..to;
        if let Some((&before, &free_len)) = self.free_ranges.range(..from).next_back()
            && before + free_len == from
        {
            free.start = before;
        }
        if let Some(free_len) = self.free_ranges.remove(&to) {
            free.end = to + free_len;
        }
        // Pages that are now entirely free are returned to the operating system, which replaces them by zeroed ones. The
        // rest of the freed bytes is zeroed here.
        let page = rustix::param::page_size();
        let pages = free.start.next_multiple_of(page).max(from - from % page)
            ..(free.end - free.end % page).min(to.next_multiple_of(page));
        // SAFETY: pages inside the region of which every byte is free.
        let is_released = !pages.is_empty() && unsafe { self.release(pages.clone()) };
        let (head, tail) = if is_released { (from..pages.start, pages.end..to) } else { (from..to, to..to) };
        for rest in [head, tail] {
            // SAFETY: a part of the freed bytes, which are no longer used.
            unsafe { self.start.add(rest.start).write_bytes(0, rest.len()) };
        }
        self.free_ranges.insert(free.start, free.len());
    }

    /// Returns `pages` to the operating system; they read as zero afterwards. Reports if that succeeded.
    ///
    /// # Safety
    /// `pages` are whole pages of this region that are not used.
    unsafe fn release(&self, pages: std::ops::Range<usize>) -> bool {
        // SAFETY: the pages lie inside the mapping and are not used, as the caller guarantees.
        unsafe {
            let start = self.start.add(pages.start).as_ptr().cast();
            madvise(start, pages.len(), Advice::LinuxDontNeed).is_ok()
        }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        let (mapping, total) = self.mapping;
        // SAFETY: exactly the mapping made in `map`. Regions are dropped once all of their bytes are free. An error
        // would mean that it is gone already.
        let _ = unsafe { munmap(mapping.as_ptr().cast(), total) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::tests::resident;
    use proptest::prelude::*;

    /// Steps: allocates bytes if true, else frees one of the held blocks.
    fn steps() -> impl Strategy<Value = Vec<(bool, usize)>> {
        let sizes =
            prop_oneof![1usize..9000, 100_000usize..5_000_000, Just(HUGE_PAGE_BYTES), Just(MIN_REGION_BYTES)];
        prop::collection::vec((prop::bool::weighted(0.6), sizes), 1..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]

        #[test]
        fn allocated_memory_is_zero_and_exclusive(steps in steps()) {
            let mut arena = Arena::new();
            let mut held: Vec<(NonNull<u8>, usize, u8)> = Vec::new();
            for (mark, (allocates, size)) in (1u8..).zip(steps) {
                if allocates {
                    let start = arena.allocate(size).unwrap();
                    prop_assert_eq!(start.as_ptr().align_offset(ALIGN), 0);
                    // SAFETY: allocated with this size, and not freed.
                    let bytes = unsafe { std::slice::from_raw_parts_mut(start.as_ptr(), size) };
                    prop_assert!(bytes.iter().all(|&byte| byte == 0));
                    bytes.fill(mark);
                    held.push((start, size, mark));
                } else if !held.is_empty() {
                    let (start, size, mark) = held.swap_remove(size % held.len());
                    // SAFETY: as above; freed once.
                    unsafe {
                        let bytes = std::slice::from_raw_parts(start.as_ptr(), size);
                        prop_assert!(bytes.iter().all(|&byte| byte == mark));
                        arena.free(start, size);
                    }
                }
            }
            for (start, size, mark) in held {
                // SAFETY: as above.
                unsafe {
                    let bytes = std::slice::from_raw_parts(start.as_ptr(), size);
                    prop_assert!(bytes.iter().all(|&byte| byte == mark));
                    arena.free(start, size);
                }
            }
            prop_assert!(arena.regions.is_empty(), "{:?}", arena.regions);
        }
    }

    #[test]
    fn buffers_are_adjacent_and_freed_memory_is_reused() {
        let mut arena = Arena::new();
        let expert = 3_538_944;
        let experts: Vec<_> = (0..9).map(|_| arena.allocate(expert).unwrap()).collect();
        assert_eq!(arena.regions.len(), 1);
        assert!(experts.windows(2).all(|pair| pair[1].addr().get() - pair[0].addr().get() == expert));
        for again in [3, 0, 8] {
            // SAFETY: allocated above with this size; the next allocation returns the same memory.
            unsafe { arena.free(experts[again], expert) };
            assert_eq!(arena.allocate(expert), Some(experts[again]));
        }
        // A buffer that exceeds the minimum size has a region of its own; smaller ones fill the rest of other regions.
        let head = arena.allocate(MIN_REGION_BYTES + HUGE_PAGE_BYTES / 2).unwrap();
        assert_eq!(arena.regions.len(), 2);
        let small = arena.allocate(HUGE_PAGE_BYTES / 2).unwrap();
        assert!(arena.regions[0].offset(small).is_some());
        assert_eq!(arena.regions.len(), 2);
        // SAFETY: as above.
        unsafe { arena.free(head, MIN_REGION_BYTES + HUGE_PAGE_BYTES / 2) };
    }

    #[test]
    fn freed_memory_is_returned_to_the_operating_system() {
        let mut arena = Arena::new();
        let kept = arena.allocate(HUGE_PAGE_BYTES / 2).unwrap();
        let (size, huge_kb) = (5 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES >> 10);
        let start = arena.allocate(size).unwrap();
        let at_first = resident(start.addr().get());
        // SAFETY: allocated just now with this size.
        unsafe { start.write_bytes(1, size) };
        assert!(resident(start.addr().get()) >= at_first + 4 * huge_kb);
        // SAFETY: freed once. The next line reads free memory, which no thread writes.
        unsafe {
            arena.free(start, size);
            assert!(
                std::slice::from_raw_parts(start.as_ptr(), HUGE_PAGE_BYTES / 2).iter().all(|&byte| byte == 0)
            );
        }
        // The first and the last huge page are shared with bytes that were not freed: the operating system may keep
        // them whole, or make them whole again at any time.
        assert!(resident(start.addr().get()) <= at_first + 2 * huge_kb);
        // SAFETY: freed once.
        unsafe { arena.free(kept, HUGE_PAGE_BYTES / 2) };
        assert!(arena.regions.is_empty());
    }
}
