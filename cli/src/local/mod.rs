//! Control plane of models on one machine: keeps the functions of each model as its gateway wants them, learns expert usage
//! from requests, replans, and accounts for costs. It knows no command and no flag of `up`.

pub(crate) mod cost;
pub(crate) mod following;
mod groups;
pub(crate) mod measuring;
pub(crate) mod rates;
pub(crate) mod replan;
pub(crate) mod report;
pub(crate) mod statement;
pub(crate) mod supervisor;
pub(crate) mod usage;
