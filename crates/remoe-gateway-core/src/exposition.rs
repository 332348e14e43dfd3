//! Pages of metrics in Prometheus' text format: those of functions merged, and what a tenant may see of them. Pure.

use crate::function_page::Page;
use crate::tenant::TenantLimits;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::sync::Arc;

/// Families of the spending of all tenants together, which `/status` does not tell a tenant either.
const SPENT_BY_ALL: [&str; 6] = [
    "remoe_cost_paid_",
    "remoe_cost_spent_",
    "remoe_cost_residual_",
    "remoe_cost_estimated_",
    "remoe_cost_rival_",
    "remoe_cost_compared_",
];

/// Returns the samples of `text` that `tenant` may see: its own, those of its models, and those of no tenant or model.
pub(crate) fn of_tenant(text: &str, tenant: &TenantLimits) -> String {
    let is_own = |line: &&str| {
        line.starts_with('#')
            || (label(line, "tenant").is_none_or(|name| name == **tenant.name())
                && label(line, "model").is_none_or(|model| tenant.may_use(&model))
                && !SPENT_BY_ALL.iter().any(|family| line.starts_with(family)))
    };
    text.lines().filter(is_own).fold(String::new(), |text, line| text + line + "\n")
}

/// Families of spending.
const SPENDING: [&str; 2] = ["remoe_cost_", "remoe_budget_"];

/// Returns `text` without spending, and without samples of single tenants.
pub(crate) fn without_spending(text: &str) -> String {
    let is_spending = |line: &str| {
        let described = line.strip_prefix("# HELP ").or_else(|| line.strip_prefix("# TYPE "));
        let name = described.unwrap_or(line);
        SPENDING.iter().any(|family| name.starts_with(family))
            || (described.is_none() && label(line, "tenant").is_some())
    };
    let shown = text.lines().filter(|line| !is_spending(line));
    shown.fold(String::new(), |text, line| text + line + "\n")
}

/// Returns the value of the label `name` of a sample.
fn label(line: &str, name: &str) -> Option<String> {
    let (_, labels) = line.split_once('{')?;
    let mut rest = labels;
    loop {
        let (key, value, behind) = first_label(rest)?;
        if key.trim_start_matches(',') == name {
            return Some(value);
        }
        rest = behind;
    }
}

/// Parses the first label of a sample's labels in Prometheus' text format: its key, its value without escapes, and the text
/// behind it.
#[must_use]
pub fn first_label(labels: &str) -> Option<(&str, String, &str)> {
    let (key, behind) = labels.split_once("=\"")?;
    let mut value = String::new();
    let mut letters = behind.char_indices();
    let end = loop {
        match letters.next()? {
            (at, '"') => break at + 1,
            (_, '\\') => value.push(match letters.next()?.1 {
                'n' => '\n',
                letter => letter,
            }),
            (_, letter) => value.push(letter),
        }
    };
    Some((key, value, behind.get(end..)?))
}

/// Merges the `pages` of all models, and names the model in each sample. Leaves out the families of `own`: they mean something
/// else there.
pub(crate) fn merged(own: &str, pages: &[(Arc<str>, Page)]) -> String {
    let described = |text: &str| -> BTreeSet<String> {
        let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next());
        lines.map(str::to_owned).collect()
    };
    let own = described(own);
    // A name's samples stand together, after its description.
    let mut families: BTreeMap<&str, (String, String)> = BTreeMap::new();
    for (model, Page { text: page, .. }) in pages {
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
                // It says so itself.
                _ if self::label(line, "model").is_some() => writeln!(samples, "{line}"),
                Some(labels) => writeln!(samples, "{name}{{{label},{labels}"),
                None => writeln!(samples, "{name}{{{label}}}{rest}"),
            };
        }
    }
    let shown = families.iter().filter(|(name, _)| !own.contains(**name));
    shown.fold(String::new(), |text, (_, (description, samples))| text + description + samples)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::body_budget::{BodyBudget, Holder};

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
            let reservation = Arc::new(BodyBudget::new(0, 0)).empty(Holder::answer(&"".into(), &model));
            (model, Page::new(text.to_owned(), reservation))
        };
        let pages = [page_of("m", page), page_of("n\"", page)];
        assert_eq!(
            merged("# TYPE c gauge\nc 9\n", &pages),
            "# HELP a_total A.\n# TYPE a_total counter\na_total{model=\"m\"} 1\na_total{model=\"n\\\"\"} 1\n\
             # HELP b B.\n# TYPE b gauge\nb{model=\"m\",x=\"1\"} 2\nb{model=\"n\\\"\",x=\"1\"} 2\n"
        );
        let said = [page_of("m", "# TYPE d gauge\nd{model=\"p\",x=\"1\"} 2\n")];
        assert_eq!(merged("", &said), said[0].1.text);
    }
}
