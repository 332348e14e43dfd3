//! Explanation of infeasible problems, with flags that would make them feasible.

use remoe_planner::{FieldError, Infeasible, Remedy, amount, limit_name, rounded_up};

/// Explains why no plan is feasible. Remedies are flags, or with `of_file`, fields of the problem file.
pub(crate) fn infeasible(reason: &Infeasible, of_file: bool) -> String {
    if of_file {
        reason.with_remedies(|remedy| format!("{} of {} or more", remedy.field, remedy.at_least))
    } else {
        reason.with_remedies(remedy_flag)
    }
}

/// Replaces the field of `error` by the flag that sets it, for a problem that was built from flags.
pub(crate) fn with_flag(error: FieldError) -> FieldError {
    match flag_of_field(&error.field) {
        Some(flag) => FieldError::new(flag, error.message),
        None => error,
    }
}

/// Returns the flag that sets a field of the problem. Fields from the model and its profile have none.
fn flag_of_field(field: &str) -> Option<&'static str> {
    const FLAGS: [(&str, &str); 12] = [
        ("specs.remote_vcpus", "--remote-cpu"),
        ("specs.remote", "--remote-memory-mb"),
        ("specs.main_vcpus", "--main-cpu"),
        ("specs.main", "--main-memory-mb"),
        ("limits.max_replicas", "--max-replicas"),
        ("pricing", "--pricing"),
        ("request.concurrency", "--concurrency"),
        ("request", "--workload"),
        ("arrivals", "--workload"),
        ("slo.ttft_seconds", "--ttft"),
        ("slo.tpot_seconds", "--tpot"),
        ("slo.cold_ttft_seconds", "--cold-ttft"),
    ];
    let is_within =
        |name: &str| field.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
    FLAGS.into_iter().find_map(|(name, flag)| is_within(name).then_some(flag))
}

/// Formats the flag that relaxes the limit of `remedy`.
fn remedy_flag(remedy: &Remedy) -> String {
    // Rounds away binary fractions after the three digits.
    let digits = |value: f64| {
        let text = format!("{value:.9}");
        text.trim_end_matches('0').trim_end_matches('.').to_owned()
    };
    let time = |flag: &str| {
        let seconds = rounded_up(remedy.at_least);
        let (value, unit) = if seconds < 1.0 { (seconds * 1e3, "ms") } else { (seconds, "s") };
        format!("{flag} {}{unit}", digits(value))
    };
    let size =
        |flag: &str| format!("{flag} MIN:MAX:STEP with a MAX of {} or more", (remedy.at_least / 1e6).ceil());
    match remedy.limit() {
        "ttft" => time("--ttft"),
        "tpot" => time("--tpot"),
        "cold_ttft" => time("--cold-ttft"),
        "cold_share" => format!("--cold-share {}", digits(rounded_up(remedy.at_least).min(1.0))),
        "mem" => size("--remote-memory-mb"),
        "main" => size("--main-memory-mb"),
        "mains" => format!("{} main functions", remedy.at_least),
        limit => format!("{} of {} or more", limit_name(limit), amount(limit, remedy.at_least)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn problem_fields_map_to_flags() {
        let flag = |field: &str| with_flag(FieldError::new(field, "is wrong")).field;
        assert_eq!(flag("specs.remote.max_bytes"), "--remote-memory-mb");
        assert_eq!(flag("specs.remote_vcpus.min"), "--remote-cpu");
        assert_eq!(flag("request.input_tokens"), "--workload");
        assert_eq!(flag("request.concurrency"), "--concurrency");
        assert_eq!(flag("layers[0].top_k"), "layers[0].top_k");
        assert_eq!(flag("requests"), "requests");
    }

    #[test]
    fn remedies_are_valid_flags() {
        let remedy = |field: &str, at_least: f64| remedy_flag(&Remedy { field: field.to_owned(), at_least });
        assert_eq!(remedy("slo.tpot_seconds", 0.001_234_5), "--tpot 1.24ms");
        assert_eq!(remedy("slo.ttft_seconds", 2.0), "--ttft 2s");
        assert_eq!(remedy("slo.tpot_seconds", 9.87e-6), "--tpot 0.00987ms");
        assert_eq!(
            remedy("specs.main.max_bytes", 5.2714e9),
            "--main-memory-mb MIN:MAX:STEP with a MAX of 5272 or more"
        );
        assert_eq!(remedy("slo.cold_ttft_seconds", 2.0), "--cold-ttft 2s");
        assert_eq!(remedy("slo.cold_share", 0.123_4), "--cold-share 0.124");
    }
}
