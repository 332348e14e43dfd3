//! `hf_quant_config.json`, in which NVIDIA's ModelOpt declares the quantisation of weights. Such checkpoints may lack
//! `quantization_config` in `config.json`.

use crate::error::CheckpointError;
use crate::fields::Fields;
use crate::json;
use crate::quantised_form::SUPPORTED;
use crate::store::Store;

const FILE: &str = "hf_quant_config.json";

/// Refuses a checkpoint whose weights are quantised by ModelOpt. A file without `quant_algo` only describes the KV cache,
/// which the server configures itself.
///
/// # Errors
/// The weights are quantised, or the file is invalid.
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
