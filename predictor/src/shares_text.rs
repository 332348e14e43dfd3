//! Text form of shares, in which gateways report usage to the operator.
//!
//! Each share is quantised as its distance from an equal share in octaves (factors of two), in steps of an eighth. If
//! the text is too long, the steps are a quarter, a half or a whole octave. The levels are one byte each before
//! packing.

use crate::error::PredictError;
use crate::packed_text::{pack, unpack};
use crate::shares::UsageShares;

/// Format version.
const VERSION: u8 = 1;
/// Steps per octave, the finest first.
const STEPS: [u8; 4] = [8, 4, 2, 1];
/// Range below an equal share, in octaves. Smaller shares share one level.
const OCTAVES_BELOW: f32 = 8.0;
/// Range above an equal share, in octaves: enough for the experts of any model.
const OCTAVES_ABOVE: f32 = 16.0;

impl UsageShares {
    /// Encodes the shares as exactly as `max_bytes` allow. Returns `None` if not even whole octaves fit.
    #[must_use]
    pub fn to_text(&self, max_bytes: usize) -> Option<String> {
        let equal = 1.0 / self.experts() as f32;
        STEPS.into_iter().find_map(|steps| {
            let level = |share: &f32| level(share / equal, steps);
            let plain: Vec<u8> =
                [VERSION, steps].into_iter().chain(self.values().iter().map(level)).collect();
            let text = pack(&plain);
            (text.len() <= max_bytes).then_some(text)
        })
    }

    /// Parses a text from [`Self::to_text`] for a model with `layers` layers of `experts` experts.
    ///
    /// # Errors
    /// [`PredictError::Text`]: the text is invalid, or of a model with another shape.
    pub fn from_text(text: &str, layers: usize, experts: usize) -> Result<Self, PredictError> {
        let invalid = |message: &str| PredictError::Text(message.to_owned());
        let expected = layers.saturating_mul(experts).saturating_add(2);
        let plain =
            unpack(text, expected).ok_or_else(|| invalid("invalid encoding, or of a larger model"))?;
        let [VERSION, steps, levels @ ..] = plain.as_slice() else {
            return Err(invalid("version mismatch; update the writer or this program"));
        };
        if !STEPS.contains(steps) {
            return Err(invalid("unknown step size"));
        }
        if plain.len() != expected {
            return Err(invalid("of a model with other layers or experts"));
        }
        let weight = |level: &u8| match level {
            0 => (-OCTAVES_BELOW - 1.0).exp2(),
            // Limits the value: a single byte must not make a layer's sum infinite.
            level => (f32::from(level - 1) / f32::from(*steps) - OCTAVES_BELOW).min(OCTAVES_ABOVE).exp2(),
        };
        Self::from_weights(experts, levels.iter().map(weight).collect())
    }
}

/// Quantises a share of `ratio` times an equal one.
fn level(ratio: f32, steps: u8) -> u8 {
    let octaves = ratio.log2();
    if octaves.is_nan() || octaves < -OCTAVES_BELOW {
        return 0;
    }
    // At most 24 octaves in eighths, which is below 256.
    1 + ((octaves.min(OCTAVES_ABOVE) + OCTAVES_BELOW) * f32::from(steps)).round() as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::divergence;
    use proptest::prelude::*;

    #[test]
    fn short_text_holds_coarser_shares() {
        // 58 layers of 256 experts with the uneven usage of a real router.
        let drawn = |number: &u64| Some(number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1));
        let numbers = std::iter::successors(Some(7_u64), drawn).take(58 * 256);
        let weights = numbers.map(|number| (4.0 * (number >> 40) as f32 / (1 << 24) as f32).exp()).collect();
        let shares = UsageShares::from_weights(256, weights).unwrap();
        let lengths = [1 << 20, 12 << 10, 8 << 10].map(|most| {
            let text = shares.to_text(most).unwrap();
            let read = UsageShares::from_text(&text, 58, 256).unwrap();
            assert!(divergence::mean(&read, &shares) < 0.01, "{most}");
            text.len()
        });
        assert!(lengths.is_sorted_by(|longer, shorter| longer > shorter), "{lengths:?}");
        assert_eq!(shares.to_text(100), None);
    }

    #[test]
    fn invalid_shares_text_is_refused() {
        let text = UsageShares::uniform(2, 3).to_text(100).unwrap();
        assert!(UsageShares::from_text(&text, 2, 3).is_ok());
        for (text, layers, experts) in
            [(text.as_str(), 2, 4), (&text, 3, 3), ("~", 2, 3), ("", 2, 3), ("AAAA", 2, 3)]
        {
            assert!(
                matches!(UsageShares::from_text(text, layers, experts), Err(PredictError::Text(_))),
                "{text}"
            );
        }
    }

    proptest! {
        /// Parsed shares are within half a step of the originals, and a second round trip changes nothing.
        #[test]
        fn shares_text_parses_back_within_half_a_step(weights in proptest::collection::vec(0.0_f32..1.0, 4 * 8)) {
            let shares = UsageShares::from_weights(8, weights).unwrap();
            let read = UsageShares::from_text(&shares.to_text(1000).unwrap(), 4, 8).unwrap();
            for (row, read) in shares.rows().zip(read.rows()) {
                for (share, read) in row.iter().zip(read) {
                    prop_assert!((share - read).abs() <= 0.1 * share + 0.002, "{} {}", share, read);
                }
            }
            let again = UsageShares::from_text(&read.to_text(1000).unwrap(), 4, 8).unwrap();
            prop_assert!(divergence::mean(&read, &again) < 1e-3);
        }

        /// Parsing arbitrary text terminates, and a result has valid shares.
        #[test]
        fn arbitrary_text_is_refused_or_parsed_as_shares(text in "[A-Za-z0-9+/]{0,60}", levels in proptest::collection::vec(any::<u8>(), 6)) {
            let plain: Vec<u8> = [1, 8].into_iter().chain(levels).collect();
            for text in [text, pack(&plain)] {
                if let Ok(read) = UsageShares::from_text(&text, 2, 3) {
                    for row in read.rows() {
                        prop_assert!((row.iter().sum::<f32>() - 1.0).abs() < 1e-4);
                    }
                }
            }
        }
    }
}
