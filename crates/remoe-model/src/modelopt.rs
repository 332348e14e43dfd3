//! `hf_quant_config.json`: the file in which NVIDIA's ModelOpt says how weights are quantised. Its checkpoints may
//! have no `quantization_config` in `config.json`.

use crate::error::CheckpointError;
use crate::fields::Fields;
use crate::json;
use crate::store::Store;
use crate::stored_form::SUPPORTED;

const FILE: &str = "hf_quant_config.json";

/// Refuses a checkpoint whose weights ModelOpt has quantised. Without `quant_algo` they are in their dtype: the file
/// may speak of the KV cache alone, of which a server decides itself.
///
/// # Errors
/// The algorithm by name, or the file is not what it should be.
pub(crate) fn refuse(store: &dyn Store) -> Result<(), CheckpointError> {
    let Some(object) = json::object_if_present(store, FILE)? else { return Ok(()) };
    let path = store.root().join(FILE);
    let fields = Fields::new(&path, &object);
    let Some(quantisation) = fields.object("quantization")? else {
        return Err(fields.error("quantization", "is missing; remove the file if weights are not quantised"));
    };
    match quantisation.text("quant_algo")? {
        None => Ok(()),
        Some(algorithm) => {
            let message = format!("`{algorithm}` of ModelOpt; {SUPPORTED}");
            Err(quantisation.unsupported("quant_algo", message))
        }
    }
}
