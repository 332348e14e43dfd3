//! Rows of experts that are computed in parts, between which the pool does other work.

use crate::plan::Plan;
use crate::threads::Suspended;
use crate::{Job, KernelError, PackedExpert};
use std::sync::Arc;

/// Rows of experts on their way. [`Pool::advance`](crate::Pool::advance) takes them on.
#[derive(Debug)]
pub struct SuspendedRows {
    jobs: Vec<(Arc<PackedExpert>, Vec<u32>)>,
    /// Shared, so that no holder can change them.
    inputs: Arc<[u8]>,
    /// Written by the plan until it is done: not touched before.
    output: Vec<u8>,
    plan: SuspensionState,
}

#[derive(Debug)]
enum SuspensionState {
    New,
    Begun(Box<Suspended>),
    /// A part panicked: what is in the output is not known.
    Failed,
}

impl SuspendedRows {
    /// For each of `jobs` an expert and the rows of `inputs` to compute: a row-major matrix of rows of `hidden` little-endian elements of the experts' type.
    #[must_use]
    pub fn new(jobs: Vec<(Arc<PackedExpert>, Vec<u32>)>, inputs: Arc<[u8]>) -> Self {
        let bytes = jobs.iter().map(|(expert, rows)| rows.len() * expert.shape().row_bytes()).sum();
        Self { jobs, inputs, output: vec![0; bytes], plan: SuspensionState::New }
    }

    /// Results: a row of `hidden` elements for each row index, job after job. Zeros where they are not done.
    #[must_use]
    pub fn into_output(self) -> Vec<u8> {
        drop(self.plan);
        self.output
    }

    /// The plan of what is left, which stays away if it is not [put back](Self::put_back).
    pub(crate) fn take(&mut self) -> Result<Box<Suspended>, KernelError> {
        match std::mem::replace(&mut self.plan, SuspensionState::Failed) {
            SuspensionState::Begun(suspended) => Ok(suspended),
            SuspensionState::Failed => Err(KernelError::Panicked),
            SuspensionState::New => {
                let mut plan = Plan::new()?;
                let mut output = self.output.as_mut_slice();
                let mut jobs = Vec::with_capacity(self.jobs.len());
                for (expert, row_index) in &self.jobs {
                    let (these, others) = output.split_at_mut(row_index.len() * expert.shape().row_bytes());
                    jobs.push(Job { expert, inputs: &self.inputs, row_index, output: these });
                    output = others;
                }
                plan.prepare_jobs(&mut jobs)?;
                Ok(Box::new(Suspended::new(plan)))
            }
        }
    }

    pub(crate) fn put_back(&mut self, suspended: Box<Suspended>) {
        self.plan = SuspensionState::Begun(suspended);
    }
}
