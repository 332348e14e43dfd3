//! Forms of weights that are shorter than the dtype, as `quantization_config` says.

use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::family::Family;
use crate::fields::Fields;
use crate::shards::Shards;

const CONFIG: &str = "quantization_config";
const BLOCK: &str = "weight_block_size";
const EXCEPT: &str = "modules_to_not_convert";
/// Element type of fp8 weights in a header.
pub(crate) const FP8: &str = "F8_E4M3";
/// Remedy for a form that is not supported.
pub(crate) const SUPPORTED: &str = "supported are fp8 (e4m3 with block scales) and mxfp4, otherwise use a float32, bfloat16 or \
                                    float16 checkpoint";
/// Longest side of a block.
const LONGEST: u64 = 65_535;

/// How a checkpoint stores those weights that are not in its dtype.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ShortForm {
    /// Projections in one byte an element, `F8_E4M3`, with a scale for every block of [rows, columns].
    Fp8 { block: [usize; 2] },
    /// Routed experts in 4 bits an element, with a scale for every 32 of a row.
    Mxfp4,
}

impl ShortForm {
    /// `quant_method` of the config, and the name in `remoe inspect`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Fp8 { .. } => "fp8",
            Self::Mxfp4 => "mxfp4",
        }
    }
}

/// A `quantization_config`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Quantisation {
    pub(crate) form: ShortForm,
    /// Names of modules that are in the dtype; a part may be `*`.
    except: Vec<String>,
}

impl Quantisation {
    /// Reads the quantisation of the config; `None` where all weights are in its dtype.
    pub(crate) fn read(fields: Fields<'_>) -> Result<Option<Self>, CheckpointError> {
        let Some(quantisation) = fields.object(CONFIG)? else {
            return match fields.get(CONFIG) {
                None => Ok(None),
                Some(_) => Err(fields.error(CONFIG, "is empty; state how weights are stored, or omit it")),
            };
        };
        let (form, known) = match quantisation.text("quant_method")? {
            Some("fp8") => (fp8(quantisation)?, FP8_FIELDS),
            Some("mxfp4") => (ShortForm::Mxfp4, MXFP4_FIELDS),
            other => {
                // ModelOpt has one method for several algorithms.
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
        Ok(Some(Self { form, except: except(quantisation)? }))
    }

    /// Refuses a form that models of this family and dtype are not stored in.
    pub(crate) fn check(
        &self,
        fields: Fields<'_>,
        family: Family,
        dtype: StoredDtype,
    ) -> Result<(), CheckpointError> {
        if self.form == ShortForm::Mxfp4 && family != Family::GptOss {
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

    /// Refuses fp8 where no tensor is stored as that: weights that were decoded already, or of another checkpoint.
    pub(crate) fn check_stored(&self, fields: Fields<'_>, shards: &Shards) -> Result<(), CheckpointError> {
        let fp8 = || shards.tensors.values().any(|tensor| tensor.dtype == FP8);
        if matches!(self.form, ShortForm::Fp8 { .. }) && !fp8() {
            let message = format!("says fp8, but no tensor is stored as {FP8}; omit it if none should be");
            return Err(fields.error(CONFIG, message));
        }
        Ok(())
    }

    /// Reports if the module that has the tensor `name` is to be in the dtype.
    pub(crate) fn excepts(&self, name: &str) -> bool {
        let parts: Vec<&str> = name.split('.').collect();
        self.except.iter().any(|pattern| {
            let pattern: Vec<&str> = pattern.split('.').collect();
            let fits = |(wanted, part): (&&str, &&str)| *wanted == "*" || wanted == part;
            parts.windows(pattern.len()).any(|parts| pattern.iter().zip(parts).all(fits))
        })
    }
}

/// Known fields, including fields that do not affect the weights: rows that are multiplied with are not quantised here,
/// `scale_fmt` is the precision of their scales.
const FP8_FIELDS: &[&str] =
    &["quant_method", "fmt", "activation_scheme", BLOCK, EXCEPT, "scale_fmt", "dequantize"];
const MXFP4_FIELDS: &[&str] = &["quant_method", EXCEPT, "dequantize"];

fn fp8(quantisation: Fields<'_>) -> Result<ShortForm, CheckpointError> {
    for (name, only) in [("fmt", "e4m3"), ("activation_scheme", "dynamic")] {
        if let Some(other) = quantisation.text(name)?.filter(|text| *text != only) {
            return Err(quantisation.unsupported(name, format!("`{other}`; expected {only} for fp8 weights")));
        }
    }
    let Some(sides) = quantisation.list(BLOCK)? else {
        return Err(quantisation.unsupported(BLOCK, "it is missing; fp8 weights need block scales"));
    };
    let side = |side: &serde_json::Value| {
        usize::try_from(side.as_u64().filter(|side| (1..=LONGEST).contains(side))?).ok()
    };
    match sides.iter().map(side).collect::<Option<Vec<_>>>().as_deref() {
        Some(&[rows, columns]) => Ok(ShortForm::Fp8 { block: [rows, columns] }),
        _ => {
            Err(quantisation.error(BLOCK, format!("expected two sides of a block, each from 1 to {LONGEST}")))
        }
    }
}

fn except(quantisation: Fields<'_>) -> Result<Vec<String>, CheckpointError> {
    let names = quantisation.list(EXCEPT)?.unwrap_or_default();
    let name = |name: &serde_json::Value| name.as_str().map(str::to_owned);
    let names = names.iter().map(name).collect::<Option<Vec<_>>>();
    names.ok_or_else(|| quantisation.error(EXCEPT, "expected a list of names of modules"))
}
