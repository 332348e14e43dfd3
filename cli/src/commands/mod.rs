//! Commands of `remoe`, one module each.

pub(crate) mod check;
pub(crate) mod completions;
pub(crate) mod convert;
pub(crate) mod cost;
pub(crate) mod dashboards;
pub(crate) mod doctor;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod models;
pub(crate) mod plan;
pub(crate) mod predictor;
pub(crate) mod profile;
pub(crate) mod ps;
pub(crate) mod record;
pub(crate) mod run;
pub(crate) mod schema;
pub(crate) mod top;
pub(crate) mod up;
