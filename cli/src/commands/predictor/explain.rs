//! `remoe predictor explain`: what a prediction rests on.

use super::args::ExplainArgs;
use crate::exit::CliError;
use crate::output::{json, table};
use crate::predictors::PredictorModel;
use remoe_model::text::{TextError, Tokenizer};
use remoe_predictor::{ErrorBars, Phase, TrainedPredictor};
use serde::Serialize;
use std::io::Write;

/// Characters of a past prompt that people are shown.
const SHOWN: usize = 72;
/// Shades of the heat map, each from a multiple of an even share on.
const SHADES: [(f32, char); 6] = [(4.0, '█'), (2.0, '▓'), (1.0, '▒'), (0.5, '░'), (0.25, '·'), (0.0, ' ')];

#[derive(Serialize)]
struct Explanation {
    prompt_ids: Vec<u32>,
    /// The method that answers.
    method: &'static str,
    /// Weights of the method's parts, averaged over layers.
    parts: Vec<PredictionTerm>,
    /// The past prompts that the part `sps` leans on, by weight.
    neighbours: Vec<SimilarPrompt>,
    layers: Vec<u32>,
    /// Predicted shares of the prefill, [layers][experts].
    prediction: Vec<Vec<f32>>,
    /// Errors on held-out prompts; null where the history was too short.
    errors: Option<ErrorBars>,
    /// Predicted shares of the decode steps, [layers][experts].
    decode: Vec<Vec<f32>>,
    /// As `errors`, for the decode steps; null, too, if no request of the history had any.
    decode_errors: Option<ErrorBars>,
}

#[derive(Serialize)]
struct PredictionTerm {
    name: &'static str,
    weight: f64,
}

#[derive(Serialize)]
struct SimilarPrompt {
    weight: f32,
    similarity: f32,
    prompt_ids: Vec<u32>,
    /// Null where the model has no tokenizer.
    text: Option<String>,
}

/// Predicts one prompt and prints why.
pub(crate) fn run(args: &ExplainArgs, as_json: bool) -> Result<(), CliError> {
    let model = PredictorModel::open(&args.source)?;
    let store = model.checkpoint.store();
    let tokenizer = Tokenizer::open_in(store, model.checkpoint.config().vocab_size)?;
    let prompt_ids = match (&args.prompt, &tokenizer) {
        (Some(text), Some(tokenizer)) => tokenizer.encode(text, true)?,
        (Some(_), None) => {
            let message = "cannot tokenise --prompt: the model has no tokenizer.json; use --prompt-ids";
            return Err(CliError::arguments("--prompt", message));
        }
        (None, _) => args.prompt_ids.clone(),
    };
    let folder = args.predictor.clone().unwrap_or_else(|| store.root().join("predictor"));
    let trained = model.saved_predictor(&folder)?;
    let explanation = Explanation::of(&trained, tokenizer.as_ref(), prompt_ids)?;
    if as_json {
        json::print(&explanation)?;
    } else {
        writeln!(anstream::stdout().lock(), "{}", explanation.for_people())?;
    }
    Ok(())
}

impl Explanation {
    fn of(
        trained: &TrainedPredictor,
        tokenizer: Option<&Tokenizer>,
        prompt_ids: Vec<u32>,
    ) -> Result<Self, CliError> {
        let phase = Phase::Prefill;
        let prediction = trained.predict_with_errors(&prompt_ids, phase)?;
        let decode = trained.predict_with_errors(&prompt_ids, Phase::Decode)?;
        let found = trained.sps().neighbours(&prompt_ids)?;
        let weights = trained.sps().weights(&found, phase);
        let past = found.iter().zip(weights).map(|(neighbour, weight)| {
            let prompt_ids = trained.sps().history().prompt(neighbour.slot).to_vec();
            let text = tokenizer.map(|tokenizer| tokenizer.decode(&prompt_ids)).transpose()?;
            Ok(SimilarPrompt { weight, similarity: neighbour.similarity, prompt_ids, text })
        });
        let neighbours = past.collect::<Result<Vec<_>, TextError>>()?;
        let part_weights = trained.part_weights(phase);
        let parts =
            part_weights.into_iter().map(|(method, weight)| PredictionTerm { name: method.name(), weight });
        Ok(Self {
            prompt_ids,
            method: trained.tuning(phase).default.name(),
            parts: parts.collect(),
            neighbours,
            layers: trained.header().layers.clone(),
            prediction: prediction.shares.rows().map(<[f32]>::to_vec).collect(),
            errors: prediction.errors.cloned(),
            decode: decode.shares.rows().map(<[f32]>::to_vec).collect(),
            decode_errors: decode.errors.cloned(),
        })
    }

    fn for_people(&self) -> String {
        let parts: Vec<String> =
            self.parts.iter().map(|part| format!("{} {:.0} %", part.name, 100.0 * part.weight)).collect();
        let rows = self.neighbours.iter().map(|past| {
            let text = past.text.clone().unwrap_or_else(|| format!("{:?}", past.prompt_ids));
            let text: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
            let shown: String = text.chars().take(SHOWN).collect();
            vec![format!("{:.3}", past.weight), format!("{:.4}", past.similarity), shown]
        });
        let past = table::with_header(&["weight", "similarity", "past prompt"], rows.collect());
        let map = self.layers.iter().zip(&self.prediction).map(|(layer, shares)| {
            let even = 1.0 / shares.len().max(1) as f32;
            let cells: String = shares.iter().map(|share| shade(share / even)).collect();
            format!("{layer:>5} |{cells}|")
        });
        let map: Vec<String> = map.collect();
        let error = self.errors.as_ref().map_or(String::new(), |errors| {
            format!(
                "\nMean JS divergence on {} similar held-out prompts: {:.4}.",
                errors.prompts, errors.js_mean
            )
        });
        format!(
            "prediction by {} ({})\n\n{past}\n\nlayer  predicted share of each expert in the prefill (uniform: {})\n{}\n{error}",
            self.method,
            parts.join(", "),
            shade(1.0),
            map.join("\n")
        )
    }
}

/// The shade of a share that is `times` an even one.
fn shade(times: f32) -> char {
    SHADES.iter().find(|(from, _)| times >= *from).map_or(' ', |(_, shade)| *shade)
}

impl From<TextError> for CliError {
    fn from(error: TextError) -> Self {
        match error {
            TextError::Checkpoint(error) => error.into(),
            other => Self::runtime(other.to_string()),
        }
    }
}
