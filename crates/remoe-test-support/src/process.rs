//! A child process: its output within bounds, its end for certain.

use crate::deadline;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Bytes of log kept per process.
const LOG_BYTES: usize = 4 << 20;

/// Lines that a failing test prints of each process.
const SHOWN_LINES: usize = 40;

/// Sends `signal` to the process `pid`.
pub fn signal(pid: u32, signal: Signal) {
    let target = Pid::from_raw(pid.cast_signed()).expect("a process id is positive");
    kill_process(target, signal).unwrap_or_else(|error| panic!("signal {signal:?} to {pid}: {error}"));
}

/// Reports if the process `pid` has not ended. One that has ended but was not waited for counts as ended:
/// where functions lose their launcher, not every machine has a process that reaps them.
#[must_use]
pub fn lives(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The state follows the name, which may contain anything.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

type Started = std::io::Result<Child>;

/// Functions end with the thread that started them, so that one thread starts all and lives as long
/// as the test program, by whatever death that ends.
static SPAWNER: LazyLock<mpsc::Sender<(Command, mpsc::Sender<Started>)>> = LazyLock::new(|| {
    let (sender, jobs) = mpsc::channel::<(Command, mpsc::Sender<Started>)>();
    std::thread::spawn(move || {
        for (mut command, reply) in jobs {
            let _caller_gone = reply.send(command.spawn());
        }
    });
    sender
});

/// A child that is killed when this is dropped. When the test fails its last log lines are printed.
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Mutex<Log>>,
}

#[derive(Default)]
struct Log {
    lines: VecDeque<String>,
    bytes: usize,
    /// Nothing more will come.
    complete: bool,
}

impl Log {
    fn push(&mut self, line: String) {
        self.bytes += line.len();
        self.lines.push_back(line);
        while self.bytes > LOG_BYTES
            && let Some(oldest) = self.lines.pop_front()
        {
            self.bytes -= oldest.len();
        }
    }
}

impl Process {
    /// Starts `command` and calls `each` for every line of its standard output; standard error is
    /// its log.
    #[must_use]
    pub fn start(name: &str, mut command: Command, each: impl FnMut(String) + Send + 'static) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let (reply, started) = mpsc::channel();
        SPAWNER.send((command, reply)).expect("the spawning thread lives");
        let child = started.recv().expect("the spawning thread answers");
        let mut child = child.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
        let log = Arc::<Mutex<Log>>::default();
        let kept = log.clone();
        let written = read_lines(child.stdout.take(), each);
        let logged = read_lines(child.stderr.take(), move |line| locked(&kept).push(line));
        let ended = log.clone();
        std::thread::spawn(move || {
            let _panics = (written.join(), logged.join());
            locked(&ended).complete = true;
        });
        Self { name: name.to_owned(), child, log }
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Bytes in memory (`VmRSS`), and the most that there ever were (`VmHWM`).
    #[must_use]
    pub fn memory(&self) -> (u64, u64) {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()));
        let status = status.expect("the process runs");
        let bytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)?.strip_suffix(" kB"));
            line.and_then(|kib| kib.trim().parse::<u64>().ok()).expect("a size") << 10
        };
        (bytes("VmRSS:"), bytes("VmHWM:"))
    }

    /// Open file descriptors.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the process runs").count()
    }

    /// Sends it `signal`.
    pub fn signal(&self, signal: Signal) {
        self::signal(self.pid(), signal);
    }

    /// The lines of its log that are kept, oldest first.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        locked(&self.log).lines.iter().cloned().collect()
    }

    /// How it ended, once it has.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be waited for")
    }

    /// Waits for its end, and for all of its output.
    pub async fn end(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        let log = self.log.clone();
        deadline::until(limit, &what, async || self.ended().filter(|_| locked(&log).complete)).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        // An ended child cannot be killed any more, and that is all that can go wrong.
        let _gone = self.child.kill();
        let _status = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            eprintln!("--- {} (process {}, before the end: {ended:?})", self.name, self.child.id());
            log[log.len().saturating_sub(SHOWN_LINES)..].iter().for_each(|line| eprintln!("{line}"));
        }
    }
}

fn locked(log: &Mutex<Log>) -> MutexGuard<'_, Log> {
    log.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read_lines(
    pipe: Option<impl Read + Send + 'static>,
    mut each: impl FnMut(String) + Send + 'static,
) -> JoinHandle<()> {
    let pipe = pipe.expect("the pipe was asked for");
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).split(b'\n').map_while(Result::ok) {
            each(String::from_utf8_lossy(&line).into_owned());
        }
    })
}
