//! Rotary position embedding: inverse frequencies in the float32 steps of transformers 5.17
//! (`modeling_rope_utils.py`), so that angles agree to the last bits.

use std::f64::consts::PI;

use crate::error::CheckpointError;
use crate::fields::{Fields, same};

/// More elements than any head has, and few enough to list their frequencies.
const HEAD_LIMIT: usize = 1 << 16;

/// How the elements of a head pair up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum RopeLayout {
    /// Element i turns with element i + dim / 2 (`rotate_half`).
    Halves,
    /// Element 2 i turns with element 2 i + 1 (complex pairs).
    Interleaved,
}

/// Change of the frequencies for a longer context.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Nothing.
    None,
    /// All frequencies divided by a factor.
    Linear {
        /// The divisor.
        factor: f64,
    },
    /// A base that grows with the context beyond the model's own ("NTK-aware"). No such context is
    /// served, so that the frequencies are the plain ones.
    Dynamic {
        /// How fast it grows.
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, a ramp between them (Llama 3.1).
    Llama3 {
        /// The divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original` / `low` are low frequencies.
        low: f64,
        /// Wavelengths below `original` / `high` are high frequencies.
        high: f64,
        /// Context length of the training.
        original: usize,
    },
    /// Interpolation by parts (YaRN, arXiv 2309.00071).
    Yarn {
        /// The divisor of the interpolated part.
        factor: f64,
        /// Rotations above which a dimension is kept.
        beta_fast: f64,
        /// Rotations below which a dimension is interpolated.
        beta_slow: f64,
        /// Context length of the training.
        original: usize,
        /// Set if the ramp's ends are whole dimensions.
        truncate: bool,
    },
    /// A divisor of each frequency (LongRoPE, arXiv 2402.13753). Beyond `original` positions the divisors
    /// would be others, of all positions; such a context is served with those alone, where it is asked for
    /// ([`RopeFacts::for_long_texts`]).
    Long {
        /// The divisors, one for each frequency.
        short: Vec<f64>,
        /// Divisors beyond `original` positions.
        long: Vec<f64>,
        /// Factor of cosine and sine beyond `original` positions.
        long_attention_factor: Option<f64>,
        /// By how much the context is longer than that of the training.
        factor: f64,
        /// Context length of the training.
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
    /// Base of the frequencies.
    pub theta: f64,
    /// Elements of a head that are rotated, even.
    pub dim: usize,
    /// How they pair up.
    pub layout: RopeLayout,
    /// Set if cosines, sines and rotations are float32 whatever the compute dtype (DeepSeek-V2); otherwise each is
    /// rounded to it.
    pub in_float32: bool,
    /// Change of the frequencies.
    pub scaling: RopeScaling,
    /// Factor of cosine and sine, in float32, before they are rounded.
    pub attention_factor: f64,
    /// m of YaRN for the scores of multi-head latent attention, which multiplies them with m^2; 1 where
    /// the config has no `mscale_all_dim`.
    pub score_mscale: f64,
}

impl RopeFacts {
    /// Positions that the rotation reaches in a model whose config states `stated`, as vLLM's
    /// `_get_and_verify_max_len` has it: YaRN multiplies those of the training, linear scaling those stated. The
    /// frequencies of both are the same for any length of text. Configs of the other kinds state what is reached;
    /// those of type dynamic would have other frequencies beyond it.
    pub(crate) fn reach(&self, stated: usize) -> f64 {
        match self.scaling {
            RopeScaling::Yarn { factor, original, .. } => original as f64 * factor,
            RopeScaling::Linear { factor } => stated as f64 * factor,
            RopeScaling::None
            | RopeScaling::Dynamic { .. }
            | RopeScaling::Llama3 { .. }
            | RopeScaling::Long { .. } => stated as f64,
        }
    }

    /// The `dim` / 2 inverse frequencies, radians per position.
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

    /// Returns the same rotation with longrope's divisors and factor for long texts, for every one of `positions`;
    /// `None` for other kinds.
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

    /// theta ^ (2 pair / dim) as a float32 power of float32 operands.
    fn power(&self, pair: usize) -> f32 {
        let exponent = (2 * pair) as f32 / self.dim as f32;
        // Correctly rounded: torch's own float32 power is within one unit of it.
        f64::from(self.theta as f32).powf(f64::from(exponent)) as f32
    }

    /// The dimensions between which yarn's ramp runs (`find_correction_range`).
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

    /// Where the config has its rope: `rope_scaling or rope_parameters`, as transformers has it.
    pub(crate) fn parameters(fields: Fields<'_>) -> Result<Option<Fields<'_>>, CheckpointError> {
        match fields.object("rope_scaling")? {
            Some(scaling) => Ok(Some(scaling)),
            None => fields.object("rope_parameters"),
        }
    }

    /// Reads either config style. `base` is the family's default theta, `dim` what is rotated.
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
        // transformers: theta inside before theta outside.
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
        // As they are computed with, in float32: a frequency of 0 would turn nothing.
        let attention_factor = attention_factor as f32;
        if !facts.inverse_frequencies().iter().all(|frequency| frequency.is_normal())
            || !attention_factor.is_normal()
        {
            return Err(fields.error(
                "rope_parameters",
                "gives frequencies that are 0 or not finite in float32; check theta, factor and the betas",
            ));
        }
        one_of_two(fields, theta)?;
        Ok(facts)
    }
}

/// Refuses `rope_parameters` that say something else than the `rope_scaling` beside them, which was read.
fn one_of_two(fields: Fields<'_>, theta: f64) -> Result<(), CheckpointError> {
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
    // A field at the top level wins over the one inside (`standardize_rope_params`).
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

/// Keys that rope parameters of every kind may have.
const EVERY_KIND: [&str; 4] = ["rope_type", "type", "rope_theta", "partial_rotary_factor"];

/// The keys that a kind has besides; `mscale_all_dim` scales the scores of latent attention with any factor.
fn known_keys(kind: &str) -> Option<&'static [&'static str]> {
    const ORIGINAL: &str = "original_max_position_embeddings";
    const ALL_DIM: &str = "mscale_all_dim";
    Some(match kind {
        // Not of use, but what older versions of transformers write beside it.
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

/// The divisors of all frequencies.
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

/// `get_mscale` of transformers' yarn.
fn yarn_mscale(scale: f64, mscale: f64) -> f64 {
    if scale <= 1.0 { 1.0 } else { 0.1 * mscale * scale.ln() + 1.0 }
}

/// One frequency of Llama 3.1 (`_compute_llama3_parameters`). A scalar divided by a tensor is the
/// tensor's reciprocal times the scalar in torch, and so here.
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
