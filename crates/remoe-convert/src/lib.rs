//! Conversion of dense checkpoints to Mixture-of-Experts checkpoints: [`gpt2_moe`] splits the feed-forward networks of
//! GPT-2 into experts.
//!
//! A conversion trains nothing. It copies weights exactly; only the new routers are computed and rounded. Equal sources and
//! options give equal bytes on every machine.

mod dense;
mod elements;
mod error;
mod gpt2;
mod split;
mod writer;

pub use error::ConvertError;
pub use gpt2::{ConversionSummary, SplitOptions, gpt2_moe};
