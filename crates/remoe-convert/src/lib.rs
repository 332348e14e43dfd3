//! Mixture-of-Experts checkpoints from dense ones: GPT-2 with its feed-forward networks cut into experts ([`gpt2_moe`]).
//!
//! Nothing is trained and nothing is rounded but the routers, which are new: a conversion moves weights. The same source and
//! options give the same bytes on every machine.

mod dense;
mod elements;
mod error;
mod gpt2;
mod split;
mod writer;

pub use error::ConvertError;
pub use gpt2::{Converted, SplitOptions, gpt2_moe};
