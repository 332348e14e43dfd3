//! Length of a run: as many rounds as a part wants, while there is time and the user does not interrupt it.

use crate::error::{BenchError, ErrorContext, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tokio::signal::unix::{SignalKind, signal};

/// Set once the user asked for the end of the run.
#[derive(Debug, Clone, Default)]
pub(crate) struct Interrupt(Arc<AtomicBool>);

impl Interrupt {
    /// Listens to SIGINT and SIGTERM from now on: the round that runs is the last one.
    pub(crate) fn listen() -> Result<Self> {
        let listening = || "listening to signals";
        let interrupt = Self::default();
        let set = interrupt.clone();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build().doing(listening)?;
        let (mut int, mut term) = {
            let _entered = runtime.enter();
            (
                signal(SignalKind::interrupt()).doing(listening)?,
                signal(SignalKind::terminate()).doing(listening)?,
            )
        };
        let listen = move || {
            runtime.block_on(async {
                tokio::select! { _ = int.recv() => (), _ = term.recv() => () }
            });
            set.0.store(true, Ordering::Relaxed);
            eprintln!("stopping after this round");
        };
        std::thread::Builder::new().name("signals".to_owned()).spawn(listen).doing(listening)?;
        Ok(interrupt)
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Time that a part may take.
#[derive(Debug, Clone)]
pub(crate) struct TimeShare {
    ends: Instant,
    interrupt: Interrupt,
}

/// How the rounds of a part ended.
#[derive(Debug)]
pub(crate) struct RoundsEnd {
    pub(crate) wanted: usize,
    /// Rounds that counted.
    pub(crate) done: usize,
    pub(crate) cause: StopCause,
}

/// Why there were no further rounds.
#[derive(Debug, PartialEq)]
pub(crate) enum StopCause {
    Complete,
    TimeLimit,
    Interrupted,
    Failed(BenchError),
}

impl TimeShare {
    pub(crate) fn new(ends: Instant, interrupt: Interrupt) -> Self {
        Self { ends, interrupt }
    }

    /// The first of `pieces` equal ones of what is left.
    pub(crate) fn first_of(&self, pieces: usize) -> Self {
        let left = self.ends.saturating_duration_since(Instant::now());
        let piece = left / u32::try_from(pieces.max(1)).unwrap_or(u32::MAX);
        Self { ends: Instant::now() + piece, interrupt: self.interrupt.clone() }
    }

    /// Runs `round` once to warm up (number 0), then up to `wanted` times (1, 2, ..). A round that would
    /// not end in time is not begun, but for the first that counts: a part without figures says nothing.
    pub(crate) fn rounds(
        &self,
        name: &str,
        wanted: usize,
        mut round: impl FnMut(usize) -> Result<()>,
    ) -> RoundsEnd {
        let started = Instant::now();
        let mut longest = Duration::ZERO;
        for number in 0..=wanted {
            let done = number.saturating_sub(1);
            let end = |cause| RoundsEnd { wanted, done, cause };
            if self.interrupt.is_set() {
                return end(StopCause::Interrupted);
            }
            let now = Instant::now();
            if number > 1 && now + longest > self.ends {
                return end(StopCause::TimeLimit);
            }
            if number > 0 {
                let seconds = started.elapsed().as_secs();
                eprintln!("{name}: round {number} of {wanted}, {seconds} s so far");
            }
            if let Err(error) = round(number) {
                // Functions get a terminal's Ctrl-C as well.
                return end(if self.interrupt.is_set() {
                    StopCause::Interrupted
                } else {
                    StopCause::Failed(error)
                });
            }
            longest = longest.max(now.elapsed());
        }
        RoundsEnd { wanted, done: wanted, cause: StopCause::Complete }
    }
}

impl fmt::Display for RoundsEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { wanted, done, cause } = self;
        match cause {
            StopCause::Complete => write!(f, "{done} rounds."),
            StopCause::TimeLimit => {
                write!(f, "**{done} of {wanted} rounds**: time limit reached; raise --time-limit.")
            }
            StopCause::Interrupted => write!(f, "**{done} of {wanted} rounds**: interrupted."),
            StopCause::Failed(error) => write!(f, "**{done} of {wanted} rounds**: {error}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share(limit: Duration) -> TimeShare {
        TimeShare::new(Instant::now() + limit, Interrupt::default())
    }

    #[test]
    fn without_time_there_is_still_one_round_that_counts() {
        let mut seen = Vec::new();
        let ending = share(Duration::ZERO).rounds("part", 5, |number| {
            seen.push(number);
            Ok(())
        });
        assert_eq!((seen, ending.done, ending.cause), (vec![0, 1], 1, StopCause::TimeLimit));
    }

    #[test]
    fn with_time_every_round_is_taken() {
        let mut count = 0;
        let ending = share(Duration::from_secs(3600)).rounds("part", 5, |_| {
            count += 1;
            Ok(())
        });
        assert_eq!((count, ending.done, ending.cause), (6, 5, StopCause::Complete));
    }

    #[test]
    fn an_interrupted_or_failed_round_leaves_those_before_it() {
        let all = share(Duration::from_secs(3600));
        let mut fail = |number| match number {
            3 => Err(BenchError::new("measuring", "it broke")),
            _ => Ok(()),
        };
        let ending = all.rounds("part", 5, &mut fail);
        assert_eq!(
            (ending.done, &ending.cause),
            (2, &StopCause::Failed(BenchError::new("measuring", "it broke")))
        );
        let ending = all.rounds("part", 5, |number| {
            all.interrupt.0.store(number == 3, Ordering::Relaxed);
            fail(number)
        });
        assert_eq!((ending.done, ending.cause), (2, StopCause::Interrupted));
    }

    #[test]
    fn pieces_share_what_is_left() {
        let all = share(Duration::from_secs(100));
        let piece = all.first_of(4);
        assert!(piece.ends <= all.ends - Duration::from_secs(74), "{piece:?} of {all:?}");
    }
}
