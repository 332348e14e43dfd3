//! Regret of plans made from wrong figures, as tables, numbers and a picture.

use super::EvalArgs;
use super::files::OutputFolder;
use super::inputs::Inputs;
use crate::exit::CliError;
use crate::files;
use crate::output::plot::{Bar, Bars, Segment};
use crate::output::progress::bar;
use crate::output::table;
use crate::plan_report::percent;
use remoe_experiments::{PlanOutcome, Regret, RegretCase, RegretSubject, Summary};
use remoe_hardware::Prices;
use remoe_planner::{ErrorDirection, MisestimatedInput, Problem};
use std::path::Path;

/// A plan's name, and where a case has what it comes to.
type NamedPlan = (&'static str, fn(&RegretCase) -> &PlanOutcome);

/// The two plans.
const PLANS: [NamedPlan; 2] = [("cheapest", |case| &case.exact), ("sturdy", |case| &case.sturdy)];

/// Plans the stated problems and the published models, with figures that are wrong.
pub(super) fn measured(args: &EvalArgs, inputs: &Inputs) -> Result<Regret, CliError> {
    let mut subjects = Vec::new();
    for path in &args.problems {
        let problem = Problem::from_json(&files::read("--problem", path)?)
            .map_err(|error| files::file_error("--problem", path, &error))?;
        if problem.prediction.is_none() {
            let message = format!("{}: missing prediction; plans need it", path.display());
            return Err(CliError::arguments("--problem", message));
        }
        let name =
            path.file_stem().map_or_else(|| path.display().to_string(), |stem| stem.display().to_string());
        subjects.push(RegretSubject { name, problem });
    }
    let default = Prices::default();
    let prices = inputs.prices.as_ref().map_or(&default, |(_, prices)| prices);
    let pricing =
        prices.separate_pricing().map_err(|error| CliError::arguments("--pricing", error.to_string()))?;
    subjects.extend(RegretSubject::published(pricing)?);
    let bar = bar(subjects.len(), "plans");
    let regret = Regret::of(&subjects, |name| {
        bar.set_message(name.to_owned());
        bar.inc(1);
    })?;
    bar.finish_and_clear();
    Ok(regret)
}

/// Every figure with both plans, and what was planned.
pub(super) fn text(regret: &Regret) -> String {
    let columns = |summary: Summary| {
        let share = |value: Option<f64>| value.map_or_else(|| "-".to_owned(), percent);
        [format!("{} of {}", summary.broken, summary.cases), share(summary.median), share(summary.most)]
    };
    let row = |name: &str, which: Option<(MisestimatedInput, ErrorDirection)>| {
        let both = PLANS.iter().flat_map(|(_, of)| columns(regret.summary(which, *of)));
        [vec![name.to_owned()], both.collect()].concat()
    };
    let mut rows: Vec<Vec<String>> =
        figures().map(|which| row(which.0.described(which.1), Some(which))).collect();
    rows.push(row("all", None));
    let header = [
        "true figures",
        "cheapest plan violates a limit",
        "regret, median",
        "most",
        "sturdy plan violates a limit",
        "regret, median",
        "most",
    ];
    let plans = regret.plans.iter().map(|plan| {
        vec![
            plan.subject.clone(),
            plan.groups.to_string(),
            plan.functions.to_string(),
            percent(plan.above_exact),
            broken(regret, &plan.subject, |case| &case.exact),
            broken(regret, &plan.subject, |case| &case.sturdy),
        ]
    });
    let of_plans = [
        "planned",
        "groups",
        "remote functions",
        "sturdy above cheapest",
        "cheapest violates a limit",
        "sturdy does",
    ];
    format!(
        "== robustness to wrong figures ==\n{}\n\nregret: extra cost over the optimal plan for the true figures; cases \
         without a feasible plan are excluded\n\n{}",
        table::with_header(&header, rows),
        table::with_header(&of_plans, plans.collect())
    )
}

fn figures() -> impl Iterator<Item = (MisestimatedInput, ErrorDirection)> {
    ErrorDirection::ALL.into_iter().flat_map(|truth| MisestimatedInput::ALL.map(|figure| (figure, truth)))
}

/// In how many cases of `subject` a plan breaks a limit, of those in which some plan does not.
fn broken(regret: &Regret, subject: &str, of: fn(&RegretCase) -> &PlanOutcome) -> String {
    let cases = regret.cases.iter().filter(|case| case.subject == subject && case.clairvoyant.is_some());
    let (mut all, mut broken) = (0, 0);
    for case in cases {
        all += 1;
        broken += usize::from(!of(case).broken.is_empty());
    }
    format!("{broken} of {all}")
}

/// Writes the tables, all numbers, every case as CSV and the picture.
pub(super) fn write(folder: &Path, regret: &Regret) -> Result<(), CliError> {
    let target = OutputFolder::new(folder.join("regret"));
    target.store("tables.txt", format!("{}\n", text(regret)).as_bytes())?;
    target.store("regret.json", &serde_json::to_vec(regret).map_err(std::io::Error::from)?)?;
    let header = [
        "planned",
        "truth",
        "clairvoyant_dollars",
        "cheapest_dollars",
        "cheapest_breaks",
        "sturdy_dollars",
        "sturdy_breaks",
    ];
    let rows = regret.cases.iter().map(|case| {
        vec![
            case.subject.clone(),
            case.figure.described(case.truth).to_owned(),
            case.clairvoyant.map_or_else(String::new, |cost| cost.to_string()),
            case.exact.cost.to_string(),
            case.exact.broken.join(" "),
            case.sturdy.cost.to_string(),
            case.sturdy.broken.join(" "),
        ]
    });
    target.csv("cases.csv", &header, rows.collect())?;
    target.store("broken.svg", picture(regret).as_bytes())
}

/// In how many cases of each figure the plans break limits.
fn picture(regret: &Regret) -> String {
    let bars = figures().flat_map(|which| {
        PLANS.iter().enumerate().map(move |(series, (plan, of))| {
            let summary = regret.summary(Some(which), *of);
            let share = 100.0 * summary.broken as f64 / summary.cases.max(1) as f64;
            Bar {
                name: format!("{}: {plan} plan", which.0.described(which.1)),
                segments: vec![Segment { series, from: 0.0, to: share }],
            }
        })
    });
    Bars {
        title: "Robustness to wrong figures",
        subtitle: "cases in which a plan violates a limit that another plan would meet",
        label: "percent of the cases",
        series: PLANS.map(|(plan, _)| plan).to_vec(),
        bars: bars.filter(|bar| bar.segments.iter().any(|segment| segment.to > 0.0)).collect(),
    }
    .svg()
}
