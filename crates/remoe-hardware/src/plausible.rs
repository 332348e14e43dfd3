//! Figures that a quiet machine does not give.

use crate::profile::Profile;
use remoe_planner::CpuProfile;
use std::fmt;

/// With more vCPUs the same work may take so many times as long before it is remarkable: small models gain nothing.
const MORE: f64 = 1.3;

/// Work that takes longer with more vCPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct Slower {
    /// Work that was measured.
    pub what: &'static str,
    /// Tokens of the work.
    pub tokens: f64,
    /// Fewer vCPUs, and more.
    pub vcpus: [f64; 2],
    /// How many times as long it takes with more.
    pub times: f64,
}

impl fmt::Display for Slower {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { what, tokens, vcpus: [fewer, more], times } = self;
        write!(f, "{what}, {tokens} tokens: {times:.1} times as long with {more} vCPUs as with {fewer}")
    }
}

impl Profile {
    /// Returns the measured work that is slowed down most by more vCPUs; none where all of it gains, or hardly loses.
    #[must_use]
    pub fn slower_with_more_vcpus(&self) -> Option<Slower> {
        let tables = [
            ("one expert in the main function", Some(&self.expert_seconds)),
            ("one expert in a remote function", self.remote_expert_seconds.as_ref()),
            ("non-expert part", Some(&self.nonexpert_seconds)),
        ];
        let found = tables.into_iter().flat_map(|(what, table)| table.map(|table| slower(what, table)));
        found.flatten().max_by(|a, b| a.times.total_cmp(&b.times))
    }
}

fn slower(what: &'static str, table: &CpuProfile) -> Vec<Slower> {
    let whole = |at: &usize| table.vcpus[*at].fract() == 0.0;
    let columns: Vec<usize> = (0..table.vcpus.len()).filter(whole).collect();
    let rows = table.tokens.iter().zip(&table.seconds);
    let of_row = |(tokens, row): (&f64, &Vec<f64>)| {
        let pairs = columns.windows(2).filter_map(|pair| {
            let times = row[pair[1]] / row[pair[0]];
            let vcpus = [table.vcpus[pair[0]], table.vcpus[pair[1]]];
            (times.is_finite() && times > MORE).then_some(Slower { what, tokens: *tokens, vcpus, times })
        });
        pairs.collect::<Vec<_>>()
    };
    rows.flat_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_vcpus_that_take_longer_are_found() {
        let table = |seconds: [f64; 4]| CpuProfile {
            vcpus: vec![0.25, 1.0, 1.9, 2.0],
            tokens: vec![16.0],
            seconds: vec![seconds.to_vec()],
        };
        // Part of a vCPU more is no measurement of its own.
        assert_eq!(slower("x", &table([4.0, 1.0, 9.0, 1.2])), []);
        let found = slower("x", &table([4.0, 1.0, 1.0, 2.0]));
        let text: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["x, 16 tokens: 2.0 times as long with 2 vCPUs as with 1"]);
    }
}
