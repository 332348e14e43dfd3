//! Metrics in Prometheus' text format: merges the pages of functions, and selects what a tenant may see. Pure.

use crate::function_page::FunctionPage;
use crate::tenant::TenantLimits;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

/// Prefixes of families with the spending of all tenants together, which a tenant may not see.
const TOTAL_SPENDING: [&str; 6] = [
    "remoe_cost_paid_",
    "remoe_cost_spent_",
    "remoe_cost_residual_",
    "remoe_cost_estimated_",
    "remoe_cost_rival_",
    "remoe_cost_compared_",
];

/// Returns the samples of `text` that `tenant` may see: its own, those of its models, and those without a tenant or
/// model.
pub(crate) fn visible_to_tenant(text: &str, tenant: &TenantLimits) -> String {
    let is_own = |line: &&str| {
        line.starts_with('#')
            || (label(line, "tenant").is_none_or(|name| name == **tenant.name())
                && label(line, "model").is_none_or(|model| tenant.may_use(&model))
                && !TOTAL_SPENDING.iter().any(|family| line.starts_with(family)))
    };
    text.lines().filter(is_own).fold(String::new(), |text, line| text + line + "\n")
}

/// Prefixes of families of spending.
const SPENDING_FAMILIES: [&str; 2] = ["remoe_cost_", "remoe_budget_"];

/// Returns `text` without families of spending and without samples of single tenants.
pub(crate) fn without_spending(text: &str) -> String {
    let is_spending = |line: &str| {
        let described_name = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        let name = described_name.unwrap_or(line);
        SPENDING_FAMILIES.iter().any(|family| name.starts_with(family))
            || (described_name.is_none() && label(line, "tenant").is_some())
    };
    let shown = text.lines().filter(|line| !is_spending(line));
    shown.fold(String::new(), |text, line| text + line + "\n")
}

/// Returns the value of the label `name` of a sample.
fn label(line: &str, name: &str) -> Option<String> {
    let (_, labels) = line.split_once('{')?;
    let mut rest = labels;
    loop {
        let (key, value, rest_after) = first_label(rest)?;
        if key.trim_start_matches(',') == name {
            return Some(value);
        }
        rest = rest_after;
    }
}

/// Parses the first label of a sample's labels in Prometheus' text format. Returns its key, its value without
/// escapes, and the text after it.
#[must_use]
pub fn first_label(labels: &str) -> Option<(&str, String, &str)> {
    let (key, rest_after) = labels.split_once("=\"")?;
    let mut value = String::new();
    let mut chars = rest_after.char_indices();
    let end = loop {
        match chars.next()? {
            (index, '"') => break index + 1,
            (_, '\\') => value.push(match chars.next()?.1 {
                'n' => '\n',
                char => char,
            }),
            (_, char) => value.push(char),
        }
    };
    Some((key, value, rest_after.get(end..)?))
}

/// Merges the `pages` of functions of all models, and adds the label `model` to each sample. Leaves out families that
/// the gateway's `own` metrics have: there they describe the gateway.
pub(crate) fn merge_pages(own: &str, pages: &[(Arc<str>, FunctionPage)]) -> String {
    let described_families = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        lines.map(str::to_owned).collect()
    };
    let described_by_gateway = described_families(own);
    // The format demands that the samples of a family stand together, after its description.
    let mut families: BTreeMap<&str, (String, String)> = BTreeMap::new();
    for (model, FunctionPage { text: page, .. }) in pages {
        let label =
            format!("model=\"{}\"", model.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"));
        let mut family = "";
        for line in page.lines() {
            if let Some(rest) = line.strip_prefix("# ") {
                family = rest.split(' ').nth(1).unwrap_or_default();
                let (description, _) = families.entry(family).or_default();
                if !description.contains(line) {
                    // Writing to a string does not fail.
                    let _written = writeln!(description, "{line}");
                }
                continue;
            }
            let Some((name, rest)) = line.split_at_checked(line.find(['{', ' ']).unwrap_or(0)) else {
                continue;
            };
            let (_, samples) = families.entry(family).or_default();
            let _written = match rest.strip_prefix('{') {
                // The function has added the label itself.
                _ if self::label(line, "model").is_some() => writeln!(samples, "{line}"),
                Some(labels) => writeln!(samples, "{name}{{{label},{labels}"),
                None => writeln!(samples, "{name}{{{label}}}{rest}"),
            };
        }
    }
    let shown = families.iter().filter(|(name, _)| !described_by_gateway.contains(**name));
    shown.fold(String::new(), |text, (_, (description, samples))| text + description + samples)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::body_budget::{BodyBudget, BudgetHolder};

    #[test]
    fn labels_are_read_as_they_are_written() {
        let line = r#"a_total{model="n\"{,}",tenant="a=\\b"} 3"#;
        assert_eq!(label(line, "model").as_deref(), Some("n\"{,}"));
        assert_eq!(label(line, "tenant").as_deref(), Some("a=\\b"));
        assert_eq!(label(line, "nant"), None);
        assert_eq!(label("a_total 3", "model"), None);
        assert_eq!(label("a_total{model=\"", "model"), None);
    }

    #[test]
    fn samples_of_models_stand_together_with_their_names() {
        let page = "# HELP a_total A.\n# TYPE a_total counter\na_total 1\n# HELP b B.\n# TYPE b gauge\nb{x=\"1\"} 2\n# HELP c C.\n# TYPE c gauge\nc 3\n";
        let page_of = |model: &str, text: &str| {
            let model = Arc::from(model);
            let reservation = Arc::new(BodyBudget::new(0, 0)).empty(BudgetHolder::answer(&"".into(), &model));
            (model, FunctionPage::new(text.to_owned(), reservation))
        };
        let pages = [page_of("m", page), page_of("n\"", page)];
        assert_eq!(
            merge_pages("# TYPE c gauge\nc 9\n", &pages),
            "# HELP a_total A.\n# TYPE a_total counter\na_total{model=\"m\"} 1\na_total{model=\"n\\\"\"} 1\n\
             # HELP b B.\n# TYPE b gauge\nb{model=\"m\",x=\"1\"} 2\nb{model=\"n\\\"\",x=\"1\"} 2\n"
        );
        let pages = [page_of("m", "# TYPE d gauge\nd{model=\"p\",x=\"1\"} 2\n")];
        assert_eq!(merge_pages("", &pages), pages[0].1.text);
    }
}
