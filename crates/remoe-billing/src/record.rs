//! Records of a ledger. Times are nanoseconds since 1970, durations nanoseconds, money nano-dollars.

use crate::life::FunctionLife;
use crate::money::Rate;
use crate::share::{Basis, Share, sum};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// One line of a ledger.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum Record {
    /// The ledger was opened: functions have ended that are not said to have started again soon, under the same name.
    Opened {
        /// When.
        at: u64,
        /// Where the prices stand, and of when they are.
        prices: String,
    },
    /// An answer whose last chunk follows.
    Request(RequestRecord),
    /// A step of the life of a deployment's function.
    Function(FunctionRecord),
    /// A request ended without an answer: its client left, or its function died.
    Lost {
        /// When.
        at: u64,
        /// When the function got it; 0 where that is not known.
        #[serde(default)]
        since: u64,
        /// Estimate that the tenant's budget is charged for it, in nano-dollars.
        #[serde(default)]
        estimate: u64,
        /// The model's name.
        model: String,
        /// Whose request it was.
        tenant: String,
        /// The main function that had it.
        function: String,
        /// As in `x-request-id`; empty in ledgers of earlier releases.
        #[serde(default)]
        id: String,
    },
    /// A sign of life: what had started and not stopped is alive.
    Alive {
        /// When.
        at: u64,
        /// Cost of gateway and launcher themselves since the last one.
        overhead: u64,
    },
    /// A file of a ledger begins that follows another: functions that are alive are [`Self::Carried`] next, so that it
    /// adds up without those before it.
    Continued {
        /// When.
        at: u64,
        /// As in [`Self::Opened`].
        prices: String,
    },
    /// State of a function after all files before.
    Carried {
        /// When.
        at: u64,
        /// The model's name; empty in ledgers of earlier releases.
        #[serde(default)]
        model: String,
        /// The function.
        function: String,
        /// `main`, or the name of its group.
        tier: String,
        /// Life of the function so far.
        life: FunctionLife,
    },
}

/// Cost of one answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestRecord {
    /// When its last chunk was about to leave.
    pub at: u64,
    /// As in `x-request-id`.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// Whose request it was.
    pub tenant: String,
    /// The main function that answered; `NAME#1` if its process was started again in its place, and counts from 0.
    pub function: String,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Shares of every function that worked for the request.
    pub shares: BTreeMap<String, Share>,
    /// Counterfactual costs, by the name of the baseline.
    pub rivals: BTreeMap<String, u64>,
    /// How long the main function's engine says that it has been serving.
    pub served: u64,
}

impl RequestRecord {
    /// Nano-dollars of all functions together.
    #[must_use]
    pub fn total(&self) -> u64 {
        sum(self.shares.values().map(|share| share.cost.sum()))
    }

    /// Cost of the request, of which `main` is the main function's share.
    #[must_use]
    pub fn cost(&self, main: &str) -> RequestCost {
        let total = self.total();
        let main = self.shares.get(main).map_or(0, |share| share.cost.sum());
        let prefill = sum(self.shares.values().map(|share| share.cost.prefill));
        RequestCost {
            total,
            main,
            remote: total.saturating_sub(main),
            prefill,
            decode: total.saturating_sub(prefill),
            rivals: self.rivals.clone(),
        }
    }
}

/// Cost of one answered request as clients are told it, in nano-dollars.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCost {
    /// All functions.
    pub total: u64,
    /// The main function.
    pub main: u64,
    /// All remote functions.
    pub remote: u64,
    /// Until the first token.
    pub prefill: u64,
    /// After it.
    pub decode: u64,
    /// Counterfactual costs, by the name of the baseline.
    pub rivals: BTreeMap<String, u64>,
}

/// A step of a function's life, with its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// When.
    pub at: u64,
    /// The model's name.
    pub model: String,
    /// The function: a name that no other one ever has.
    pub function: String,
    /// The step.
    pub event: FunctionEvent,
}

/// A step of a function's life.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionEvent {
    /// It is paid for from now on, or has been where that was said before.
    Started {
        /// `main`, or the name of its group.
        tier: String,
        /// Price of the function.
        rate: Rate,
        /// Billing basis.
        #[serde(default)]
        basis: Basis,
    },
    /// It serves: the first placement that names it is in force.
    Serving,
    /// Another one serves in its place, and it is still there.
    Replaced,
    /// It is gone.
    Stopped,
}

impl Record {
    /// When it was written.
    #[must_use]
    pub fn at(&self) -> u64 {
        match self {
            Self::Opened { at, .. }
            | Self::Lost { at, .. }
            | Self::Alive { at, .. }
            | Self::Continued { at, .. }
            | Self::Carried { at, .. } => *at,
            Self::Request(request) => request.at,
            Self::Function(function) => function.at,
        }
    }
}
