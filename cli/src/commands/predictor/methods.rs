//! The methods that are compared, each with the time that it took to build.

use super::source::Model;
use crate::exit::CliError;
use crate::output::progress;
use remoe_predictor::record::{ActivationRecord, RecordHeader};
use remoe_predictor::{
    ByPhase, Clustering, History, Index, Method, Phase, PredictError, Predictor, SimilarPrompts, TokenTable,
    Trained, TrainingOptions, UNTEMPERED, Uniform, informed_sps,
};
use std::sync::Arc;
use std::time::Instant;

/// A predictor that takes part.
pub(crate) struct Contestant<'a> {
    pub(crate) predictor: Box<dyn Predictor + 'a>,
    pub(crate) build_seconds: f64,
    /// Where it leans on similar prompts: itself, so that its neighbours can be looked at.
    pub(crate) similar: Option<SimilarPrompts>,
}

/// What all contestants are built from.
pub(crate) struct Field<'a> {
    pub(crate) model: &'a Model,
    pub(crate) header: &'a RecordHeader,
    pub(crate) records: &'a [ActivationRecord],
    pub(crate) options: TrainingOptions,
}

fn timed<T>(work: impl FnOnce() -> Result<T, PredictError>) -> Result<(T, f64), PredictError> {
    let started = Instant::now();
    let value = work()?;
    Ok((value, started.elapsed().as_secs_f64()))
}

impl Field<'_> {
    /// The predictor that `remoe predictor build` makes of the same records, and the seconds it took.
    pub(crate) fn trained(&self) -> Result<(Trained, f64), PredictError> {
        let Self { model, header, records, options } = self;
        timed(|| Trained::fit((*header).clone(), records, &model.embedding, *options))
    }

    /// Everyone, SPS first. Temperatures are the one that `trained` fitted for SPS, unless said otherwise.
    pub(crate) fn contestants<'a>(
        &self,
        trained: &'a Trained,
        trained_seconds: f64,
    ) -> Result<Vec<Contestant<'a>>, CliError> {
        let Self { model, header, records, options } = self;
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let temperature = trained.sps().temperature();
        let (history, history_seconds) = timed(|| History::of(&model.embedding, layers, experts, records))?;
        let history = Arc::new(history);
        let similar = |predictor: SimilarPrompts, build_seconds| Contestant {
            predictor: Box::new(predictor.clone()),
            build_seconds,
            similar: Some(predictor),
        };
        let simple = |predictor: Box<dyn Predictor + 'a>, build_seconds| Contestant {
            predictor,
            build_seconds,
            similar: None,
        };
        let mut field = Vec::new();
        for (name, clustering) in [
            ("sps", Clustering::Centred),
            ("sps-plain", Clustering::Similarity),
            ("var-pam", Clustering::Pam),
            ("var-pam-plain", Clustering::Pam),
            ("var-ed", Clustering::Activations),
            ("var-ed-plain", Clustering::Activations),
        ] {
            let embedding = model.embedding.clone();
            let TrainingOptions { alpha, mut tree } = *options;
            if name.ends_with("-plain") {
                // To the letter of the paper: siblings only while there are fewer than alpha.
                tree.breadth = 0;
            }
            match timed(|| SimilarPrompts::with_tree(name, embedding, &history, clustering, tree, alpha)) {
                Ok((predictor, seconds)) => {
                    let seconds = history_seconds + seconds;
                    field.push(similar(predictor.tempered(name, temperature), seconds));
                    if name == "sps" {
                        field.push(similar(
                            predictor.tempered("sps-untempered", ByPhase::both(UNTEMPERED)),
                            seconds,
                        ));
                    }
                }
                // Full PAM is quadratic.
                Err(PredictError::Option { option: "clustering", message, .. }) => {
                    progress::print_warning(&format!("{name} is left out: {message}"));
                }
                Err(error) => return Err(error.into()),
            }
        }
        let exhaustive =
            SimilarPrompts::new("bf", model.embedding.clone(), history, Index::Exhaustive, options.alpha)?;
        field.push(similar(exhaustive.tempered("bf", temperature), history_seconds));
        field.push(similar(exhaustive.tempered("bf-untempered", ByPhase::both(UNTEMPERED)), history_seconds));
        field.push(simple(Box::new(trained.method(Method::Dop)), history_seconds));
        field.push(simple(Box::new(model.fate()?), 0.0));
        field.push(simple(Box::new(Uniform::new(layers, experts)), 0.0));
        let (informed, seconds) = timed(|| {
            let table = trained.tokens(Phase::Prefill);
            informed_sps(&model.embedding, table, trained.popularity(), records, *options)
        })?;
        field.push(similar(informed, seconds));
        let fit = || {
            let (embedding, history) = (&model.embedding, trained.sps().history());
            let table =
                |phase| TokenTable::fit(embedding, history, phase, trained.tuning(phase).rounds).map(drop);
            Phase::ALL.into_iter().try_for_each(table)
        };
        let ((), seconds) = timed(fit)?;
        field.push(simple(Box::new(trained.method(Method::Tokens)), history_seconds + seconds));
        field.push(simple(Box::new(trained.method(Method::Blend)), trained_seconds));
        Ok(field)
    }
}
