//! Parts of a measurement; each answers one question.

mod accounting;
mod kernels;
mod model;
mod raw_tcp;
mod start;
mod wire;
mod work;

use crate::context::BenchContext;
use crate::load::LoadMonitor;
use crate::pace::TimeShare;
use crate::report::BenchSection;
use clap::ValueEnum;

/// A part of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum PartName {
    /// The expert FFN against the machine's limits and torch
    Kernels,
    /// Overhead of an exchange with a remote function
    Wire,
    /// Start time of a remote function
    Start,
    /// Tokens per second of the whole model
    Model,
    /// Overhead of cost accounting per request
    Accounting,
}

impl PartName {
    /// As it is written on the command line.
    pub(crate) fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    pub(crate) fn measure(self, context: &BenchContext, share: &TimeShare) -> Vec<BenchSection> {
        let watch = LoadMonitor::start();
        let measured = match self {
            Self::Kernels => kernels::measure(context, share),
            Self::Wire => wire::measure(context, share).map(|part| vec![part]),
            Self::Start => start::measure(context, share).map(|part| vec![part]),
            Self::Model => model::measure(context, share).map(|part| vec![part]),
            Self::Accounting => accounting::measure(context, share).map(|part| vec![part]),
        };
        let mut parts = measured.unwrap_or_else(|error| vec![BenchSection::failed(self.name(), error)]);
        let load = watch.stop();
        parts.iter_mut().for_each(|part| part.load = Some(load.clone()));
        parts
    }
}
