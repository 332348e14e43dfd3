//! Memory oracle: a counting allocator that aborts the process if an input allocates more than its limit.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

struct CountingAllocator;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Allocated bytes of the process.
static ALLOCATED_BYTES: AtomicUsize = AtomicUsize::new(0);
/// Limit of [`ALLOCATED_BYTES`].
static LIMIT_BYTES: AtomicUsize = AtomicUsize::new(usize::MAX);

/// Runs `work`, which may allocate at most `bytes` in addition to the current allocations.
pub(crate) fn with_limit<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    LIMIT_BYTES.store(ALLOCATED_BYTES.load(Relaxed).saturating_add(bytes), Relaxed);
    let result = work();
    remove_limit();
    result
}

/// Removes the limit.
pub(crate) fn remove_limit() {
    LIMIT_BYTES.store(usize::MAX, Relaxed);
}

fn count_allocation(bytes: usize) {
    let allocated = ALLOCATED_BYTES.fetch_add(bytes, Relaxed).saturating_add(bytes);
    let limit = LIMIT_BYTES.load(Relaxed);
    if allocated > limit {
        // Removes the limit, because printing allocates.
        remove_limit();
        eprintln!("memory: {bytes} bytes are {} above the limit of this input", allocated - limit);
        eprintln!("{}", std::backtrace::Backtrace::force_capture());
        std::process::abort();
    }
}

// SAFETY: every method forwards its arguments to the system allocator, which upholds the contract of `GlobalAlloc`. The
// counters are separate atomics.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: the arguments are forwarded unchanged, and `System` has the same preconditions.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count_allocation(layout.size());
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ALLOCATED_BYTES.fetch_sub(layout.size(), Relaxed);
        // SAFETY: as above.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Counts both allocations, because they exist together while the bytes are copied.
        count_allocation(size);
        // SAFETY: as above.
        let moved = unsafe { System.realloc(pointer, layout, size) };
        ALLOCATED_BYTES.fetch_sub(layout.size(), Relaxed);
        moved
    }
}
