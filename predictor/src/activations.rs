//! Activations: expert usage of one request, as a main function reports it at the end of an answer.
//!
//! Activations have only counts and no text. The text form is the value of an HTTP header: `2.`, then layers,
//! experts, positions and counts as LEB128 numbers, packed. If that is too long for a header, the text is `3.`, then
//! the positions and the shares of each phase, as exact as fits.

use crate::error::PredictError;
use crate::packed_text::{pack, unpack};
use crate::phase::{ByPhase, Phase};
use crate::record::RecordHeader;
use crate::shares::UsageShares;

/// Prefix of the text form with counts.
const COUNTS_PREFIX: &str = "2.";
/// Prefix of the text form with shares.
const SHARES_PREFIX: &str = "3.";
/// Largest LEB128 number, in bytes.
const MAX_NUMBER_BYTES: usize = 9;
/// Largest text form, in bytes. Common servers limit HTTP/1.1 trailers to 16 KiB in all.
pub const MAX_ACTIVATIONS_BYTES: usize = 12 << 10;

/// Assignments of tokens to experts in both phases of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activations {
    experts: usize,
    /// Positions that were computed. Positions from the prefix cache were not.
    positions: ByPhase<u64>,
    /// Assignments, [layers, experts].
    counts: ByPhase<Vec<u32>>,
}

impl Activations {
    /// Creates empty counts for a model with `layers` layers of `experts` experts.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self {
            experts,
            positions: ByPhase::both(0),
            counts: ByPhase::both(vec![0; layers.saturating_mul(experts)]),
        }
    }

    /// Counts one computed position. `selected` has its experts, layer by layer. Experts that the model does not have
    /// are ignored.
    pub fn count<'a>(&mut self, phase: Phase, selected: impl Iterator<Item = &'a [(u32, f32)]>) {
        *self.positions.get_mut(phase) += 1;
        let rows = self.counts.get_mut(phase).chunks_exact_mut(self.experts.max(1));
        for (row, selected) in rows.zip(selected) {
            for (expert, _) in selected {
                if let Some(count) = row.get_mut(*expert as usize) {
                    *count = count.saturating_add(1);
                }
            }
        }
    }

    /// Clears the counts of a request that starts over.
    pub fn restart(&mut self) {
        self.positions = ByPhase::both(0);
        Phase::ALL.into_iter().for_each(|phase| self.counts.get_mut(phase).fill(0));
    }

    /// Adds the activations of another prompt of the same request.
    pub fn add(&mut self, other: &Self) {
        for phase in Phase::ALL {
            *self.positions.get_mut(phase) += other.positions.get(phase);
            let pairs = self.counts.get_mut(phase).iter_mut().zip(other.counts.get(phase));
            pairs.for_each(|(count, other)| *count = count.saturating_add(*other));
        }
    }

    /// Returns the number of computed positions of a phase.
    #[must_use]
    pub fn positions(&self, phase: Phase) -> u64 {
        *self.positions.get(phase)
    }

    /// Returns the assignments of a phase, [layers, experts].
    #[must_use]
    pub fn counts(&self, phase: Phase) -> &[u32] {
        self.counts.get(phase)
    }

    /// Returns the shares of a phase. Returns `None` without positions.
    ///
    /// # Errors
    /// The model has no experts.
    pub fn shares(&self, phase: Phase) -> Result<Option<UsageShares>, PredictError> {
        let has_positions = self.positions(phase) > 0;
        has_positions.then(|| UsageShares::from_counts(self.experts, self.counts(phase))).transpose()
    }

    /// Encodes the text form. Returns `None` if not even shares fit into [`MAX_ACTIVATIONS_BYTES`].
    #[must_use]
    pub fn to_text(&self) -> Option<String> {
        let layers = self.counts.prefill.len() / self.experts.max(1);
        let mut bytes = Vec::with_capacity(2 * self.counts.prefill.len() + 16);
        [layers as u64, self.experts as u64].into_iter().for_each(|number| push_leb128(&mut bytes, number));
        for phase in Phase::ALL {
            push_leb128(&mut bytes, self.positions(phase));
            // An empty phase has no counts.
            if self.positions(phase) > 0 {
                self.counts(phase).iter().for_each(|count| push_leb128(&mut bytes, u64::from(*count)));
            }
        }
        let text = format!("{COUNTS_PREFIX}{}", pack(&bytes));
        if text.len() <= MAX_ACTIVATIONS_BYTES { Some(text) } else { self.shares_to_text() }
    }

    /// Encodes positions and shares, with half of the space for each phase.
    fn shares_to_text(&self) -> Option<String> {
        let parts = ByPhase::try_each(|phase| {
            let shares = self.shares(phase).ok().flatten();
            let text = match shares {
                Some(shares) => shares.to_text(MAX_ACTIVATIONS_BYTES / 2 - 32).ok_or(())?,
                None => String::new(),
            };
            Ok::<_, ()>(format!("{}.{text}", self.positions(phase)))
        });
        let ByPhase { prefill, decode } = parts.ok()?;
        Some(format!("{SHARES_PREFIX}{prefill}.{decode}"))
    }

    /// Parses the text form for the model of `header`. Rejects impossible counts: every position has `top_k` experts
    /// in every layer, so that no request weighs more than its tokens. From shares, computes the rounded counts of
    /// the same positions.
    ///
    /// # Errors
    /// [`PredictError::Activations`] names the problem.
    pub fn from_text(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let invalid = |message: &str| PredictError::Activations(message.to_owned());
        if text.len() > MAX_ACTIVATIONS_BYTES {
            return Err(invalid("too long for a header"));
        }
        match (text.strip_prefix(COUNTS_PREFIX), text.strip_prefix(SHARES_PREFIX)) {
            (Some(counts), _) => Self::from_counts(counts, header),
            (_, Some(shares)) => Self::from_shares(shares, header),
            _ => Err(invalid("version mismatch; update the sender or this program")),
        }
    }

    fn from_counts(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let invalid = |message: &str| PredictError::Activations(message.to_owned());
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let limit = MAX_NUMBER_BYTES * (2 * layers * experts + 4);
        let bytes = unpack(text, limit).ok_or_else(|| invalid("invalid encoding, or of a larger model"))?;
        let mut rest = bytes.as_slice();
        let mut number =
            || pull_leb128(&mut rest).ok_or_else(|| invalid("truncated, or a number is too large"));
        if (number()?, number()?) != (layers as u64, experts as u64) {
            return Err(invalid("of a model with other layers or experts"));
        }
        let mut activations = Self::new(layers, experts);
        for phase in Phase::ALL {
            let positions = number()?;
            *activations.positions.get_mut(phase) = positions;
            if positions == 0 {
                continue;
            }
            let expected = positions.checked_mul(u64::from(header.top_k));
            for row in activations.counts.get_mut(phase).chunks_exact_mut(experts) {
                for count in row.iter_mut() {
                    *count = u32::try_from(number()?).map_err(|_| invalid("count too large"))?;
                }
                if Some(row.iter().map(|count| u64::from(*count)).sum()) != expected {
                    return Err(invalid("expected top-k counts for every position of a layer"));
                }
            }
        }
        match rest {
            [] => Ok(activations),
            _ => Err(invalid("unexpected data at the end")),
        }
    }

    /// Parses the form with shares, whose counts are approximate.
    fn from_shares(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let invalid = |message: &str| PredictError::Activations(message.to_owned());
        let mut parts = text.split('.');
        let mut part = || parts.next().ok_or_else(|| invalid("truncated"));
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let mut activations = Self::new(layers, experts);
        for phase in Phase::ALL {
            let positions: u32 = part()?.parse().map_err(|_| invalid("invalid number of positions"))?;
            let shares = part()?;
            *activations.positions.get_mut(phase) = u64::from(positions);
            if positions == 0 {
                continue;
            }
            let shares = UsageShares::from_text(shares, layers, experts)?;
            let pairs = f64::from(positions) * f64::from(header.top_k);
            let counts = activations.counts.get_mut(phase).iter_mut().zip(shares.values());
            counts.for_each(|(count, share)| *count = (f64::from(*share) * pairs).round() as u32);
        }
        match parts.next() {
            None => Ok(activations),
            Some(_) => Err(invalid("unexpected data at the end")),
        }
    }
}

fn push_leb128(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn pull_leb128(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0_u64;
    for shift in (0..63).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        number |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(number);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn header() -> RecordHeader {
        RecordHeader {
            model: "ab".to_owned(),
            layers: vec![1, 2],
            experts: 3,
            top_k: 2,
            dtype: "float32".to_owned(),
            tokens: false,
        }
    }

    fn some() -> Activations {
        let mut activations = Activations::new(2, 3);
        for position in 0..200 {
            let layer: [&[(u32, f32)]; 2] = [&[(0, 0.5), (1, 0.5)], &[(position % 2, 1.0), (2, 0.0)]];
            activations.count(Phase::Prefill, layer.into_iter());
        }
        activations
    }

    #[test]
    fn activations_text_parses_back() {
        let mut activations = some();
        let text = activations.to_text().unwrap();
        assert_eq!(Activations::from_text(&text, &header()).unwrap(), activations);
        assert_eq!(activations.shares(Phase::Decode).unwrap(), None);
        activations.count(Phase::Decode, [&[(0, 1.0), (2, 1.0)][..], &[(1, 1.0), (2, 1.0)]].into_iter());
        activations.add(&activations.clone());
        assert_eq!(activations.positions(Phase::Prefill), 400);
        assert_eq!(activations.counts(Phase::Decode), [2, 0, 2, 0, 2, 2]);
        let text = activations.to_text().unwrap();
        assert_eq!(Activations::from_text(&text, &header()).unwrap(), activations);
    }

    #[test]
    fn long_counts_are_reported_as_shares() {
        // The number of experts of the largest models.
        let header = RecordHeader { layers: (0..58).collect(), experts: 256, top_k: 8, ..header() };
        let mut activations = Activations::new(58, 256);
        let (mut selected, mut number) = (vec![[(0, 1.0); 8]; 58], 1_u64);
        for position in 0..3000 {
            for (layer, selected) in selected.iter_mut().enumerate() {
                for (rank, place) in selected.iter_mut().enumerate() {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(layer as u64 + 1);
                    // Few experts are used much.
                    let drawn = (number >> 40) % 1024;
                    place.0 = (drawn * drawn * 32 / (1024 * 1024) + 32 * rank as u64) as u32;
                }
            }
            let phase = if position < 2500 { Phase::Prefill } else { Phase::Decode };
            activations.count(phase, selected.iter().map(|layer| &layer[..]));
        }
        let text = activations.to_text().unwrap();
        assert!(text.starts_with(SHARES_PREFIX) && text.len() <= MAX_ACTIVATIONS_BYTES, "{}", text.len());
        let read = Activations::from_text(&text, &header).unwrap();
        for phase in Phase::ALL {
            assert_eq!(activations.positions(phase), activations.positions(phase));
            let shares = |of: &Activations| of.shares(phase).unwrap().unwrap();
            let apart = crate::divergence::mean(&shares(&read), &shares(&activations));
            assert!(apart < 0.02, "{apart}");
        }
        let longer = format!("{text}.1");
        for text in [&text[..text.len() / 2], &longer, "3.-1.", "3.1.AAAA.0."] {
            assert!(Activations::from_text(text, &header).is_err(), "{text}");
        }
    }

    #[test]
    fn activations_too_long_for_a_header_are_not_reported() {
        let mut activations = Activations::new(400, 1000);
        let mut number = 1_u64;
        for count in activations.counts.prefill.iter_mut() {
            number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            *count = (number >> 50) as u32;
        }
        activations.positions.prefill = 1;
        assert_eq!(activations.to_text(), None);
    }

    #[test]
    fn impossible_counts_are_refused() {
        // One position with three experts in the first layer.
        let forged = packed(&[2, 3, 1, 1, 1, 1, 1, 1, 0, 0]);
        assert!(Activations::from_text(&forged, &header()).is_err());
        let other = RecordHeader { experts: 4, ..header() };
        assert!(Activations::from_text(&some().to_text().unwrap(), &other).is_err());
        // Text of an earlier version.
        assert!(Activations::from_text("AQIDAAA", &header()).is_err());
    }

    fn packed(bytes: &[u8]) -> String {
        format!("{COUNTS_PREFIX}{}", pack(bytes))
    }

    proptest! {
        /// Parsing arbitrary text terminates, and a result has the shape of the model.
        #[test]
        fn arbitrary_text_is_refused_or_parsed_within_the_model(bytes in proptest::collection::vec(any::<u8>(), 0..40), valid in any::<bool>()) {
            let mut bytes = bytes;
            if valid {
                bytes.splice(0..0, [2, 3]);
            }
            if let Ok(activations) = Activations::from_text(&packed(&bytes), &header()) {
                for phase in Phase::ALL {
                    let sum: u64 = activations.counts(phase).iter().map(|count| u64::from(*count)).sum();
                    prop_assert_eq!(sum, activations.positions(phase) * 4);
                }
            }
        }
    }
}
