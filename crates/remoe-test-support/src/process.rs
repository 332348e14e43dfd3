//! Child process with a bounded log, which is killed at the end of the test.

use crate::deadline;
use rustix::process::{Pid, Signal, kill_process};
use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// Largest log kept per process, in bytes.
const LOG_BYTES: usize = 4 << 20;

/// Number of log lines that a failing test prints per process.
const SHOWN_LINES: usize = 40;

/// Sends `signal` to the process `pid`.
pub fn signal(pid: u32, signal: Signal) {
    let target = Pid::from_raw(pid.cast_signed()).expect("a process id is positive");
    kill_process(target, signal).unwrap_or_else(|error| panic!("signal {signal:?} to {pid}: {error}"));
}

/// Returns true if the process `pid` has not ended. A zombie counts as ended, because not every machine reaps
/// orphaned functions.
#[must_use]
pub fn lives(pid: u32) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    // The state follows the name, which may contain any characters.
    let state = stat.rsplit_once(") ").and_then(|(_, rest)| rest.chars().next());
    !matches!(state, None | Some('Z' | 'X'))
}

type Started = std::io::Result<Child>;

/// Thread that starts all functions. Functions end with the thread that started them, so it must live as long as the
/// test program.
static SPAWNER: LazyLock<mpsc::Sender<(Command, mpsc::Sender<Started>)>> = LazyLock::new(|| {
    let (sender, jobs) = mpsc::channel::<(Command, mpsc::Sender<Started>)>();
    std::thread::spawn(move || {
        for (mut command, reply) in jobs {
            let _caller_gone = reply.send(command.spawn());
        }
    });
    sender
});

/// Child process, which is killed on drop. If the test fails, its last log lines are printed.
pub struct Process {
    name: String,
    child: Child,
    log: Arc<Mutex<ProcessLog>>,
}

#[derive(Default)]
struct ProcessLog {
    lines: VecDeque<String>,
    bytes: usize,
    /// True once both outputs are closed.
    is_complete: bool,
}

impl ProcessLog {
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
    /// Starts `command`, calls `each` for every line of its standard output, and keeps its standard error as the log.
    #[must_use]
    pub fn start(name: &str, mut command: Command, each: impl FnMut(String) + Send + 'static) -> Self {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let program = command.get_program().to_string_lossy().into_owned();
        let (reply, started) = mpsc::channel();
        SPAWNER.send((command, reply)).expect("the spawning thread lives");
        let child = started.recv().expect("the spawning thread answers");
        let mut child = child.unwrap_or_else(|error| panic!("cannot start {program}: {error}"));
        let log = Arc::<Mutex<ProcessLog>>::default();
        let log_writer = log.clone();
        let stdout_reader = read_lines(child.stdout.take(), each);
        let stderr_reader = read_lines(child.stderr.take(), move |line| locked(&log_writer).push(line));
        let ended = log.clone();
        std::thread::spawn(move || {
            let _panics = (stdout_reader.join(), stderr_reader.join());
            locked(&ended).is_complete = true;
        });
        Self { name: name.to_owned(), child, log }
    }

    /// Returns the process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Returns the present and the largest resident memory (`VmRSS`, `VmHWM`), in bytes.
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

    /// Returns the number of open file descriptors.
    #[must_use]
    pub fn descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("the process runs").count()
    }

    /// Sends `signal` to the process.
    pub fn signal(&self, signal: Signal) {
        self::signal(self.pid(), signal);
    }

    /// Returns the kept log lines, the oldest first.
    #[must_use]
    pub fn log(&self) -> Vec<String> {
        locked(&self.log).lines.iter().cloned().collect()
    }

    /// Returns the exit status once the process has ended.
    pub fn ended(&mut self) -> Option<ExitStatus> {
        self.child.try_wait().expect("the child can be waited for")
    }

    /// Waits for the end of the process and of its output.
    pub async fn end(&mut self, limit: Duration) -> ExitStatus {
        let what = format!("the end of {}", self.name);
        let log = self.log.clone();
        deadline::until(limit, &what, async || self.ended().filter(|_| locked(&log).is_complete)).await
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let ended = self.child.try_wait();
        // Killing fails only if the child has already ended.
        let _gone = self.child.kill();
        let _status = self.child.wait();
        if std::thread::panicking() {
            let log = self.log();
            eprintln!("--- {} (process {}, before the end: {ended:?})", self.name, self.child.id());
            log[log.len().saturating_sub(SHOWN_LINES)..].iter().for_each(|line| eprintln!("{line}"));
        }
    }
}

fn locked(log: &Mutex<ProcessLog>) -> MutexGuard<'_, ProcessLog> {
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
