//! SPS over token embeddings weighted by how much each token tells about routing.

use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::History;
use crate::phase::{ByPhase, Phase};
use crate::predictor::Popularity;
use crate::record::ActivationRecord;
use crate::sps::SimilarPrompts;
use crate::tokens::TokenTable;
use crate::training::{HELD_OUT, TrainingOptions};
use crate::tree::Clustering;
use crate::tuning::DEFAULT_TEMPERATURE;

/// Builds SPS with token weights by [`TokenTable::information`] and without the component that all prompts share. So
/// two prompts are similar if their tokens that decide routing are.
///
/// The temperature is fitted to one tenth of `records` against a tree of the rest. The final tree has all records.
///
/// # Errors
/// There is no record, or a record has another shape than the model.
pub fn informed_sps(
    embedding: &Embedding,
    table: &TokenTable,
    popularity: &Popularity,
    records: &[ActivationRecord],
    options: TrainingOptions,
) -> Result<SimilarPrompts, PredictError> {
    let embedding = embedding.weighted(&table.information(popularity)?)?;
    let shares = popularity.shares(Phase::Prefill);
    let build = |records: &[ActivationRecord]| {
        let history = History::from_records(&embedding, shares.layers(), shares.experts(), records)?;
        let TrainingOptions { alpha, tree } = options;
        let clustering = Clustering::Centred;
        SimilarPrompts::with_tree("sps-informed", embedding.clone(), &history, clustering, tree, alpha)
    };
    // Takes every tenth record: a history is ordered by time.
    let (held_out, rest): (Vec<_>, Vec<_>) =
        records.iter().cloned().zip(0_usize..).partition(|(_, index)| index % HELD_OUT == 0);
    let records_of =
        |list: Vec<(ActivationRecord, usize)>| list.into_iter().map(|(record, _)| record).collect::<Vec<_>>();
    let (held_out, rest) = (records_of(held_out), records_of(rest));
    let mut temperature = ByPhase::both(DEFAULT_TEMPERATURE);
    if !rest.is_empty() {
        let mut fitted = build(&rest)?;
        for phase in Phase::ALL {
            fitted.fit_temperature(&held_out, phase)?;
        }
        temperature = fitted.temperature();
    }
    Ok(build(records)?.with_temperature("sps-informed", temperature))
}
