//! Parts of the function that take time to load, and their descriptions.

use crate::backend::DeferredWeights;
use crate::dispatch::RemoteRequirements;
use crate::engine::{RequestLimits, Vocabulary};
use crate::http::ModelCard;
use crate::model_text::ModelText;
use crate::transformer::{Model, Transformer};
use crate::{Backend, DeviceName, Error, LoadModelError, Settings};
use remoe_kernels::{CacheFormat, Dtype, NumericsClass, Pool, PoolConfig, wrong_paths};
use remoe_model::{Checkpoint, DenseDtype, KvCacheDtype};
use remoe_predictor::record::RecordHeader;
use remoe_proto::WIRE_VERSION;
use remoe_proto::identity::Trust;
use remoe_proto::v1::MainDescription;
use remoe_weights::{checked_experts_class, default_dtype, experts_class};
use std::sync::Arc;

/// Most choices of one request.
const MAX_CHOICES: usize = 16;

/// The loaded model and its compute resources.
pub(crate) struct Loaded {
    pub(crate) checkpoint: Arc<Checkpoint>,
    /// Numerics of the experts. Everything else is computed in its dtype.
    pub(crate) class: NumericsClass,
    pub(crate) threads: usize,
    pub(crate) device: DeviceName,
    /// [`Backend::NAME`] of the model's backend.
    pub(crate) operations: &'static str,
    /// Format of the KV cache, if it is not the compute dtype.
    pub(crate) kv_cache_dtype: Option<KvCacheDtype>,
    pub(crate) text: Option<Arc<ModelText>>,
    pub(crate) pool: Arc<Pool>,
    pub(crate) model: Box<dyn Model>,
    /// Bytes of device memory by use: weights, KV cache and workspace; empty on the CPU.
    pub(crate) device_memory: Vec<(&'static str, usize)>,
    /// Number of KV cache pages that the device has memory for, at most as many as requested.
    cache_pages: usize,
    pub(crate) deferred_weights: Vec<Arc<dyn DeferredWeights>>,
    pub(crate) fingerprint: String,
}

impl Loaded {
    /// Loads the model of `settings`.
    pub(crate) fn new<B: Backend>(settings: &Settings) -> Result<Self, Error> {
        let mut checkpoint = settings.source.open()?.checkpoint;
        if let Some(positions) = settings.max_model_len {
            checkpoint.set_positions(positions)?;
        }
        let checkpoint = Arc::new(checkpoint);
        let dtype = settings.dtype.map_or_else(|| default_dtype(&checkpoint), |dtype| dtype.0);
        let class = checked_experts_class(&checkpoint, dtype, settings.experts_dtype)?;
        let threads = settings.threads.unwrap_or(PoolConfig::default().threads);
        let text = ModelText::open(&checkpoint)?.map(Arc::new);
        let config = PoolConfig { threads, path: settings.instruction_path, ..PoolConfig::default() };
        let pool = Arc::new(Pool::new(config)?);
        tracing::info!(threads, pinned = pool.is_pinned(), "kernel threads started");
        let mut ops = B::open(settings.device, dtype, &pool)?;
        let device = ops.device();
        let format =
            settings.kv_cache_dtype.map_or(CacheFormat::Plain, |KvCacheDtype::Int8| CacheFormat::Int8);
        if !ops.set_cache_format(format) {
            return Err(Error::KvCacheDtype { operations: B::NAME });
        }
        let dense = dense_class(settings, dtype, device)?;
        let classes = [dtype.into(), dense, class];
        for (path, class) in wrong_paths(&classes) {
            tracing::warn!(%path, %class, "instruction path disabled: wrong results on this CPU");
        }
        for class in classes {
            // The first query measures the paths; otherwise the first request would.
            let paths = pool.paths(class);
            tracing::debug!(%class, %paths, "instruction paths");
        }
        let mut model = Transformer::load(&checkpoint, dense, ops, threads)?;
        tracing::info!(bytes = model.weight_bytes(), class = %dense, "non-expert weights loaded");
        // Rounded up, so that a request of exactly the configured size fits.
        let wanted_pages = settings.kv_cache_bytes.div_ceil(model.page_bytes().max(1) as u64);
        let wanted_pages = usize::try_from(wanted_pages).unwrap_or(usize::MAX);
        let positions = checkpoint.config().served_context();
        let cache_pages = model.reserve_pages(wanted_pages, positions).map_err(LoadModelError::from)?;
        if cache_pages < wanted_pages {
            let bytes = cache_pages.saturating_mul(model.page_bytes());
            tracing::warn!(bytes, "KV cache limited by device memory");
        }
        let device_memory = match device {
            DeviceName::Cpu => Vec::new(),
            DeviceName::Cuda(_) => vec![
                ("weights", model.weight_bytes()),
                ("kv_cache", cache_pages.saturating_mul(model.page_bytes())),
                ("workspace", model.workspace_bytes()),
            ],
        };
        let (deferred_weights, model) = (model.deferred_weights(), Box::new(model));
        let fingerprint = checkpoint.fingerprint()?.to_string();
        Ok(Self {
            checkpoint,
            class,
            threads,
            device,
            operations: B::NAME,
            kv_cache_dtype: settings.kv_cache_dtype,
            text,
            pool,
            model,
            device_memory,
            cache_pages,
            deferred_weights,
            fingerprint,
        })
    }

    /// Returns the bytes of one KV cache page.
    pub(crate) fn page_bytes(&self) -> usize {
        self.model.page_bytes().max(1)
    }

    /// Returns the limits of one request. `prefill_rows` limits the rows of a layered prefill.
    pub(crate) fn limits(&self, settings: &Settings, prefill_rows: usize) -> RequestLimits {
        let config = self.checkpoint.config();
        RequestLimits {
            vocab_size: config.vocab_size,
            context_length: config.served_context(),
            cache_pages: self.cache_pages,
            page_needs: self.model.page_needs(),
            prefill_rows,
            max_choices: MAX_CHOICES.min(settings.max_batch),
            max_requests: settings.max_requests,
            queue_deadline: settings.queue_deadline,
        }
    }

    /// Returns the tokens that end an answer.
    pub(crate) fn end_ids(&self) -> Vec<u32> {
        match self.checkpoint.generation().eos_token_ids.as_slice() {
            [] => self.checkpoint.config().eos_ids.clone(),
            ids => ids.to_vec(),
        }
    }

    /// Returns the tokenizer and end-of-sequence ids for the engine.
    pub(crate) fn vocabulary(&self) -> Vocabulary {
        let tokenizer = self.text.as_ref().map(|text| text.tokenizer().clone());
        Vocabulary { tokenizer, end_ids: self.end_ids() }
    }

    /// Returns the properties that remote functions must have; the sets of experts are empty.
    pub(crate) fn remote_requirements(&self, trust: Option<&Trust>) -> RemoteRequirements {
        RemoteRequirements {
            checkpoint: self.fingerprint.clone(),
            dtype: self.class.dtype.to_string(),
            numerics_class: self.class.name().to_owned(),
            hidden_size: self.checkpoint.config().hidden_size,
            sets: Vec::new(),
            trust: trust.map(Trust::to_remote),
        }
    }

    /// Returns the header of this function's activation records.
    pub(crate) fn record_header(&self, settings: &Settings) -> RecordHeader {
        let config = self.checkpoint.config();
        let layers = config.moe_layers();
        let facts = layers.first().and_then(|&layer| config.moe(layer));
        RecordHeader {
            model: self.fingerprint.clone(),
            layers: layers.iter().map(|&layer| layer as u32).collect(),
            experts: facts.map_or(0, |moe| moe.experts as u32),
            top_k: facts.map_or(0, |moe| moe.top_k as u32),
            dtype: self.class.dtype.to_string(),
            tokens: settings.record_tokens,
        }
    }

    /// Returns the facts of the model for the placement page.
    pub(crate) fn card(&self) -> Result<ModelCard, Error> {
        Ok(ModelCard {
            facts: self.checkpoint.inspect()?,
            compute_dtype: self.class.dtype.to_string(),
            device: self.device.to_string(),
            operations: self.operations,
            numerics_class: self.class.name().to_owned(),
        })
    }

    /// Returns the constant part of the description for launchers. The start took `start_us` microseconds.
    pub(crate) fn description(&self, start_us: u64) -> MainDescription {
        MainDescription {
            wire_version: WIRE_VERSION,
            checkpoint: self.fingerprint.clone(),
            dtype: self.class.dtype.to_string(),
            numerics_class: self.class.name().to_owned(),
            device: self.device.to_string(),
            operations: self.operations.to_owned(),
            kv_cache_dtype: self.kv_cache_dtype.map_or("", KvCacheDtype::name).to_owned(),
            start_us,
            ..MainDescription::default()
        }
    }
}

/// Returns the numerics of attention, dense layers, shared experts and the head.
fn dense_class(settings: &Settings, dtype: Dtype, device: DeviceName) -> Result<NumericsClass, Error> {
    let plain = match settings.dense_dtype {
        Some(DenseDtype::Bfloat16) => Some(Dtype::Bf16),
        Some(DenseDtype::Float32) => Some(Dtype::F32),
        Some(DenseDtype::Int8 | DenseDtype::Int4) | None => None,
    };
    if let Some(plain) = plain.filter(|plain| *plain != dtype) {
        return Err(Error::DenseDtype {
            asked: plain.to_string(),
            why: format!("the compute dtype is {dtype}"),
        });
    }
    let is_cpu = device == DeviceName::Cpu;
    let name = if is_cpu { "cpu" } else { "cuda" };
    let Some(quantised) = DenseDtype::quantised(settings.dense_dtype, settings.experts_dtype, name) else {
        return Ok(dtype.into());
    };
    if !is_cpu {
        return Err(Error::DenseDtype {
            asked: quantised.name().to_owned(),
            why: format!("not supported on {device}"),
        });
    }
    Ok(experts_class(dtype, quantised.of_experts()))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use clap::Parser;
    use remoe_kernels::WeightFormat;

    #[test]
    fn other_weights_are_quantised_beside_experts_on_cpus() {
        let class = |arguments: &[&str], device| {
            let arguments = ["main-model-fn", "--model", "m"].iter().chain(arguments);
            let class = dense_class(&Settings::parse_from(arguments), Dtype::Bf16, device);
            class.map(|class| class.weights).map_err(|error| error.to_string())
        };
        let (cpu, cuda) = (DeviceName::Cpu, DeviceName::Cuda(0));
        let (plain, int8) = (Ok(WeightFormat::Plain), Ok(WeightFormat::Int8));
        assert_eq!(class(&[], cpu), plain);
        assert_eq!(class(&["--experts-dtype", "int4"], cpu), int8);
        assert_eq!(class(&["--experts-dtype", "int4"], cuda), plain);
        assert_eq!(class(&["--experts-dtype", "fp8"], cpu), plain);
        assert_eq!(class(&["--experts-dtype", "int4", "--dense-dtype", "bfloat16"], cpu), plain);
        assert_eq!(class(&["--dense-dtype", "int8"], cpu), int8);
        assert_eq!(class(&["--experts-dtype", "int4", "--dense-dtype", "int4"], cpu), Ok(WeightFormat::Int4));
        let refused = class(&["--dense-dtype", "int8"], cuda).unwrap_err();
        assert_eq!(refused, "invalid --dense-dtype int8: not supported on cuda:0");
        let refused = class(&["--dense-dtype", "float32"], cpu).unwrap_err();
        assert_eq!(refused, "invalid --dense-dtype float32: the compute dtype is bfloat16");
    }
}
