//! The tensors of a GPT-2 checkpoint, as transformers 5.17 and its predecessors store them.
//!
//! Projections are `Conv1D`: [inputs, outputs]. Names have `transformer.` in front, or had not in older checkpoints.

use remoe_model::{CheckpointError, ModelConfig, Store, StoredDtype, TensorFiles, TensorRef};
use std::collections::HashSet;

/// The two that every GPT-2 has; their names say how the others are called.
const TOKENS: &str = "wte.weight";
const PREFIX: &str = "transformer.";
const HEAD: &str = "lm_head.weight";

/// Masks that older checkpoints store in every layer.
const MASKS: [&str; 2] = ["attn.bias", "attn.masked_bias"];

/// A GPT-2, of whose tensors all are known.
pub(crate) struct Dense {
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
    /// Neurons of a feed-forward network.
    pub(crate) width: usize,
    /// Set if the head is a tensor of its own.
    pub(crate) head: bool,
}

impl Dense {
    /// Opens the weights beside a config, `config` being that of the model with one expert a layer.
    pub(crate) fn open(store: &dyn Store, config: &ModelConfig) -> Result<Self, CheckpointError> {
        let files = TensorFiles::open_in(store)?;
        let prefix = if files.tensor(TOKENS).is_some() { "" } else { PREFIX };
        let tokens = format!("{prefix}{TOKENS}");
        let Some(table) = files.tensor(&tokens) else {
            return Err(files.wrong(&tokens, "expected a tensor in float32, bfloat16 or float16"));
        };
        let sizes = DenseSizes {
            vocabulary: config.vocab_size,
            positions: config.context_length,
            hidden: config.hidden_size,
            layers: config.layers.len(),
            width: config.any_moe().map_or(0, |moe| moe.expert_width),
            head: files.tensor(HEAD).is_some() || !config.tie_embeddings,
        };
        let dense = Self { files, prefix, dtype: table.dtype, sizes };
        dense.no_others()?;
        Ok(dense)
    }

    pub(crate) fn dtype(&self) -> StoredDtype {
        self.dtype
    }

    /// Names of a layer's tensors, and their shapes.
    fn of_layer(&self) -> [(&'static str, Vec<usize>); 12] {
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

    /// Names of the tensors outside of layers, and their shapes.
    fn around(&self) -> Vec<(&'static str, Vec<usize>)> {
        let DenseSizes { vocabulary, positions, hidden, head, .. } = self.sizes;
        let mut around = vec![
            (TOKENS, vec![vocabulary, hidden]),
            ("wpe.weight", vec![positions, hidden]),
            ("ln_f.weight", vec![hidden]),
            ("ln_f.bias", vec![hidden]),
        ];
        if head {
            around.push((HEAD, vec![vocabulary, hidden]));
        }
        around
    }

    fn name(&self, name: &str) -> String {
        if name == HEAD { name.to_owned() } else { format!("{}{name}", self.prefix) }
    }

    /// Every tensor is there, and there is none of which nothing is known: to leave it out could give another answer.
    fn no_others(&self) -> Result<(), CheckpointError> {
        let mut known = HashSet::new();
        for (name, shape) in self.around() {
            known.insert(self.find(name, &shape)?.name.to_string());
        }
        for layer in 0..self.sizes.layers {
            for (name, shape) in self.of_layer() {
                known.insert(self.find(&format!("h.{layer}.{name}"), &shape)?.name.to_string());
            }
            known.extend(MASKS.map(|mask| self.name(&format!("h.{layer}.{mask}"))));
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
        let name = self.name(name);
        let wanted = || format!("expected shape {shape:?} in {}", self.dtype.name());
        let tensor = self.files.tensor(&name).ok_or_else(|| self.files.wrong(&name, wanted()))?;
        if tensor.shape != shape || tensor.dtype != self.dtype {
            let message = format!("{}, got {:?} in {}", wanted(), tensor.shape, tensor.dtype.name());
            return Err(self.files.wrong(&name, message));
        }
        Ok(tensor)
    }

    /// Reads a tensor of the model.
    pub(crate) fn read(&self, name: &str) -> Result<Vec<u8>, CheckpointError> {
        let name = self.name(name);
        let gone = || self.files.wrong(&name, "it was present when the file was checked");
        let tensor = self.files.tensor(&name).ok_or_else(gone)?;
        self.files.read(&tensor)
    }
}
