//! Comparison of all prediction methods, built from the same records, with the build time of each.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::fate::Fate;
use crate::history::History;
use crate::informed_sps::informed_sps;
use crate::method::Method;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Predictor, Uniform};
use crate::record::{ActivationRecord, RecordHeader};
use crate::sps::{PromptIndex, SimilarPrompts, UNTEMPERED};
use crate::tokens::TokenTable;
use crate::trained::TrainedPredictor;
use crate::training::TrainingOptions;
use crate::tree::Clustering;
use std::sync::Arc;

/// Predictor in a comparison.
pub struct ComparedMethod<'a> {
    /// Predictor of the method.
    pub predictor: Box<dyn Predictor + 'a>,
    /// Build time, in seconds.
    pub build_seconds: f64,
    /// Similar-prompt search of this method, if it has one, for access to its neighbours.
    pub similar: Option<SimilarPrompts>,
}

/// Predictors of a comparison.
pub struct ComparedMethods<'a> {
    /// Compared predictors, SPS first.
    pub methods: Vec<ComparedMethod<'a>>,
    /// Names of excluded methods with the reason.
    pub excluded: Vec<(&'static str, String)>,
}

/// Input of a comparison.
pub struct MethodComparison<'a> {
    /// Embedding of the model.
    pub embedding: &'a Embedding,
    /// Header of the records.
    pub header: &'a RecordHeader,
    /// Activation records.
    pub records: &'a [ActivationRecord],
    /// Training options of all methods.
    pub options: TrainingOptions,
    /// Clock in seconds from any origin. This crate reads no clock itself (invariant 4 of ARCHITECTURE.md).
    pub clock: &'a dyn Fn() -> f64,
}

impl MethodComparison<'_> {
    /// Trains a predictor on the records and returns it with its build time in seconds.
    ///
    /// # Errors
    /// As [`TrainedPredictor::fit`].
    pub fn trained(&self) -> Result<(TrainedPredictor, f64), PredictError> {
        let Self { embedding, header, records, options, .. } = self;
        self.timed(|| TrainedPredictor::fit((*header).clone(), records, embedding, *options))
    }

    fn timed<T>(&self, work: impl FnOnce() -> Result<T, PredictError>) -> Result<(T, f64), PredictError> {
        let started = (self.clock)();
        let value = work()?;
        Ok((value, (self.clock)() - started))
    }

    /// Builds all methods beside `trained` and the model's `fate`. Temperatures are the ones that `trained` fitted
    /// for SPS, except for methods named otherwise.
    ///
    /// # Errors
    /// There are too few records, or they do not match the embedding.
    pub fn build_all<'a>(
        &self,
        (trained, trained_seconds): (&'a TrainedPredictor, f64),
        fate: Fate,
    ) -> Result<ComparedMethods<'a>, PredictError> {
        let Self { embedding, header, records, options, .. } = self;
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let temperature = trained.sps().temperature();
        let (history, history_seconds) =
            self.timed(|| History::from_records(embedding, layers, experts, records))?;
        let history = Arc::new(history);
        let similar = |predictor: SimilarPrompts, build_seconds| ComparedMethod {
            predictor: Box::new(predictor.clone()),
            build_seconds,
            similar: Some(predictor),
        };
        let simple = |predictor: Box<dyn Predictor + 'a>, build_seconds| ComparedMethod {
            predictor,
            build_seconds,
            similar: None,
        };
        let (mut methods, mut excluded) = (Vec::new(), Vec::new());
        for (name, clustering) in [
            ("sps", Clustering::Centred),
            ("sps-plain", Clustering::Similarity),
            ("var-pam", Clustering::Pam),
            ("var-pam-plain", Clustering::Pam),
            ("var-ed", Clustering::Activations),
            ("var-ed-plain", Clustering::Activations),
        ] {
            let TrainingOptions { alpha, mut tree } = *options;
            if name.ends_with("-plain") {
                // As in the paper: searches extend to siblings only below alpha.
                tree.breadth = 0;
            }
            let build =
                || SimilarPrompts::with_tree(name, (*embedding).clone(), &history, clustering, tree, alpha);
            match self.timed(build) {
                Ok((predictor, seconds)) => {
                    let seconds = history_seconds + seconds;
                    methods.push(similar(predictor.with_temperature(name, temperature), seconds));
                    if name == "sps" {
                        methods.push(similar(
                            predictor.with_temperature("sps-untempered", ByPhase::both(UNTEMPERED)),
                            seconds,
                        ));
                    }
                }
                // Full PAM is quadratic.
                Err(PredictError::Option { option: "clustering", message, .. }) => {
                    excluded.push((name, message));
                }
                Err(error) => return Err(error),
            }
        }
        let exhaustive =
            SimilarPrompts::new("bf", (*embedding).clone(), history, PromptIndex::Exhaustive, options.alpha)?;
        methods.push(similar(exhaustive.with_temperature("bf", temperature), history_seconds));
        methods.push(similar(
            exhaustive.with_temperature("bf-untempered", ByPhase::both(UNTEMPERED)),
            history_seconds,
        ));
        methods.push(simple(Box::new(trained.method(Method::Dop)), history_seconds));
        methods.push(simple(Box::new(fate), 0.0));
        methods.push(simple(Box::new(Uniform::new(layers, experts)), 0.0));
        let (informed, seconds) = self.timed(|| {
            let table = trained.tokens(Phase::Prefill);
            informed_sps(embedding, table, trained.popularity(), records, *options)
        })?;
        methods.push(similar(informed, seconds));
        let fit = || {
            let history = trained.sps().history();
            let table =
                |phase| TokenTable::fit(embedding, history, phase, trained.tuning(phase).rounds).map(drop);
            Phase::ALL.into_iter().try_for_each(table)
        };
        let ((), seconds) = self.timed(fit)?;
        methods.push(simple(Box::new(trained.method(Method::Tokens)), history_seconds + seconds));
        methods.push(simple(Box::new(trained.method(Method::Blend)), trained_seconds));
        Ok(ComparedMethods { methods, excluded })
    }
}
