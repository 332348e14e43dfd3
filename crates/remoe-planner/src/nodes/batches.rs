//! Times of a request as a function of the batch size.

/// Batch sizes at which decode steps are computed. Steps of other batches are interpolated.
pub(super) const BATCHES: [u32; 10] = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

/// Figures at [`BATCHES`].
pub(super) type ByBatch = [f64; BATCHES.len()];

/// Returns the values of `figure` for every index into [`BATCHES`].
pub(super) fn by_batch(figure: impl FnMut(usize) -> f64) -> ByBatch {
    std::array::from_fn(figure)
}

/// Returns the index in [`BATCHES`] of the largest size up to `batch`.
pub(super) fn position(batch: u32) -> usize {
    BATCHES.iter().rposition(|size| *size <= batch).unwrap_or(0)
}

/// Times of a typical request, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct BatchTimes {
    /// Prefill of a request that runs alone.
    pub(super) prefill: f64,
    /// Decode step at each of [`BATCHES`]; zeros if requests have no decode steps.
    pub(super) steps: ByBatch,
}

impl BatchTimes {
    /// Times of 0.
    pub(super) const ZERO: Self = Self { prefill: 0.0, steps: [0.0; BATCHES.len()] };

    /// Returns the seconds of a decode step of a request that runs alone.
    pub(super) fn alone(&self) -> f64 {
        self.steps[0]
    }

    /// Returns the seconds of a decode step of `batch` requests.
    pub(super) fn step(&self, batch: u32) -> f64 {
        let below = position(batch);
        let Some(above) = BATCHES.get(below + 1) else { return self.steps[below] };
        let part = f64::from(batch.max(1) - BATCHES[below]) / f64::from(above - BATCHES[below]);
        self.steps[below] + part * (self.steps[below + 1] - self.steps[below])
    }

    /// Returns the smaller of each time.
    pub(super) fn faster(self, other: Self) -> Self {
        Self {
            prefill: self.prefill.min(other.prefill),
            steps: by_batch(|index| self.steps[index].min(other.steps[index])),
        }
    }

    /// Returns the larger of each time.
    pub(super) fn slower(self, other: Self) -> Self {
        Self {
            prefill: self.prefill.max(other.prefill),
            steps: by_batch(|index| self.steps[index].max(other.steps[index])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_between_two_batches_is_linear() {
        let times = BatchTimes { prefill: 1.0, steps: by_batch(|index| f64::from(BATCHES[index])) };
        for batch in [1, 2, 3, 5, 24, 100, 512] {
            assert!((times.step(batch) - f64::from(batch)).abs() < 1e-12, "{batch}");
        }
        assert_eq!(times.step(1000), 512.0);
        assert_eq!((position(1), position(3), position(600)), (0, 1, 9));
    }
}
