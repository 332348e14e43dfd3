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
    /// The ledger was opened. Functions that no later record names again have ended.
    Opened {
        /// Nanoseconds since 1970.
        at: u64,
        /// Source and date of the prices.
        prices: String,
    },
    /// Answer whose last bytes are about to be sent.
    Request(RequestRecord),
    /// Event in the life of a function.
    Function(FunctionRecord),
    /// Request that ended without an answer: its client disconnected, or its function failed.
    Lost {
        /// Nanoseconds since 1970.
        at: u64,
        /// Time when the function got the request; 0: not known.
        #[serde(default)]
        since: u64,
        /// Estimated cost that is charged to the tenant's budget.
        #[serde(default)]
        estimate: u64,
        /// The model's name.
        model: String,
        /// Name of the tenant; empty without keys.
        tenant: String,
        /// Main function that had the request.
        function: String,
        /// Value of `x-request-id`; empty in ledgers of earlier releases.
        #[serde(default)]
        id: String,
    },
    /// Sign of life: all functions that have started and not stopped are alive.
    Alive {
        /// Nanoseconds since 1970.
        at: u64,
        /// Cost of gateway and launcher since the last sign of life.
        overhead: u64,
    },
    /// First record of a file that follows another one. [`Self::Carried`] records of all living functions follow, so
    /// that the file can be added up without earlier ones.
    Continued {
        /// Nanoseconds since 1970.
        at: u64,
        /// As in [`Self::Opened`].
        prices: String,
    },
    /// State of a function after all earlier files.
    Carried {
        /// Nanoseconds since 1970.
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
    /// Time when the last bytes were about to be sent.
    pub at: u64,
    /// Value of `x-request-id`.
    pub id: String,
    /// The model's name.
    pub model: String,
    /// Tenant who sent the request.
    pub tenant: String,
    /// Main function that answered. `NAME#1` after a restart of its process, which counts its work from 0 again.
    pub function: String,
    /// Tokens of the prompts.
    pub prompt_tokens: u64,
    /// Tokens of the answer.
    pub completion_tokens: u64,
    /// Shares of every function that worked for the request.
    pub shares: BTreeMap<String, Share>,
    /// Counterfactual costs, by the name of the baseline.
    pub rivals: BTreeMap<String, u64>,
    /// Nanoseconds that the main function's engine has served, by its own report.
    pub served: u64,
}

impl RequestRecord {
    /// Returns the cost of all functions.
    #[must_use]
    pub fn total(&self) -> u64 {
        sum(self.shares.values().map(|share| share.cost.sum()))
    }

    /// Returns the cost of the request by parts. `main` is the main function's name in the shares.
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

/// Cost of one answered request as answers state it, in nano-dollars.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestCost {
    /// Cost of all functions.
    pub total: u64,
    /// Cost of the main function.
    pub main: u64,
    /// Cost of all remote functions.
    pub remote: u64,
    /// Cost until the first token.
    pub prefill: u64,
    /// Cost after the first token.
    pub decode: u64,
    /// Counterfactual costs, by the name of the baseline.
    pub rivals: BTreeMap<String, u64>,
}

/// Event in the life of a function, with its time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionRecord {
    /// Nanoseconds since 1970.
    pub at: u64,
    /// The model's name.
    pub model: String,
    /// Name of the function, which no other function ever has.
    pub function: String,
    /// The event.
    pub event: FunctionEvent,
}

/// Event in the life of a function.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FunctionEvent {
    /// The function is paid for from now on. Repeated when a ledger is opened again while it runs.
    Started {
        /// `main`, or the name of its group.
        tier: String,
        /// Price of the function.
        rate: Rate,
        /// Billing basis.
        #[serde(default)]
        basis: Basis,
    },
    /// The function serves: the first placement with it is in force.
    Serving,
    /// Another function serves in its place, while it is still alive.
    Replaced,
    /// The function has ended.
    Stopped,
}

impl Record {
    /// Returns the time of the record.
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
