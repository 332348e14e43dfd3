//! Checkpoints that are not in a folder: from the Hugging Face hub, from S3 and from web servers.
//!
//! Only the bytes that are read or prefetched are fetched, by range requests, in parallel, into sparse
//! files of a cache folder. A journal per file says which bytes are there, so that a process that was
//! killed goes on where it ended; locks on byte ranges see to it that processes which share the folder
//! fetch nothing twice. Every wait ends: with bytes, or with an error once nothing came for a while.
//!
//! Every connection is made under [`Egress`] rules: where a source, its redirects and its DNS answers lead is not
//! believed.
//!
//! [`ModelArgs`] is what programs take on their command line. A model in a folder is opened by
//! [`remoe_model`] alone: no thread is started and no connection prepared for it.

mod access;
mod answer;
mod args;
mod background;
mod cache;
mod cached_sources;
mod checked_client;
mod checksum;
mod client;
mod demo;
mod describe;
mod egress;
mod error;
mod identity;
mod location;
mod opening;
mod progress;
mod source;
mod store;
mod timeouts;
mod transfer;
mod whole;

pub use access::Access;
pub use args::{ModelArgs, Opened, SizedModel, SourceArgs, cache_folder, location};
pub use cached_sources::{CachedSource, allocated, kept};
pub use egress::{Egress, NotAllowed, Rule, RuleError};
pub use error::FetchError;
pub use location::{LocationError, ModelLocation};
pub use store::FetchedStore;
pub use timeouts::{FetchTimeouts, StallLimit};
pub use whole::WholeModel;
