//! The memory oracle: an allocator that counts, and ends the process where an input takes more than
//! its share.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct Meter;

#[global_allocator]
static METER: Meter = Meter;

/// Bytes in use.
static LIVE: AtomicUsize = AtomicUsize::new(0);
/// Upper limit of [`LIVE`].
static CEILING: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Runs `work`, which may hold `bytes` more than is held now at any time.
pub(crate) fn within<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    CEILING.store(LIVE.load(Relaxed).saturating_add(bytes), Relaxed);
    let result = work();
    lift();
    result
}

/// Takes the limit away.
pub(crate) fn lift() {
    CEILING.store(usize::MAX, Relaxed);
}

fn take(bytes: usize) {
    let live = LIVE.fetch_add(bytes, Relaxed).saturating_add(bytes);
    let ceiling = CEILING.load(Relaxed);
    if live > ceiling {
        // What follows allocates.
        lift();
        eprintln!("memory: {bytes} bytes are {} above the limit of this input", live - ceiling);
        eprintln!("{}", std::backtrace::Backtrace::force_capture());
        std::process::abort();
    }
}

// SAFETY: every call goes to the system's allocator as it came; counting touches no memory of it.
unsafe impl GlobalAlloc for Meter {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: the caller's promises are the system allocator's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        take(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist while one is copied to the other.
        take(size);
        // SAFETY: as above.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        LIVE.fetch_sub(layout.size(), Relaxed);
        moved
    }
}
