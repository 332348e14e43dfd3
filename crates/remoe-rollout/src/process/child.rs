//! Watcher of one child process.

use crate::activity::Activity;
use crate::cgroup::Cgroup;
use crate::launcher::{Ending, FunctionPhase, ObservedFunction};
use crate::lines::{Tail, each_line};
use crate::process::{LauncherShared, LogLine, LogSink};
use remoe_process::Announcement;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use tokio::time::{Instant, sleep_until, timeout};

/// Record of one child in the launcher.
pub(crate) struct ChildRecord {
    pub(crate) observed: ObservedFunction,
    /// Sends a grace period to the child's watcher to stop the child.
    pub(crate) stop: mpsc::Sender<Duration>,
    /// Control group with its resource limits.
    pub(crate) cgroup: Option<Arc<Cgroup>>,
}

impl ChildRecord {
    fn announced(&mut self, announcement: &Announcement) {
        // A child that is being stopped does not return to service.
        if self.observed.phase == FunctionPhase::Starting {
            self.observed.phase = FunctionPhase::Listening {
                grpc: announcement.grpc,
                http: announcement.http,
                // An HTTP server also serves the metrics.
                metrics: announcement.metrics.or(announcement.http),
            };
        }
    }
}

/// State of the task that watches a child.
pub(crate) struct ChildWatch {
    pub(crate) number: u64,
    pub(crate) name: String,
    pub(crate) pid: u32,
    pub(crate) process: tokio::process::Child,
    /// Control group with its resource limits.
    pub(crate) cgroup: Option<Arc<Cgroup>>,
    pub(crate) stop_requests: mpsc::Receiver<Duration>,
    pub(crate) announce_timeout: Duration,
    /// Progress that extends this timeout.
    pub(crate) activity: Activity,
    pub(crate) sink: LogSink,
    pub(crate) shared: Arc<LauncherShared>,
}

/// Time for which output is read after the child ended: a grandchild may hold the pipes open.
const OUTPUT_GRACE: Duration = Duration::from_millis(500);

/// Watches a child until it ends, and records its state.
pub(crate) async fn watch(mut watched: ChildWatch) {
    let tail = Arc::new(Mutex::new(Tail::default()));
    let (announced, announcement) = oneshot::channel();
    let mut output = tokio::spawn(read_output(&mut watched, tail.clone(), announced));
    let (status, cause) = follow(&mut watched, announcement).await;
    if timeout(OUTPUT_GRACE, &mut output).await.is_err() {
        output.abort();
    }
    let out_of_memory = watched.cgroup.as_ref().is_some_and(|cgroup| cgroup.ran_out_of_memory());
    let cause = cause.or_else(|| out_of_memory.then(|| "exceeded its memory limit".to_owned()));
    let log = tail.lock().unwrap_or_else(PoisonError::into_inner).lines();
    let ending = Ending {
        code: status.and_then(|status| status.code()),
        signal: status.and_then(|status| status.signal()),
        cause,
        log,
    };
    watched.shared.update(watched.number, |child| child.observed.phase = FunctionPhase::Ended(ending));
}

/// Waits for the end of the child while handling its announcement, deadlines and stop requests.
async fn follow(
    watched: &mut ChildWatch,
    mut announcement: oneshot::Receiver<Announcement>,
) -> (Option<ExitStatus>, Option<String>) {
    let mut cause = None;
    let mut listening_for = true;
    let started = Instant::now();
    let announce_deadline =
        |watched: &ChildWatch| watched.activity.deadline(started, watched.announce_timeout);
    let mut announce_by = Some(announce_deadline(watched));
    let mut kill_at: Option<Instant> = None;
    loop {
        let next_deadline = [announce_by, kill_at].into_iter().flatten().min();
        tokio::select! {
            status = watched.process.wait() => return (status.ok(), cause),
            received = &mut announcement, if listening_for => {
                listening_for = false;
                // A child that closed its output without announcing runs into the deadline.
                if let Ok(received) = received {
                    announce_by = None;
                    watched.shared.update(watched.number, |child| child.announced(&received));
                }
            }
            Some(grace) = watched.stop_requests.recv() => {
                announce_by = None;
                let end = Instant::now() + grace;
                // A later request can only shorten the remaining time.
                kill_at = Some(kill_at.map_or(end, |earlier| earlier.min(end)));
                if !grace.is_zero() {
                    terminate(watched.pid);
                }
            }
            () = sleep_until(next_deadline.unwrap_or_else(Instant::now)), if next_deadline.is_some() => {
                if announce_by.is_some() && kill_at.is_none() {
                    let extended = announce_deadline(watched);
                    if extended > Instant::now() {
                        announce_by = Some(extended);
                        continue;
                    }
                    cause = Some(no_announcement(watched.announce_timeout, &watched.activity.what()));
                }
                (announce_by, kill_at) = (None, None);
                kill(watched.pid);
            }
        }
    }
}

/// Returns the reason to kill a child that did not announce itself.
fn no_announcement(timeout: Duration, what: &str) -> String {
    match what {
        "" => format!("did not announce its address within {timeout:?}"),
        what => format!("made no progress for {timeout:?}: {what}; raise --ready-timeout to wait longer"),
    }
}

/// Asks the child to drain. It was not reaped yet, so its id is still valid.
fn terminate(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        // It can only fail if the child has ended meanwhile.
        let _gone = kill_process(pid, Signal::TERM);
    }
}

/// Kills the child's process group, including stopped members.
fn kill(pid: u32) {
    if let Some(pid) = Pid::from_raw(pid.cast_signed()) {
        let _gone = kill_process_group(pid, Signal::KILL);
    }
}

/// Reads both streams of the child until they end; every line is a log line, except the announcement.
fn read_output(
    watched: &mut ChildWatch,
    tail: Arc<Mutex<Tail>>,
    announced: oneshot::Sender<Announcement>,
) -> impl Future<Output = ()> + Send + use<> {
    let (stdout, stderr) = (watched.process.stdout.take(), watched.process.stderr.take());
    let (name, pid, sink) = (watched.name.clone(), watched.pid, watched.sink.clone());
    let log = move |text: &str| {
        tail.lock().unwrap_or_else(PoisonError::into_inner).push(text);
        sink(LogLine { name: &name, pid, text });
    };
    async move {
        let mut announced = Some(announced);
        let from_stdout = async {
            let Some(stdout) = stdout else { return };
            each_line(stdout, |line| {
                match (serde_json::from_str(line), announced.take()) {
                    // The receiver is dropped only when the child has ended.
                    (Ok(announcement), Some(sender)) => drop(sender.send(announcement)),
                    (_, sender) => {
                        announced = sender;
                        log(line);
                    }
                }
            })
            .await;
        };
        let from_stderr = async {
            let Some(stderr) = stderr else { return };
            each_line(stderr, &log).await;
        };
        tokio::join!(from_stdout, from_stderr);
    }
}
