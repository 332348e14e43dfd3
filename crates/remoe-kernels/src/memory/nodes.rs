//! The machine's memory (NUMA) nodes: weights are spread over them.
//!
//! Memory lies on the node of the thread that writes it first. Were that left to the thread that packs, attention and
//! head, which a single thread packs, would lie on one node, and all threads would wait for it while the memory of the
//! other nodes rests. So the huge pages of a large buffer are first written by threads of the nodes in turn. No system
//! call is needed for it that containers are refused, as those that set a policy of memory are. Smaller buffers lie
//! where they are packed, which several threads do.

use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock};
use std::thread;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::HUGE;

/// From this size on a buffer is spread.
const SPREAD: usize = 2 * HUGE;

/// Where a machine has pages of this size or larger ones, a byte in each makes all resident.
const PAGE: usize = 4096;

/// Cores of each node; fewer than two nodes are nothing to spread over.
static NODES: RwLock<Vec<Vec<usize>>> = RwLock::new(Vec::new());

/// Spreads the weights of matrices and large experts that are packed from now on over memory nodes, of which `nodes`
/// has the cores. Those that the process may not run on count for nothing: who binds it to one node wants its memory
/// there. Neither is anything spread where one node has cores enough for the share of the machine that the process has.
/// Returns over how many nodes they are spread; 1 where they are not.
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

/// The nodes that `threads` on the `allowed` cores compute on, with those cores.
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

/// Memory that threads of several nodes write to.
#[derive(Clone, Copy)]
struct Zeros(NonNull<u8>);

// SAFETY: threads write to different pages of it.
unsafe impl Send for Zeros {}

impl Zeros {
    fn at(self, offset: usize) -> *mut u8 {
        self.0.as_ptr().wrapping_add(offset)
    }
}

/// Makes a large buffer resident, a huge page on each node in turn, where there are several nodes.
///
/// # Safety
/// `start` points to `len` zero bytes, which no other code uses before this returns.
pub(super) unsafe fn spread(start: NonNull<u8>, len: usize) {
    let nodes = NODES.read().unwrap_or_else(PoisonError::into_inner);
    if nodes.len() < 2 || len < SPREAD {
        return;
    }
    // SAFETY: the caller's promise.
    unsafe { spread_over(&nodes, start, len) }
}

/// # Safety
/// As for [`spread`].
unsafe fn spread_over(nodes: &[Vec<usize>], start: NonNull<u8>, len: usize) {
    let zeros = Zeros(start);
    thread::scope(|scope| {
        for (node, cores) in nodes.iter().enumerate() {
            let turns = nodes.len();
            let write = move || {
                let mut here = CpuSet::new();
                cores.iter().for_each(|&core| here.set(core));
                if sched_setaffinity(None, &here).is_err() {
                    return;
                }
                let first = zeros.at(0).addr();
                for huge in (first / HUGE..=(first + len - 1) / HUGE).filter(|huge| huge % turns == node) {
                    let from = (huge * HUGE).saturating_sub(first);
                    for offset in (from..len.min((huge + 1) * HUGE - first)).step_by(PAGE) {
                        // SAFETY: inside of the buffer; no other thread writes to these bytes. Volatile: zeros are
                        // written where zeros are.
                        unsafe { zeros.at(offset).write_volatile(0) };
                    }
                }
            };
            // Only speed depends on it.
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
    fn all_of_a_buffer_and_nothing_else_is_made_resident() {
        let allowed = sched_getaffinity(None).unwrap();
        let mine: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let mut arena = Arena::new();
        // The first huge page of the mapping belongs to another buffer, in part.
        let before = arena.take(HUGE / 2).unwrap();
        let len = 9 * HUGE + 4 * PAGE;
        let start = arena.take(len).unwrap();
        let at_first = resident(start.addr().get());
        // SAFETY: taken just now.
        unsafe { spread_over(&[mine.clone(), mine.clone(), mine], start, len) };
        let made = resident(start.addr().get()) - at_first;
        let pages = len.div_ceil(PAGE) * (PAGE >> 10);
        assert!((pages..=pages + 2 * (HUGE >> 10)).contains(&made), "{made} kB for {len} bytes");
        // SAFETY: taken above, and not given back.
        let bytes = unsafe { std::slice::from_raw_parts(start.as_ptr(), len) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        // SAFETY: as above; given back once.
        unsafe {
            arena.give(start, len);
            arena.give(before, HUGE / 2);
        }
    }
}
