//! Kubernetes quantities, in the canonical form in which the API server stores them, so that an object that is read
//! back compares equal.

use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

/// Bytes of 1 MB.
pub(crate) const MB: u64 = 1_000_000;

/// Returns a quantity of memory. Units are decimal: 1000 MB are 1 GB, not 1 GiB.
pub(crate) fn megabytes(megabytes: u32) -> Quantity {
    Quantity(with_decimal_suffix(u64::from(megabytes) * MB))
}

/// Returns the millicores that come with `megabytes` of memory: one vCPU per 1000 MB (Remoe paper, section III-A).
pub(crate) fn millicores_for_memory(megabytes: u32) -> u32 {
    megabytes
}

/// Returns a quantity of CPU.
pub(crate) fn vcpus(millicores: u32) -> Quantity {
    if millicores.is_multiple_of(1000) {
        Quantity((millicores / 1000).to_string())
    } else {
        Quantity(format!("{millicores}m"))
    }
}

/// Returns the number of threads that use `millicores` fully.
pub(crate) fn threads(millicores: u32) -> u32 {
    millicores.div_ceil(1000).max(1)
}

fn with_decimal_suffix(bytes: u64) -> String {
    const SUFFIXES: [(u64, &str); 4] =
        [(1_000_000_000_000, "T"), (1_000_000_000, "G"), (1_000_000, "M"), (1_000, "k")];
    let fitting = SUFFIXES.iter().find(|(unit, _)| bytes > 0 && bytes.is_multiple_of(*unit));
    fitting.map_or_else(|| bytes.to_string(), |(unit, suffix)| format!("{}{suffix}", bytes / unit))
}

/// Parses a quantity; absent if it is invalid.
pub(crate) fn parse_amount(quantity: &Quantity) -> Option<f64> {
    const UNITS: [(&str, f64); 11] = [
        ("Ki", 1024.0),
        ("Mi", 1_048_576.0),
        ("Gi", 1_073_741_824.0),
        ("Ti", 1_099_511_627_776.0),
        ("n", 1e-9),
        ("u", 1e-6),
        ("m", 1e-3),
        ("k", 1e3),
        ("M", 1e6),
        ("G", 1e9),
        ("T", 1e12),
    ];
    let (number, unit) = UNITS
        .iter()
        .find_map(|(suffix, unit)| Some((quantity.0.strip_suffix(suffix)?, *unit)))
        .unwrap_or((&quantity.0, 1.0));
    let amount = number.parse::<f64>().ok()? * unit;
    (amount.is_finite() && amount >= 0.0).then_some(amount)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_as_they_are_written() {
        let read = |text: &str| parse_amount(&Quantity(text.to_owned()));
        assert_eq!(read("1500m"), Some(1.5));
        assert_eq!(read("2"), Some(2.0));
        assert_eq!(read("1500M"), Some(1.5e9));
        assert_eq!(read("1Gi"), Some(1_073_741_824.0));
        assert_eq!(read("1e3"), Some(1000.0));
        assert_eq!([read(""), read("much"), read("-1"), read("inf")], [None; 4]);
    }

    #[test]
    fn amounts_are_in_canonical_form() {
        assert_eq!(megabytes(1_500).0, "1500M");
        assert_eq!(megabytes(2_000).0, "2G");
        assert_eq!(megabytes(3_000_000).0, "3T");
        assert_eq!(vcpus(100).0, "100m");
        assert_eq!(vcpus(1_500).0, "1500m");
        assert_eq!(vcpus(2_000).0, "2");
        assert_eq!(threads(100), 1);
        assert_eq!(threads(2_100), 3);
    }
}
