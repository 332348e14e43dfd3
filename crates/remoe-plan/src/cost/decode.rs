//! Decode step of a layer with one remote function: distribution of a token's remote experts, and expected seconds.

/// Returns the probabilities that 0, 1, .., `top_k` of a token's experts are remote: a binomial distribution.
///
/// `share`: probability of each expert to be remote, at most 1.
pub fn remote_count_probabilities(top_k: usize, share: f64) -> Vec<f64> {
    let share = share.clamp(0.0, 1.0);
    let mut local_power = vec![1.0; top_k + 1];
    for count in 1..=top_k {
        local_power[count] = local_power[count - 1] * (1.0 - share);
    }
    let mut combinations = 1.0;
    let mut remote_power = 1.0;
    let mut probabilities = Vec::with_capacity(top_k + 1);
    for count in 0..=top_k {
        probabilities.push(combinations * remote_power * local_power[top_k - count]);
        combinations = combinations * (top_k - count) as f64 / (count + 1) as f64;
        remote_power *= share;
    }
    probabilities
}

/// Returns the expected seconds of the slower of both paths of a token (Remoe paper, equation 5).
///
/// With `count` remote experts the local path takes `(top_k - count) * local`, the remote path `count * remote + trip`.
pub fn expected_slower_path(probabilities: &[f64], local: f64, remote: f64, trip: f64) -> f64 {
    let top_k = probabilities.len() - 1;
    let paths = probabilities.iter().enumerate().map(|(count, probability)| {
        let remote_path = if count > 0 { count as f64 * remote + trip } else { 0.0 };
        probability * ((top_k - count) as f64 * local).max(remote_path)
    });
    paths.sum()
}

/// Prepared form of [`expected_slower_path`], which evaluates many pairs of times in constant time.
///
/// The local path is the slower one up to some count of remote experts, the remote path from there. So three sums over
/// the counts are enough.
#[derive(Debug, Clone)]
pub struct SlowerPath {
    top_k: f64,
    trip: f64,
    /// `[first]`: sums if the remote path is the slower one from `first` remote experts on, 0 to top-k + 1.
    sums: Vec<DecodeSums>,
}

#[derive(Debug, Clone, Copy, Default)]
struct DecodeSums {
    /// Expected local experts of counts with a slower local path.
    local: f64,
    /// Expected remote experts of counts with a slower remote path.
    remote: f64,
    /// Probability that the remote path is the slower one.
    trips: f64,
}

impl SlowerPath {
    /// `probabilities`: of each count of remote experts. `trip`: seconds of a call.
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

    /// Returns the expected seconds with `local` seconds for each local and `remote` seconds for each remote expert.
    #[inline]
    pub fn seconds(&self, local: f64, remote: f64) -> f64 {
        let both = local + remote;
        // The local path is the slower one below this count. Without remote experts there is no call: at least 1.
        let break_even = if both > 0.0 { (self.top_k * local - self.trip) / both } else { 1.0 };
        let break_even = break_even.clamp(1.0, self.top_k + 1.0);
        // Rounds up without `ceil`, which is a function call on targets without that instruction.
        let below = break_even as usize;
        let first = below + usize::from(break_even > below as f64);
        let sums = self.sums[first];
        sums.local * local + sums.remote * remote + sums.trips * self.trip
    }
}
