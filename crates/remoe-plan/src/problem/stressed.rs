//! Shares of remote experts where the prediction errs.

/// Factors on the shares of the remote set and on those of the rest, when the set's `share` is
/// `factor` times as large, at most 1 in all.
pub fn stressed_scales(share: f64, factor: f64) -> (f64, f64) {
    let stressed = (share * factor).min(1.0);
    let up = if share > 0.0 { stressed / share } else { 1.0 };
    let down = if share < 1.0 { (1.0 - stressed) / (1.0 - share) } else { 0.0 };
    (up, down)
}
