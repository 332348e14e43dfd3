//! Progress on standard error: a spinner on a terminal, plain lines elsewhere.

use crate::machine;
use crate::output::logs;
use anstyle::AnsiColor;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use remoe_rollout::{LogLine, RolloutEvent};
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::Duration;

/// Reports progress and log lines.
pub(crate) struct Progress {
    spinner: Option<ProgressBar>,
    verbose: bool,
    silent: bool,
    /// Number of steps of the present work, and how many of them have begun; 0 if that is not known.
    steps: AtomicUsize,
    begun: AtomicUsize,
}

impl Progress {
    /// With `verbose`, or a filter of the user's own, everything that functions log is shown.
    pub(crate) fn new(verbose: bool) -> Self {
        Self {
            spinner: std::io::stderr().is_terminal().then(ProgressBar::new_spinner),
            verbose: verbose || std::env::var_os("REMOE_LOG").is_some(),
            silent: false,
            steps: AtomicUsize::new(0),
            begun: AtomicUsize::new(0),
        }
    }

    /// Reports nothing: for work in the background.
    pub(crate) fn silent() -> Self {
        let (steps, begun) = (AtomicUsize::new(0), AtomicUsize::new(0));
        Self { spinner: None, verbose: false, silent: true, steps, begun }
    }

    /// True if everything is shown.
    pub(crate) fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Expects `steps` until [`Self::clear`]; each call of [`Self::doing`] begins one of them.
    pub(crate) fn expect(&self, steps: usize) {
        self.steps.store(steps, Relaxed);
        self.begun.store(0, Relaxed);
        if let Some(spinner) = &self.spinner {
            spinner.reset();
            spinner.set_length(steps as u64);
            restyle(spinner, "{bar:20} {pos}/{len}, {eta} left: {msg}");
        }
    }

    /// Shows what is being waited for now.
    pub(crate) fn doing(&self, what: impl Into<String>) {
        if self.silent {
            return;
        }
        let what = what.into();
        let steps = self.steps.load(Relaxed);
        if steps > 0 {
            let before = self.begun.fetch_add(1, Relaxed);
            match &self.spinner {
                Some(spinner) => {
                    spinner.set_position(before as u64);
                    spinner.set_message(what);
                    spinner.enable_steady_tick(Duration::from_millis(100));
                }
                None => print_line(&format!("[{}/{steps}] {what}", before + 1)),
            }
            return;
        }
        match &self.spinner {
            Some(spinner) => {
                // One that has been cleared would stay so.
                spinner.reset();
                spinner.set_message(what);
                spinner.enable_steady_tick(Duration::from_millis(100));
            }
            None => print_line(&what),
        }
    }

    /// Beside what is being waited for: `done` of `all` bytes are there, on terminals alone.
    pub(crate) fn bytes(&self, done: u64, all: u64) {
        let Some(spinner) = &self.spinner else { return };
        if spinner.length() != Some(all) {
            spinner.set_length(all);
            restyle(spinner, "{bar:20} {bytes}/{total_bytes}, {bytes_per_sec}, {eta} left: {msg}");
        }
        spinner.set_position(done);
    }

    /// Nothing is being waited for any more.
    pub(crate) fn clear(&self) {
        self.steps.store(0, Relaxed);
        if let Some(spinner) = &self.spinner {
            spinner.disable_steady_tick();
            spinner.finish_and_clear();
            spinner.unset_length();
            spinner.set_style(ProgressStyle::default_spinner());
        }
    }

    /// One line that stays.
    pub(crate) fn line(&self, text: &str) {
        match &self.spinner {
            _ if self.silent => {}
            Some(spinner) => spinner.suspend(|| print_line(text)),
            None => print_line(text),
        }
    }

    /// A line that a function logged.
    pub(crate) fn log(&self, line: LogLine<'_>) {
        if let Some(text) = logs::render(line.name, line.text, self.verbose) {
            self.line(&text);
        }
    }

    /// Something that happened to a function; with `verbose`, when.
    pub(crate) fn event(&self, event: &RolloutEvent) {
        let line = |text: String| match self.verbose {
            true => self.line(&format!("{} {text}", machine::now_micros())),
            false => self.line(&text),
        };
        match event {
            RolloutEvent::Unhealthy { name, fault } => line(format!("{name} {fault}")),
            RolloutEvent::Ended { name, ending } => line(format!("{name} {ending}")),
            RolloutEvent::Stopped { name, ending } if self.verbose => line(format!("{name} {ending}")),
            RolloutEvent::Started { name } if self.verbose => line(format!("{name} started")),
            RolloutEvent::Stopped { .. } | RolloutEvent::Started { .. } => {}
            RolloutEvent::Routed { problems, .. } => {
                for problem in problems {
                    line(format!("cannot use a remote function: {problem}"));
                }
            }
            RolloutEvent::Overruled { generation } => line(format!(
                "main reports unknown routing generation {generation}: another process uses its control address; \
                 restoring this deployment's placement"
            )),
            RolloutEvent::RoutingFailed { message } => line(format!("cannot apply the placement: {message}")),
        }
    }
}

/// Returns a bar for `count` things of a kind, with a rate and the time that is left; hidden unless standard error is a
/// terminal.
pub(crate) fn bar(count: usize, kind: &str) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(count as u64), target);
    restyle(&bar, &format!("{{bar:40}} {{pos}}/{{len}} {kind}, {{per_sec:1}}, {{eta}} left {{msg}}"));
    bar
}

fn restyle(bar: &ProgressBar, template: &str) {
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
}

/// Prints the last line of a command that failed.
pub(crate) fn print_error(message: &str) {
    let style = AnsiColor::Red.on_default().bold();
    print_line(&format!("{style}error{style:#}: {message}"));
}

/// Prints a line about something that was left out.
pub(crate) fn print_warning(message: &str) {
    let style = AnsiColor::Yellow.on_default().bold();
    print_line(&format!("{style}warning{style:#}: {message}"));
}

fn print_line(text: &str) {
    // A closed standard error must not end what runs.
    let _closed = writeln!(anstream::stderr().lock(), "{text}");
}
