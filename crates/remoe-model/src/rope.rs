//! Rotary position embedding (RoPE). Inverse frequencies are computed in the same float32 steps as in transformers 5.17
//! (`modeling_rope_utils.py`), so that angles have the same bits.

use std::f64::consts::PI;

use crate::error::CheckpointError;
use crate::fields::{Fields, same};

/// Upper bound of the elements of a head, above that of any model.
const HEAD_LIMIT: usize = 1 << 16;

/// Pairing of a head's elements for the rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Element i is paired with element i + dim / 2 (`rotate_half`).
    Halves,
    /// Element 2 i is paired with element 2 i + 1 (complex pairs).
    Interleaved,
}

/// Rope type: change of the frequencies for a longer context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// No change.
    None,
    /// All frequencies are divided by a factor.
    Linear {
        /// Divisor of the frequencies.
        factor: f64,
    },
    /// The base grows with contexts beyond the model's own ("NTK-aware"). Such contexts are not served, so that the
    /// frequencies do not change.
    Dynamic {
        /// Growth of the base.
        factor: f64,
    },
    /// Low frequencies are divided, high ones are kept, with a ramp between them (Llama 3.1).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original` / `low` are low frequencies.
        low: f64,
        /// Wavelengths below `original` / `high` are high frequencies.
        high: f64,
        /// Original context length, of the training.
        original: usize,
    },
    /// YaRN (arXiv 2309.00071): interpolates low frequencies.
    Yarn {
        /// Divisor of the interpolated frequencies.
        factor: f64,
        /// Rotations over the original context above which a dimension is kept.
        beta_fast: f64,
        /// Rotations over the original context below which a dimension is interpolated.
        beta_slow: f64,
        /// Original context length, of the training.
        original: usize,
        /// Set if the ends of the ramp are rounded to whole dimensions.
        truncate: bool,
    },
    /// LongRoPE (arXiv 2402.13753): a divisor for each frequency. Texts beyond the original context have other divisors, at
    /// all their positions. Only one of the two sets is used by a server ([`RopeFacts::for_long_texts`]).
    Long {
        /// Divisors of texts within the original context.
        short: Vec<f64>,
        /// Divisors of texts beyond the original context.
        long: Vec<f64>,
        /// Factor of cosine and sine for texts beyond the original context.
        long_attention_factor: Option<f64>,
        /// Ratio of the context length to the original one.
        factor: f64,
        /// Original context length, of the training.
        original: usize,
    },
}

impl RopeScaling {
    fn factor(&self) -> Option<f64> {
        match *self {
            Self::None => None,
            Self::Linear { factor }
            | Self::Dynamic { factor }
            | Self::Llama3 { factor, .. }
            | Self::Long { factor, .. }
            | Self::Yarn { factor, .. } => Some(factor),
        }
    }
}

/// Rotary position embedding of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFacts {
    /// Base of the frequencies (`rope_theta`).
    pub theta: f64,
    /// Number of a head's elements that are rotated; even.
    pub dim: usize,
    /// Pairing of the elements.
    pub layout: RopeLayout,
    /// Set if cosines, sines and rotations are computed in float32 (DeepSeek-V2). Otherwise each is rounded to the compute
    /// dtype.
    pub in_float32: bool,
    /// Rope type.
    pub scaling: RopeScaling,
    /// Factor of cosine and sine, applied in float32 before they are rounded.
    pub attention_factor: f64,
    /// YaRN's m for the scores of multi-head latent attention, which are multiplied by m^2. It is 1 without
    /// `mscale_all_dim` in the config.
    pub score_mscale: f64,
}

impl RopeFacts {
    /// Returns the context length after scaling, for a config that states `stated` positions. The rule is that of vLLM's
    /// `_get_and_verify_max_len`: YaRN multiplies the original context, linear scaling the stated one. Both have the same
    /// frequencies for texts of any length. With other rope types the config states the scaled context.
    pub(crate) fn scaled_context(&self, stated: usize) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { factor, original, .. } => original as f64 * factor,
            RopeScaling::Linear { factor } => stated as f64 * factor,
            RopeScaling::None
            | RopeScaling::Dynamic { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Long { .. } => stated as f64,
        }
    }

    /// Returns the `dim` / 2 inverse frequencies, in radians per position.
    #[must_use]
    pub fn inverse_frequencies(&self) -> Vec<f32> {
        let wavelengths: Vec<f32> = (0..self.dim / 2).map(|pair| self.power(pair)).collect();
        let plain = wavelengths.iter().map(|power| 1.0 / power);
        match &self.scaling {
            RopeScaling::None | RopeScaling::Dynamic { .. } => plain.collect(),
            RopeScaling::Linear { factor } => plain.map(|inv| inv / *factor as f32).collect(),
            RopeScaling::Long { short, .. } => {
                let divided = wavelengths.iter().zip(short);
                divided.map(|(power, divisor)| 1.0 / (*divisor as f32 * power)).collect()
            }
            RopeScaling::Llama3 { factor, low, high, original } => {
                plain.map(|inv| llama3(inv, *factor, *low, *high, *original as f64)).collect()
            }
            RopeScaling::Yarn { factor, .. } => {
                let (from, to) = self.yarn_range();
                wavelengths
                    .iter()
                    .enumerate()
                    .map(|(pair, power)| {
                        let ramp = ((pair as f32 - from as f32) / (to - from) as f32).clamp(0.0, 1.0);
                        let kept = 1.0 - ramp;
                        let interpolated = 1.0 / (*factor as f32 * power);
                        interpolated * (1.0 - kept) + (1.0 / power) * kept
                    })
                    .collect()
            }
        }
    }

    /// Returns the same embedding with longrope's divisors and factor for long texts, at every position up to `positions`.
    /// Returns `None` for other rope types.
    #[must_use]
    pub fn for_long_texts(&self, positions: usize) -> Option<Self> {
        let RopeScaling::Long { long, long_attention_factor, factor, .. } = &self.scaling else {
            return None;
        };
        let scaling = RopeScaling::Long {
            short: long.clone(),
            long: long.clone(),
            long_attention_factor: *long_attention_factor,
            factor: *factor,
            original: positions,
        };
        let attention_factor = long_attention_factor.unwrap_or(self.attention_factor);
        Some(Self { scaling, attention_factor, ..self.clone() })
    }

    /// Computes theta ^ (2 pair / dim) as a float32 power of float32 operands.
    fn power(&self, pair: usize) -> f32 {
        let exponent = (2 * pair) as f32 / self.dim as f32;
        // Correctly rounded. torch's float32 power is within one unit in the last place of it.
        f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
    }

    /// Returns the dimensions at the ends of YaRN's ramp (`find_correction_range`).
    fn yarn_range(&self) -> (f64, f64) {
        let RopeScaling::Yarn { beta_fast, beta_slow, original, truncate, .. } = self.scaling else {
            return (0.0, 1.0);
        };
        let dim = self.dim as f64;
        let dimension =
            |rotations: f64| dim * (original as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * self.theta.ln());
        let (mut from, mut to) = (dimension(beta_fast), dimension(beta_slow));
        if truncate {
            (from, to) = (from.floor(), to.ceil());
        }
        (from, to) = (from.max(0.0), to.min(dim - 1.0));
        if from == to {
            to += 0.001;
        }
        (from, to)
    }

    /// Returns the object with the rope's parameters: `rope_scaling`, else `rope_parameters`, as in transformers.
    pub(crate) fn parameters(fields: Fields<'_>) -> Result<Option<Fields<'_>>, CheckpointError> {
        match fields.object("rope_scaling")? {
            Some(scaling) => Ok(Some(scaling)),
            None => fields.object("rope_parameters"),
        }
    }

    /// Reads the rope of a config. `base` is the family's default theta, `dim` the number of rotated elements of a head.
    pub(crate) fn parse(
        fields: Fields<'_>,
        base: f64,
        dim: usize,
        layout: RopeLayout,
        context_length: usize,
    ) -> Result<Self, CheckpointError> {
        if dim > HEAD_LIMIT {
            return Err(fields.error(
                "num_attention_heads",
                format!("gives heads of {dim} elements, expected at most {HEAD_LIMIT}"),
            ));
        }
        // As in transformers, fields of the parameters take precedence over those of the config.
        let parameters = Self::parameters(fields)?;
        let inside = |name: &str| parameters.filter(|parameters| parameters.get(name).is_some());
        let theta = inside("rope_theta").unwrap_or(fields).optional_positive("rope_theta")?.unwrap_or(base);
        let partial = inside("partial_rotary_factor").unwrap_or(fields);
        if let Some(factor) = partial.optional_number("partial_rotary_factor")?
            && factor != 1.0
        {
            return Err(partial.unsupported(
                "partial_rotary_factor",
                format!("{factor}; only rotation of whole heads is supported"),
            ));
        }
        let scaling = match parameters {
            Some(parameters) => parse_scaling(parameters, fields, [theta, dim as f64], context_length)?,
            None => RopeScaling::None,
        };
        let attention_factor = match parameters {
            Some(parameters) => attention_factor(&scaling, parameters)?,
            None => 1.0,
        };
        if matches!(scaling, RopeScaling::Dynamic { .. }) && dim <= 2 {
            return Err(fields.error("head_dim", "is 2, expected more for rope type `dynamic`"));
        }
        // `yarn_apply_mscale` of transformers' `modeling_deepseek_v2.py`, of any kind of rope that has a factor.
        let score_mscale = match (scaling.factor(), parameters) {
            (Some(factor), Some(parameters)) => {
                yarn_mscale(factor, parameters.optional_number("mscale_all_dim")?.unwrap_or(0.0))
            }
            _ => 1.0,
        };
        let facts = Self { theta, dim, layout, in_float32: false, scaling, attention_factor, score_mscale };
        // Checked in float32, as they are used: a frequency of 0 would not rotate.
        let attention_factor = attention_factor as f32;
        if !facts.inverse_frequencies().iter().all(|frequency| frequency.is_normal())
            || !attention_factor.is_normal()
        {
            return Err(fields.error(
                "rope_parameters",
                "gives frequencies that are 0 or not finite in float32; check theta, factor and the betas",
            ));
        }
        check_consistent(fields, theta)?;
        Ok(facts)
    }
}

/// Refuses `rope_parameters` that contradict `rope_scaling`, which takes precedence.
fn check_consistent(fields: Fields<'_>, theta: f64) -> Result<(), CheckpointError> {
    let (Some(scaling), Some(parameters)) =
        (fields.object("rope_scaling")?, fields.object("rope_parameters")?)
    else {
        return Ok(());
    };
    let differs = |name: &str| {
        parameters.error(name, "differs from rope_scaling, which takes precedence; remove one of the two")
    };
    if let Some(other) = parameters.optional_positive("rope_theta")?
        && other != theta
    {
        return Err(differs("rope_theta"));
    }
    let kind_field = parameters.either("rope_type", "type")?;
    let kind = |fields: Fields<'_>| match (fields.text("rope_type")?, fields.text("type")?) {
        (Some(kind), _) | (None, Some(kind)) => Ok::<_, CheckpointError>(kind.to_owned()),
        (None, None) => Ok("default".to_owned()),
    };
    if kind(scaling)? != kind(parameters)? {
        return Err(differs(kind_field));
    }
    let besides = |name: &&str| !["rope_type", "type", "rope_theta"].contains(name);
    for name in scaling.keys().chain(parameters.keys()).filter(besides) {
        let same = match (scaling.get(name), parameters.get(name)) {
            (Some(one), Some(two)) => same(one, two),
            (one, two) => one.is_none() && two.is_none(),
        };
        if !same {
            return Err(differs(name));
        }
    }
    Ok(())
}

/// Reads the rope type and its parameters.
fn parse_scaling(
    scaling: Fields<'_>,
    fields: Fields<'_>,
    [theta, dim]: [f64; 2],
    context_length: usize,
) -> Result<RopeScaling, CheckpointError> {
    for key in scaling.keys() {
        if matches!(key, "full_attention" | "sliding_attention" | "chunked_attention") {
            return Err(scaling.unsupported(key, "rope parameters per layer type are not supported"));
        }
    }
    let kind_field = scaling.either("rope_type", "type")?;
    let kind = scaling.text(kind_field)?.unwrap_or("default");
    if let Some(known) = known_keys(kind) {
        let known = |key: &str| EVERY_KIND.contains(&key) || known.contains(&key);
        if let Some(key) = scaling.keys().find(|key| !known(key) && scaling.get(key).is_some()) {
            let message = format!("unknown for rope type `{kind}`");
            return Err(scaling.unsupported(key, message));
        }
    }
    let required = |name: &str| {
        scaling
            .optional_positive(name)?
            .ok_or_else(|| scaling.error(name, format!("is missing, rope type `{kind}` needs it")))
    };
    // A field of the config takes precedence over one of the parameters (`standardize_rope_params`).
    let original = || -> Result<usize, CheckpointError> {
        let name = "original_max_position_embeddings";
        Ok(match fields.optional_size(name)? {
            Some(original) => original,
            None => scaling.optional_size(name)?.unwrap_or(context_length),
        })
    };
    match kind {
        "default" => Ok(RopeScaling::None),
        "linear" => Ok(RopeScaling::Linear { factor: required("factor")? }),
        "dynamic" => Ok(RopeScaling::Dynamic { factor: required("factor")? }),
        "llama3" => {
            let (low, high) = (required("low_freq_factor")?, required("high_freq_factor")?);
            if high <= low {
                return Err(scaling.error(
                    "high_freq_factor",
                    format!("is {high}, expected more than low_freq_factor ({low})"),
                ));
            }
            Ok(RopeScaling::Llama3 { factor: required("factor")?, low, high, original: original()? })
        }
        "yarn" => {
            if theta <= 1.0 {
                return Err(fields.error("rope_theta", format!("is {theta}, expected more than 1 for yarn")));
            }
            let original = original()?;
            let factor = match scaling.optional_positive("factor")? {
                Some(factor) => factor,
                None if scaling.is_null("factor") => context_length as f64 / original as f64,
                None => {
                    return Err(scaling.error("factor", "is missing, rope type `yarn` needs it"));
                }
            };
            Ok(RopeScaling::Yarn {
                factor,
                beta_fast: scaling.optional_positive("beta_fast")?.unwrap_or(32.0),
                beta_slow: scaling.optional_positive("beta_slow")?.unwrap_or(1.0),
                original,
                truncate: scaling.flag("truncate", true)?,
            })
        }
        "longrope" => {
            let original = original()?;
            Ok(RopeScaling::Long {
                short: divisors(scaling, "short_factor", dim / 2.0)?,
                long: divisors(scaling, "long_factor", dim / 2.0)?,
                long_attention_factor: None,
                factor: scaling
                    .optional_positive("factor")?
                    .unwrap_or(context_length as f64 / original as f64),
                original,
            })
        }
        other => Err(scaling.unsupported(
            kind_field,
            format!("rope type `{other}`; supported are default, linear, dynamic, llama3, yarn and longrope"),
        )),
    }
}

/// Keys that parameters of every rope type may have.
const EVERY_KIND: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// Returns the other keys of a rope type. `mscale_all_dim` scales the scores of latent attention for any type with a factor.
fn known_keys(kind: &str) -> Option<&'static [&'static str]> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    const ALL_DIM: &str = "mscale_all_dim";
    Some(match kind {
        // Unused, but written by older versions of transformers.
        "default" => &[ORIGINAL],
        "linear" | "dynamic" => &["factor", ORIGINAL, ALL_DIM],
        "llama3" => &["factor", "low_freq_factor", "high_freq_factor", ORIGINAL, ALL_DIM],
        "yarn" => {
            &["factor", "attention_factor", "beta_fast", "beta_slow", "mscale", ALL_DIM, ORIGINAL, "truncate"]
        }
        "longrope" => &[
            "factor",
            "attention_factor",
            "short_factor",
            "long_factor",
            "short_mscale",
            "long_mscale",
            ORIGINAL,
            ALL_DIM,
        ],
        _ => return None,
    })
}

/// Reads the divisors of all frequencies.
fn divisors(scaling: Fields<'_>, name: &str, count: f64) -> Result<Vec<f64>, CheckpointError> {
    let Some(list) = scaling.list(name)? else {
        return Err(scaling.error(name, "is missing, rope type `longrope` needs it"));
    };
    let positive = |value: &serde_json::Value| value.as_f64().filter(|divisor| *divisor > 0.0);
    match list.iter().map(positive).collect::<Option<Vec<_>>>() {
        Some(divisors) if divisors.len() as f64 == count => Ok(divisors),
        _ => Err(scaling.error(name, format!("expected {count} numbers above 0"))),
    }
}

/// Returns the factor of cosine and sine.
fn attention_factor(scaling: &RopeScaling, parameters: Fields<'_>) -> Result<f64, CheckpointError> {
    let given = || parameters.optional_positive("attention_factor");
    Ok(match *scaling {
        RopeScaling::Yarn { factor, .. } => {
            let mscale = parameters.optional_number("mscale")?.unwrap_or(0.0);
            let all_dim = parameters.optional_number("mscale_all_dim")?.unwrap_or(0.0);
            match given()? {
                Some(given) => given,
                None if mscale != 0.0 && all_dim != 0.0 => {
                    yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
                }
                None => yarn_mscale(factor, 1.0),
            }
        }
        RopeScaling::Long { factor, original, .. } => match given()? {
            Some(given) => given,
            None if factor <= 1.0 => 1.0,
            None => (1.0 + factor.ln() / (original as f64).ln()).sqrt(),
        },
        _ => 1.0,
    })
}

/// Computes `get_mscale` of YaRN in transformers.
fn yarn_mscale(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}

/// Scales one inverse frequency for Llama 3.1 (`_compute_llama3_parameters`). As in torch, a scalar divided by a tensor is
/// computed as the tensor's reciprocal times the scalar.
fn llama3(inv: f32, factor: f64, low: f64, high: f64, original: f64) -> f32 {
    let wavelength = (1.0 / inv) * (2.0 * PI) as f32;
    let low_wavelength = (original / low) as f32;
    let high_wavelength = (original / high) as f32;
    if wavelength > low_wavelength {
        return inv / factor as f32;
    }
    if wavelength < high_wavelength {
        return inv;
    }
    let smooth = ((1.0 / wavelength) * original as f32 - low as f32) / (high - low) as f32;
    (1.0 - smooth) * inv / factor as f32 + smooth * inv
}
