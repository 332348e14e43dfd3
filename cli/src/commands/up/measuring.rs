//! Measurements of this machine beside models that serve on assumed figures: while no request runs or waits.

use super::statement::ProblemStatement;
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

/// Time without a request before measurements begin or go on.
const QUIET: Duration = Duration::from_secs(1);
/// Time after which the user is told that measurements are not done, and why; then after twice as long each time.
const LATE: Duration = Duration::from_secs(600);

/// A model whose plan stands on assumed figures, or on ones that were disturbed.
pub(crate) struct MeasuredModel {
    pub(crate) statement: ProblemStatement,
    pub(crate) wanted: DesiredDeployment,
    pub(crate) request: ProfileRequest,
    /// Takes what was measured.
    pub(crate) tell: oneshot::Sender<Measured>,
}

/// Measurements that go on. Dropping this ends them.
pub(crate) struct Measuring {
    gate: Arc<Gate>,
    tasks: [JoinHandle<()>; 2],
}

impl Drop for Measuring {
    fn drop(&mut self) {
        self.gate.end();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Measuring {
    /// Measures for each of `subjects` in turn while none of `models` has a request.
    pub(crate) fn start(
        subjects: Vec<MeasuredModel>,
        models: Vec<Arc<Model>>,
        progress: Arc<Progress>,
    ) -> Self {
        let gate = Gate::new(false);
        let watching = tokio::spawn(open_while_idle(models, gate.clone()));
        let shared = gate.clone();
        let measuring = tokio::spawn(async move {
            for subject in subjects {
                let name = subject.wanted.name();
                let measured = tokio::select! {
                    measured = measure(subject, shared.clone(), &progress) => measured,
                    never = tell_if_late(&name, LATE, || shared.counts(), |line| progress.line(line)) => match never {},
                };
                if let Err(error) = measured {
                    progress.line(&format!("{name}: measurements failed: {}", error.message));
                }
            }
        });
        Self { gate, tasks: [watching, measuring] }
    }
}

async fn measure(subject: MeasuredModel, gate: Arc<Gate>, progress: &Progress) -> Result<(), CliError> {
    let MeasuredModel { statement, wanted, request, tell } = subject;
    let needed = profiling::memory_needed(&request.subject.inspection, &request.subject.dtype);
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
    let began = Instant::now();
    let profile = profiling::measure(request, gate, &Arc::new(Progress::silent())).await?;
    for doubt in profiling::doubts(&profile) {
        progress.line(&format!("{}: {doubt}", wanted.name()));
    }
    profiling::keep_unless_known(&profile)?;
    let problem = statement.problem(&profile, &wanted)?;
    // Closed: the model is not kept any more.
    let _unwanted = tell.send(Measured { problem, took: began.elapsed() });
    Ok(())
}

/// Tells the user after `pause`, and then ever more rarely, that measurements for the model `name` are not done.
async fn tell_if_late(
    name: &str,
    mut pause: Duration,
    counts: impl Fn() -> MeasurementCounts,
    mut tell: impl FnMut(&str),
) -> Infallible {
    let began = Instant::now();
    loop {
        tokio::time::sleep(pause).await;
        pause *= 2;
        tell(&late(name, began.elapsed(), counts()));
    }
}

fn late(name: &str, after: Duration, MeasurementCounts { done, disturbed }: MeasurementCounts) -> String {
    format!(
        "{name}: this machine is not measured after {} min: requests leave too little time\n  ({done} measurements \
         done, {disturbed} interrupted), and the plan stands on assumed speeds.\n  For a plan on measured ones run \
         `remoe profile` while nothing is served,\n  or start with --profile-first",
        after.as_secs() / 60
    )
}

/// Opens `gate` when no model had a request for [`QUIET`], and closes it as soon as one has.
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
        let quiet = async {
            match busy {
                true => std::future::pending().await,
                false => tokio::time::sleep(QUIET).await,
            }
            gate.open();
            std::future::pending::<()>().await;
        };
        let changed = select_all(loads.iter_mut().map(|load| Box::pin(load.changed())));
        tokio::select! {
            // Closed: a model is gone, and with it what is measured for it.
            (changed, ..) = changed => if changed.is_err() {
                gate.end();
                return;
            },
            () = quiet => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc::unbounded_channel;

    #[tokio::test]
    async fn measurements_that_are_not_done_are_told_again_and_again() {
        let (says, mut said) = unbounded_channel();
        let counts = || MeasurementCounts { done: 3, disturbed: 40 };
        let telling = tell_if_late("demo", Duration::from_millis(1), counts, |line| {
            let _ends = says.send(line.to_owned());
        });
        let thrice = async {
            for _ in 0..3 {
                assert_eq!(said.recv().await, Some(late("demo", Duration::ZERO, counts())));
            }
        };
        tokio::select! {
            never = telling => match never {},
            () = thrice => {}
        }
    }

    #[test]
    fn late_measurements_are_told_with_their_numbers_and_a_remedy() {
        let text = late("demo", Duration::from_secs(1800), MeasurementCounts { done: 3, disturbed: 40 });
        assert!(text.starts_with("demo: this machine is not measured after 30 min: requests leave"));
        assert!(text.contains("(3 measurements done, 40 interrupted)") && text.contains("--profile-first"));
        assert!(text.lines().all(|line| line.len() <= 80), "{text}");
    }
}
