//! A model as far as nodes depend on it.

use crate::exit::CliError;
use crate::flags::{Dtype, default_dtype};
use remoe_hardware::ResidentWeights;
use remoe_hub::{ModelArgs, OpenedModel, SizedModel};
use remoe_model::{Checkpoint, CheckpointError, DenseDtype, ExpertsDtype, Inspection, Outline};
use remoe_planner::{ResidentModel, WindowedCache};
use serde::Serialize;
use std::sync::Arc;

/// Forms of weights that were asked for; absent ones are the checkpoint's.
#[derive(Debug, Clone, Copy)]
pub(super) struct Forms {
    pub(super) dtype: Option<Dtype>,
    pub(super) experts: Option<ExpertsDtype>,
    pub(super) dense: Option<DenseDtype>,
}

/// Bytes of a quantised expert that make it worth a line, over those of the form that is planned.
const SMALLER: f64 = 0.9;

/// A model as far as nodes depend on it.
#[derive(Debug, Serialize)]
pub(super) struct KnownModel {
    pub(super) family: String,
    pub(super) parameters: u64,
    /// Parameters that one token is multiplied with.
    pub(super) active_parameters: u64,
    pub(super) dtype: String,
    /// How weights are counted, for people.
    pub(super) counted: String,
    /// True if headers of weights were read.
    pub(super) weights_seen: bool,
    /// True if this version runs the model.
    pub(super) runs: bool,
    /// Why weights were not seen or it does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) because: Option<String>,
    pub(super) layers: usize,
    pub(super) moe_layers: usize,
    pub(super) experts: usize,
    pub(super) top_k: usize,
    pub(super) expert_bytes: u64,
    /// Everything but routed experts, as engines in general hold it.
    pub(super) rest_bytes: u64,
    /// Everything but routed experts, as Remoe's main functions hold it on CPUs.
    pub(super) main_rest_bytes: u64,
    /// Everything but routed experts, as Remoe's main functions hold it on a GPU.
    pub(super) device_rest_bytes: u64,
    /// All weights as engines in general hold them.
    pub(super) total_bytes: u64,
    /// Facts with all weights in the compute dtype.
    #[serde(skip)]
    pub(super) inspection: Inspection,
    #[serde(skip)]
    pub(super) weights: ResidentWeights,
    #[serde(skip)]
    pub(super) checkpoint: Option<Arc<Checkpoint>>,
    #[serde(skip)]
    stored: StoredModel,
}

/// A model as its checkpoint stores it, and the forms that were asked for.
#[derive(Debug, Clone)]
struct StoredModel {
    /// Facts with all weights in the compute dtype.
    plain: Inspection,
    /// The shorter form of its weights, with facts in that form.
    short: Option<(ExpertsDtype, Inspection)>,
    forms: Forms,
}

impl KnownModel {
    /// Reads headers of weights, or `config.json` alone.
    pub(super) fn open(source: &ModelArgs, forms: Forms) -> Result<Self, CliError> {
        let dtype = forms.dtype.map(Dtype::name);
        Ok(match source.open_or_outline(dtype)? {
            SizedModel::Checkpoint(opened) => {
                let inspection = opened.checkpoint.inspect()?;
                let dtype = dtype.unwrap_or_else(|| default_dtype(&inspection));
                Self::seen(inspection, dtype, forms, *opened)
            }
            SizedModel::Outline { outline, reason } => Self::outlined(source, &outline, forms, &reason),
        })
    }

    /// A model whose headers were read.
    fn seen(stored: Inspection, dtype: &str, forms: Forms, opened: OpenedModel) -> Self {
        let short = stored.stored_as.as_ref().and_then(|stored| stored.form.parse().ok());
        let plain = stored.decoded();
        let element = if plain.dtype == "float32" { 4 } else { 2 };
        let idle = plain.experts.saturating_sub(plain.top_k) * plain.moe_layers.len();
        let looked_up = plain.vocab_size as u64 * plain.token_bytes;
        let tied = plain.outside_bytes < 2 * looked_up;
        let unused = idle as u64 * plain.expert_bytes + if tied { 0 } else { looked_up };
        Self {
            parameters: plain.total_bytes / element,
            active_parameters: plain.total_bytes.saturating_sub(unused) / element,
            weights_seen: true,
            runs: true,
            because: None,
            checkpoint: Some(Arc::new(opened.checkpoint)),
            ..Self::of(dtype, StoredModel { short: short.map(|form| (form, stored)), plain, forms })
        }
    }

    /// A model of which only `config.json` was read.
    fn outlined(source: &ModelArgs, outline: &Outline, forms: Forms, why: &CheckpointError) -> Self {
        // A config that the engine takes is refused for its files, never as unsupported.
        let runs = !matches!(why, CheckpointError::Unsupported { .. });
        let name = source.model.to_string();
        let stored = outline.inspection(&name);
        let plain = outline.in_dtype(&outline.dtype).inspection(&name);
        let short = stored.dtype.parse().ok();
        Self {
            parameters: outline.parameters(),
            active_parameters: outline.active_parameters(),
            weights_seen: false,
            runs,
            because: Some(why.to_string()),
            ..Self::of(
                &plain.dtype.clone(),
                StoredModel { short: short.map(|form| (form, stored)), plain, forms },
            )
        }
    }

    /// Returns the same model with its routed experts in int8 or int4, where no form was asked for and that is smaller
    /// than what the checkpoint stores.
    pub(super) fn quantised(&self) -> impl Iterator<Item = (ExpertsDtype, Self)> {
        let forms = self.stored.forms;
        let asked = forms.experts.is_none().then_some([ExpertsDtype::Int8, ExpertsDtype::Int4]);
        asked.into_iter().flatten().filter_map(move |experts| {
            let stored =
                StoredModel { forms: Forms { experts: Some(experts), ..forms }, ..self.stored.clone() };
            let model = Self { checkpoint: self.checkpoint.clone(), ..Self::of(&self.dtype, stored) };
            (model.expert_bytes as f64 <= SMALLER * self.expert_bytes as f64).then_some((experts, model))
        })
    }

    /// Sizes of a model that is held as it was asked for. What was not asked for stays in the form in which it is stored.
    fn of(dtype: &str, stored: StoredModel) -> Self {
        let StoredModel { plain, short, forms } = &stored;
        let short = short.as_ref();
        let stored_experts = short.filter(|_| forms.experts.is_none()).map(|(_, stored)| stored.expert_bytes);
        let stored_rest = short
            .filter(|_| forms.dense.is_none())
            .map(|(_, stored)| stored.non_expert_layer_bytes.iter().sum::<u64>() + stored.outside_bytes);
        let forms = Forms { experts: forms.experts.or(short.map(|(form, _)| *form)), ..*forms };
        let on = |device: &str| plain.clone().kept_as(forms.experts, forms.dense, device);
        let (cpu, gpu) = (on("cpu"), on("cuda"));
        let expert_bytes = stored_experts.unwrap_or_else(|| cpu.resident_expert_bytes(dtype));
        let main_rest_bytes = cpu.resident_non_expert_bytes(dtype);
        let device_rest_bytes = gpu.resident_non_expert_bytes(dtype);
        let rest_bytes = stored_rest.unwrap_or(device_rest_bytes);
        let routed = (plain.moe_layers.len() as u64).saturating_mul(plain.experts as u64);
        let weights = ResidentWeights::of(&cpu, dtype);
        // Everything is multiplied with but one table of the vocabulary, in whatever form.
        let used = |bytes: u64| weights.main_rest_bytes * bytes as f64 / main_rest_bytes.max(1) as f64;
        Self {
            family: plain.family.clone(),
            parameters: 0,
            active_parameters: 0,
            dtype: dtype.to_owned(),
            counted: counted(dtype, forms),
            weights_seen: false,
            runs: false,
            because: None,
            layers: plain.layers,
            moe_layers: plain.moe_layers.len(),
            experts: plain.experts,
            top_k: plain.top_k,
            expert_bytes,
            rest_bytes,
            main_rest_bytes,
            device_rest_bytes,
            total_bytes: rest_bytes.saturating_add(routed.saturating_mul(expert_bytes)),
            weights: ResidentWeights {
                expert_bytes: expert_bytes as f64,
                rest_bytes: used(rest_bytes),
                device_rest_bytes: used(device_rest_bytes),
                ..weights
            },
            inspection: cpu,
            checkpoint: None,
            stored,
        }
    }

    /// The sizes that nodes are planned for.
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

/// The forms in which weights are counted, for people.
fn counted(dtype: &str, forms: Forms) -> String {
    let experts = forms.experts.map_or(dtype, |experts| experts.name());
    match (forms.dense, forms.experts) {
        (Some(dense), _) => format!("routed experts in {experts}, the rest in {}", dense.name()),
        (None, Some(ExpertsDtype::Fp8)) => {
            format!("routed experts in {experts}, the rest as stored; Remoe holds the rest in {dtype}")
        }
        (None, _) => format!("routed experts in {experts}, the rest in {dtype}"),
    }
}
