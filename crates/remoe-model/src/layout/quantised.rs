//! Finds quantised tensors and their scales.

use super::{ExpertsLayout, LayerMlp, Layout, TensorFinder};
use crate::decode::{MXFP4_BYTES, MXFP4_GROUP};
use crate::error::CheckpointError;
use crate::facts::StoredDtype;
use crate::quantised_form::{FP8, QuantisedForm};
use crate::shards::RawTensor;
use crate::tensors::{MlpTensors, Scales, StoredAs, TensorRef};

impl TensorFinder<'_> {
    /// Finds the weight of a projection, which may be stored as fp8.
    pub(super) fn find_weight(&self, name: &str, shape: &[usize]) -> Result<TensorRef, CheckpointError> {
        let scales_name = format!("{name}_scale_inv");
        let is_fp8 = self.shards.tensors.get(name).is_some_and(|raw| raw.dtype == FP8);
        if !is_fp8 {
            let tensor = self.find(name, shape)?;
            return match self.shards.tensors.get(&*scales_name) {
                None => Ok(tensor),
                Some(scales) => {
                    let dtype = tensor.dtype.name();
                    Err(self
                        .wrong(scales, format!("unexpected scales of `{name}`, which is stored as {dtype}")))
                }
            };
        }
        let raw = self.raw(name, shape)?;
        let Some(quantisation) = self.quantisation else {
            return Err(self.wrong(raw, self.undeclared("fp8")));
        };
        let (QuantisedForm::Fp8 { block }, &[rows, columns]) = (quantisation.form, shape) else {
            return Err(self.wrong(raw, self.undeclared("fp8")));
        };
        if quantisation.excepts(name) {
            let message = "is stored as fp8, but listed in modules_to_not_convert of config.json";
            return Err(self.wrong(raw, message.to_owned()));
        }
        let blocks = [rows.div_ceil(block[0]), columns.div_ceil(block[1])];
        let scales = self.raw(&scales_name, &blocks)?;
        let scale_dtype = match StoredDtype::from_header(scales.dtype) {
            Some(dtype @ (StoredDtype::F32 | StoredDtype::Bf16)) => dtype,
            _ => {
                let message = format!("has dtype {}, expected scales in F32 or BF16", scales.dtype);
                return Err(self.wrong(scales, message));
            }
        };
        let stored = StoredAs::Fp8 { block, scales: Box::new(scales_range(scales)), scale_dtype };
        Ok(self.quantised_tensor(raw, shape, stored))
    }

    /// Finds a stack of matrices `[experts, outputs, inputs]` that is stored as MXFP4 under `name`_blocks.
    pub(super) fn find_mxfp4(
        &self,
        name: &str,
        [experts, outputs, inputs]: [usize; 3],
    ) -> Result<TensorRef, CheckpointError> {
        let groups = inputs / MXFP4_GROUP;
        let raw = self.raw(&format!("{name}_blocks"), &[experts, outputs, groups, MXFP4_BYTES])?;
        let scales = self.raw(&format!("{name}_scales"), &[experts, outputs, groups])?;
        for raw in [raw, scales] {
            if raw.dtype != "U8" {
                return Err(self.wrong(raw, format!("has dtype {}, expected U8 for MXFP4", raw.dtype)));
            }
        }
        if !inputs.is_multiple_of(MXFP4_GROUP) {
            let message = format!("has rows of {inputs} elements, expected a multiple of {MXFP4_GROUP}");
            return Err(self.wrong(raw, message));
        }
        let stored = StoredAs::Mxfp4 { scales: Box::new(scales_range(scales)) };
        Ok(self.quantised_tensor(raw, &[experts, outputs, inputs], stored))
    }

    /// Refuses experts that are stored in different formats, because only one size is reported for all.
    pub(super) fn check_equal_expert_sizes(&self, layout: &Layout) -> Result<(), CheckpointError> {
        let mut experts = layout.layers.iter().filter_map(|layer| match &layer.mlp {
            LayerMlp::Moe { experts: ExpertsLayout::Separate(experts), .. } => Some(experts),
            _ => None,
        });
        let mut experts = experts.by_ref().flatten();
        let Some(first) = experts.next() else { return Ok(()) };
        let Some(other) = experts.find(|expert| expert.bytes() != first.bytes()) else { return Ok(()) };
        let bytes = |expert: &MlpTensors| expert.tensors().map(TensorRef::own_bytes).collect::<Vec<_>>();
        let pairs = first.tensors().zip(other.tensors());
        let differs = pairs.into_iter().find(|(a, b)| a.own_bytes() != b.own_bytes());
        let name = differs.map_or(&other.up.weight.name, |(_, tensor)| &tensor.name);
        Err(CheckpointError::tensor(
            &self.shards.listing,
            name,
            format!(
                "its expert has projections of {:?} bytes, another one {:?}; all must be stored in one form",
                bytes(other),
                bytes(first)
            ),
        ))
    }

    fn quantised_tensor(&self, raw: &RawTensor, shape: &[usize], stored: StoredAs) -> TensorRef {
        TensorRef {
            file: raw.file,
            name: raw.name.clone(),
            offset: raw.offset,
            bytes: raw.bytes,
            dtype: self.dtype,
            shape: shape.to_vec(),
            strides: None,
            stored,
        }
    }

    /// Returns the message for a quantised tensor that the config does not declare.
    pub(super) fn undeclared(&self, form: &str) -> String {
        let declared = self.quantisation.map_or("none", |quantisation| quantisation.form.name());
        format!(
            "is stored as {form}, but quantization_config of config.json says {declared}; check that both files belong to \
             one checkpoint"
        )
    }
}

/// Returns the byte range of a tensor of scales.
fn scales_range(raw: &RawTensor) -> Scales {
    Scales { file: raw.file, name: raw.name.clone(), offset: raw.offset, bytes: raw.bytes }
}
