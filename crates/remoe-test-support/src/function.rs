//! Function processes, announced and ready to be spoken to.

use crate::binaries;
use crate::control::Control;
use crate::deadline::{LONG, SOON, within};
use crate::metrics::MetricsPage;
use crate::process::Process;
use remoe_process::Announcement;
use remoe_proto::identity::Trust;
use std::fs::File;
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::Duration;
use tokio::sync::mpsc;

/// How a function is started beside its model.
#[derive(Debug, Clone, Default)]
pub struct StartOptions {
    /// `--dtype`; none: the checkpoint's.
    pub dtype: Option<&'static str>,
    /// Filter of the log (`REMOE_LOG`); none: the usual one.
    pub log: Option<&'static str>,
    /// Set if the main function uses LibTorch's operations.
    pub torch: bool,
    /// Set if the device of these operations is recorded or simulated.
    pub recorded: bool,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Further variables.
    pub environment: Vec<(&'static str, String)>,
    /// The program that runs it and its arguments; none: it runs by itself. Whatever that is, it makes it slow.
    pub under: Vec<String>,
}

impl StartOptions {
    /// Only a dtype.
    #[must_use]
    pub fn dtype(dtype: &'static str) -> Self {
        Self { dtype: Some(dtype), ..Self::default() }
    }

    /// These with LibTorch's operations in the main function.
    #[must_use]
    pub fn torch(mut self) -> Self {
        self.torch = true;
        self
    }

    /// These with LibTorch's operations on a device of `bytes` that is simulated on the CPU: everything above them takes
    /// the branches that it takes on a GPU.
    #[must_use]
    pub fn simulated_device(mut self, bytes: u64) -> Self {
        self.recorded = true;
        self.environment.push(("REMOE_TEST_DEVICE_BYTES", bytes.to_string()));
        self.torch()
    }

    fn main_program(&self) -> &'static str {
        match (self.torch, self.recorded) {
            (_, true) => "examples/recorded_device",
            (true, false) => "main-model-fn-torch",
            (false, false) => "main-model-fn",
        }
    }

    /// These and one more argument with its value.
    #[must_use]
    pub fn with(mut self, argument: &str, value: impl ToString) -> Self {
        self.arguments.extend([argument.to_owned(), value.to_string()]);
        self
    }
}

/// A process of `program` and what it announces.
struct Starting {
    /// How long it may take.
    limit: Duration,
    process: Process,
    announcements: mpsc::UnboundedReceiver<String>,
}

impl Starting {
    fn new(program: &str, model: &Path, options: &StartOptions) -> Self {
        let path = binaries::program(program);
        let mut command = match options.under.split_first() {
            None => Command::new(path),
            Some((tool, arguments)) => {
                let mut command = Command::new(tool);
                command.args(arguments).arg(path);
                command
            }
        };
        command.arg("--model").arg(model).args(&options.arguments);
        command.arg("--launcher-pid").arg(std::process::id().to_string());
        // One thread each: what is tested here does not depend on how many there are.
        if !options.arguments.iter().any(|argument| argument == "--threads") {
            command.args(["--threads", "1"]);
        }
        if let Some(dtype) = options.dtype {
            command.args(["--dtype", dtype]);
        }
        command.env_remove("REMOE_LOG").env_remove("REMOE_API_KEY");
        command.envs(options.environment.iter().map(|(name, value)| (name, value)));
        if let Some(log) = options.log {
            command.env("REMOE_LOG", log);
        }
        let (sender, announcements) = mpsc::unbounded_channel();
        let process = Process::start(program, command, move |line| drop(sender.send(line)));
        let limit = if options.under.is_empty() { SOON } else { LONG };
        Self { limit, process, announcements }
    }

    async fn announced(mut self) -> (Process, Announcement) {
        let line = within(self.limit, "the announcement of a function", self.announcements.recv()).await;
        let Some(line) = line else {
            panic!("a function ended before its announcement: {:?}", self.process.end(SOON).await)
        };
        let announcement = serde_json::from_str(&line);
        (self.process, announcement.unwrap_or_else(|error| panic!("announcement {line:?}: {error}")))
    }

    async fn refused(mut self) -> (ExitStatus, Vec<String>) {
        let line = within(SOON, "the end of a function that refuses", self.announcements.recv()).await;
        assert_eq!(line, None, "a function that should refuse announced itself");
        let status = self.process.end(SOON).await;
        (status, self.process.log())
    }
}

/// A main function.
pub struct MainFunction {
    /// Client of the control interface.
    pub control: Control,
    /// Process of the function.
    pub process: Process,
    /// Announcement that the function printed.
    pub announcement: Announcement,
}

impl MainFunction {
    /// Starts one and waits for its announcement; it has no routing yet.
    pub async fn start(model: &Path, options: StartOptions) -> Self {
        let options = options.with("--http-listen", "127.0.0.1:0");
        let (process, announcement) =
            Starting::new(options.main_program(), model, &options).announced().await;
        Self { control: Control::new(announcement.grpc), process, announcement }
    }

    /// As [`Self::start`], for an operator with `trust`.
    pub async fn start_within(model: &Path, options: StartOptions, trust: Trust) -> Self {
        let mut main = Self::start(model, options).await;
        main.control = Control::within(main.announcement.grpc, Some(trust));
        main
    }

    /// Starts one that is expected to refuse; returns how it ended and what it logged.
    pub async fn refuse(model: &Path, options: StartOptions) -> (ExitStatus, Vec<String>) {
        let options = options.with("--http-listen", "127.0.0.1:0");
        Starting::new(options.main_program(), model, &options).refused().await
    }

    /// Where it speaks HTTP.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.announcement.http.expect("a main function with HTTP announces where")
    }

    /// Returns when nothing is left that it reads of the checkpoint for the placement in force.
    pub async fn has_read_all(&self) {
        MetricsPage::settle(self.http(), "remoe_experts_arriving", 0).await;
    }

    /// From here on no weights can be read from its model in `folder`. What it reads for the placement in force it has
    /// by then.
    pub async fn take_weights_away(&self, folder: &Path) {
        self.has_read_all().await;
        let file = File::options().write(true).open(folder.join("model.safetensors"));
        file.and_then(|file| file.set_len(1000)).expect("the weights can be cut");
    }
}

/// A remote-expert function.
pub struct RemoteFunction {
    /// Process of the function.
    pub process: Process,
    /// Announcement that the function printed.
    pub announcement: Announcement,
}

impl RemoteFunction {
    /// Starts one that hosts `listing` and waits for its announcement.
    pub async fn start(model: &Path, listing: &str, options: StartOptions) -> Self {
        let options = options.with("--experts", listing);
        let (process, announcement) = Starting::new("remote-expert-fn", model, &options).announced().await;
        Self { process, announcement }
    }

    /// Starts one that is expected to refuse; returns how it ended and what it logged.
    pub async fn refuse(model: &Path, listing: &str, options: StartOptions) -> (ExitStatus, Vec<String>) {
        Starting::new("remote-expert-fn", model, &options.with("--experts", listing)).refused().await
    }

    /// Where it speaks gRPC.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.announcement.grpc
    }
}
