use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal};

/// Why a process could not be tied to its launcher.
#[derive(Debug, thiserror::Error)]
pub enum GuardError {
    /// The kernel refused.
    #[error("cannot set the parent-death signal: {0}")]
    Refused(#[from] rustix::io::Errno),
    /// The launcher ended before this process could be tied to it.
    #[error("launcher (process {launcher}) ended")]
    Gone {
        /// The process id that was expected.
        launcher: u32,
    },
}

/// Has the kernel kill this process when the thread of `launcher` that started it ends, by whatever
/// death, and even while this process is stopped. Call it first thing in `main`.
///
/// # Errors
/// The launcher is already gone, or the kernel has no such service.
pub fn end_with_launcher(launcher: u32) -> Result<(), GuardError> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    // The launcher may have died before the line above took effect; no signal would come then.
    if getppid().map(Pid::as_raw_nonzero).map(|pid| pid.get().cast_unsigned()) == Some(launcher) {
        Ok(())
    } else {
        Err(GuardError::Gone { launcher })
    }
}
