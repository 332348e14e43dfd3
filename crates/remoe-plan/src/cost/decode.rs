//! One decode step of a layer: how many of a token's experts are remote, and what that takes.

/// Probabilities that 0, 1, .., `top_k` of a token's experts are remote, each with probability
/// `share` (at most 1).
pub fn remote_count_probabilities(top_k: usize, share: f64) -> Vec<f64> {
    let share = share.clamp(0.0, 1.0);
    let mut local_power = vec![1.0; top_k + 1];
    for count in 1..=top_k {
        local_power[count] = local_power[count - 1] * (1.0 - share);
    }
    let mut ways = 1.0;
    let mut remote_power = 1.0;
    let mut probabilities = Vec::with_capacity(top_k + 1);
    for count in 0..=top_k {
        probabilities.push(ways * remote_power * local_power[top_k - count]);
        ways = ways * (top_k - count) as f64 / (count + 1) as f64;
        remote_power *= share;
    }
    probabilities
}

/// Expected seconds of the slower of both paths (Remoe paper, equation 5, taken per token): with
/// `count` remote experts, `(top_k - count) * local` against `count * remote + trip`.
pub fn expected_slower_path(probabilities: &[f64], local: f64, remote: f64, trip: f64) -> f64 {
    let top_k = probabilities.len() - 1;
    let paths = probabilities.iter().enumerate().map(|(count, probability)| {
        let away = if count > 0 { count as f64 * remote + trip } else { 0.0 };
        probability * ((top_k - count) as f64 * local).max(away)
    });
    paths.sum()
}

/// [`expected_slower_path`] for many times at constant cost: up to some count the local path is the
/// slower one, from there the remote one, so three running sums are enough.
#[derive(Debug, Clone)]
pub struct SlowerPath {
    top_k: f64,
    trip: f64,
    /// Per first count at which the remote path decides, 0 to top-k + 1.
    sums: Vec<DecodeSums>,
}

#[derive(Debug, Clone, Copy, Default)]
struct DecodeSums {
    /// Expected local experts where the local path decides.
    local: f64,
    /// Expected remote experts where the remote path decides.
    remote: f64,
    /// Probability that the remote path decides.
    trips: f64,
}

impl SlowerPath {
    /// Makes the path of a layer whose remote calls number so many with these `probabilities`, at `trip` seconds each.
    pub fn new(probabilities: &[f64], trip: f64) -> Self {
        let top_k = probabilities.len() - 1;
        let mut sums = vec![DecodeSums::default(); top_k + 2];
        for (count, probability) in probabilities.iter().enumerate() {
            sums[count + 1].local = sums[count].local + probability * (top_k - count) as f64;
        }
        for (count, probability) in probabilities.iter().enumerate().rev() {
            sums[count].remote = sums[count + 1].remote + probability * count as f64;
            sums[count].trips = sums[count + 1].trips + probability;
        }
        Self { top_k: top_k as f64, trip, sums }
    }

    /// Expected seconds with `local` per local and `remote` per remote expert.
    #[inline]
    pub fn seconds(&self, local: f64, remote: f64) -> f64 {
        let both = local + remote;
        // Counts below this have the slower path at home. No remote expert, no trip: at least 1.
        let even = if both > 0.0 { (self.top_k * local - self.trip) / both } else { 1.0 };
        let even = even.clamp(1.0, self.top_k + 1.0);
        // Rounds up; `ceil` is a call where the instruction cannot be assumed.
        let below = even as usize;
        let first = below + usize::from(even > below as f64);
        let sums = self.sums[first];
        sums.local * local + sums.remote * remote + sums.trips * self.trip
    }
}
