//! Function processes, started and announced.

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

/// Start options of a function.
#[derive(Debug, Clone, Default)]
pub struct StartOptions {
    /// Value of `--dtype`. Defaults to that of the checkpoint.
    pub dtype: Option<&'static str>,
    /// Value of `REMOE_LOG`. Defaults to the default filter.
    pub log: Option<&'static str>,
    /// True to use LibTorch in the main function.
    pub torch: bool,
    /// True to record or simulate the device of LibTorch.
    pub recorded: bool,
    /// Further arguments.
    pub arguments: Vec<String>,
    /// Further environment variables.
    pub environment: Vec<(&'static str, String)>,
    /// Wrapper program with arguments, if any. It makes the function slow.
    pub under: Vec<String>,
}

impl StartOptions {
    /// Returns options with a dtype alone.
    #[must_use]
    pub fn dtype(dtype: &'static str) -> Self {
        Self { dtype: Some(dtype), ..Self::default() }
    }

    /// Enables LibTorch in the main function.
    #[must_use]
    pub fn torch(mut self) -> Self {
        self.torch = true;
        self
    }

    /// Enables LibTorch on a device of `bytes` that is simulated on the CPU: all code above it takes the branches of
    /// a GPU.
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

    /// Adds an argument with its value.
    #[must_use]
    pub fn with(mut self, argument: &str, value: impl ToString) -> Self {
        self.arguments.extend([argument.to_owned(), value.to_string()]);
        self
    }
}

/// Starting function, before its announcement.
struct StartingFunction {
    /// Timeout of the announcement.
    limit: Duration,
    process: Process,
    announcements: mpsc::UnboundedReceiver<String>,
}

impl StartingFunction {
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
        // One thread each: the tests do not depend on the number.
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

/// Running main function.
pub struct MainFunction {
    /// Client of the control interface.
    pub control: Control,
    /// Process of the function.
    pub process: Process,
    /// Announcement that the function printed.
    pub announcement: Announcement,
}

impl MainFunction {
    /// Starts a main function without routing and waits for its announcement.
    pub async fn start(model: &Path, options: StartOptions) -> Self {
        let options = options.with("--http-listen", "127.0.0.1:0");
        let (process, announcement) =
            StartingFunction::new(options.main_program(), model, &options).announced().await;
        Self { control: Control::new(announcement.grpc), process, announcement }
    }

    /// Starts a main function as [`Self::start`] does and connects as an operator with `trust`.
    pub async fn start_within(model: &Path, options: StartOptions, trust: Trust) -> Self {
        let mut main = Self::start(model, options).await;
        main.control = Control::within(main.announcement.grpc, Some(trust));
        main
    }

    /// Starts a function that must fail to start. Returns its exit status and its log.
    pub async fn refuse(model: &Path, options: StartOptions) -> (ExitStatus, Vec<String>) {
        let options = options.with("--http-listen", "127.0.0.1:0");
        StartingFunction::new(options.main_program(), model, &options).refused().await
    }

    /// Returns its HTTP address.
    #[must_use]
    pub fn http(&self) -> SocketAddr {
        self.announcement.http.expect("a main function with HTTP announces where")
    }

    /// Waits until all experts of the placement in force are loaded.
    pub async fn has_read_all(&self) {
        MetricsPage::settle(self.http(), "remoe_experts_arriving", 0).await;
    }

    /// Waits until all experts of the placement are loaded, then truncates the weights of its model in `folder`.
    pub async fn take_weights_away(&self, folder: &Path) {
        self.has_read_all().await;
        let file = File::options().write(true).open(folder.join("model.safetensors"));
        file.and_then(|file| file.set_len(1000)).expect("the weights can be cut");
    }
}

/// Running remote-expert function.
pub struct RemoteFunction {
    /// Process of the function.
    pub process: Process,
    /// Announcement that the function printed.
    pub announcement: Announcement,
}

impl RemoteFunction {
    /// Starts a function that hosts `listing` and waits for its announcement.
    pub async fn start(model: &Path, listing: &str, options: StartOptions) -> Self {
        let options = options.with("--experts", listing);
        let (process, announcement) =
            StartingFunction::new("remote-expert-fn", model, &options).announced().await;
        Self { process, announcement }
    }

    /// Starts a function that must fail to start. Returns its exit status and its log.
    pub async fn refuse(model: &Path, listing: &str, options: StartOptions) -> (ExitStatus, Vec<String>) {
        StartingFunction::new("remote-expert-fn", model, &options.with("--experts", listing)).refused().await
    }

    /// Returns its gRPC address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.announcement.grpc
    }
}
