//! Output of `remoe inspect --json`. The names of its fields are part of the interface.

use serde::{Deserialize, Serialize};

use crate::config::ModelConfig;
use crate::facts::{DenseDtype, ExpertsDtype, KvCacheDtype};
use crate::fingerprint::Fingerprint;
use crate::kv_pages::{PREFILL_ROWS, WindowedLayers, prefill_rows};
use crate::layout::Ignored;
use crate::quantised_form::QuantisedForm;
use crate::sizes::Sizes;

/// Sizes and facts of a model, as one JSON object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Inspection {
    /// Identity of the weights ([`Fingerprint`]).
    pub fingerprint: String,
    /// Family, as `model_type` of the config.
    pub family: String,
    /// `float32`, `bfloat16` or `float16`; for an [`crate::Outline`] with quantised weights, the name of their format.
    pub dtype: String,
    /// If weights are stored quantised: the format, and the sizes of the decoded weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stored_as: Option<Decoded>,
    /// Quantisation of routed experts in memory, if it was requested. Sizes in this object remain those of stored weights.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts_dtype: Option<ExpertsDtype>,
    /// Quantisation of the other matrices in memory, if any: int8 or int4.
    #[serde(
        default,
        alias = "dense_int8",
        deserialize_with = "DenseDtype::deserialize_quantised",
        skip_serializing_if = "Option::is_none"
    )]
    pub dense_dtype: Option<DenseDtype>,
    /// Format of the KV cache, if it is not the compute dtype. `kv_bytes_per_token` remains that of the stored dtype.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_dtype: Option<KvCacheDtype>,
    /// Number of layers.
    pub layers: usize,
    /// Ids of the layers with routed experts.
    pub moe_layers: Vec<usize>,
    /// Routed experts per layer.
    pub experts: usize,
    /// Routed experts per token.
    pub top_k: usize,
    /// Shared experts per layer.
    pub shared_experts: usize,
    /// Elements of a hidden state.
    pub hidden_size: usize,
    /// Rows of the embedding.
    pub vocab_size: usize,
    /// Positions that the model supports.
    pub context_length: usize,
    /// Positions that are served by default, if fewer; see [`Self::served_context`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub served_context: Option<usize>,
    /// See [`Sizes::expert_bytes`].
    pub expert_bytes: u64,
    /// See [`Sizes::non_expert_layer_bytes`].
    pub non_expert_layer_bytes: Vec<u64>,
    /// See [`Sizes::outside_bytes`].
    pub outside_bytes: u64,
    /// See [`Sizes::kv_bytes_per_token`].
    pub kv_bytes_per_token: u64,
    /// Scales that one token adds to an int8 KV cache, in all layers. 0 in the output of earlier versions.
    #[serde(default)]
    pub kv_scales_per_token: u64,
    /// Layers with a sliding window, which release older positions of the KV cache, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_windowed: Option<WindowedLayers>,
    /// See [`Sizes::token_bytes`].
    pub token_bytes: u64,
    /// See [`Sizes::total_bytes`].
    pub total_bytes: u64,
    /// Tensors in the files that are not part of the served model, if any. No size includes them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignored: Option<Ignored>,
}

/// Sizes of quantised weights after decoding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Decoded {
    /// Format of the stored weights: `fp8` or `mxfp4`.
    pub form: String,
    /// [`Inspection::expert_bytes`] of decoded weights.
    pub decoded_expert_bytes: u64,
    /// [`Inspection::non_expert_layer_bytes`] of decoded weights.
    pub decoded_non_expert_layer_bytes: Vec<u64>,
    /// [`Inspection::outside_bytes`] of decoded weights.
    pub decoded_outside_bytes: u64,
    /// [`Inspection::total_bytes`] of decoded weights.
    pub decoded_total_bytes: u64,
}

/// Memory of the KV cache, in all layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResidentKv {
    /// Bytes per token in layers that keep all positions of a sequence.
    pub bytes_per_token: u64,
    /// Bytes per token in layers with a sliding window.
    pub windowed_bytes_per_token: u64,
    /// Largest number of a sequence's tokens that layers with a window hold at a time.
    pub most_windowed_tokens: u64,
}

impl ResidentKv {
    /// Returns the bytes of a sequence of `tokens` tokens.
    #[must_use]
    pub fn of(&self, tokens: u64) -> u64 {
        let windowed = self.windowed_bytes_per_token.saturating_mul(tokens.min(self.most_windowed_tokens));
        self.bytes_per_token.saturating_mul(tokens).saturating_add(windowed)
    }

    /// Returns the bytes per token in all layers.
    #[must_use]
    pub fn all_bytes_per_token(&self) -> u64 {
        self.bytes_per_token.saturating_add(self.windowed_bytes_per_token)
    }
}

impl Inspection {
    /// Returns the positions that are served by default; see [`crate::ModelConfig::served_context`].
    #[must_use]
    pub fn served_context(&self) -> usize {
        self.served_context.map_or(self.context_length, |served| served.min(self.context_length))
    }

    /// Returns the same model on `device`, with routed experts kept as `experts` and other weights as `dense`
    /// ([`DenseDtype::quantised`]).
    #[must_use]
    pub fn kept_as(self, experts: Option<ExpertsDtype>, dense: Option<DenseDtype>, device: &str) -> Self {
        let dense_dtype = DenseDtype::quantised(dense, experts, device);
        Self { experts_dtype: experts, dense_dtype, ..self }
    }

    /// Returns the same model with the sizes of decoded weights.
    #[must_use]
    pub fn decoded(&self) -> Self {
        let Some(decoded) = self.stored_as.clone() else { return self.clone() };
        Self {
            stored_as: None,
            expert_bytes: decoded.decoded_expert_bytes,
            non_expert_layer_bytes: decoded.decoded_non_expert_layer_bytes,
            outside_bytes: decoded.decoded_outside_bytes,
            total_bytes: decoded.decoded_total_bytes,
            ..self.clone()
        }
    }

    /// Converts bytes in the stored dtype to bytes in memory if the compute dtype is `dtype`: `float32` takes 4 bytes per
    /// element, any other 2.
    #[must_use]
    pub fn resident_bytes(&self, bytes: u64, dtype: &str) -> u64 {
        let element = |dtype: &str| if dtype == "float32" { 4 } else { 2 };
        bytes.saturating_mul(element(dtype)).div_ceil(element(&self.dtype))
    }

    /// Returns the bytes of a routed expert in memory if the compute dtype is `dtype`, quantised if that was requested.
    #[must_use]
    pub fn resident_expert_bytes(&self, dtype: &str) -> u64 {
        let element = if self.dtype == "float32" { 4 } else { 2 };
        let decoded = self.stored_as.as_ref();
        let expert_bytes = decoded.map_or(self.expert_bytes, |decoded| decoded.decoded_expert_bytes);
        match self.experts_dtype {
            Some(experts) => experts.bytes(expert_bytes / element),
            None => self.resident_bytes(expert_bytes, dtype),
        }
    }

    /// Returns the bytes in memory of each layer without its routed experts, for compute dtype `dtype`.
    #[must_use]
    pub fn resident_layer_bytes(&self, dtype: &str) -> Vec<u64> {
        let router = (self.experts as u64).saturating_mul(self.token_bytes);
        let decoded = self.stored_as.as_ref();
        let layers = decoded
            .map_or(&self.non_expert_layer_bytes, |decoded| &decoded.decoded_non_expert_layer_bytes)
            .iter()
            .enumerate();
        layers
            .map(|(layer, &bytes)| {
                let plain = if self.moe_layers.contains(&layer) { router.min(bytes) } else { 0 };
                self.resident_dense_bytes(bytes, plain, dtype)
            })
            .collect()
    }

    /// Returns the bytes in memory of embedding, final norm and head, for compute dtype `dtype`. Embedding and head may be quantised, but not learned positions.
    #[must_use]
    pub fn resident_outside_bytes(&self, dtype: &str) -> u64 {
        let table = (self.vocab_size as u64).saturating_mul(self.token_bytes).max(1);
        let decoded = self.stored_as.as_ref();
        let bytes = decoded.map_or(self.outside_bytes, |decoded| decoded.decoded_outside_bytes);
        // Tied embedding and head are one table.
        let tables = (bytes / table).min(2);
        self.resident_dense_bytes(bytes, bytes - tables * table, dtype)
    }

    /// Returns the bytes in memory of all weights except routed experts, for compute dtype `dtype`.
    #[must_use]
    pub fn resident_non_expert_bytes(&self, dtype: &str) -> u64 {
        self.resident_layer_bytes(dtype)
            .into_iter()
            .fold(self.resident_outside_bytes(dtype), u64::saturating_add)
    }

    /// Returns the bytes in memory of all weights, for compute dtype `dtype`.
    #[must_use]
    pub fn resident_total_bytes(&self, dtype: &str) -> u64 {
        let experts = (self.moe_layers.len() as u64).saturating_mul(self.experts as u64);
        let experts = experts.saturating_mul(self.resident_expert_bytes(dtype));
        self.resident_non_expert_bytes(dtype).saturating_add(experts)
    }

    /// Returns the bytes that one token adds to the KV cache of all layers, for compute dtype `dtype`.
    #[must_use]
    pub fn resident_kv_bytes_per_token(&self, dtype: &str) -> u64 {
        match self.kv_cache_dtype {
            None => self.resident_bytes(self.kv_bytes_per_token, dtype),
            Some(cache_dtype) => {
                let elements = self.kv_bytes_per_token / self.element_bytes();
                let scales = match self.kv_scales_per_token {
                    0 => elements.div_ceil(32),
                    scales => scales,
                };
                cache_dtype.bytes(elements, scales)
            }
        }
    }

    /// Returns the memory of the KV cache, for compute dtype `dtype`, by the rule of the engine's admission.
    #[must_use]
    pub fn resident_kv(&self, dtype: &str) -> ResidentKv {
        let all = self.resident_kv_bytes_per_token(dtype);
        let Some(windowed) = self.kv_windowed.filter(|_| self.layers > 0) else {
            return ResidentKv { bytes_per_token: all, windowed_bytes_per_token: 0, most_windowed_tokens: 0 };
        };
        let layers = windowed.layers.min(self.layers) as u64;
        // All layers have the same number of bytes.
        let share = (u128::from(all) * u128::from(layers) / self.layers as u128) as u64;
        let element_bytes = if dtype == "float32" { 4 } else { 2 };
        let rows = prefill_rows(self.hidden_size, element_bytes, self.top_k, PREFILL_ROWS);
        ResidentKv {
            bytes_per_token: all - share,
            windowed_bytes_per_token: share,
            most_windowed_tokens: windowed.most_positions(rows) as u64,
        }
    }

    /// Returns the bytes of an element of the stored dtype.
    fn element_bytes(&self) -> u64 {
        if self.dtype == "float32" { 4 } else { 2 }
    }

    /// Converts `bytes` of stored weights to bytes in memory; `plain` of them are never quantised.
    fn resident_dense_bytes(&self, bytes: u64, plain: u64, dtype: &str) -> u64 {
        let Some(quantised) = self.dense_dtype.and_then(DenseDtype::of_experts) else {
            return self.resident_bytes(bytes, dtype);
        };
        let quantised = quantised.bytes((bytes - plain) / self.element_bytes());
        self.resident_bytes(plain, dtype).saturating_add(quantised)
    }

    pub(crate) fn new(
        config: &ModelConfig,
        sizes: Sizes,
        decoded: Option<(QuantisedForm, Sizes)>,
        fingerprint: Fingerprint,
        ignored: &Ignored,
    ) -> Self {
        let moe = config.any_moe();
        let stored_as = decoded.map(|(form, sizes)| Decoded {
            form: form.name().to_owned(),
            decoded_expert_bytes: sizes.expert_bytes,
            decoded_non_expert_layer_bytes: sizes.non_expert_layer_bytes,
            decoded_outside_bytes: sizes.outside_bytes,
            decoded_total_bytes: sizes.total_bytes,
        });
        Self {
            fingerprint: fingerprint.to_string(),
            family: config.family.name().to_owned(),
            dtype: config.dtype.name().to_owned(),
            stored_as,
            experts_dtype: None,
            dense_dtype: None,
            kv_cache_dtype: None,
            layers: config.layers.len(),
            moe_layers: config.moe_layers(),
            experts: moe.map_or(0, |moe| moe.experts),
            top_k: moe.map_or(0, |moe| moe.top_k),
            shared_experts: moe.and_then(|moe| moe.shared.as_ref()).map_or(0, |shared| shared.count),
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            context_length: config.context_length,
            served_context: Some(config.served_context()).filter(|served| *served < config.context_length),
            expert_bytes: sizes.expert_bytes,
            non_expert_layer_bytes: sizes.non_expert_layer_bytes,
            outside_bytes: sizes.outside_bytes,
            kv_bytes_per_token: sizes.kv_bytes_per_token,
            kv_scales_per_token: config
                .layers
                .iter()
                .map(|layer| layer.attention.cache_scales() as u64)
                .sum(),
            kv_windowed: WindowedLayers::of_config(config),
            token_bytes: sizes.token_bytes,
            total_bytes: sizes.total_bytes,
            ignored: Some(ignored).filter(|ignored| ignored.bytes > 0).cloned(),
        }
    }
}
