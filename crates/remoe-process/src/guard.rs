//! Ties the life of a process to that of its launcher.

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Failure to tie a process to its launcher.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The kernel refused.
    #[error("cannot set the parent-death signal: {0}")]
    Refused(#[from] rustix::io::Errno),
    /// The launcher ended before this process could be tied to it.
    #[error("launcher (process {launcher}) ended")]
    Gone {
        /// Expected process id.
        launcher: u32,
    },
}

/// Has the kernel kill this process when the thread of `launcher` that started it ends, for any reason, even while
/// this process is stopped. Must be called first in `main`.
///
/// # Errors
/// The launcher has ended already, or the kernel does not support this.
pub fn end_with_launcher(launcher: u32) -> Result<(), GuardError> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The launcher may have ended before the call above took effect; then no signal would come.
    if getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get().cast_unsigned()) == Some(launcher) {
        Ok(())
    } else {
        Err(GuardError::Gone { launcher })
    }
}
