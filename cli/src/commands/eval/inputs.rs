//! Inputs of the experiments, read from files.

use super::EvalArgs;
use super::workloads::Recorded;
use crate::exit::CliError;
use crate::files::read;
use remoe_experiments::{
    CpuScaling, INPUT_TOKENS, Machine, REQUESTS, Routing, Scenario, Setting, Shape, SimulatedRequest,
    paper_pricing,
};
use remoe_hardware::{Prices, Profile};
use remoe_hub::ModelArgs;
use remoe_model::Inspection;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Everything that was given.
pub(super) struct Inputs {
    pub(super) setting: Setting,
    /// Where prices came from; none: [`paper_pricing`].
    pub(super) prices: Option<(PathBuf, Prices)>,
    pub(super) own: Option<OwnModel>,
}

/// A model of the user's own.
pub(super) struct OwnModel {
    facts: Inspection,
    pub(super) profile: Option<(PathBuf, Profile)>,
    pub(super) recorded: Option<Recorded>,
}

impl Inputs {
    /// Reads and checks all files.
    pub(super) fn read(args: &EvalArgs) -> Result<Self, CliError> {
        let prices = args.pricing.as_deref().map(prices).transpose()?;
        let pricing = match &prices {
            Some((_, prices)) => {
                prices.pricing().map_err(|error| CliError::arguments("--pricing", error.to_string()))?
            }
            None => paper_pricing(),
        };
        let setting = Setting::of_the_paper(pricing);
        let own = args
            .source
            .as_ref()
            .map(|source| OwnModel::read(source, args, setting.decode_steps))
            .transpose()?;
        Ok(Self { setting, prices, own })
    }

    /// Median seconds of one prediction, where requests were predicted.
    pub(super) fn predict_seconds(&self) -> Option<f64> {
        Some(self.own.as_ref()?.recorded.as_ref()?.predict_seconds)
    }

    /// The user's model as it is, and with widths at which memory matters where its routing is known.
    pub(super) fn own_scenarios(&self, routing: Routing) -> Vec<Scenario> {
        let Some(own) = &self.own else { return Vec::new() };
        let shape = Shape::of_checkpoint("checkpoint", own.facts.clone());
        let requests = match &own.recorded {
            Some(recorded) => recorded.requests.clone(),
            None => routing.requests(&shape, REQUESTS, INPUT_TOKENS),
        };
        self.scenarios_of(own, &requests)
    }

    /// As [`Self::own_scenarios`], for these requests.
    pub(super) fn scenarios_of(&self, own: &OwnModel, requests: &[SimulatedRequest]) -> Vec<Scenario> {
        let shape = Shape::of_checkpoint("checkpoint", own.facts.clone());
        let mut scenarios = Vec::new();
        if let Some((_, profile)) = &own.profile {
            let machine = Machine::reference(CpuScaling::Wide);
            let (shape, profile, requests) = (shape.clone(), profile.clone(), requests.to_vec());
            scenarios.push(Scenario::measured(shape, profile, &machine, self.setting, requests));
        }
        let mut shapes = Vec::new();
        if own.profile.is_none() {
            shapes.push(shape);
        }
        if own.recorded.is_some() {
            shapes.push(Shape::enlarged("checkpoint-enlarged", &own.facts));
        }
        for shape in shapes {
            for scaling in CpuScaling::ALL {
                let machine = Machine::reference(scaling);
                let requests = requests.to_vec();
                scenarios.push(Scenario::assumed(shape.clone(), &machine, self.setting, requests));
            }
        }
        scenarios
    }
}

impl OwnModel {
    fn read(source: &ModelArgs, args: &EvalArgs, steps: f64) -> Result<Self, CliError> {
        let checkpoint = Arc::new(source.open()?.checkpoint);
        let facts = checkpoint.inspect()?;
        if facts.moe_layers.is_empty() {
            return Err(CliError::arguments("--model", "invalid --model: no layer with routed experts"));
        }
        let profile = args.profile.as_deref().map(|path| profile(path, &facts)).transpose()?;
        let recorded = (!args.records.is_empty()).then(|| {
            let folder =
                args.predictor.clone().unwrap_or_else(|| checkpoint.store().root().join("predictor"));
            Recorded::read(&checkpoint, &args.records, &folder, steps)
        });
        Ok(Self { profile, recorded: recorded.transpose()?, facts })
    }
}

fn prices(path: &Path) -> Result<(PathBuf, Prices), CliError> {
    let prices = Prices::from_yaml(&read("--pricing", path)?)
        .map_err(|error| file_error(path, &error.field, &error))?;
    Ok((path.to_owned(), prices))
}

fn profile(path: &Path, facts: &Inspection) -> Result<(PathBuf, Profile), CliError> {
    let profile = Profile::from_json(&read("--profile", path)?)
        .map_err(|error| file_error(path, &error.field, &error))?;
    profile.check_model(facts, &facts.dtype).map_err(|error| file_error(path, "model", &error))?;
    Ok((path.to_owned(), profile))
}

fn file_error(path: &Path, field: &str, error: &dyn std::error::Error) -> CliError {
    let field = Some(field.to_owned()).filter(|field| !field.is_empty());
    let message = format!("{}: {error}", path.display());
    CliError { path: Some(path.to_owned()), field, ..CliError::arguments("", message) }
}
