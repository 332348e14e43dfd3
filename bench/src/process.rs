//! Programs under measurement: started, read line by line, ended for certain.

use crate::error::{BenchError, ErrorContext, Result};
use rustix::process::{Pid, Signal, kill_process};
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

/// A program that was asked to end has so long before it is killed.
const END_LIMIT: Duration = Duration::from_secs(10);

/// A program that says things on its standard output and is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct ChildProcess {
    name: String,
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl ChildProcess {
    /// Starts `command`; what it writes to standard error is shown.
    pub(crate) fn start(name: &str, mut command: Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().doing(|| format!("starting {name}"))?;
        let input = child.stdin.take();
        let output = child.stdout.take().doing(|| format!("reading from {name}"))?;
        Ok(Self { name: name.to_owned(), child, input, output: BufReader::new(output) })
    }

    /// The next line that it says.
    pub(crate) fn line(&mut self) -> Result<String> {
        let mut line = String::new();
        let read = self.output.read_line(&mut line).doing(|| format!("reading from {}", self.name))?;
        if read > 0 {
            return Ok(line.trim_end().to_owned());
        }
        let status = self.child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
        Err(BenchError::new(format!("waiting for {}", self.name), format!("ended early: {status}")))
    }

    /// Kills it as a crash would.
    pub(crate) fn kill(&mut self) -> Result<()> {
        self.child.kill().doing(|| format!("killing {}", self.name))
    }

    /// Tells it `line` and returns what it says next.
    pub(crate) fn ask(&mut self, line: &str) -> Result<String> {
        let asking = || format!("asking {}", self.name);
        let input = self.input.as_mut().doing(asking)?;
        writeln!(input, "{line}").and_then(|()| input.flush()).doing(asking)?;
        self.line()
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        // Asked first: a launcher then waits for its functions, whose time counts as ours only so. One
        // that has ended cannot be signalled any more, and that is all that can go wrong.
        if let Some(pid) = Pid::from_raw(self.child.id().cast_signed()) {
            let _gone = kill_process(pid, Signal::TERM);
        }
        let asked = Instant::now();
        while asked.elapsed() < END_LIMIT && matches!(self.child.try_wait(), Ok(None)) {
            std::thread::sleep(Duration::from_millis(5));
        }
        let _gone = self.child.kill();
        let _status = self.child.wait();
    }
}
