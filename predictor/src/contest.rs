//! All methods side by side, built from the same records, each with the time that it took.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::fate::Fate;
use crate::history::History;
use crate::informed::informed_sps;
use crate::method::Method;
use crate::phase::{ByPhase, Phase};
use crate::predictor::{Predictor, Uniform};
use crate::record::{ActivationRecord, RecordHeader};
use crate::sps::{Index, SimilarPrompts, UNTEMPERED};
use crate::tokens::TokenTable;
use crate::trained::Trained;
use crate::training::TrainingOptions;
use crate::tree::Clustering;
use std::sync::Arc;

/// A predictor that takes part.
pub struct Contestant<'a> {
    /// The predictor.
    pub predictor: Box<dyn Predictor + 'a>,
    /// Seconds that it took to build.
    pub build_seconds: f64,
    /// Where it leans on similar prompts: itself, so that its neighbours can be looked at.
    pub similar: Option<SimilarPrompts>,
}

/// Predictors to compare.
pub struct Field<'a> {
    /// SPS first.
    pub contestants: Vec<Contestant<'a>>,
    /// Methods that cannot take part, and why.
    pub left_out: Vec<(&'static str, String)>,
}

/// Data from which all contestants are built.
pub struct Contest<'a> {
    /// The model's embedding.
    pub embedding: &'a Embedding,
    /// Header of the records: their model.
    pub header: &'a RecordHeader,
    /// Activation records.
    pub records: &'a [ActivationRecord],
    /// How trees are grown.
    pub options: TrainingOptions,
    /// Seconds since any moment: nothing here has a clock.
    pub clock: &'a dyn Fn() -> f64,
}

impl Contest<'_> {
    /// The predictor that is fitted to the same records, and the seconds that took.
    ///
    /// # Errors
    /// As [`Trained::fit`].
    pub fn trained(&self) -> Result<(Trained, f64), PredictError> {
        let Self { embedding, header, records, options, .. } = self;
        self.timed(|| Trained::fit((*header).clone(), records, embedding, *options))
    }

    fn timed<T>(&self, work: impl FnOnce() -> Result<T, PredictError>) -> Result<(T, f64), PredictError> {
        let started = (self.clock)();
        let value = work()?;
        Ok((value, (self.clock)() - started))
    }

    /// Everyone, with the model's own `fate`. Temperatures are the one that `trained` fitted for SPS, unless said
    /// otherwise.
    ///
    /// # Errors
    /// The records are too few, or not of this embedding.
    pub fn field<'a>(
        &self,
        (trained, trained_seconds): (&'a Trained, f64),
        fate: Fate,
    ) -> Result<Field<'a>, PredictError> {
        let Self { embedding, header, records, options, .. } = self;
        let (layers, experts) = (header.layers.len(), header.experts as usize);
        let temperature = trained.sps().temperature();
        let (history, history_seconds) = self.timed(|| History::of(embedding, layers, experts, records))?;
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
        let (mut field, mut left_out) = (Vec::new(), Vec::new());
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
                // To the letter of the paper: siblings only while there are fewer than alpha.
                tree.breadth = 0;
            }
            let plant =
                || SimilarPrompts::with_tree(name, (*embedding).clone(), &history, clustering, tree, alpha);
            match self.timed(plant) {
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
                    left_out.push((name, message));
                }
                Err(error) => return Err(error),
            }
        }
        let exhaustive =
            SimilarPrompts::new("bf", (*embedding).clone(), history, Index::Exhaustive, options.alpha)?;
        field.push(similar(exhaustive.tempered("bf", temperature), history_seconds));
        field.push(similar(exhaustive.tempered("bf-untempered", ByPhase::both(UNTEMPERED)), history_seconds));
        field.push(simple(Box::new(trained.method(Method::Dop)), history_seconds));
        field.push(simple(Box::new(fate), 0.0));
        field.push(simple(Box::new(Uniform::new(layers, experts)), 0.0));
        let (informed, seconds) = self.timed(|| {
            let table = trained.tokens(Phase::Prefill);
            informed_sps(embedding, table, trained.popularity(), records, *options)
        })?;
        field.push(similar(informed, seconds));
        let fit = || {
            let history = trained.sps().history();
            let table =
                |phase| TokenTable::fit(embedding, history, phase, trained.tuning(phase).rounds).map(drop);
            Phase::ALL.into_iter().try_for_each(table)
        };
        let ((), seconds) = self.timed(fit)?;
        field.push(simple(Box::new(trained.method(Method::Tokens)), history_seconds + seconds));
        field.push(simple(Box::new(trained.method(Method::Blend)), trained_seconds));
        Ok(Field { contestants: field, left_out })
    }
}
