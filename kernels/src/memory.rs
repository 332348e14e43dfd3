//! Zeroed memory, aligned to 64 bytes, on huge pages where it is large.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::KernelError;

/// Alignment of every buffer: a cache line and a 512-bit vector.
const ALIGN: usize = 64;

/// Size of a huge page. From this size on a buffer is a mapping of its own.
const HUGE: usize = 2 << 20;

const PAGE: usize = 4096;

/// Zeroed, aligned bytes that are owned, never moved and given back to the operating system when dropped.
///
/// Memory becomes resident when it is first written, by the thread that writes it. Whole huge pages are asked for as such; the rest of the last one stays on small pages, so that an expert does not take more than it needs.
#[derive(Debug)]
pub(crate) struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// The whole mapping, which begins before `start` where the kernel did not align it; `None` for memory of the allocator.
    mapping: Option<(NonNull<u8>, usize)>,
}

// SAFETY: a buffer owns its memory, like a Vec; shared references to it only read.
unsafe impl Send for Buffer {}
// SAFETY: as above; writing needs `&mut`.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// Memory that a buffer of `len` bytes takes once all of it has been written.
    pub(crate) const fn resident_bytes(len: usize) -> usize {
        if len >= HUGE && cfg!(unix) { len.next_multiple_of(PAGE) } else { len.next_multiple_of(ALIGN) }
    }

    /// `len` zero bytes.
    pub(crate) fn zeroed(len: usize) -> Result<Self, KernelError> {
        #[cfg(unix)]
        if len >= HUGE {
            return Self::mapped(len);
        }
        if len == 0 {
            return Ok(Self { start: NonNull::dangling(), len, mapping: None });
        }
        let layout = Self::layout(len)?;
        // SAFETY: the layout has a size above zero.
        let start = unsafe { alloc_zeroed(layout) };
        let start = NonNull::new(start).ok_or(KernelError::OutOfMemory { bytes: len })?;
        Ok(Self { start, len, mapping: None })
    }

    fn layout(len: usize) -> Result<Layout, KernelError> {
        Layout::from_size_align(len, ALIGN).map_err(|_| KernelError::TooLarge { what: "a buffer" })
    }

    #[cfg(unix)]
    fn mapped(len: usize) -> Result<Self, KernelError> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};

        let out_of_memory = KernelError::OutOfMemory { bytes: len };
        // Room to move the start to a huge page's boundary; what is left over is never touched and so never resident.
        let total = len.checked_add(HUGE).ok_or(KernelError::TooLarge { what: "a buffer" })?;
        // SAFETY: a fresh private mapping at an address of the kernel's choice touches no other memory.
        let mapping = unsafe {
            mmap_anonymous(std::ptr::null_mut(), total, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE)
        };
        let mapping = mapping.ok().and_then(|p| NonNull::new(p.cast::<u8>())).ok_or(out_of_memory)?;
        let skip = mapping.as_ptr().align_offset(HUGE).min(HUGE);
        // SAFETY: `skip <= HUGE`, and the mapping is `len + HUGE` bytes long.
        let start = unsafe { mapping.add(skip) };
        #[cfg(target_os = "linux")]
        {
            use rustix::mm::{Advice, madvise};
            // Only speed depends on the answer: a kernel without huge pages refuses.
            // SAFETY: the range lies inside the mapping, and the advice does not change contents.
            let _ = unsafe { madvise(start.as_ptr().cast(), len - len % HUGE, Advice::LinuxHugepage) };
        }
        Ok(Self { start, len, mapping: Some((mapping, total)) })
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

    /// The contents as 32-bit words; trailing bytes that fill no word are left out.
    pub(crate) fn words(&self) -> &[u32] {
        // SAFETY: as in `words_mut`, but borrowed and only read.
        unsafe {
            let start = if self.len == 0 { NonNull::<u32>::dangling() } else { self.start.cast::<u32>() };
            std::slice::from_raw_parts(start.as_ptr(), self.len / 4)
        }
    }

    /// The same to be written.
    pub(crate) fn words_mut(&mut self) -> &mut [u32] {
        // SAFETY: aligned to 64 bytes (dangling and empty when `len` is 0: NonNull::<u8>::dangling() is only 1-aligned, hence the cast below), initialised to zero, and borrowed mutably.
        unsafe {
            let start = if self.len == 0 { NonNull::<u32>::dangling() } else { self.start.cast::<u32>() };
            std::slice::from_raw_parts_mut(start.as_ptr(), self.len / 4)
        }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some((mapping, total)) = self.mapping {
            // SAFETY: exactly the mapping made in `mapped`; no reference outlives `self`. An error would mean that it is gone already.
            let _ = unsafe { rustix::mm::munmap(mapping.as_ptr().cast(), total) };
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

    #[test]
    fn small_and_large_buffers_are_aligned_and_zero() {
        for len in [0, 1, 3, 64, 65, 4096, HUGE - 1, HUGE, HUGE + 5, 3 * HUGE + 12_345] {
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
