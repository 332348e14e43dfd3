//! Detection of profiles that were measured on a busy machine.

use crate::profile::Profile;
use remoe_planner::CpuProfile;
use std::fmt;

/// Slowdown from more vCPUs up to which a measurement is plausible: work of small models does not speed up.
const MAX_PLAUSIBLE_SLOWDOWN: f64 = 1.3;

/// Work that was measured to take longer with more vCPUs.
#[derive(Debug, Clone, PartialEq)]
pub struct VcpuSlowdown {
    /// Name of the work.
    pub work: &'static str,
    /// Number of tokens.
    pub tokens: f64,
    /// The smaller and the larger number of vCPUs.
    pub vcpus: [f64; 2],
    /// Seconds with the larger number over seconds with the smaller.
    pub ratio: f64,
}

impl fmt::Display for VcpuSlowdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { work, tokens, vcpus: [fewer, more], ratio } = self;
        write!(f, "{work}, {tokens} tokens: {ratio:.1} times as long with {more} vCPUs as with {fewer}")
    }
}

impl Profile {
    /// Returns the measured work that more vCPUs slow down most, or `None` if no slowdown is implausible.
    #[must_use]
    pub fn slower_with_more_vcpus(&self) -> Option<VcpuSlowdown> {
        let tables = [
            ("one expert in the main function", Some(&self.expert_seconds)),
            ("one expert in a remote function", self.remote_expert_seconds.as_ref()),
            ("non-expert part", Some(&self.nonexpert_seconds)),
        ];
        let found = tables.into_iter().flat_map(|(work, table)| table.map(|table| slowdowns(work, table)));
        found.flatten().max_by(|a, b| a.ratio.total_cmp(&b.ratio))
    }
}

/// Finds the implausible slowdowns between neighbouring columns of `table` with whole vCPUs. A fraction of a vCPU is
/// measured as a share of the next whole number.
fn slowdowns(work: &'static str, table: &CpuProfile) -> Vec<VcpuSlowdown> {
    let whole = |at: &usize| table.vcpus[*at].fract() == 0.0;
    let columns: Vec<usize> = (0..table.vcpus.len()).filter(whole).collect();
    let rows = table.tokens.iter().zip(&table.seconds);
    let of_row = |(tokens, row): (&f64, &Vec<f64>)| {
        let pairs = columns.windows(2).filter_map(|pair| {
            let ratio = row[pair[1]] / row[pair[0]];
            let vcpus = [table.vcpus[pair[0]], table.vcpus[pair[1]]];
            (ratio.is_finite() && ratio > MAX_PLAUSIBLE_SLOWDOWN).then_some(VcpuSlowdown {
                work,
                tokens: *tokens,
                vcpus,
                ratio,
            })
        });
        pairs.collect::<Vec<_>>()
    };
    rows.flat_map(of_row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_that_more_vcpus_slow_down_is_found() {
        let table = |seconds: [f64; 4]| CpuProfile {
            vcpus: vec![0.25, 1.0, 1.9, 2.0],
            tokens: vec![16.0],
            seconds: vec![seconds.to_vec()],
        };
        // Columns of fractional vCPUs are ignored.
        assert_eq!(slowdowns("x", &table([4.0, 1.0, 9.0, 1.2])), []);
        let found = slowdowns("x", &table([4.0, 1.0, 1.0, 2.0]));
        let text: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert_eq!(text, ["x, 16 tokens: 2.0 times as long with 2 vCPUs as with 1"]);
    }
}
