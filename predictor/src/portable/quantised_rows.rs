//! Quantised coordinates of all tokens of a vocabulary, one byte each.

use crate::error::PredictError;
use crate::vector::add_scaled;
use bytes::Bytes;
use rayon::prelude::*;

/// Quantisation steps on either side of zero.
const STEPS: f32 = 127.0;

/// Rows of 8-bit numbers, each row with its own step.
#[derive(Debug, Clone)]
pub(super) struct QuantisedRows {
    width: usize,
    /// Signed codes, [tokens, width].
    codes: Bytes,
    /// Step of each row.
    steps: Vec<f32>,
}

impl QuantisedRows {
    /// Returns the size of a row of `width` numbers with its step, in bytes.
    pub(super) fn row_bytes(width: usize) -> usize {
        width + size_of::<f32>()
    }

    /// Quantises `rows`, [tokens, width].
    pub(super) fn quantise(width: usize, rows: &[f32]) -> Self {
        let coded = rows.par_chunks_exact(width.max(1)).map(|row| {
            let step = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs())) / STEPS;
            // The lower bound covers a row of zeros, whose step is 0. The cast saturates.
            let code = |value: &f32| (value / step.max(f32::MIN_POSITIVE)).round() as i8 as u8;
            (step, row.iter().map(code).collect::<Vec<u8>>())
        });
        let (steps, codes): (Vec<f32>, Vec<Vec<u8>>) = coded.unzip();
        Self { width, codes: codes.concat().into(), steps }
    }

    /// Restores saved codes.
    ///
    /// # Errors
    /// The numbers of steps and rows differ, or a step is not finite.
    pub(super) fn from_parts(width: usize, codes: Bytes, steps: Vec<f32>) -> Result<Self, PredictError> {
        PredictError::require_size("`tokens.coordinates`", steps.len().saturating_mul(width), codes.len())?;
        match steps.iter().position(|step| !step.is_finite()) {
            Some(row) => Err(PredictError::NotFinite { what: "`tokens.steps`", row }),
            None => Ok(Self { width, codes, steps }),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn codes(&self) -> &[u8] {
        &self.codes
    }

    pub(super) fn steps(&self) -> &[f32] {
        &self.steps
    }

    pub(super) fn bytes(&self) -> u64 {
        (self.codes.len() + size_of_val(self.steps.as_slice())) as u64
    }

    /// Returns the mean of the rows of `tokens`, which must be in the vocabulary.
    pub(super) fn mean(&self, tokens: &[u32]) -> Vec<f32> {
        let (mut mean, mut row) = (vec![0.0; self.width], vec![0.0; self.width]);
        for token in tokens.iter().map(|token| *token as usize) {
            let codes = self.codes.get(token * self.width..(token + 1) * self.width).unwrap_or_default();
            row.iter_mut().zip(codes).for_each(|(value, code)| *value = f32::from(*code as i8));
            let step = self.steps.get(token).copied().unwrap_or(0.0);
            add_scaled(&mut mean, step / tokens.len() as f32, &row);
        }
        mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_rows_are_within_half_a_step() {
        let rows = [0.5, -1.0, 0.25, 0.0, 0.0, 0.0, 3e-9, 1e-9, -2e-9];
        let codes = QuantisedRows::quantise(3, &rows);
        for (token, row) in (0..).zip(rows.chunks(3)) {
            let most = row.iter().fold(0.0_f32, |largest, value| largest.max(value.abs()));
            for (found, value) in codes.mean(&[token]).iter().zip(row) {
                assert!((found - value).abs() <= 0.51 * most / STEPS, "{found} {value}");
            }
        }
        let mean = codes.mean(&[0, 1]);
        assert!((mean[1] + 0.5).abs() < 0.01, "{mean:?}");
    }

    #[test]
    fn codes_with_a_wrong_number_of_steps_are_refused() {
        assert!(QuantisedRows::from_parts(2, Bytes::from_static(&[1, 2, 3, 4]), vec![1.0, 2.0]).is_ok());
        assert!(QuantisedRows::from_parts(2, Bytes::from_static(&[1, 2, 3]), vec![1.0, 2.0]).is_err());
        assert!(QuantisedRows::from_parts(2, Bytes::from_static(&[1, 2]), vec![f32::NAN]).is_err());
    }
}
