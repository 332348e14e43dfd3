//! Computation of experts that can be suspended, so that the pool can do other work in between.

use crate::plan::CallPlan;
use crate::threads::SuspendedCall;
use crate::{ExpertJob, KernelError, PackedExpert};
use std::sync::Arc;

/// Rows that experts compute piece by piece: each call of [`Pool::advance`](crate::Pool::advance) computes more of them.
#[derive(Debug)]
pub struct SuspendedRows {
    jobs: Vec<(Arc<PackedExpert>, Vec<u32>)>,
    /// Input rows. Shared and so immutable while the plan points to them.
    inputs: Arc<[u8]>,
    /// Results. The plan holds pointers into it and writes it until all rows are computed.
    output: Vec<u8>,
    state: SuspendedState,
}

#[derive(Debug)]
enum SuspendedState {
    New,
    Started(Box<SuspendedCall>),
    /// A call panicked: the output is undefined.
    Failed,
}

impl SuspendedRows {
    /// Takes experts, each with the numbers of the rows of `inputs` that it computes. `inputs` is a row-major matrix with
    /// `hidden` little-endian elements of the experts' type per row.
    #[must_use]
    pub fn new(jobs: Vec<(Arc<PackedExpert>, Vec<u32>)>, inputs: Arc<[u8]>) -> Self {
        let bytes = jobs.iter().map(|(expert, rows)| rows.len() * expert.shape().row_bytes()).sum();
        Self { jobs, inputs, output: vec![0; bytes], state: SuspendedState::New }
    }

    /// Returns the results: a row of `hidden` elements for each row number, expert after expert. Rows that are not computed are zero.
    #[must_use]
    pub fn into_output(self) -> Vec<u8> {
        drop(self.state);
        self.output
    }

    /// Takes the remaining work. Without a [`put_back`](Self::put_back), as after a panic, it is lost and the rows have failed.
    pub(crate) fn take(&mut self) -> Result<Box<SuspendedCall>, KernelError> {
        match std::mem::replace(&mut self.state, SuspendedState::Failed) {
            SuspendedState::Started(suspended) => Ok(suspended),
            SuspendedState::Failed => Err(KernelError::Panicked),
            SuspendedState::New => {
                let mut plan = CallPlan::new()?;
                let mut output = self.output.as_mut_slice();
                let mut jobs = Vec::with_capacity(self.jobs.len());
                for (expert, row_index) in &self.jobs {
                    let (job_output, rest) =
                        output.split_at_mut(row_index.len() * expert.shape().row_bytes());
                    jobs.push(ExpertJob { expert, inputs: &self.inputs, row_index, output: job_output });
                    output = rest;
                }
                plan.prepare_jobs(&mut jobs)?;
                Ok(Box::new(SuspendedCall::new(plan)))
            }
        }
    }

    /// Returns the remaining work after a call.
    pub(crate) fn put_back(&mut self, suspended: Box<SuspendedCall>) {
        self.state = SuspendedState::Started(suspended);
    }
}
