//! Measurements of this machine while its models serve on assumed speeds. They run while no request runs or waits.

use super::problem_statement::ProblemStatement;
use crate::deployment::DesiredDeployment;
use crate::exit::CliError;
use crate::machine;
use crate::output::progress::Progress;
use crate::output::table;
use crate::profiling::{self, Gate, MeasurementCounts, ProfileRequest};
use futures_util::future::select_all;
use remoe_gateway_core::Model;
use remoe_local::Measured;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;

/// Time without a request before measurements begin or continue.
const IDLE_TIME: Duration = Duration::from_secs(1);
/// Time until the first message that measurements are not done. The time doubles with each further message.
const FIRST_DELAY_MESSAGE: Duration = Duration::from_secs(600);

/// A model whose plan is based on assumed speeds, or on measurements that other programs disturbed.
pub(crate) struct UnmeasuredModel {
    pub(crate) statement: ProblemStatement,
    pub(crate) wanted: DesiredDeployment,
    pub(crate) request: ProfileRequest,
    /// Receives the result of the measurement.
    pub(crate) result_sender: oneshot::Sender<Measured>,
}

/// Running measurements. Dropping the value ends them.
pub(crate) struct BackgroundMeasurement {
    gate: Arc<Gate>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for BackgroundMeasurement {
    fn drop(&mut self) {
        self.gate.end();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl BackgroundMeasurement {
    /// Measures for each of `unmeasured` in turn while none of `models` has a request.
    pub(crate) fn start(
        unmeasured: Vec<UnmeasuredModel>,
        models: Vec<Arc<Model>>,
        progress: Arc<Progress>,
    ) -> Self {
        let gate = Gate::new(false);
        let watching = tokio::spawn(open_while_idle(models, gate.clone()));
        let shared = gate.clone();
        let measuring = tokio::spawn(async move {
            for model in unmeasured {
                let name = model.wanted.name();
                let measured = tokio::select! {
                    measured = measure(model, shared.clone(), &progress) => measured,
                    never = report_delays(&name, FIRST_DELAY_MESSAGE, || shared.counts(), |line| progress.line(line)) => match never {},
                };
                if let Err(error) = measured {
                    progress.line(&format!("{name}: measurements failed: {}", error.message));
                }
            }
        });
        Self { gate, tasks: [watching, measuring] }
    }
}

async fn measure(model: UnmeasuredModel, gate: Arc<Gate>, progress: &Progress) -> Result<(), CliError> {
    let UnmeasuredModel { statement, wanted, request, result_sender } = model;
    let needed = profiling::memory_needed(&request.measurement.inspection, &request.measurement.dtype);
    let free = machine::free_memory_bytes();
    if free < needed {
        progress.line(&format!(
            "{}: not measured beside the model: that needs {} of memory, {} are free;\n  stop the model and run \
             `remoe profile`",
            wanted.name(),
            table::bytes(needed),
            table::bytes(free)
        ));
        return Ok(());
    }
    let start = Instant::now();
    let profile = profiling::measure(request, gate, &Arc::new(Progress::silent())).await?;
    for doubt in profiling::doubts(&profile) {
        progress.line(&format!("{}: {doubt}", wanted.name()));
    }
    profiling::save_if_newer(&profile)?;
    let problem = statement.problem(&profile, &wanted)?;
    // The channel is closed if the model has stopped.
    let _closed = result_sender.send(Measured { problem, took: start.elapsed() });
    Ok(())
}

/// Reports after `pause`, and then after twice as long each time, that measurements for the model `name` are not done.
async fn report_delays(
    name: &str,
    mut pause: Duration,
    counts: impl Fn() -> MeasurementCounts,
    mut report: impl FnMut(&str),
) -> Infallible {
    let start = Instant::now();
    loop {
        tokio::time::sleep(pause).await;
        pause *= 2;
        report(&delay_message(name, start.elapsed(), counts()));
    }
}

fn delay_message(
    name: &str,
    after: Duration,
    MeasurementCounts { done, disturbed }: MeasurementCounts,
) -> String {
    format!(
        "{name}: this machine is not measured after {} min: requests leave too little time\n  ({done} measurements \
         done, {disturbed} interrupted), and the plan stands on assumed speeds.\n  For a plan on measured ones run \
         `remoe profile` while nothing is served,\n  or start with --profile-first",
        after.as_secs() / 60
    )
}

/// Opens `gate` when no model had a request for [`IDLE_TIME`], and closes it as soon as one has.
async fn open_while_idle(models: Vec<Arc<Model>>, gate: Arc<Gate>) {
    let mut loads: Vec<_> = models.iter().map(|model| model.watch_load()).collect();
    if loads.is_empty() {
        return;
    }
    loop {
        let busy = loads.iter_mut().any(|load| load.borrow_and_update().is_busy());
        if busy {
            gate.close();
        }
        let idle = async {
            match busy {
                true => std::future::pending().await,
                false => tokio::time::sleep(IDLE_TIME).await,
            }
            gate.open();
            std::future::pending::<()>().await;
        };
        let changed = select_all(loads.iter_mut().map(|load| Box::pin(load.changed())));
        tokio::select! {
            // The channel is closed if a model has stopped, so its measurement is not needed any more.
            (changed, ..) = changed => if changed.is_err() {
                gate.end();
                return;
            },
            () = idle => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    #[tokio::test]
    async fn delays_are_reported_repeatedly() {
        let (sender, mut messages) = unbounded_channel();
        let counts = || MeasurementCounts { done: 3, disturbed: 40 };
        let reporting = report_delays("demo", Duration::from_millis(1), counts, |line| {
            let _closed = sender.send(line.to_owned());
        });
        let thrice = async {
            for _ in 0..3 {
                assert_eq!(messages.recv().await, Some(delay_message("demo", Duration::ZERO, counts())));
            }
        };
        tokio::select! {
            never = reporting => match never {},
            () = thrice => {}
        }
    }

    #[test]
    fn delay_message_has_counts_and_a_remedy() {
        let text =
            delay_message("demo", Duration::from_secs(1800), MeasurementCounts { done: 3, disturbed: 40 });
        assert!(text.starts_with("demo: this machine is not measured after 30 min: requests leave"));
        assert!(text.contains("(3 measurements done, 40 interrupted)") && text.contains("--profile-first"));
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }
}
