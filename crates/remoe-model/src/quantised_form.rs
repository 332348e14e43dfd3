//! Quantisation of a checkpoint's weights, as declared by `quantization_config`.

use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::family::Family;
use crate::fields::Fields;
use crate::shards::Shards;

const CONFIG: &str = "quantization_config";
const BLOCK: &str = "weight_block_size";
const EXCEPTED_MODULES: &str = "modules_to_not_convert";
/// Element type of fp8 weights in a safetensors header.
pub(crate) const FP8: &str = "F8_E4M3";
/// Remedy for an unsupported quantisation.
pub(crate) const SUPPORTED: &str = "supported are fp8 (e4m3 with block scales) and mxfp4, otherwise use a float32, bfloat16 or \
                                    float16 checkpoint";
/// Upper bound of the rows and columns of a block.
const MAX_BLOCK_SIDE: u64 = 65_535;

/// Format of a checkpoint's quantised weights. Its `Debug` output is hashed into the fingerprint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum QuantisedForm {
    /// Projections have one byte per element, `F8_E4M3`, and a scale for each block of `[rows, columns]`.
    Fp8 { block: [usize; 2] },
    /// Routed experts have 4 bits per element, and a scale for every 32 of a row.
    Mxfp4,
}

impl QuantisedForm {
    /// Returns `quant_method` of the config, which is also the name in `remoe inspect`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp8 { .. } => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// A parsed `quantization_config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Quantisation {
    pub(crate) form: QuantisedForm,
    /// Patterns of the names of modules that are not quantised. A component may be `*`.
    excepted_modules: Vec<String>,
}

impl Quantisation {
    /// Reads `quantization_config`, or returns `None` if weights are not quantised.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Option<Self>, CheckpointError> {
        let Some(quantisation) = fields.object(CONFIG)? else {
            return match fields.get(CONFIG) {
                None => Ok(None),
                Some(_) => Err(fields.error(CONFIG, "is empty; state how weights are stored, or omit it")),
            };
        };
        let (form, known) = match quantisation.text("quant_method")? {
            Some("fp8") => (fp8(quantisation)?, FP8_FIELDS),
            Some("mxfp4") => (QuantisedForm::Mxfp4, MXFP4_FIELDS),
            other => {
                // ModelOpt uses one method for several algorithms.
                let algorithm = quantisation.text("quant_algo")?.map(|name| format!(" ({name})"));
                let (method, algorithm) = (other.unwrap_or("null"), algorithm.unwrap_or_default());
                let message = format!("`{method}`{algorithm}; {SUPPORTED}");
                return Err(quantisation.unsupported("quant_method", message));
            }
        };
        if let Some(name) =
            quantisation.keys().find(|name| !known.contains(name) && quantisation.get(name).is_some())
        {
            return Err(quantisation.unsupported(name, "unknown quantisation setting"));
        }
        Ok(Some(Self { form, excepted_modules: excepted_modules(quantisation)? }))
    }

    /// Checks that the format is supported for a family and dtype.
    pub(crate) fn check(
        &self,
        fields: Fields<'_>,
        family: Family,
        dtype: StoredDtype,
    ) -> Result<(), CheckpointError> {
        if self.form == QuantisedForm::Mxfp4 && family != Family::GptOss {
            let message = format!("mxfp4 in family {}; supported in gpt_oss only", family.name());
            return Err(fields.unsupported(CONFIG, message));
        }
        if dtype == StoredDtype::F16 {
            let message =
                format!("{} weights beside float16; they decode to bfloat16 or float32", self.form.name());
            return Err(fields.unsupported(CONFIG, message));
        }
        Ok(())
    }

    /// Refuses a config that declares fp8 if no tensor is stored as fp8. The weights may be decoded, or belong to another checkpoint.
    pub(crate) fn check_stored(&self, fields: Fields<'_>, shards: &Shards) -> Result<(), CheckpointError> {
        let has_fp8 = || shards.tensors.values().any(|tensor| tensor.dtype == FP8);
        if matches!(self.form, QuantisedForm::Fp8 { .. }) && !has_fp8() {
            let message = format!("says fp8, but no tensor is stored as {FP8}; omit it if none should be");
            return Err(fields.error(CONFIG, message));
        }
        Ok(())
    }

    /// Reports if the module of the tensor `name` is declared as not quantised.
    pub(crate) fn excepts(&self, name: &str) -> bool {
        let parts: Vec<&str> = name.split('.').collect();
        self.excepted_modules.iter().any(|pattern| {
            let pattern: Vec<&str> = pattern.split('.').collect();
            let matches = |(wanted, part): (&&str, &&str)| *wanted == "*" || wanted == part;
            parts.windows(pattern.len()).any(|parts| pattern.iter().zip(parts).all(matches))
        })
    }
}

/// Known fields. Some do not affect weights: `activation_scheme` and `scale_fmt` concern the quantisation of activations,
/// which are not quantised here.
const FP8_FIELDS: &[&str] =
    &["quant_method", "fmt", "activation_scheme", BLOCK, EXCEPTED_MODULES, "scale_fmt", "dequantize"];
const MXFP4_FIELDS: &[&str] = &["quant_method", EXCEPTED_MODULES, "dequantize"];

/// Reads the settings of fp8 weights.
fn fp8(quantisation: Fields<'_>) -> Result<QuantisedForm, CheckpointError> {
    for (name, supported) in [("fmt", "e4m3"), ("activation_scheme", "dynamic")] {
        if let Some(other) = quantisation.text(name)?.filter(|text| *text != supported) {
            return Err(
                quantisation.unsupported(name, format!("`{other}`; expected {supported} for fp8 weights"))
            );
        }
    }
    let Some(sides) = quantisation.list(BLOCK)? else {
        return Err(quantisation.unsupported(BLOCK, "it is missing; fp8 weights need block scales"));
    };
    let side = |side: &serde_json::Value| {
        usize::try_from(side.as_u64().filter(|side| (1..=MAX_BLOCK_SIDE).contains(side))?).ok()
    };
    match sides.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
        Some(&[rows, columns]) => Ok(QuantisedForm::Fp8 { block: [rows, columns] }),
        _ => Err(quantisation
            .error(BLOCK, format!("expected two sides of a block, each from 1 to {MAX_BLOCK_SIDE}"))),
    }
}

/// Reads the names of modules that are not quantised.
fn excepted_modules(quantisation: Fields<'_>) -> Result<Vec<String>, CheckpointError> {
    let names = quantisation.list(EXCEPTED_MODULES)?.unwrap_or_default();
    let name = |name: &serde_json::Value| name.as_str().map(str::to_owned);
    let names = names.iter().map(name).collect::<Option<Vec<_>>>();
    names.ok_or_else(|| quantisation.error(EXCEPTED_MODULES, "expected a list of names of modules"))
}
