//! Checkpoints that are not in a folder: from the Hugging Face hub, from S3 and from web servers.
//!
//! The fetcher requests only the bytes that are read or prefetched: by parallel range requests, into sparse
//! files of a cache folder. A journal per file records the bytes that are there, so that the next process
//! continues where a killed one stopped. Locks on byte ranges keep processes that share the folder from
//! fetching bytes twice. Every wait is limited: it ends with bytes, or with an error after a time without any.
//!
//! Sources are not trusted: [`Egress`] rules check the target of every connection, also after redirects and DNS
//! answers.
//!
//! [`ModelArgs`] are the command-line arguments of programs that read a model. A model in a local folder is opened
//! by [`remoe_model`] alone, without threads or connections.

mod access;
mod args;
mod cache;
mod cached_sources;
mod checksum;
mod client;
mod demo;
mod description;
mod egress;
mod egress_client;
mod error;
mod file_opener;
mod identity;
mod location;
mod progress;
mod response;
mod runtime;
mod source;
mod store;
mod timeouts;
mod transfer;
mod whole;

pub use access::Access;
pub use args::{ModelArgs, OpenedModel, SizedModel, SourceArgs, cache_folder, location_parser};
pub use cached_sources::{CachedSource, allocated_bytes, list_cached_sources};
pub use egress::{Egress, EgressRule, NotAllowed, RuleError};
pub use error::FetchError;
pub use location::{LocationError, ModelLocation};
pub use store::FetchedStore;
pub use timeouts::{FetchTimeouts, StallLimit};
pub use whole::WholeModel;
