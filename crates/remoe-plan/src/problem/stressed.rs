//! Shares of remote experts if the prediction errs.

/// Returns the factors on the shares of the remote set and on those of all other experts.
///
/// The set's `share` becomes `factor` times as large, at most 1; the others are scaled so that the sum stays 1.
pub fn stressed_scales(share: f64, factor: f64) -> (f64, f64) {
    let stressed = (share * factor).min(1.0);
    let up = if share > 0.0 { stressed / share } else { 1.0 };
    let down = if share < 1.0 { (1.0 - stressed) / (1.0 - share) } else { 0.0 };
    (up, down)
}
