//! What goes on, on standard error: a spinner on a terminal, plain lines elsewhere.

use crate::machine;
use crate::output::logs;
use anstyle::AnsiColor;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use remoe_launcher::{Event, LogLine};
use std::io::{IsTerminal, Write};
use std::time::Duration;

/// Reports progress and log lines.
pub(crate) struct Progress {
    spinner: Option<ProgressBar>,
    verbose: bool,
}

impl Progress {
    /// With `verbose`, or a filter of the user's own, everything that functions log is shown.
    pub(crate) fn new(verbose: bool) -> Self {
        Self {
            spinner: std::io::stderr().is_terminal().then(ProgressBar::new_spinner),
            verbose: verbose || std::env::var_os("REMOE_LOG").is_some(),
        }
    }

    /// What is being waited for now.
    pub(crate) fn doing(&self, what: impl Into<String>) {
        let what = what.into();
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

    /// Nothing is being waited for any more.
    pub(crate) fn clear(&self) {
        if let Some(spinner) = &self.spinner {
            spinner.disable_steady_tick();
            spinner.finish_and_clear();
        }
    }

    /// One line that stays.
    pub(crate) fn line(&self, text: &str) {
        match &self.spinner {
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
    pub(crate) fn event(&self, event: &Event) {
        let line = |text: String| match self.verbose {
            true => self.line(&format!("{} {text}", machine::now_micros())),
            false => self.line(&text),
        };
        match event {
            Event::Unhealthy { name, fault } => line(format!("{name} {fault}")),
            Event::Ended { name, ending } => line(format!("{name} {ending}")),
            Event::Stopped { name, ending } if self.verbose => line(format!("{name} {ending}")),
            Event::Started { name } if self.verbose => line(format!("{name} started")),
            Event::Stopped { .. } | Event::Started { .. } => {}
            Event::Routed { problems, .. } => {
                for problem in problems {
                    line(format!("remote function not usable: {problem}"));
                }
            }
            Event::Overruled { generation } => line(format!(
                "main follows generation {generation}, which is not of this deployment: somebody else \
                 speaks to its control address; the deployment's own placement is put in force again"
            )),
            Event::RoutingFailed { message } => line(format!("routing failed: {message}")),
        }
    }
}

/// A bar for `count` things of a kind, with a rate and the time that is left; nothing where nobody watches.
pub(crate) fn bar(count: usize, kind: &str) -> ProgressBar {
    let target = match std::io::stderr().is_terminal() {
        true => ProgressDrawTarget::stderr(),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(Some(count as u64), target);
    let style = format!("{{bar:40}} {{pos}}/{{len}} {kind}, {{per_sec}}, {{eta}} left {{msg}}");
    match ProgressStyle::with_template(&style) {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
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
