//! What the experiments are made of, read from files.

use super::EvalArgs;
use crate::commands::predictor::source;
use crate::exit::CliError;
use crate::planning::{read, rows};
use remoe_experiments::{
    CpuScaling, INPUT_TOKENS, Machine, REQUESTS, Request, Routing, Scenario, Setting, Shape, paper_pricing,
};
use remoe_fetch::ModelArgs;
use remoe_model::{Checkpoint, Inspection};
use remoe_predictor::record::ActivationRecord;
use remoe_predictor::{PredictError, Shares, Trained, quantile};
use remoe_profile::{Prices, Profile};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

/// Everything that was given.
pub(super) struct Inputs {
    pub(super) setting: Setting,
    /// Where prices came from; none: [`paper_pricing`].
    pub(super) prices: Option<(PathBuf, Prices)>,
    pub(super) own: Option<Own>,
}

/// A model of the user's own.
pub(super) struct Own {
    facts: Inspection,
    pub(super) profile: Option<(PathBuf, Profile)>,
    pub(super) recorded: Option<Recorded>,
}

/// Requests that a model truly had.
pub(super) struct Recorded {
    pub(super) path: PathBuf,
    requests: Vec<Request>,
    /// Median seconds of one prediction.
    predict_seconds: f64,
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
        let own = args.source.as_ref().map(|source| Own::read(source, args)).transpose()?;
        Ok(Self { setting: Setting::of_the_paper(pricing), prices, own })
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
        let mut scenarios = Vec::new();
        if let Some((_, profile)) = &own.profile {
            let machine = Machine::reference(CpuScaling::Wide);
            let (shape, profile, requests) = (shape.clone(), profile.clone(), requests.clone());
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
                let requests = requests.clone();
                scenarios.push(Scenario::assumed(shape.clone(), &machine, self.setting, requests));
            }
        }
        scenarios
    }
}

impl Own {
    fn read(source: &ModelArgs, args: &EvalArgs) -> Result<Self, CliError> {
        let checkpoint = Arc::new(source.open()?.checkpoint);
        let facts = checkpoint.inspect()?;
        if facts.moe_layers.is_empty() {
            return Err(CliError::arguments("--model", "the model has no layer with experts to place"));
        }
        let profile = args.profile.as_deref().map(|path| profile(path, &facts)).transpose()?;
        let recorded = args.records.as_deref().map(|path| {
            let folder =
                args.predictor.clone().unwrap_or_else(|| checkpoint.store().root().join("predictor"));
            Recorded::read(&checkpoint, path, &folder)
        });
        Ok(Self { profile, recorded: recorded.transpose()?, facts })
    }
}

impl Recorded {
    /// Predicts requests spread evenly over the file.
    fn read(checkpoint: &Arc<Checkpoint>, path: &Path, predictor: &Path) -> Result<Self, CliError> {
        let model = source::Model::of(Arc::clone(checkpoint))?;
        let trained = model.saved_predictor(predictor)?;
        let (header, records) = model.records("--records", path)?;
        let step = (records.len() / REQUESTS).max(1);
        let records: Vec<&ActivationRecord> = records.iter().step_by(step).take(REQUESTS).collect();
        if records.is_empty() {
            return Err(CliError::arguments(
                "--records",
                format!("{} holds no whole record", path.display()),
            ));
        }
        let experts = header.experts as usize;
        let mut seconds = Vec::with_capacity(records.len());
        let mut requests = Vec::with_capacity(records.len());
        for record in records {
            let started = Instant::now();
            let predicted = predict(&trained, &record.prompt)?;
            seconds.push(started.elapsed().as_secs_f64());
            requests.push(request(record, experts, &predicted)?);
        }
        Ok(Self { path: path.to_owned(), requests, predict_seconds: quantile(&mut seconds, 0.5) })
    }
}

fn predict(trained: &Trained, prompt: &[u32]) -> Result<Shares, PredictError> {
    Ok(trained.predict_with_errors(prompt)?.shares)
}

/// A record as a request. One that ended before its first decode step is taken to decode as it
/// prefilled.
fn request(record: &ActivationRecord, experts: usize, predicted: &Shares) -> Result<Request, PredictError> {
    let prefill = Shares::from_counts(experts, &record.prefill)?;
    let decode = match record.steps {
        0 => prefill.clone(),
        _ => Shares::from_counts(experts, &record.decode)?,
    };
    Ok(Request {
        input_tokens: record.prompt.len() as f64,
        predicted: rows(predicted),
        prefill: rows(&prefill),
        decode: rows(&decode),
    })
}

fn prices(path: &Path) -> Result<(PathBuf, Prices), CliError> {
    let prices =
        Prices::from_yaml(&read("--pricing", path)?).map_err(|error| in_file(path, &error.field, &error))?;
    Ok((path.to_owned(), prices))
}

fn profile(path: &Path, facts: &Inspection) -> Result<(PathBuf, Profile), CliError> {
    let profile =
        Profile::from_json(&read("--profile", path)?).map_err(|error| in_file(path, &error.field, &error))?;
    profile.check_model(facts, &facts.dtype).map_err(|error| in_file(path, "model", &error))?;
    Ok((path.to_owned(), profile))
}

fn in_file(path: &Path, field: &str, error: &dyn std::error::Error) -> CliError {
    let field = Some(field.to_owned()).filter(|field| !field.is_empty());
    let message = format!("{}: {error}", path.display());
    CliError { path: Some(path.to_owned()), field, ..CliError::arguments("", message) }
}
