//! The commands, one file each.

pub(crate) mod cost;
pub(crate) mod dashboards;
pub(crate) mod eval;
pub(crate) mod generate;
pub(crate) mod inspect;
pub(crate) mod logits;
pub(crate) mod plan;
pub(crate) mod predictor;
pub(crate) mod profile;
pub(crate) mod record;
pub(crate) mod top;
pub(crate) mod up;
