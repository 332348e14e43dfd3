//! Sizes of a model for planning nodes.

use crate::exit::CliError;
use crate::flags::{Dtype, default_dtype};
use remoe_hardware::ResidentWeights;
use remoe_hub::{ModelArgs, OpenedModel, SizedModel};
use remoe_model::{Checkpoint, CheckpointError, DenseDtype, ExpertsDtype, Inspection, Outline};
use remoe_planner::{ResidentModel, WindowedCache};
use serde::Serialize;
use std::sync::Arc;

/// Dtypes of weights from flags. `None`: as the checkpoint stores them.
#[derive(Debug, Clone, Copy)]
pub(super) struct WeightDtypes {
    pub(super) dtype: Option<Dtype>,
    pub(super) experts: Option<ExpertsDtype>,
    pub(super) dense: Option<DenseDtype>,
}

/// Limit of a quantised expert's bytes, as a share of the planned expert's, for showing it as an alternative.
const MAX_QUANTISED_SHARE: f64 = 0.9;

/// Model to plan nodes for, with its sizes.
#[derive(Debug, Serialize)]
pub(super) struct KnownModel {
    pub(super) family: String,
    pub(super) parameters: u64,
    /// Parameters that are used for one token.
    pub(super) active_parameters: u64,
    pub(super) dtype: String,
    /// Description of the dtypes in which weights are counted.
    #[serde(rename = "counted")]
    pub(super) counted_as: String,
    /// Headers of weights were read, not only `config.json`.
    pub(super) weights_seen: bool,
    /// This version can run the model.
    pub(super) runs: bool,
    /// Reason why weights were not read, or the model cannot run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) because: Option<String>,
    pub(super) layers: usize,
    pub(super) moe_layers: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) expert_bytes: u64,
    /// Bytes of all weights but routed experts, as other engines store them.
    pub(super) rest_bytes: u64,
    /// Bytes of all weights but routed experts in Remoe's main functions on CPUs.
    pub(super) main_rest_bytes: u64,
    /// Bytes of all weights but routed experts in Remoe's main functions on a GPU.
    pub(super) device_rest_bytes: u64,
    /// Bytes of all weights, as other engines store them.
    pub(super) total_bytes: u64,
    /// Inspection with all weights in the compute dtype.
    #[serde(skip)]
    pub(super) inspection: Inspection,
    #[serde(skip)]
    pub(super) weights: ResidentWeights,
    #[serde(skip)]
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
    #[serde(skip)]
    stored: StoredModel,
}

/// Model as its checkpoint stores it, with the dtypes from flags.
#[derive(Debug, Clone)]
struct StoredModel {
    /// Inspection with all weights in the compute dtype.
    decoded: Inspection,
    /// Quantised dtype of the stored experts, with the inspection in it. `None` if experts are not quantised.
    quantised: Option<(ExpertsDtype, Inspection)>,
    forms: WeightDtypes,
}

impl KnownModel {
    /// Reads the headers of weights, or only `config.json` if the weights are missing or unsupported.
    pub(super) fn open(source: &ModelArgs, forms: WeightDtypes) -> Result<Self, CliError> {
        let dtype = forms.dtype.map(Dtype::name);
        Ok(match source.open_or_outline(dtype)? {
            SizedModel::Checkpoint(opened) => {
                let inspection = opened.checkpoint.inspect()?;
                let dtype = dtype.unwrap_or_else(|| default_dtype(&inspection));
                Self::from_checkpoint(inspection, dtype, forms, *opened)
            }
            SizedModel::Outline { outline, reason } => Self::from_outline(source, &outline, forms, &reason),
        })
    }

    /// Creates a model whose weight headers were read.
    fn from_checkpoint(stored: Inspection, dtype: &str, forms: WeightDtypes, opened: OpenedModel) -> Self {
        let quantised = stored.stored_as.as_ref().and_then(|stored| stored.form.parse().ok());
        let decoded = stored.decoded();
        let element_bytes = if decoded.dtype == "float32" { 4 } else { 2 };
        let unused_experts = decoded.experts.saturating_sub(decoded.top_k) * decoded.moe_layers.len();
        let embedding_bytes = decoded.vocab_size as u64 * decoded.token_bytes;
        let is_tied = decoded.outside_bytes < 2 * embedding_bytes;
        let unused = unused_experts as u64 * decoded.expert_bytes + if is_tied { 0 } else { embedding_bytes };
        Self {
            parameters: decoded.total_bytes / element_bytes,
            active_parameters: decoded.total_bytes.saturating_sub(unused) / element_bytes,
            weights_seen: true,
            runs: true,
            because: None,
            checkpoint: Some(Arc::new(opened.checkpoint)),
            ..Self::with_dtypes(
                dtype,
                StoredModel { quantised: quantised.map(|form| (form, stored)), decoded, forms },
            )
        }
    }

    /// Creates a model of which only `config.json` was read.
    fn from_outline(
        source: &ModelArgs,
        outline: &Outline,
        forms: WeightDtypes,
        reason: &CheckpointError,
    ) -> Self {
        // If the engine supports the config, the error is about missing files.
        let runs = !matches!(reason, CheckpointError::Unsupported { .. });
        let name = source.model.to_string();
        let stored = outline.inspection(&name);
        let decoded = outline.in_dtype(&outline.dtype).inspection(&name);
        let quantised = stored.dtype.parse().ok();
        Self {
            parameters: outline.parameters(),
            active_parameters: outline.active_parameters(),
            weights_seen: false,
            runs,
            because: Some(reason.to_string()),
            ..Self::with_dtypes(
                &decoded.dtype.clone(),
                StoredModel { quantised: quantised.map(|form| (form, stored)), decoded, forms },
            )
        }
    }

    /// Returns the model with routed experts in int8 and in int4, if these are smaller. Returns nothing if flags state the
    /// dtype of experts.
    pub(super) fn quantised(&self) -> impl Iterator<Item = (ExpertsDtype, Self)> {
        let forms = self.stored.forms;
        let dtypes = forms.experts.is_none().then_some([ExpertsDtype::Int8, ExpertsDtype::Int4]);
        dtypes.into_iter().flatten().filter_map(move |experts| {
            let stored = StoredModel {
                forms: WeightDtypes { experts: Some(experts), ..forms },
                ..self.stored.clone()
            };
            let model =
                Self { checkpoint: self.checkpoint.clone(), ..Self::with_dtypes(&self.dtype, stored) };
            (model.expert_bytes as f64 <= MAX_QUANTISED_SHARE * self.expert_bytes as f64)
                .then_some((experts, model))
        })
    }

    /// Computes the sizes with the dtypes from flags. Without a flag, weights keep their stored dtype.
    fn with_dtypes(dtype: &str, stored: StoredModel) -> Self {
        let StoredModel { decoded, quantised, forms } = &stored;
        let quantised = quantised.as_ref();
        let stored_experts =
            quantised.filter(|_| forms.experts.is_none()).map(|(_, stored)| stored.expert_bytes);
        let stored_rest = quantised
            .filter(|_| forms.dense.is_none())
            .map(|(_, stored)| stored.non_expert_layer_bytes.iter().sum::<u64>() + stored.outside_bytes);
        let forms = WeightDtypes { experts: forms.experts.or(quantised.map(|(form, _)| *form)), ..*forms };
        let inspection_on = |device: &str| decoded.clone().kept_as(forms.experts, forms.dense, device);
        let (cpu, gpu) = (inspection_on("cpu"), inspection_on("cuda"));
        let expert_bytes = stored_experts.unwrap_or_else(|| cpu.resident_expert_bytes(dtype));
        let main_rest_bytes = cpu.resident_non_expert_bytes(dtype);
        let device_rest_bytes = gpu.resident_non_expert_bytes(dtype);
        let rest_bytes = stored_rest.unwrap_or(device_rest_bytes);
        let routed = (decoded.moe_layers.len() as u64).saturating_mul(decoded.experts as u64);
        let weights = ResidentWeights::of(&cpu, dtype);
        // Every weight is read for a token, except the embedding table.
        let read_bytes = |bytes: u64| weights.main_rest_bytes * bytes as f64 / main_rest_bytes.max(1) as f64;
        Self {
            family: decoded.family.clone(),
            parameters: 0,
            active_parameters: 0,
            dtype: dtype.to_owned(),
            counted_as: describe_dtypes(dtype, forms),
            weights_seen: false,
            runs: false,
            because: None,
            layers: decoded.layers,
            moe_layers: decoded.moe_layers.len(),
            experts: decoded.experts,
            top_k: decoded.top_k,
            expert_bytes,
            rest_bytes,
            main_rest_bytes,
            device_rest_bytes,
            total_bytes: rest_bytes.saturating_add(routed.saturating_mul(expert_bytes)),
            weights: ResidentWeights {
                expert_bytes: expert_bytes as f64,
                rest_bytes: read_bytes(rest_bytes),
                device_rest_bytes: read_bytes(device_rest_bytes),
                ..weights
            },
            inspection: cpu,
            checkpoint: None,
            stored,
        }
    }

    /// Returns the sizes in memory that nodes are planned for.
    pub(super) fn resident(&self) -> ResidentModel {
        let resident = |bytes: u64| self.inspection.resident_bytes(bytes, &self.dtype) as f64;
        let kv = self.inspection.resident_kv(&self.dtype);
        ResidentModel {
            layers: self.moe_layers,
            experts: self.experts,
            top_k: self.top_k,
            expert_bytes: self.expert_bytes as f64,
            rest_bytes: self.rest_bytes as f64,
            main_rest_bytes: self.main_rest_bytes as f64,
            device_rest_bytes: self.device_rest_bytes as f64,
            kv_bytes_per_token: kv.bytes_per_token as f64,
            kv_windowed: (kv.windowed_bytes_per_token > 0).then_some(WindowedCache {
                bytes_per_token: kv.windowed_bytes_per_token as f64,
                most_tokens: kv.most_windowed_tokens as f64,
            }),
            token_bytes: resident(self.inspection.token_bytes),
        }
    }
}

/// Describes the dtypes in which weights are counted.
fn describe_dtypes(dtype: &str, forms: WeightDtypes) -> String {
    let experts = forms.experts.map_or(dtype, |experts| experts.name());
    match (forms.dense, forms.experts) {
        (Some(dense), _) => format!("routed experts in {experts}, the rest in {}", dense.name()),
        (None, Some(ExpertsDtype::Fp8)) => {
            format!("routed experts in {experts}, the rest as stored; Remoe holds the rest in {dtype}")
        }
        (None, _) => format!("routed experts in {experts}, the rest in {dtype}"),
    }
}
