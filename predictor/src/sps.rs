//! Similar-prompt search (SPS) and its variants: predicted shares are the weighted mean of the shares of similar past
//! prompts.

use crate::divergence;
use crate::embedding::Embedding;
use crate::error::PredictError;
use crate::history::{History, UsageSample};
use crate::phase::{ByPhase, Phase};
use crate::predictor::Predictor;
use crate::record::ActivationRecord;
use crate::shares::UsageShares;
use crate::tree::{self, Clustering, Neighbour, SearchEffort, Tree, TreeOptions};
use crate::vector::{add_scaled, dot};
use std::sync::Arc;

/// Temperature of the paper's softmax, which has none.
pub const UNTEMPERED: f32 = 1.0;
/// Range of fitted temperatures. Similarities differ by a few hundredths.
const TEMPERATURE_RANGE: (f64, f64) = (1e-3, 10.0);
/// Steps of the golden-section search over the logarithm of the temperature.
const SEARCH_STEPS: usize = 24;

/// Method of finding similar prompts.
#[derive(Debug, Clone)]
pub enum PromptIndex {
    /// Search in a clustering tree.
    Tree(Box<Tree>),
    /// Linear search over all prompts (the paper's BF).
    Exhaustive,
    /// Linear search over at most this many prompts, evenly spaced. It bounds the time and may miss similar prompts.
    Sampled(usize),
}

/// Slots that a new request changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotUpdate {
    /// Slot of the new request, which may be an evicted one.
    pub slot: u32,
    /// Slots of the requests that were evicted for it.
    pub evicted: Vec<u32>,
}

/// Predictor from the most similar past prompts: SPS, VarPAM, VarED and BF of the paper, depending on the index.
#[derive(Debug, Clone)]
pub struct SimilarPrompts {
    name: &'static str,
    embedding: Embedding,
    history: Arc<History>,
    index: PromptIndex,
    alpha: usize,
    temperature: ByPhase<f32>,
}

impl SimilarPrompts {
    /// Builds a tree and creates the predictor over a copy of `history` in the order of the tree's leaves.
    ///
    /// # Errors
    /// The history is empty, or the options are invalid.
    pub fn with_tree(
        name: &'static str,
        embedding: Embedding,
        history: &History,
        clustering: Clustering,
        options: TreeOptions,
        alpha: usize,
    ) -> Result<Self, PredictError> {
        let mut tree = Tree::build(history, clustering, options, alpha)?;
        let history = Arc::new(tree.arrange(history)?);
        Self::new(name, embedding, history, PromptIndex::Tree(Box::new(tree)), alpha)
    }

    /// Creates the predictor over an existing index, with the untempered softmax.
    ///
    /// # Errors
    /// The history is empty, `alpha` is 0, or the embedding and the history have different sizes.
    pub fn new(
        name: &'static str,
        embedding: Embedding,
        history: Arc<History>,
        index: PromptIndex,
        alpha: usize,
    ) -> Result<Self, PredictError> {
        if history.is_empty() {
            return Err(PredictError::History { records: 0, needed: 1 });
        }
        match &index {
            PromptIndex::Tree(tree) => tree.options().check(alpha)?,
            PromptIndex::Exhaustive | PromptIndex::Sampled(_) if alpha == 0 => {
                return Err(PredictError::option("alpha", alpha, "expected 1 or more"));
            }
            PromptIndex::Exhaustive | PromptIndex::Sampled(_) => {}
        }
        PredictError::require_size("a row of the embedding", history.vectors.width(), embedding.hidden())?;
        Ok(Self { name, embedding, history, index, alpha, temperature: ByPhase::both(UNTEMPERED) })
    }

    /// Creates a growing history from its first request. Searches compare linearly with at most `max_compared`
    /// prompts. [`Self::learn_from`] adds requests.
    ///
    /// # Errors
    /// `alpha` is 0, or the embedding and the request have different sizes.
    pub fn from_first_request(
        name: &'static str,
        embedding: Embedding,
        first: &UsageSample,
        alpha: usize,
        max_compared: usize,
    ) -> Result<Self, PredictError> {
        Self::new(
            name,
            embedding,
            Arc::new(History::from_request(first)),
            PromptIndex::Sampled(max_compared),
            alpha,
        )
    }

    /// Replaces the index.
    pub(crate) fn set_index(&mut self, index: PromptIndex) {
        self.index = index;
    }

    /// Returns a copy with another temperature for each phase and another name.
    #[must_use]
    pub fn with_temperature(&self, name: &'static str, temperature: ByPhase<f32>) -> Self {
        Self { name, temperature, ..self.clone() }
    }

    /// Returns the past prompts.
    #[must_use]
    pub fn history(&self) -> &Arc<History> {
        &self.history
    }

    /// Returns true if all tokens count alike in similarity, as in the paper.
    #[must_use]
    pub fn weighs_tokens_equally(&self) -> bool {
        !self.embedding.is_weighted()
    }

    /// Returns the index that finds similar prompts.
    #[must_use]
    pub fn index(&self) -> &PromptIndex {
        &self.index
    }

    /// Returns the number of similar prompts per prediction.
    #[must_use]
    pub fn alpha(&self) -> usize {
        self.alpha
    }

    /// Returns the temperature of the softmax in each phase.
    #[must_use]
    pub fn temperature(&self) -> ByPhase<f32> {
        self.temperature
    }

    /// Returns the `alpha` past prompts most similar to `prompt`, the most similar first.
    ///
    /// # Errors
    /// As [`Predictor::predict`].
    pub fn neighbours(&self, prompt: &[u32]) -> Result<Vec<Neighbour>, PredictError> {
        Ok(self.neighbours_of(&self.embedding.prompt_vector(prompt)?))
    }

    fn neighbours_of(&self, query: &[f32]) -> Vec<Neighbour> {
        self.search_counted(query).0
    }

    fn search_counted(&self, query: &[f32]) -> (Vec<Neighbour>, SearchEffort) {
        match &self.index {
            PromptIndex::Tree(tree) => tree.search_counted(&self.history, query, self.alpha),
            PromptIndex::Exhaustive => tree::linear_search(&self.history, query, self.alpha, usize::MAX),
            PromptIndex::Sampled(limit) => tree::linear_search(&self.history, query, self.alpha, *limit),
        }
    }

    /// Returns the search effort for a prompt with this vector.
    #[must_use]
    pub fn effort(&self, vector: &[f32]) -> SearchEffort {
        self.search_counted(vector).1
    }

    /// Returns the number of edges from the root to the leaf of `slot`, 0 without a tree.
    #[must_use]
    pub fn depth_of(&self, slot: u32) -> usize {
        match &self.index {
            PromptIndex::Tree(tree) => tree.depth_of(slot),
            PromptIndex::Exhaustive | PromptIndex::Sampled(_) => 0,
        }
    }

    /// Predicts the shares of both phases from the vector of the prompt.
    ///
    /// # Errors
    /// The vector has another size than the embedding.
    pub fn predict_by_vector(&self, vector: &[f32]) -> Result<ByPhase<UsageShares>, PredictError> {
        PredictError::require_size("a prompt's vector", self.embedding.hidden(), vector.len())?;
        let neighbours = self.neighbours_of(vector);
        ByPhase::try_each(|phase| {
            weighted_mean(&self.history, &neighbours, &self.weights(&neighbours, phase), phase)
        })
    }

    /// Returns the weight of each neighbour: the softmax of similarity / temperature.
    #[must_use]
    pub fn weights(&self, neighbours: &[Neighbour], phase: Phase) -> Vec<f32> {
        softmax(neighbours, *self.temperature.get(phase))
    }

    /// Fits the temperature of a phase to `held_out` by golden-section search for the least mean Jensen-Shannon
    /// divergence. The history must not contain any of `held_out`.
    ///
    /// # Errors
    /// A record has another shape than the model.
    pub fn fit_temperature(
        &mut self,
        held_out: &[ActivationRecord],
        phase: Phase,
    ) -> Result<(), PredictError> {
        let mut cases = Vec::with_capacity(held_out.len());
        for record in held_out {
            if let Some(truth) = self.history.shares_of(record, phase)? {
                cases.push((self.neighbours(&record.prompt)?, truth));
            }
        }
        if cases.is_empty() {
            return Ok(());
        }
        let error = |temperature: f32| {
            let errors = cases.iter().map(|(neighbours, truth)| {
                let weights = softmax(neighbours, temperature);
                Ok(divergence::mean(&weighted_mean(&self.history, neighbours, &weights, phase)?, truth))
            });
            errors.sum()
        };
        *self.temperature.get_mut(phase) = best_temperature(error)?;
        Ok(())
    }

    /// Adds a record without a rebuild. At `capacity`, first evicts the past prompt near the new one that is most
    /// redundant with it.
    ///
    /// Redundancy is defined as RDY in `FineMoE` (section 4.4): `semantic` times the similarity of the prompts plus
    /// (1 - `semantic`) times the cosine of the activations. There, `semantic` is the prefetch distance over the
    /// number of layers.
    ///
    /// # Errors
    /// The record has another shape than the model, or `capacity` is 0.
    pub fn learn(
        &mut self,
        record: &ActivationRecord,
        capacity: usize,
        semantic: f32,
    ) -> Result<(), PredictError> {
        let vector = self.embedding.prompt_vector(&record.prompt)?;
        let Some(prefill) = self.history.shares_of(record, Phase::Prefill)? else { return Ok(()) };
        let decode = self.history.shares_of(record, Phase::Decode)?;
        self.insert(&record.prompt, &UsageSample { vector, prefill, decode }, capacity, semantic)?;
        Ok(())
    }

    /// Adds a request whose tokens are not kept, as [`Self::learn`] does.
    ///
    /// # Errors
    /// The request has another shape than the model, or `capacity` is 0.
    pub fn learn_from(
        &mut self,
        experience: &UsageSample,
        capacity: usize,
        semantic: f32,
    ) -> Result<SlotUpdate, PredictError> {
        PredictError::require_size("a prompt's vector", self.embedding.hidden(), experience.vector.len())?;
        let cells = self.history.layers() * self.history.experts();
        for shares in [Some(&experience.prefill), experience.decode.as_ref()].into_iter().flatten() {
            PredictError::require_size("a matrix of shares", cells, shares.values().len())?;
        }
        self.insert(&[], experience, capacity, semantic)
    }

    fn insert(
        &mut self,
        prompt: &[u32],
        UsageSample { vector, prefill: shares, decode }: &UsageSample,
        capacity: usize,
        semantic: f32,
    ) -> Result<SlotUpdate, PredictError> {
        if capacity == 0 {
            return Err(PredictError::option("capacity", capacity, "expected 1 or more"));
        }
        let mut evicted = Vec::new();
        while self.history.len() >= capacity {
            let slots = match &self.index {
                PromptIndex::Tree(tree) => tree.candidates(vector, self.alpha).slots,
                PromptIndex::Exhaustive => self.history.slots().collect(),
                PromptIndex::Sampled(limit) => self.history.sampled_slots(*limit).collect(),
            };
            let redundancy = |slot: u32| {
                let row = self.history.share_row(slot, Phase::Prefill);
                let norms = (dot(row, row) * dot(shares.values(), shares.values())).sqrt();
                let activations = dot(row, shares.values()) / norms.max(f32::MIN_POSITIVE);
                semantic * dot(self.history.vector(slot), vector) + (1.0 - semantic) * activations
            };
            let scored = slots.into_iter().map(|slot| (redundancy(slot), slot));
            // Ties go to the lowest slot.
            let Some((_, slot)) = scored.min_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))) else {
                break;
            };
            self.remove(slot);
            evicted.push(slot);
        }
        let history = Arc::make_mut(&mut self.history);
        let slot = history.insert(prompt, vector, shares, decode.as_ref());
        if let PromptIndex::Tree(tree) = &mut self.index {
            tree.insert(history, slot);
        }
        Ok(SlotUpdate { slot, evicted })
    }

    /// Removes the prompt in a slot.
    pub fn remove(&mut self, slot: u32) {
        if let PromptIndex::Tree(tree) = &mut self.index {
            tree.remove(slot);
        }
        Arc::make_mut(&mut self.history).remove(slot);
    }
}

impl Predictor for SimilarPrompts {
    fn name(&self) -> &'static str {
        self.name
    }

    fn predict(&self, prompt: &[u32], phase: Phase) -> Result<UsageShares, PredictError> {
        let neighbours = self.neighbours(prompt)?;
        weighted_mean(&self.history, &neighbours, &self.weights(&neighbours, phase), phase)
    }

    fn bytes(&self) -> u64 {
        let index = match &self.index {
            PromptIndex::Tree(tree) => tree.bytes(),
            PromptIndex::Exhaustive | PromptIndex::Sampled(_) => 0,
        };
        self.history.bytes() + index
    }
}

/// Returns the temperature with the least `error`, by golden-section search over its logarithm.
pub(crate) fn best_temperature(
    error: impl Fn(f32) -> Result<f64, PredictError>,
) -> Result<f32, PredictError> {
    let error = |log: f64| error(log.exp() as f32);
    let inverse_phi = (5.0_f64.sqrt() - 1.0) / 2.0;
    let (mut low, mut high) = (TEMPERATURE_RANGE.0.ln(), TEMPERATURE_RANGE.1.ln());
    // The two inner points of the bracket.
    let (mut a, mut b) = (high - inverse_phi * (high - low), low + inverse_phi * (high - low));
    let (mut error_a, mut error_b) = (error(a)?, error(b)?);
    for _ in 0..SEARCH_STEPS {
        if error_a < error_b {
            (high, b, error_b) = (b, a, error_a);
            a = high - inverse_phi * (high - low);
            error_a = error(a)?;
        } else {
            (low, a, error_a) = (a, b, error_b);
            b = low + inverse_phi * (high - low);
            error_b = error(b)?;
        }
    }
    Ok(((low + high) / 2.0).exp() as f32)
}

/// Returns the softmax of similarity / temperature.
pub(crate) fn softmax(neighbours: &[Neighbour], temperature: f32) -> Vec<f32> {
    let best = neighbours.iter().map(|neighbour| neighbour.similarity).fold(f32::NEG_INFINITY, f32::max);
    let exponentials: Vec<f32> =
        neighbours.iter().map(|neighbour| ((neighbour.similarity - best) / temperature).exp()).collect();
    let sum: f32 = exponentials.iter().sum();
    exponentials.into_iter().map(|value| value / sum).collect()
}

/// Returns the weighted mean of the neighbours' shares.
fn weighted_mean(
    history: &History,
    neighbours: &[Neighbour],
    weights: &[f32],
    phase: Phase,
) -> Result<UsageShares, PredictError> {
    let mut sum = vec![0.0; history.layers() * history.experts()];
    for (neighbour, &weight) in neighbours.iter().zip(weights) {
        add_scaled(&mut sum, weight, history.share_row(neighbour.slot, phase));
    }
    UsageShares::from_weights(history.experts(), sum)
}
