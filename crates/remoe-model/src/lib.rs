//! Mixture-of-Experts checkpoints: config, shapes, tensor names and byte ranges of each model family, sizes, fingerprint
//! and, with the feature `text`, tokenizer and chat template.
//!
//! Opening a checkpoint reads no weights. [`Checkpoint::open`] parses `config.json`, `generation_config.json` and the
//! safetensors headers, and checks that all tensors of the family exist with the right shape and type. Then it provides
//! their byte ranges. The files come from a folder or from another [`Store`]. Quantised weights (fp8, MXFP4) are decoded
//! when they are read; nothing else is computed here.
//!
//! A new family is one file in `families/`.

mod checkpoint;
mod config;
mod config_file;
mod decode;
mod error;
mod facts;
mod families;
mod family;
mod fields;
mod fingerprint;
mod foreign_fields;
mod generation;
mod header;
mod inspection;
mod json;
mod json_constants;
mod layout;
mod modelopt;
mod outline;
mod quantised_form;
mod rope;
mod shards;
mod sizes;
mod store;
mod tensor_files;
mod tensors;
#[cfg(feature = "text")]
pub mod text;

pub use checkpoint::{BlockScales, Checkpoint};
pub mod kv_pages;
pub use config::{ModelConfig, Multipliers};
pub use error::CheckpointError;
pub use facts::{
    Activation, AttentionFacts, DenseDtype, DenseDtypeError, ExpertBiases, ExpertsDtype, ExpertsDtypeError,
    GqaFacts, GroupFacts, KvCacheDtype, KvCacheDtypeError, LayerFacts, MlaFacts, MlpFacts, MoeFacts,
    NormKind, QkNorm, RoutingFacts, Score, SharedFacts, StoredDtype,
};
pub use family::Family;
pub use fingerprint::Fingerprint;
pub use generation::GenerationDefaults;
pub use header::TENSOR_LIMIT;
#[doc(hidden)]
pub use header::tensor_table;
pub use inspection::{Decoded, Inspection, ResidentKv};
pub use layout::Ignored;
pub use outline::{AttentionOutline, ExpertsOutline, LayerOutline, MlpOutline, Outline, Weights};
pub use rope::{RopeFacts, RopeLayout, RopeScaling};
pub use sizes::Sizes;
pub use store::{FileRange, Folder, Store, StoredFile};
pub use tensor_files::TensorFiles;
pub use tensors::{
    AttentionTensors, ExpertTensors, GqaTensors, Linear, MlaTensors, MlpTensors, NormTensors, QueryTensors,
    RouterTensors, Scales, SharedTensors, StoredAs, Strides, TensorRef,
};

/// Message for a number of GPUs per main function other than 1.
pub const ONE_GPU: &str = "must be 1: the layers of a model are not divided over several GPUs; use a GPU with more \
                           memory, fewer bits per weight (expertsDtype, dtype), or more main functions";
