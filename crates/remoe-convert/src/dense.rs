//! Tensors of a GPT-2 checkpoint, in the layouts of transformers 5.17 and earlier versions.
//!
//! Projections are `Conv1D`: [inputs, outputs]. Names start with `transformer.`, except in older checkpoints.

use remoe_model::{CheckpointError, ModelConfig, Store, StoredDtype, TensorFiles, TensorRef};
use std::collections::HashSet;

/// Token embedding, which every GPT-2 has. Its stored name shows if names have the prefix.
const TOKEN_EMBEDDING: &str = "wte.weight";
const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";

/// Attention masks that older checkpoints store in every layer. They are not converted.
const MASKS: [&str; 2] = ["attn.bias", "attn.masked_bias"];

/// Weights of a GPT-2 checkpoint, with all tensors checked.
pub(crate) struct DenseModel {
    files: TensorFiles,
    prefix: &'static str,
    dtype: StoredDtype,
    pub(crate) sizes: DenseSizes,
}

/// Sizes of a dense model, in elements.
#[derive(Clone, Copy)]
pub(crate) struct DenseSizes {
    pub(crate) vocabulary: usize,
    pub(crate) positions: usize,
    pub(crate) hidden: usize,
    pub(crate) layers: usize,
    /// Neurons of a layer's feed-forward network.
    pub(crate) width: usize,
    /// The head is a separate tensor, not tied to the token embedding.
    pub(crate) has_head: bool,
}

impl DenseModel {
    /// Opens the weights in `store`. `config` describes the model with one expert per layer.
    pub(crate) fn open(store: &dyn Store, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let files = TensorFiles::open_in(store)?;
        let prefix = if files.tensor(TOKEN_EMBEDDING).is_some() { "" } else { PREFIX };
        let tokens = format!("{prefix}{TOKEN_EMBEDDING}");
        let Some(embedding) = files.tensor(&tokens) else {
            return Err(files.wrong(&tokens, "expected a tensor in float32, bfloat16 or float16"));
        };
        let sizes = DenseSizes {
            vocabulary: config.vocab_size,
            positions: config.context_length,
            hidden: config.hidden_size,
            layers: config.layers.len(),
            width: config.any_moe().map_or(0, |moe| moe.expert_width),
            has_head: files.tensor(HEAD).is_some() || !config.tie_embeddings,
        };
        let dense = Self { files, prefix, dtype: embedding.dtype, sizes };
        dense.check_tensors()?;
        Ok(dense)
    }

    pub(crate) fn dtype(&self) -> StoredDtype {
        self.dtype
    }

    /// Returns the names and shapes of a layer's tensors.
    fn layer_tensors(&self) -> [(&'static str, Vec<usize>); 12] {
        let DenseSizes { hidden, width, .. } = self.sizes;
        [
            ("ln_1.weight", vec![hidden]),
            ("ln_1.bias", vec![hidden]),
            ("attn.c_attn.weight", vec![hidden, 3 * hidden]),
            ("attn.c_attn.bias", vec![3 * hidden]),
            ("attn.c_proj.weight", vec![hidden, hidden]),
            ("attn.c_proj.bias", vec![hidden]),
            ("ln_2.weight", vec![hidden]),
            ("ln_2.bias", vec![hidden]),
            ("mlp.c_fc.weight", vec![hidden, width]),
            ("mlp.c_fc.bias", vec![width]),
            ("mlp.c_proj.weight", vec![width, hidden]),
            ("mlp.c_proj.bias", vec![hidden]),
        ]
    }

    /// Returns the names and shapes of the tensors outside of layers.
    fn outer_tensors(&self) -> Vec<(&'static str, Vec<usize>)> {
        let DenseSizes { vocabulary, positions, hidden, has_head, .. } = self.sizes;
        let mut tensors = vec![
            (TOKEN_EMBEDDING, vec![vocabulary, hidden]),
            ("wpe.weight", vec![positions, hidden]),
            ("ln_f.weight", vec![hidden]),
            ("ln_f.bias", vec![hidden]),
        ];
        if has_head {
            tensors.push((HEAD, vec![vocabulary, hidden]));
        }
        tensors
    }

    fn stored_name(&self, name: &str) -> String {
        if name == HEAD { name.to_owned() } else { format!("{}{name}", self.prefix) }
    }

    /// Checks that every expected tensor exists, and no other. Dropping an unknown tensor could change the model's output.
    fn check_tensors(&self) -> Result<(), CheckpointError> {
        let mut known = HashSet::new();
        for (name, shape) in self.outer_tensors() {
            known.insert(self.find(name, &shape)?.name.to_string());
        }
        for layer in 0..self.sizes.layers {
            for (name, shape) in self.layer_tensors() {
                known.insert(self.find(&format!("h.{layer}.{name}"), &shape)?.name.to_string());
            }
            known.extend(MASKS.map(|mask| self.stored_name(&format!("h.{layer}.{mask}"))));
        }
        match self.files.names().into_iter().find(|name| !known.contains(*name)) {
            None => Ok(()),
            Some(other) => {
                let message = format!("unexpected tensor for a GPT-2 of {} layers", self.sizes.layers);
                Err(self.files.wrong(other, message))
            }
        }
    }

    fn find(&self, name: &str, shape: &[usize]) -> Result<TensorRef, CheckpointError> {
        let name = self.stored_name(name);
        let wanted = || format!("expected shape {shape:?} in {}", self.dtype.name());
        let tensor = self.files.tensor(&name).ok_or_else(|| self.files.wrong(&name, wanted()))?;
        if tensor.shape != shape || tensor.dtype != self.dtype {
            let message = format!("{}, got {:?} in {}", wanted(), tensor.shape, tensor.dtype.name());
            return Err(self.files.wrong(&name, message));
        }
        Ok(tensor)
    }

    /// Reads the bytes of a tensor.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let name = self.stored_name(name);
        let missing = || self.files.wrong(&name, "it was present when the file was checked");
        let tensor = self.files.tensor(&name).ok_or_else(missing)?;
        self.files.read(&tensor)
    }
}
