//! The machine's memory nodes: weights are spread over them.
//!
//! Memory lies on the node of the thread that writes it first. Were that left to whoever packs, attention and head, which one
//! thread packs, would lie on one node, and all threads would wait for it while the others' memory rests. So the huge
//! pages of each mapping are first written by threads of the nodes in turn. No system call is needed for it that
//! containers are refused, as those that set a policy of memory are.

use std::ptr::NonNull;
use std::sync::{PoisonError, RwLock};

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::HUGE;

/// Where a machine has pages of this size or larger ones, a byte in each makes all resident.
const PAGE: usize = 4096;

/// Cores of each node; fewer than two nodes are nothing to spread over.
static NODES: RwLock<Vec<Vec<usize>>> = RwLock::new(Vec::new());

/// Spreads the weights of experts and matrices that are packed from now on over memory nodes, of which `nodes` has the
/// cores. Those that the process may not run on count for nothing: who binds it to one node wants its memory there.
pub fn spread_over_nodes(nodes: &[Vec<usize>]) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let is_allowed = |&&core: &&usize| core < CpuSet::MAX_CPU && allowed.is_set(core);
    let mut usable: Vec<Vec<usize>> =
        nodes.iter().map(|cores| cores.iter().filter(is_allowed).copied().collect()).collect();
    usable.retain(|cores| !cores.is_empty());
    *NODES.write().unwrap_or_else(PoisonError::into_inner) = usable;
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

/// Makes `len` bytes resident, a huge page on each node in turn, where there are several nodes.
///
/// # Safety
/// Zero bytes from a huge page's boundary on, which are used by nobody else before this returns.
pub(super) unsafe fn spread(start: NonNull<u8>, len: usize) {
    let nodes = NODES.read().unwrap_or_else(PoisonError::into_inner);
    if nodes.len() < 2 {
        return;
    }
    let zeros = Zeros(start);
    std::thread::scope(|scope| {
        for (node, cores) in nodes.iter().enumerate() {
            let turns = nodes.len();
            let write = move || {
                let mut here = CpuSet::new();
                cores.iter().for_each(|&core| here.set(core));
                if sched_setaffinity(None, &here).is_err() {
                    return;
                }
                for page in (node * HUGE..len).step_by(turns * HUGE) {
                    for offset in (page..len.min(page + HUGE)).step_by(PAGE) {
                        // SAFETY: inside of the memory; no other thread writes to this huge page. Volatile: zeros are written where zeros are.
                        unsafe { zeros.at(offset).write_volatile(0) };
                    }
                }
            };
            // Only speed depends on it.
            let _ = std::thread::Builder::new().name(format!("node-{node}")).spawn_scoped(scope, write);
        }
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::Buffer;

    #[test]
    fn nodes_that_the_process_may_not_use_count_for_nothing() {
        let allowed = sched_getaffinity(None).unwrap();
        let mine: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
        let others: Vec<usize> = (0..CpuSet::MAX_CPU + 9).filter(|core| !mine.contains(core)).collect();
        spread_over_nodes(&[others.clone(), mine.clone(), Vec::new()]);
        assert_eq!(*NODES.read().unwrap(), [mine.clone()]);
        // Cores in any grouping will do to see that memory stays what it is.
        spread_over_nodes(&[mine.clone(), others, mine]);
        let mut buffer = Buffer::zeroed(40 * HUGE + 5).unwrap();
        assert!(buffer.words_mut().iter().all(|&word| word == 0));
        spread_over_nodes(&[]);
    }
}
