//! Spreads weights over the machine's memory (NUMA) nodes.
//!
//! Memory lies on the node of the thread that first writes it. A single thread packs attention and output projection:
//! their weights would all lie on its node, and all threads would wait for that node's memory while the other nodes are
//! idle. So the huge pages of a large buffer are first written by threads of each node in turn. This needs no system
//! call that sets a memory policy; containers may not use those. Smaller buffers lie on the node where they are packed,
//! and several threads pack them.

use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::HUGE_PAGE_BYTES;

/// Bytes from which on a buffer is spread.
const MIN_SPREAD_BYTES: usize = 2 * HUGE_PAGE_BYTES;

/// Smallest page size of any machine: writing one byte in each makes all pages resident.
const PAGE_BYTES: usize = 4096;

/// Cores of each node. Nothing is spread over fewer than two nodes.
static NODES: RwLock<Vec<Vec<usize>>> = RwLock::new(Vec::new());

/// Spreads the weights of matrices and large experts that are packed from now on over memory nodes. `nodes` lists the
/// cores of each node.
///
/// Nodes on which the process may not run are skipped: an operator who binds it to one node wants its memory there.
/// Nothing is spread if a single node has enough cores for all threads of the process. Returns the number of nodes in
/// use, 1 if nothing is spread.
pub fn spread_over_nodes(nodes: &[Vec<usize>]) -> usize {
    if nodes.len() < 2 {
        return 1;
    }
    let Ok(allowed) = sched_getaffinity(None) else { return 1 };
    let threads = thread::available_parallelism().map_or(1, |threads| threads.get());
    let usable = usable(nodes, &allowed, threads);
    let count = usable.len().max(1);
    *NODES.write().unwrap_or_else(PoisonError::into_inner) = usable;
    count
}

/// Returns the `allowed` cores of each node, for nodes that have any; no node if one alone has `threads` cores.
fn usable(nodes: &[Vec<usize>], allowed: &CpuSet, threads: usize) -> Vec<Vec<usize>> {
    let is_allowed = |&&core: &&usize| core < CpuSet::MAX_CPU && allowed.is_set(core);
    let mut usable: Vec<Vec<usize>> =
        nodes.iter().map(|cores| cores.iter().filter(is_allowed).copied().collect()).collect();
    usable.retain(|cores| !cores.is_empty());
    if usable.iter().any(|cores| cores.len() >= threads) {
        return Vec::new();
    }
    usable
}

/// Start of a zeroed buffer that threads of several nodes write to.
#[derive(Clone, Copy)]
struct ZeroedBuffer(NonNull<u8>);

// SAFETY: threads write to different pages of it.
unsafe impl Send for ZeroedBuffer {}

impl ZeroedBuffer {
    fn at(self, offset: usize) -> *mut u8 {
        self.0.as_ptr().wrapping_add(offset)
    }
}

/// Makes a large buffer resident, with its huge pages on each node in turn. Does nothing with fewer than two nodes.
///
/// # Safety
/// `start` points to `len` zero bytes, which no other code uses before this returns.
pub(super) unsafe fn spread_buffer(start: NonNull<u8>, len: usize) {
    let nodes = NODES.read().unwrap_or_else(PoisonError::into_inner);
    if nodes.len() < 2 || len < MIN_SPREAD_BYTES {
        return;
    }
    // SAFETY: `start` points to `len` zero bytes that no other code uses, as the caller guarantees.
    unsafe { write_on_nodes(&nodes, start, len) }
}

/// Writes zeros to each huge page of the buffer, from threads on each node in turn.
///
/// # Safety
/// As for [`spread_buffer`].
unsafe fn write_on_nodes(nodes: &[Vec<usize>], start: NonNull<u8>, len: usize) {
    let buffer = ZeroedBuffer(start);
    thread::scope(|scope| {
        for (node, cores) in nodes.iter().enumerate() {
            let node_count = nodes.len();
            let write = move || {
                let mut node_cores = CpuSet::new();
                cores.iter().for_each(|&core| node_cores.set(core));
                if sched_setaffinity(None, &node_cores).is_err() {
                    return;
                }
                let first = buffer.at(0).addr();
                let huge_pages = first / HUGE_PAGE_BYTES..=(first + len - 1) / HUGE_PAGE_BYTES;
                for page in huge_pages.filter(|page| page % node_count == node) {
                    let from = (page * HUGE_PAGE_BYTES).saturating_sub(first);
                    let to = len.min((page + 1) * HUGE_PAGE_BYTES - first);
                    for offset in (from..to).step_by(PAGE_BYTES) {
                        // SAFETY: inside of the buffer; no other thread writes to these bytes. The write is volatile,
                        // because it leaves the contents as they are.
                        unsafe { buffer.at(offset).write_volatile(0) };
                    }
                }
            };
            // The result is ignored: a thread that does not start only costs speed.
            let _ = thread::Builder::new().name(format!("node-{node}")).spawn_scoped(scope, write);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::arena::Arena;
    use crate::memory::tests::resident;

    #[test]
    fn numa_nodes_outside_affinity_or_need_are_not_used() {
        let mut allowed = CpuSet::new();
        (0..4).for_each(|core| allowed.set(core));
        let nodes = [vec![0, 1, 8], vec![8, 9, CpuSet::MAX_CPU], vec![2], vec![], vec![3]];
        assert_eq!(usable(&nodes, &allowed, 4), [vec![0, 1], vec![2], vec![3]]);
        assert_eq!(usable(&nodes, &allowed, 3), [vec![0, 1], vec![2], vec![3]]);
        // A share of two cores fits the first node.
        assert!(usable(&nodes, &allowed, 2).is_empty());
    }

    #[test]
    fn spreading_makes_exactly_the_buffer_resident() {
        let allowed = sched_getaffinity(None).unwrap();
        let mine: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let mut arena = Arena::new();
        // The first huge page of the mapping belongs partly to another buffer.
        let before = arena.allocate(HUGE_PAGE_BYTES / 2).unwrap();
        let len = 9 * HUGE_PAGE_BYTES + 4 * PAGE_BYTES;
        let start = arena.allocate(len).unwrap();
        let at_first = resident(start.addr().get());
        // SAFETY: allocated just now.
        unsafe { write_on_nodes(&[mine.clone(), mine.clone(), mine], start, len) };
        let made = resident(start.addr().get()) - at_first;
        let pages = len.div_ceil(PAGE_BYTES) * (PAGE_BYTES >> 10);
        assert!((pages..=pages + 2 * (HUGE_PAGE_BYTES >> 10)).contains(&made), "{made} kB for {len} bytes");
        // SAFETY: allocated above, and not freed.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        // SAFETY: as above; freed once.
        unsafe {
            arena.free(start, len);
            arena.free(before, HUGE_PAGE_BYTES / 2);
        }
    }
}
