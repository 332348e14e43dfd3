//! Zeroed memory, aligned to 64 bytes. Large buffers lie on huge pages.

#[cfg(target_os = "linux")]
mod arena;
#[cfg(target_os = "linux")]
mod nodes;

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::KernelError;

#[cfg(target_os = "linux")]
pub use nodes::spread_over_nodes;

/// Spreads nothing, since memory nodes are known on Linux only. Returns 1.
#[cfg(not(target_os = "linux"))]
pub fn spread_over_nodes(_nodes: &[Vec<usize>]) -> usize {
    1
}

/// Alignment of every buffer: a cache line and a 512-bit vector.
const ALIGN: usize = 64;

/// Bytes of a huge page.
const HUGE_PAGE_BYTES: usize = 2 << 20;

/// Bytes from which on a buffer is placed in the [`arena`]; smaller ones come from the allocator.
const MIN_ARENA_BYTES: usize = 128 << 10;

#[cfg(target_os = "linux")]
static ARENA: std::sync::Mutex<arena::Arena> = std::sync::Mutex::new(arena::Arena::new());

/// Zeroed, aligned bytes that are owned and never moved.
///
/// Memory becomes resident when it is first written, by the thread that writes it, but for [weights](Self::for_weights)
/// on machines with several memory nodes, and goes back to the operating system when the buffer is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: a buffer owns its memory, like a Vec; shared references to it only read.
unsafe impl Send for Buffer {}
// SAFETY: as above; writing needs `&mut`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Bytes of memory that a buffer of `len` bytes takes once all of it has been written.
    pub(crate) const fn resident_bytes(len: usize) -> usize {
        len.next_multiple_of(ALIGN)
    }

    /// Allocates `len` zero bytes.
    pub(crate) fn zeroed(len: usize) -> Result<Self, KernelError> {
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len });
        }
        let out_of_memory = KernelError::OutOfMemory { bytes: len };
        #[cfg(target_os = "linux")]
        if len >= MIN_ARENA_BYTES {
            let start = Self::arena().allocate(len).ok_or(out_of_memory)?;
            return Ok(Self { start, len });
        }
        let layout = Self::layout(len)?;
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(out_of_memory)?;
        Ok(Self { start, len })
    }

    /// Allocates `len` zero bytes that all threads will read. On a machine with several memory nodes, a large buffer is
    /// spread over the nodes.
    pub(crate) fn for_weights(len: usize) -> Result<Self, KernelError> {
        let buffer = Self::zeroed(len)?;
        // SAFETY: allocated just now, so that no other code uses it.
        #[cfg(target_os = "linux")]
        unsafe {
            nodes::spread_buffer(buffer.start, len)
        };
        Ok(buffer)
    }

    fn layout(len: usize) -> Result<Layout, KernelError> {
        Layout::from_size_align(len, ALIGN).map_err(|_| KernelError::TooLarge { what: "a buffer" })
    }

    #[cfg(target_os = "linux")]
    fn arena() -> std::sync::MutexGuard<'static, arena::Arena> {
        // A poisoned lock is used: no panic leaves the arena half-changed.
        ARENA.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    pub(crate) fn as_ptr(&self) -> *const u8 {
        self.start.as_ptr()
    }

    pub(crate) fn as_mut_ptr(&mut self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Returns the contents.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: as in `bytes_mut`, but borrowed and only read.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the contents for writing.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `len` initialised bytes, dangling where there are none, and borrowed mutably.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Returns the contents as 32-bit words, without trailing bytes that fill no word.
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: as in `words_mut`, but borrowed and only read.
        unsafe {
            let start = if self.len == 0 { NonNull::<u32>::dangling() } else { self.start.cast::<u32>() };
            std::slice::from_raw_parts(start.as_ptr(), self.len / 4)
        }
    }

    /// Returns the words for writing.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: aligned to 64 bytes (dangling and empty when `len` is 0: NonNull::<u8>::dangling() is only 1-aligned,
        // hence the cast below), initialised to zero, and borrowed mutably.
        unsafe {
            let start = if self.len == 0 { NonNull::<u32>::dangling() } else { self.start.cast::<u32>() };
            std::slice::from_raw_parts_mut(start.as_ptr(), self.len / 4)
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        #[cfg(target_os = "linux")]
        if self.len >= MIN_ARENA_BYTES {
            // SAFETY: allocated in `zeroed` with this length; no reference outlives `self`.
            unsafe { Self::arena().free(self.start, self.len) };
            return;
        }
        if self.len > 0
            && let Ok(layout) = Self::layout(self.len)
        {
            // SAFETY: allocated in `zeroed` with this layout.
            unsafe { dealloc(self.start.as_ptr(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Resident kB of the mapping that `address` lies in.
    #[cfg(target_os = "linux")]
    pub(super) fn resident(address: usize) -> usize {
        let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut inside = false;
        for line in maps.lines() {
            if let Some((from, to)) = line.split(' ').next().and_then(|range| range.split_once('-'))
                && let (Ok(from), Ok(to)) = (usize::from_str_radix(from, 16), usize::from_str_radix(to, 16))
            {
                inside = (from..to).contains(&address);
            } else if let Some(rest) = line.strip_prefix("Rss:")
                && inside
            {
                return rest.trim().trim_end_matches(" kB").parse().unwrap();
            }
        }
        panic!("no mapping has {address:x}");
    }

    #[test]
    fn small_and_large_buffers_are_aligned_and_zero() {
        for len in [
            0,
            1,
            3,
            64,
            65,
            4096,
            MIN_ARENA_BYTES - 1,
            MIN_ARENA_BYTES,
            HUGE_PAGE_BYTES - 1,
            HUGE_PAGE_BYTES,
            HUGE_PAGE_BYTES + 5,
            3 * HUGE_PAGE_BYTES + 12_345,
        ] {
            let mut buffer = Buffer::zeroed(len).unwrap();
            assert_eq!(buffer.len(), len);
            let words = buffer.words_mut();
            assert_eq!(words.len(), len / 4);
            assert!(words.iter().all(|&w| w == 0), "{len}");
            words.fill(0xdead_beef);
            if len > 0 {
                assert_eq!(buffer.as_ptr().align_offset(ALIGN), 0, "{len}");
            }
        }
    }

    #[test]
    fn impossible_sizes_are_errors() {
        assert!(Buffer::zeroed(1 << 60).is_err());
        assert!(Buffer::zeroed(usize::MAX).is_err());
    }
}
