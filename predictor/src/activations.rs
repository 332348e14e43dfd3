//! Expert activations of a request, as a main function reports them at the end of an answer.
//!
//! Only counts: nothing of the prompt's or the answer's text. The text form is a header's value. `2.` stands before
//! layers, experts, positions and counts as LEB128 numbers, packed. Where that is too long for a header, `3.` stands
//! before the positions and the shares of each phase, as exact as there is room for.

use crate::error::PredictError;
use crate::packed::{pack, unpack};
use crate::phase::{ByPhase, Phase};
use crate::record::RecordHeader;
use crate::shares::Shares;

/// Prefix of the text form with all counts.
const COUNTS: &str = "2.";
/// Prefix of the text form with shares.
const SHARES: &str = "3.";
/// Most bytes of a number.
const LONGEST_NUMBER: usize = 9;
/// Bytes of the text form, at most: trailers of HTTP/1.1 end at 16 KiB for common servers, and others share them.
pub const MAX_ACTIVATIONS_BYTES: usize = 12 << 10;

/// Assignments of tokens to experts in both phases of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Activations {
    experts: usize,
    /// Positions that went through the model: those of the prompt that were kept from earlier requests did not.
    positions: ByPhase<u64>,
    /// [layers, experts] row after row.
    counts: ByPhase<Vec<u32>>,
}

impl Activations {
    /// Returns empty counts, for a model with so many layers with experts, and experts in each.
    #[must_use]
    pub fn new(layers: usize, experts: usize) -> Self {
        Self {
            experts,
            positions: ByPhase::both(0),
            counts: ByPhase::both(vec![0; layers.saturating_mul(experts)]),
        }
    }

    /// A position went through the model: `selected` has its experts, layer after layer. What the model does not have
    /// is left out.
    pub fn count<'a>(&mut self, phase: Phase, selected: impl Iterator<Item = &'a [(u32, f32)]>) {
        *self.positions.of_mut(phase) += 1;
        let rows = self.counts.of_mut(phase).chunks_exact_mut(self.experts.max(1));
        for (row, selected) in rows.zip(selected) {
            for (expert, _) in selected {
                if let Some(count) = row.get_mut(*expert as usize) {
                    *count = count.saturating_add(1);
                }
            }
        }
    }

    /// Clears the counts: the request starts over.
    pub fn restart(&mut self) {
        self.positions = ByPhase::both(0);
        Phase::ALL.into_iter().for_each(|phase| self.counts.of_mut(phase).fill(0));
    }

    /// Takes those of another prompt of the same request in.
    pub fn add(&mut self, other: &Self) {
        for phase in Phase::ALL {
            *self.positions.of_mut(phase) += other.positions.of(phase);
            let pairs = self.counts.of_mut(phase).iter_mut().zip(other.counts.of(phase));
            pairs.for_each(|(count, other)| *count = count.saturating_add(*other));
        }
    }

    /// Positions that went through the model in a phase.
    #[must_use]
    pub fn positions(&self, phase: Phase) -> u64 {
        *self.positions.of(phase)
    }

    /// Assignments in a phase, [layers, experts] row after row.
    #[must_use]
    pub fn counts(&self, phase: Phase) -> &[u32] {
        self.counts.of(phase)
    }

    /// The shares of a phase; `None` where nothing went through the model in it.
    ///
    /// # Errors
    /// There are no experts.
    pub fn shares(&self, phase: Phase) -> Result<Option<Shares>, PredictError> {
        let some = self.positions(phase) > 0;
        some.then(|| Shares::from_counts(self.experts, self.counts(phase))).transpose()
    }

    /// The text form; `None` where not even shares fit into [`MAX_ACTIVATIONS_BYTES`].
    #[must_use]
    pub fn to_text(&self) -> Option<String> {
        let layers = self.counts.prefill.len() / self.experts.max(1);
        let mut bytes = Vec::with_capacity(2 * self.counts.prefill.len() + 16);
        [layers as u64, self.experts as u64].into_iter().for_each(|number| push(&mut bytes, number));
        for phase in Phase::ALL {
            push(&mut bytes, self.positions(phase));
            // A phase that was empty has no counts.
            if self.positions(phase) > 0 {
                self.counts(phase).iter().for_each(|count| push(&mut bytes, u64::from(*count)));
            }
        }
        let text = format!("{COUNTS}{}", pack(&bytes));
        if text.len() <= MAX_ACTIVATIONS_BYTES { Some(text) } else { self.shares_to_text() }
    }

    /// Positions and shares of both phases, half of the room for each.
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
        Some(format!("{SHARES}{prefill}.{decode}"))
    }

    /// Reads the text form of the model that `header` names. Counts that cannot be are refused: every position has
    /// `top_k` experts in every layer, so that no request weighs more than its tokens. Where the text has shares, the
    /// counts are those of the same positions, rounded.
    ///
    /// # Errors
    /// [`PredictError::Activations`] says what is wrong.
    pub fn from_text(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let wrong = |message: &str| PredictError::Activations(message.to_owned());
        if text.len() > MAX_ACTIVATIONS_BYTES {
            return Err(wrong("too long for a header"));
        }
        match (text.strip_prefix(COUNTS), text.strip_prefix(SHARES)) {
            (Some(counts), _) => Self::from_counts(counts, header),
            (_, Some(shares)) => Self::from_shares(shares, header),
            _ => Err(wrong("version mismatch; update the sender or this program")),
        }
    }

    fn from_counts(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let wrong = |message: &str| PredictError::Activations(message.to_owned());
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let most = LONGEST_NUMBER * (2 * layers * experts + 4);
        let bytes = unpack(text, most).ok_or_else(|| wrong("invalid encoding, or of a larger model"))?;
        let mut rest = bytes.as_slice();
        let mut number = || pull(&mut rest).ok_or_else(|| wrong("truncated, or a number is too large"));
        if (number()?, number()?) != (layers as u64, experts as u64) {
            return Err(wrong("of a model with other layers or experts"));
        }
        let mut read = Self::new(layers, experts);
        for phase in Phase::ALL {
            let positions = number()?;
            *read.positions.of_mut(phase) = positions;
            if positions == 0 {
                continue;
            }
            let expected = positions.checked_mul(u64::from(header.top_k));
            for row in read.counts.of_mut(phase).chunks_exact_mut(experts) {
                for count in row.iter_mut() {
                    *count = u32::try_from(number()?).map_err(|_| wrong("count too large"))?;
                }
                if Some(row.iter().map(|count| u64::from(*count)).sum()) != expected {
                    return Err(wrong("expected top-k counts for every position of a layer"));
                }
            }
        }
        match rest {
            [] => Ok(read),
            _ => Err(wrong("unexpected data at the end")),
        }
    }

    /// Counts that are near what they were.
    fn from_shares(text: &str, header: &RecordHeader) -> Result<Self, PredictError> {
        let wrong = |message: &str| PredictError::Activations(message.to_owned());
        let mut parts = text.split('.');
        let mut part = || parts.next().ok_or_else(|| wrong("truncated"));
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let mut read = Self::new(layers, experts);
        for phase in Phase::ALL {
            let positions: u32 = part()?.parse().map_err(|_| wrong("invalid number of positions"))?;
            let shares = part()?;
            *read.positions.of_mut(phase) = u64::from(positions);
            if positions == 0 {
                continue;
            }
            let shares = Shares::from_text(shares, layers, experts)?;
            let pairs = f64::from(positions) * f64::from(header.top_k);
            let counts = read.counts.of_mut(phase).iter_mut().zip(shares.values());
            counts.for_each(|(count, share)| *count = (f64::from(*share) * pairs).round() as u32);
        }
        match parts.next() {
            None => Ok(read),
            Some(_) => Err(wrong("unexpected data at the end")),
        }
    }
}

fn push(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn pull(bytes: &mut &[u8]) -> Option<u64> {
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
    fn the_text_form_comes_back() {
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
    fn where_counts_are_too_long_for_a_header_shares_are_told() {
        // As many experts as the largest models have.
        let header = RecordHeader { layers: (0..58).collect(), experts: 256, top_k: 8, ..header() };
        let mut activations = Activations::new(58, 256);
        let (mut selected, mut number) = (vec![[(0, 1.0); 8]; 58], 1_u64);
        for position in 0..3000 {
            for (layer, selected) in selected.iter_mut().enumerate() {
                for (rank, place) in selected.iter_mut().enumerate() {
                    number = number.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(layer as u64 + 1);
                    // Few are used much.
                    let drawn = (number >> 40) % 1024;
                    place.0 = (drawn * drawn * 32 / (1024 * 1024) + 32 * rank as u64) as u32;
                }
            }
            let phase = if position < 2500 { Phase::Prefill } else { Phase::Decode };
            activations.count(phase, selected.iter().map(|layer| &layer[..]));
        }
        let text = activations.to_text().unwrap();
        assert!(text.starts_with(SHARES) && text.len() <= MAX_ACTIVATIONS_BYTES, "{}", text.len());
        let read = Activations::from_text(&text, &header).unwrap();
        for phase in Phase::ALL {
            assert_eq!(read.positions(phase), activations.positions(phase));
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
    fn what_is_too_long_even_so_is_not_told() {
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
    fn counts_that_cannot_be_are_refused() {
        // One position that claims three experts of the first layer.
        let forged = packed(&[2, 3, 1, 1, 1, 1, 1, 1, 0, 0]);
        assert!(Activations::from_text(&forged, &header()).is_err());
        let other = RecordHeader { experts: 4, ..header() };
        assert!(Activations::from_text(&some().to_text().unwrap(), &other).is_err());
        // What a version before wrote.
        assert!(Activations::from_text("AQIDAAA", &header()).is_err());
    }

    fn packed(bytes: &[u8]) -> String {
        format!("{COUNTS}{}", pack(bytes))
    }

    proptest! {
        /// Whatever arrives, reading ends, and what is taken has the form of the model.
        #[test]
        fn any_bytes_are_read(bytes in proptest::collection::vec(any::<u8>(), 0..40), valid in any::<bool>()) {
            let mut bytes = bytes;
            if valid {
                bytes.splice(0..0, [2, 3]);
            }
            if let Ok(read) = Activations::from_text(&packed(&bytes), &header()) {
                for phase in Phase::ALL {
                    let sum: u64 = read.counts(phase).iter().map(|count| u64::from(*count)).sum();
                    prop_assert_eq!(sum, read.positions(phase) * 4);
                }
            }
        }
    }
}
